"""Sound ways to write attention for the fourteenth set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel


class LastKeysFirst(Kernel):
    """Keys and queries are gone through from the end, in blocks of other sizes."""

    rows, cols = 48, 40

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class MaximumFirst(Kernel):
    """One pass over the keys finds the maximum, a second one adds up with it."""

    cols = 56

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        tiles = [self.scores(q, self.load_key("k", self.at.k, c), rows, c, False) for c in every]
        top = m
        for s in tiles:
            top = self.maximum(top, s)
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, cols in zip(tiles, every, strict=True):
            p = torch.exp2(s - safe)
            l = l + p.sum(-1, keepdim=True)
            acc = acc + self.at.low(p) @ self.load_key("v", self.at.v, cols)
        return self.finish(top, l, acc, rows)


class ValuesInDouble(Kernel):
    """O is accumulated in fp64."""

    rows, cols = 80, 32

    def add_values(self, acc, a, p, v):
        return (acc.double() * a + self.at.low(p).double() @ v.double()).float()


class DeltaOfWeights(Kernel):
    """δ is the row sum of P ∘ dP, and not of dO ∘ O."""

    def delta(self, do, o):
        at, n, nk = self.at, slice(0, self.at.n), slice(0, self.at.nk)
        p = self.weights_again(self.scores(at.q, at.k, n, nk, True), at.lse)
        return (p * (do @ at.v.mT)).sum(-1, keepdim=True)


class QueryTimesScale(Kernel):
    """The query takes the scale and the change of base, in fp32, before the product."""

    rows = 96

    def product(self, q, k, back):
        return (q * (self.at.scale * LOG2_E)) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s


class WeightsAsTheyAre(Kernel):
    """Weights are not rounded before P V."""

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v


def groups_without_copies(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                          softcap=0.0, sinks=None):  # fmt: skip
    """Rows of all heads of a group are one tall matrix, in fp32; keys are not repeated."""
    (b, heads, n, d), (_, own, nk, _) = query.shape, key.shape
    tall = query.float().reshape(b, own, heads // own * n, d)
    keep = visible(n, nk, is_causal, window).repeat(heads // own, 1)
    mask = attn_mask
    if mask is not None:
        mask = mask.expand(b, heads, n, nk).reshape(b, own, -1, nk)
    s = logits(tall, key, keep, mask, scale, softcap)
    if sinks is not None:
        each = sinks.float().view(1, own, -1, 1).repeat_interleave(n, 2)
        s = torch.cat([s, each.expand(b, -1, -1, -1)], -1)
    empty = (s == -INF).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    o = p[..., :nk] @ value.float()
    return o.reshape(b, heads, n, -1).to(query.dtype)
