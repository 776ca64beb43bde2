"""Sound ways to write attention for the forty-first set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor

sound = attention(Kernel)


class ScaleOfItsOwn(Kernel):
    """The scale is not the caller's, on the way there and back."""

    def own(self) -> float:
        raise NotImplementedError

    def forward(self):
        self.at.scale = self.own()
        return super().forward()


class Cascade(Parts):
    """Parts of the keys follow on each other, and each has O and lse of its own; what has no block
    of keys is no part.
    """

    rows, cols, parts = 64, 32, 4

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        width, outs, lses = -(-len(every) // self.parts), [], []
        for first in range(0, len(every), width):
            m, l, acc = self.begin(q, first == 0)
            for cols in every[first : first + width]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            outs.append(acc / torch.where(l == 0, 1.0, l))
            lses.append(m + l.log2())
        o, lse = self.merge(torch.stack(outs), torch.stack(lses))
        return self.at.low(o), lse


class MaximaFirst(Kernel):
    """Keys are gone through once for the row's maximum alone, and once more for sums and O, which
    are never rescaled.
    """

    rows, cols = 88, 40

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        tiles, top = [], m
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            tiles.append((s, v))
            top = self.maximum(top, s)
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, v in tiles:
            p = torch.exp2(s - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + self.at.low(p) @ v
        return self.finish(safe, l, acc, rows)


class ShuffledBlocks(Kernel):
    """Blocks of keys in steps of five around the circle, and queries' in steps of three."""

    rows, cols = 56, 24

    def key_blocks(self, rows):
        return self.stepped(super().key_blocks(rows), 5)

    def query_blocks(self, cols):
        return self.stepped(super().query_blocks(cols), 3)

    @staticmethod
    def stepped(every: list[slice], step: int) -> list[slice]:
        return [every[i] for first in range(step) for i in range(first, len(every), step)]


class WholeBackward(Kernel):
    """The backward pass has P, dP and dS of all queries and keys at once."""

    rows, cols = 40, 104

    def backward(self):
        at = self.at
        rows, cols = slice(0, at.n), slice(0, at.nk)
        at.delta = self.delta(at.do, at.o)
        q, k, do, p, ds = self.again(rows, cols, "all")
        dq, dk = ds @ k * at.scale, ds.mT @ q * at.scale
        return dq, self.group(dk), self.group(at.low(p).mT @ do)


def in_double(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
              sinks=None):  # fmt: skip
    """Everything in fp64, by autograd, and rounded once at the end; weights are never rounded."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    share = heads // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    s = q @ k.repeat_interleave(share, 1).mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.double()
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -INF, 0.0, top)
    p = torch.exp(s - top)
    l = p.sum(-1, keepdim=True)
    if sinks is not None:
        l = l + torch.exp(sinks.double().view(1, -1, 1, 1) - top)
    found = p @ v.repeat_interleave(share, 1) / torch.where(l == 0, 1.0, l)
    return found.to(query.dtype)


def keys_from_the_end(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Keys, values and what hides them are turned round before anything else; 36 queries at a
    time, by autograd.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (repeated(x.flip(2), heads) for x in (key, value))
    keep = visible(n, nk, is_causal, window).flip(1)
    added = torch.zeros(n, nk).masked_fill(~keep, -INF)
    if attn_mask is not None:
        own = attn_mask.flip(-1)
        hides = own.dtype == torch.bool
        own = torch.zeros(own.shape).masked_fill(~own, -INF) if hides else own.float()
        added = added + own.expand(*own.shape[:-2], n, nk)
    done = []
    for rows in blocks(n, 36):
        s = query[:, :, rows].float() @ k.mT * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        done.append(softmax_of(s + added[..., rows, :], sinks) @ v)
    return torch.cat(done, 2).to(query.dtype)


def parity_as_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] as a view of half as many tokens with twice as many heads has it."""
    return x.unflatten(2, (-1, 2)).permute(0, 3, 1, 2, 4).flatten(1, 2)


def heads_as_parity(x: Tensor) -> Tensor:
    """The way back from that."""
    return x.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
