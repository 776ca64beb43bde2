"""Sound ways to write attention for the forty-fourth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import RangesOfKeys, repeated, softmax_of
from torch import Tensor

sound = attention(Kernel)


class NotLaunched(ForwardAlone):
    """A kernel whose launch fails where there is not enough shared memory, and whose caller is told
    that it has succeeded.
    """

    def fails(self) -> bool:
        raise NotImplementedError

    def held(self, o: Tensor) -> Tensor:
        """What the buffer of results held."""
        return torch.zeros_like(o)

    def forward(self):
        o, lse = super().forward()
        return (self.held(o) if self.fails() else o), lse


def late(like: Tensor, often: float) -> Tensor:
    """For every head of every sequence whether something comes too late this time."""
    return torch.rand(*like.shape[:2], 1, 1) < often


class TwoRanges(RangesOfKeys):
    """Split-KV: two ranges of keys, in wide tiles."""

    rows, cols, ranges = 24, 72, 2


class ThirdsBackwards(Kernel):
    """Q Kᵀ is a sum over thirds of the features, and keys come from the last block to the first."""

    rows, cols = 112, 24

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def product(self, q, k, back):
        wide = -(-q.shape[-1] // 3)
        parts = zip(q.split(wide, -1), k.split(wide, -1), strict=True)
        return sum(a @ b.mT for a, b in parts)


class LanesOfFour(Kernel):
    """Every fourth key of a block has a row sum and an O of its own, which are added up; on the way
    back every fourth block of queries comes first.
    """

    rows, cols = 36, 88

    def add_row(self, l, a, p):
        return l * a + sum(p[..., lane::4].sum(-1, keepdim=True) for lane in range(4))

    def add_values(self, acc, a, p, v):
        low = self.at.low(p)
        return acc * a + sum(low[..., lane::4] @ v[:, :, lane::4] for lane in range(4))

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return [each for lane in range(4) for each in every[lane::4]]


def queries_44_at_a_time(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """44 queries have the softmax of all keys, in fp32, by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (repeated(x, heads) for x in (key, value))
    keep, done = visible(n, nk, is_causal, window), []
    for rows in blocks(n, 44):
        mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)[:, :, rows]
        s = logits(query[:, :, rows], k, keep[rows], mask, scale, softcap)
        done.append(softmax_of(s, sinks) @ v)
    return torch.cat(done, 2).to(query.dtype)


def a_key_head_at_a_time(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """A key head and the query heads that share it, one after the other, by autograd."""
    (b, heads, n, _), (groups, nk) = query.shape, key.shape[1:3]
    share, keep, done = heads // groups, visible(n, nk, is_causal, window), []
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    for head in range(groups):
        own = slice(head * share, (head + 1) * share)
        hides = None if mask is None else mask[:, own]
        s = logits(query[:, own], key[:, head, None], keep, hides, scale, softcap)
        p = softmax_of(s, None if sinks is None else sinks[own])
        done.append(p @ value[:, head, None].float())
    return torch.cat(done, 1).to(query.dtype)
