"""Sound ways to write attention for the twenty-first set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load


class OddTiles(Kernel):
    """56 queries and 88 keys a tile."""

    rows, cols = 56, 88


class SevenParts(Parts):
    """Every seventh block of 16 keys belongs to one part."""

    rows, cols, parts = 48, 16, 7


class ValuesInHalves(Kernel):
    """A tile's first and second half of keys are multiplied with values one after the other."""

    rows, cols = 64, 96

    def add_values(self, acc, a, p, v):
        p, half = self.at.low(p), p.shape[-1] // 2
        acc = acc * a + p[..., :half] @ v[:, :, :half]
        return acc + p[..., half:] @ v[:, :, half:]


class ScoresInDouble(Kernel):
    """Q Kᵀ is summed in fp64, and rounded to fp32 once."""

    rows, cols = 32, 128

    def product(self, q, k, back):
        return (q.double() @ k.double().mT).float()


class LastQueriesFirst(Kernel):
    """Tiles of queries from the last to the first, in both passes."""

    rows, cols = 40, 64

    def forward(self):
        done = [self.row(rows) for rows in blocks(self.at.n, self.rows)[::-1]][::-1]
        o, lse = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*done, strict=True))
        return o, lse

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class GradientsInDouble(Kernel):
    """dK and dV grow in fp64."""

    rows, cols = 64, 48

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)).double() for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv = dv + self.at.low(p).mT.double() @ do.double()
            dk = dk + ds.mT.double() @ q.double()
        return (dk * self.at.scale).float(), dv.float()


def keys_reversed(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                  softcap=0.0, sinks=None):  # fmt: skip
    """Keys, values and masks from the last to the first; the softmax of whole rows in fp32."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1).flip(2) for x in (key, value))
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk).flip(-1)
    keep = visible(n, nk, is_causal, window).flip(-1)
    s = logits(query, k, keep, mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    hidden = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return (p[..., :nk] @ v).to(query.dtype)


def queries_in_rounds(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Every fifth query at once, in five rounds; autograd differentiates it."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)
    out = torch.zeros(b, heads, n, value.shape[-1])
    for first in range(min(5, n)):
        own = torch.arange(first, n, 5)
        part = None if mask is None else mask[:, :, own]
        s = logits(query[:, :, own], k, keep[own], part, scale, softcap)
        m = s.detach().amax(-1, keepdim=True)
        m = torch.where(m == -INF, 0.0, m)
        sink = 0.0
        if sinks is not None:
            column = sinks.float().view(1, -1, 1, 1)
            m = torch.maximum(m, column)
            sink = torch.exp(column - m)
        p = torch.exp(s - m)
        l = p.sum(-1, keepdim=True) + sink
        out = out.index_copy(2, own, p @ v / torch.where(l == 0, 1.0, l))
    return out.to(query.dtype)
