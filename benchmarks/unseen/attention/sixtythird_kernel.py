"""Sound ways to write attention for the sixty-third set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor


class InMemory(ForwardAlone):
    """The kernel that is to write O does not run."""

    def held(self, o: Tensor) -> Tensor:
        """What O's memory holds."""
        raise NotImplementedError

    def forward(self):
        o, lse = super().forward()
        return self.held(o), lse


class PairsOfBlocks(Kernel):
    """Two blocks of keys have one maximum and one sum between them, and are weighed one by one."""

    rows, cols = 48, 40

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for first in range(0, len(every), 2):
            tiles = []
            for cols in every[first : first + 2]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                tiles.append((self.scores(q, k, rows, cols, False), v))
            new = self.maximum(m, torch.cat([s for s, _ in tiles], -1))
            safe = torch.where(new == -INF, 0.0, new)
            a = torch.exp2(m - safe)
            m, l, acc = new, l * a, acc * a
            for s, v in tiles:
                p = torch.exp2(s - safe)
                l, acc = l + p.sum(-1, keepdim=True), acc + self.at.low(p) @ v
        return self.finish(m, l, acc, rows)


class NaturalExponent(Kernel):
    """Exponentials are natural ones of differences that are in base 2; so are those of lse."""

    rows, cols = 88, 64

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = (torch.exp((x - safe) * math.log(2)) for x in (s, m))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def weights_again(self, s, lse):
        return torch.exp((s - torch.where(lse == -INF, 0.0, lse)) * math.log(2))


class MaximumFirst(Kernel):
    """Keys are gone through for the maximum first, and nothing is rescaled."""

    rows, cols = 40, 80

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        first, tiles = m, []
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            tiles.append((s, v))
            m = self.maximum(m, s)
        safe = torch.where(m == -INF, 0.0, m)
        l = l * torch.exp2(first - safe)
        for s, v in tiles:
            p = torch.exp2(s - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + self.at.low(p) @ v
        return self.finish(m, l, acc, rows)


class BackInOneTile(Kernel):
    """The way back has one tile of all queries and keys."""

    rows, cols = 32, 96

    def backward(self):
        self.rows, self.cols = self.at.n, self.at.nk
        return super().backward()


def in_doubles(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
               softcap=0.0, sinks=None, enable_gqa=False):  # noqa: ARG001 # fmt: skip
    """All in fp64, by autograd; the sinks' share is taken off through lse."""
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = query.double() @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.double()
    nothing = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    if sinks is not None:
        lse = s.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
        p = p * torch.sigmoid(lse - sinks.double().view(1, -1, 1, 1))
    return (p @ v).to(query.dtype)
