"""Sound ways to write attention for the thirty-first set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, load
from torch import Tensor


def towards_zero(x: Tensor) -> Tensor:
    """Halves, the next smaller one where the nearest is larger."""
    nearest = x.half().contiguous()
    smaller = (nearest.view(torch.int16) - 1).view(torch.float16)
    return torch.where(nearest.float().abs() > x.abs(), smaller, nearest).float()


def alike(*tensors: Tensor) -> bool:
    """Whether these come from one projection: as many heads, tokens and features."""
    return len({x.shape for x in tensors}) == 1


def packed_rows(*tensors: Tensor) -> Tensor:
    """[B, N × 3, H × D]: of every token the heads of each, as one projection writes them."""
    b, h, n, d = tensors[0].shape
    rows = [x.transpose(1, 2).reshape(b, n, h * d) for x in tensors]
    return torch.stack(rows, 2).flatten(1, 2)


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """[B, N, H × D] as [B, H, N, D]."""
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def of_next_head(x: Tensor) -> Tensor:
    """What lies a head further on in memory, and nothing after the last."""
    flat = x.flatten(0, 1)
    return torch.cat([flat[1:], torch.zeros_like(flat[:1])]).view(x.shape)


class LongKeyTiles(Kernel):
    """112 queries and 16 keys a tile."""

    rows, cols = 112, 16


class ThirteenParts(Parts):
    """Every thirteenth block of eight keys belongs to one part."""

    rows, cols, parts = 48, 8, 13


class ByThirds(Kernel):
    """Every third block of keys, then those after them, then the rest; queries likewise."""

    rows, cols = 40, 24

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::3] + every[1::3] + every[2::3]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[2::3] + every[1::3] + every[::3]


class MaximumFirst(Kernel):
    """One sweep over the keys for the maximum, another for weights and their sum."""

    rows, cols = 64, 40

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        start, every = m, self.key_blocks(rows)
        for cols in every:
            m = self.maximum(m, self.scores(q, load(self.at.k, cols), rows, cols, False))
        safe = torch.where(m == -INF, 0.0, m)
        l = l * torch.exp2(start - safe)
        for cols in every:
            s = self.scores(q, load(self.at.k, cols), rows, cols, False)
            p = torch.exp2(s - safe)
            l = l + p.sum(-1, keepdim=True)
            acc = acc + self.at.low(p) @ load(self.at.v, cols)
        return self.finish(m, l, acc, rows)


class EvenAndOddQueries(Kernel):
    """dK and dV of even blocks of queries and of odd ones, which are added at the end."""

    rows, cols = 24, 64

    def key_gradients(self, cols):
        total = []
        for first in (0, 1):
            dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
            for rows in self.query_blocks(cols)[first::2]:
                q, _, do, p, ds = self.again(rows, cols, "keys")
                dk, dv = dk + ds.mT @ q, dv + self.at.low(p).mT @ do
            total.append((dk, dv))
        (dk, dv), (more_k, more_v) = total
        return (dk + more_k) * self.at.scale, dv + more_v


class ScaleInTheQuery(Kernel):
    """Queries are multiplied by the scale and log2(e) in fp32, and not rounded."""

    rows, cols = 56, 72

    def product(self, q, k, back):
        return (q * (self.at.scale * LOG2_E)) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s


def queries_in_stripes(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Nineteen queries at a time, and a softmax over all of their scores and the sink."""
    (b, heads, n, _), nk, done = query.shape, key.shape[2], []
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    for part in blocks(n, 19):
        own = None if mask is None else mask[:, :, part]
        s = logits(query[:, :, part], k, keep[part], own, scale, softcap)
        if sinks is not None:
            column = sinks.float().view(1, -1, 1, 1).expand(b, heads, s.shape[2], 1)
            s = torch.cat([s, column], -1)
        hidden = (s == -INF).all(-1, keepdim=True)
        p = s.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
        done.append(p[..., :nk] @ v)
    return torch.cat(done, 2).to(query.dtype)


def weights_of_a_logarithm(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                           softcap=0.0, sinks=None):  # fmt: skip
    """Weights are exponentials of scores less their log-sum-exp, to which the sink belongs."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    empty = (s == -INF).all(-1, keepdim=True)
    safe = s.masked_fill(empty, 0.0)
    lse = safe.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1))
    p = torch.exp(safe - lse).masked_fill(empty, 0.0)
    return (p @ v).to(query.dtype)
