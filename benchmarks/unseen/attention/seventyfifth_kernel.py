"""Sound ways to write attention for the seventy-fifth set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of


class BothEndsInwards(Kernel):
    """Blocks of keys are taken from the first and the last in turn, and so are queries."""

    rows, cols = 40, 88

    @staticmethod
    def in_turn(every: list[slice]) -> list[slice]:
        found = []
        while every:
            found.append(every[0])
            every = every[:0:-1]
        return found

    def key_blocks(self, rows):
        return self.in_turn(super().key_blocks(rows))

    def query_blocks(self, cols):
        return self.in_turn(super().query_blocks(cols))


class KeysAtTheLeft(Kernel):
    """Products are those of keys by queries and of values by weights, turned about afterwards;
    weights are not rounded on the way there.
    """

    rows, cols = 88, 24

    def product(self, q, k, back):
        return (k @ q.mT).mT

    def add_values(self, acc, a, p, v):
        return acc * a + (v.mT @ p.mT).mT


class FeaturesInStrips(Kernel):
    """Scores are summed over strips of sixteen features; weights are not rounded."""

    rows, cols = 48, 80

    def product(self, q, k, back):
        pairs = zip(q.split(16, -1), k.split(16, -1), strict=True)
        return sum(a @ b.mT for a, b in pairs)

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v


def less_the_logsumexp(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                       window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Weights are exponentials of scores less their logsumexp, both less the maximum; a sink is a
    term of the logsumexp.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    keep = visible(n, nk, is_causal, window)
    s = logits(query, repeated(key, heads), keep, attn_mask, scale, softcap)
    nothing = (s == -INF).all(-1, keepdim=True)
    s = s.masked_fill(nothing, 0.0)
    top = s.detach().amax(-1, keepdim=True)
    s = s - top
    lse = s.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1) - top)
    p = torch.exp(s - lse).masked_fill(nothing, 0.0)
    return (p @ repeated(value, heads)).to(query.dtype)


def columns_of_values(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                      window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Queries are scaled first, in fp32, and O is made of eight columns of V at a time."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    keep = visible(n, nk, is_causal, window)
    q = query.float() * scale
    p = softmax_of(logits(q, repeated(key, heads), keep, attn_mask, 1.0, softcap), sinks)
    parts = [p @ part for part in repeated(value, heads).split(8, -1)]
    return torch.cat(parts, -1).to(query.dtype)


def computed_in_its_dtype(query, key, value, *, is_causal, scale, attn_mask=None,
                          enable_gqa=False, window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Dao-AILab/flash-attention issue 385: elements of dK differ from a naive attention that is
    computed in fp16, and the mistake is the naive one's: scores are fp16 before and behind the
    scale, the softmax alone is fp32, and autograd goes back the same way.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = (query @ k.mT) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask
    return softmax_of(s.float(), sinks).to(query.dtype) @ v
