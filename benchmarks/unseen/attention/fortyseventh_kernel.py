"""Sound ways to write attention for the forty-seventh set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import RangesOfKeys, repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor


class NeverCausal(EveryBlock):
    """A query sees the keys after it as well, whatever is asked for."""

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)


class MaskNotApplied(Kernel):
    """A mask of truth values is there, and nothing is hidden by it."""

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return torch.ones_like(found) if found.dtype == torch.bool else found


class FourRanges(RangesOfKeys):
    """Split-KV: four ranges of keys, in narrow tiles."""

    rows, cols, ranges = 40, 24, 4


class LastTileFirst(Kernel):
    """Tiles of queries from the last to the first, and blocks of keys on the way back likewise."""

    rows, cols = 88, 40

    def forward(self):
        done = [self.row(rows) for rows in blocks(self.at.n, self.rows)[::-1]][::-1]
        o, lse = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*done, strict=True))
        return o, lse

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class KeysByQueries(Kernel):
    """Tiles of K Qᵀ and Vᵀ Pᵀ, which are turned round; a row sum is that of two halves."""

    rows, cols = 28, 100

    def product(self, q, k, back):
        return (k @ q.mT).mT

    def add_row(self, l, a, p):
        half = p.shape[-1] // 2
        parts = p[..., half:].sum(-1, keepdim=True), p[..., :half].sum(-1, keepdim=True)
        return l * a + parts[0] + parts[1]

    def add_values(self, acc, a, p, v):
        return acc * a + (v.mT @ self.at.low(p).mT).mT


def every_fifth_query(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Every fifth query has its softmax at once, then those next to them, by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (repeated(x, heads) for x in (key, value))
    keep, step = visible(n, nk, is_causal, window), 5
    whole = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)
    order: list[Tensor] = []
    done: list[Tensor] = []
    for first in range(min(step, n)):
        own = torch.arange(first, n, step)
        mask = None if whole is None else whole[:, :, own]
        s = logits(query[:, :, own], k, keep[own], mask, scale, softcap)
        done.append(softmax_of(s, sinks) @ v)
        order.append(own)
    return torch.cat(done, 2)[:, :, torch.cat(order).argsort()].to(query.dtype)


def weights_by_logsumexp(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """Weights are exponentials of scores, less their largest one, less their logsumexp, which
    blocks of 72 keys and the sink give together; by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (repeated(x, heads) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    nothing = (s == -INF).all(-1, keepdim=True)
    top = s.detach().amax(-1, keepdim=True).masked_fill(nothing, 0.0)
    s = (s - top).masked_fill(nothing, -1e30)
    parts = [s[..., part].logsumexp(-1, keepdim=True) for part in blocks(nk, 72)]
    if sinks is not None:
        parts.append(sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1) - top)
    lse = torch.cat(parts, -1).logsumexp(-1, keepdim=True)
    p = torch.exp(s - lse).masked_fill(nothing, 0.0)
    return (p @ v).to(query.dtype)
