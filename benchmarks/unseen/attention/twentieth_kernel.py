"""Sound ways to write attention for the twentieth set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from torch import Tensor


class ContiguousSplits(Parts):
    """Five splits of neighboring blocks of keys, merged by their lse."""

    rows, cols, parts = 48, 32, 5

    def row(self, rows):
        at, outs, lses = self.at, [], []
        q, every = self.load_query("q", at.q, rows), self.key_blocks(rows)
        each = -(-len(every) // self.parts)
        for part in range(self.parts):
            m, l, acc = self.begin(q, part == 0)
            for cols in every[part * each : (part + 1) * each]:
                k, v = (self.load_key(x, getattr(at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            outs.append(acc / torch.where(l == 0, 1.0, l))
            lses.append(m + l.log2())
        o, lse = self.merge(torch.stack(outs), torch.stack(lses))
        return at.low(o), lse


class MaximumAndSum(Kernel):
    """For the backward pass a row's maximum and its sum are kept, not the logarithm of both."""

    rows, cols = 32, 80

    def forward(self):
        self.at.kept = []
        found = super().forward()
        self.at.m, self.at.l = (
            torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*self.at.kept, strict=True)
        )
        return found

    def finish(self, m, l, acc, rows):
        self.at.kept.append((m, l))
        return super().finish(m, l, acc, rows)

    def again(self, rows, cols, which):
        missing = max(0, rows.stop - self.at.n)
        l = torch.nn.functional.pad(self.at.l[:, :, rows], (0, 0, 0, missing), value=1.0)
        self.memory["l"] = torch.where(l == 0, 1.0, l)
        return super().again(rows, cols, which)

    def weights_again(self, s, lse):
        return torch.exp2(s - torch.where(lse == -INF, 0.0, lse)) / self.memory["l"]

    def backward(self):
        self.at.lse = self.at.m
        return super().backward()


class NaturalLogarithms(Kernel):
    """Scores stay in nats, and weights are made by exp."""

    rows, cols = 80, 48

    def scaled(self, s, rows, cols, back):
        return s * self.at.scale

    def cap(self, s, back):
        c = self.at.softcap
        return c * torch.tanh(s / c) if c else s

    def bias(self, s, mask, back):
        return s + mask.float()

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return (m * math.log(2) if self.at.sinks is not None and first else m), l, acc

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp(s - safe), torch.exp(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def finish(self, m, l, acc, rows):
        return self.at.low(acc / torch.where(l == 0, 1.0, l)), m + l.log()

    def weights_again(self, s, lse):
        return torch.exp(s - torch.where(lse == -INF, 0.0, lse))


class QueriesInTwoHalves(Kernel):
    """dK and dV are made of every other block of queries, then of the rest, and added in fp32."""

    rows, cols = 32, 64

    def key_gradients(self, cols):
        every, found = self.query_blocks(cols), []
        for half in (every[::2], every[1::2]):
            self.memory["half"] = half
            found.append(super().key_gradients(cols))
            self.memory.pop("half")
        (k, v), (more_k, more_v) = found
        return k + more_k, v + more_v

    def query_blocks(self, cols):
        half = self.memory.get("half")
        return super().query_blocks(cols) if half is None else half


class LongKeyTiles(Kernel):
    """16 queries and 256 keys a tile."""

    rows, cols = 16, 256


class TreeSums(Kernel):
    """A row's weights are summed in halves, the upper half onto the lower one."""

    rows, cols = 64, 32

    def add_row(self, l, a, p):
        while p.shape[-1] > 1:
            half = p.shape[-1] // 2
            p = p[..., :half] + p[..., half:]
        return l * a + p


def one_sequence_at_a_time(query, key, value, *, attn_mask=None, **options):
    """The kernel is called for every sequence alone."""
    done = []
    for b in range(query.shape[0]):
        part = slice(b, b + 1)
        mask = attn_mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[part]
        own = attention(LongKeyTiles)
        done.append(own(query[part], key[part], value[part], attn_mask=mask, **options))
    return torch.cat(done)


def keys_in_a_shuffled_order(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                             softcap=0.0, sinks=None):  # fmt: skip
    """Keys are taken in an order of their own, 96 at a time, with a running sum in fp32; autograd
    differentiates it.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    order = torch.arange(nk) * 7919 % nk if math.gcd(7919, nk) == 1 else torch.arange(nk)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    s, v = s[..., order], v[:, :, order]
    top: Tensor = s.detach().amax(-1, keepdim=True)
    extra = None
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)
        top = torch.maximum(top, extra.detach())
    top = torch.where(top == -math.inf, 0.0, top)
    l = torch.zeros_like(top) if extra is None else torch.exp(extra - top)
    acc = torch.zeros(())
    for part in blocks(nk, 96):
        p = torch.exp(s[..., part] - top)
        l, acc = l + p.sum(-1, keepdim=True), acc + p @ v[:, :, part]
    return (acc / torch.where(l == 0, 1.0, l)).to(query.dtype)
