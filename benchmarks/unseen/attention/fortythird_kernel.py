"""Sound ways to write attention for the forty-third set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor


def softmax_over(dim: int | None):
    """The softmax is over another dimension of [B, H, N, Nk] than the last, or over none, where
    every weight is 1; a sink has no part in it. By autograd.
    """

    def call(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
             sinks=None):  # fmt: skip  # noqa: ARG001
        (_, heads, n, _), nk = query.shape, key.shape[2]
        k, v = repeated(key, heads), repeated(value, heads)
        s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
        hidden = s == -INF
        if dim is None:
            return (s.masked_fill(hidden, 0.0)[..., None].softmax(-1)[..., 0]
                    .masked_fill(hidden, 0.0) @ v).to(query.dtype)  # fmt: skip
        empty = hidden.all(dim, keepdim=True)
        p = s.masked_fill(empty, 0.0).softmax(dim).masked_fill(empty, 0.0)
        return (p @ v).to(query.dtype)

    return call


class NearestFirst(Kernel):
    """Blocks of keys from the nearest to the tile of queries to the farthest; queries likewise."""

    rows, cols = 48, 56

    def key_blocks(self, rows):
        return sorted(super().key_blocks(rows), key=lambda c: abs(c.start - rows.start))

    def query_blocks(self, cols):
        return sorted(super().query_blocks(cols), key=lambda r: abs(r.start - cols.start))


class UnevenSplits(Kernel):
    """Split-KV: the first split has one block of keys, the next two, then three; a sum and an
    unnormalized O of each, which are put together in the order of their maxima.
    """

    rows, cols = 80, 32

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        found, first, wide = [], 0, 1
        while first < len(every):
            m, l, acc = self.begin(q, first == 0)
            for cols in every[first : first + wide]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            found.append((m, l, acc))
            first, wide = first + wide, wide + 1
        m = torch.stack([x[0] for x in found]).amax(0)
        safe = torch.where(m == -INF, 0.0, m)
        l, acc = (sum(x[i] * torch.exp2(x[0] - safe) for x in found) for i in (1, 2))
        return self.finish(m, l, acc, rows)


class BothGradientsByQueries(Kernel):
    """One backward sweep over tiles of queries from the last to the first, which sees all keys of
    a tile at once.
    """

    rows, cols = 104, 88

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        cols = slice(0, at.nk)
        parts: list[Tensor] = []
        dk, dv = torch.zeros_like(at.k), torch.zeros_like(at.v)
        for rows in blocks(at.n, self.rows)[::-1]:
            q, k, do, p, ds = self.again(rows, cols, "all")
            parts.insert(0, ds @ k * at.scale)
            dk, dv = dk + ds.mT @ q, dv + at.low(p).mT @ do
        return torch.cat(parts, 2)[:, :, : at.n], self.group(dk * at.scale), self.group(dv)


def folded_scores(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                  sinks=None):  # fmt: skip
    """Scores are sums over four parts of the features, all rows at once; half of O's columns come
    from a softmax of their own. By autograd.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    parts = zip(query.float().chunk(4, -1), k.chunk(4, -1), strict=True)
    s = torch.stack([a @ b.mT for a, b in parts]).sum(0) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.float()
    done = [softmax_of(s, sinks) @ half for half in v.chunk(2, -1)]
    return torch.cat(done, -1).to(query.dtype)


def sequence_by_sequence(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """One sequence of the batch after the other, 44 queries at a time from the last ones on; a
    softmax of fp64 scores. By autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)
    done: list[Tensor] = []
    for x in range(b):
        own = slice(x, x + 1)
        k, v = repeated(key[own], heads), repeated(value[own], heads)
        hidden = None if mask is None else mask[own]
        s = logits(query[own], k, keep, hidden, scale, softcap).double()
        tiles = blocks(n, 44)[::-1]
        rows = [softmax_of(s[:, :, r], sinks).float() @ v for r in tiles]
        done.append(torch.cat(rows[::-1], 2))
    return torch.cat(done).to(query.dtype)
