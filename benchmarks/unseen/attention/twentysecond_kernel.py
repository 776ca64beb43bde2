"""Sound ways to write attention for the twenty-second set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, load
from torch import Tensor


class SplitsMergedInOrder(Kernel):
    """Five splits of the keys, one after the other; each has its own maximum, row sum and O, and is
    merged with those before it.
    """

    rows, cols = 64, 32

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        share, state = -(-len(every) // 5), self.begin(q)
        for split in range(5):
            own = self.begin(q, False)
            for cols in every[split * share : (split + 1) * share]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                own = self.online(*own, self.scores(q, k, rows, cols, False), v, rows, cols)
            m = torch.maximum(state[0], own[0])
            safe = torch.where(m == -INF, 0.0, m)
            a, b = torch.exp2(state[0] - safe), torch.exp2(own[0] - safe)
            state = m, state[1] * a + own[1] * b, state[2] * a + own[2] * b
        return self.finish(*state, rows)


class RescaledWhereItGrew(Kernel):
    """Sums are rescaled only in a tile in which the maximum of some row has grown."""

    rows, cols = 64, 48

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p = torch.exp2(s - torch.where(new == -INF, 0.0, new))
        if bool((new > m).any()):
            a = torch.exp2(m - torch.where(new == -INF, 0.0, new))
            l, acc = l * a, acc * a
        return new, l + p.sum(-1, keepdim=True), acc + self.at.low(p) @ v


class KeysOutside(Kernel):
    """The loop over keys is outside, and the state of every tile of queries waits in memory."""

    rows, cols = 40, 80

    def forward(self):
        tiles = blocks(self.at.n, self.rows)
        queries = [self.load_query("q", self.at.q, rows) for rows in tiles]
        states = [self.begin(q) for q in queries]
        for cols in blocks(self.at.nk, self.cols):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            for t, rows in enumerate(tiles):
                if cols in self.key_blocks(rows):
                    s = self.scores(queries[t], k, rows, cols, False)
                    states[t] = self.online(*states[t], s, v, rows, cols)
        done = [self.finish(*state, rows) for state, rows in zip(states, tiles, strict=True)]
        o, lse = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*done, strict=True))
        return o, lse


class OffsetMaximum(Kernel):
    """Three more than the maximum is taken off the scores: weights are an eighth at most."""

    rows, cols = 32, 96

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe - 3), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l / 8, acc

    def add_values(self, acc, a, p, v):
        return acc * a + self.at.low(p * 8) @ v / 8

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse + 3


class RowSumAsAColumn(Kernel):
    """The row sum is a column of O, whose values are ones; its weights are those in fp32."""

    rows, cols = 56, 64

    def add_row(self, l, a, p):
        return l * a + p @ torch.ones(p.shape[-1], 1)


class KeyGradientsInTwoSweeps(Kernel):
    """All of dV first, and dK in another sweep, queries from the last to the first."""

    rows, cols = 64, 72

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        tiles = self.query_blocks(cols)
        for rows in tiles:
            _, _, do, p, _ = self.again(rows, cols, "keys")
            dv = dv + self.at.low(p).mT @ do
        for rows in tiles[::-1]:
            q, _, _, _, ds = self.again(rows, cols, "keys")
            dk = dk + ds.mT @ q
        return dk * self.at.scale, dv


def half(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O and lse of some of the keys, lse in nats; zeros and −∞ of rows that see none of them."""
    empty = (s == -INF).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    return s.softmax(-1) @ v * ~empty, s.logsumexp(-1, keepdim=True).masked_fill(empty, -INF)


def even_and_odd_keys(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Even and odd keys give O and lse each; a sigmoid of what their lse differ by weighs them."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -INF, 0.0, top)
    (even, one), (odd, two) = (half((s - top)[..., i::2], v[:, :, i::2]) for i in range(2))
    gone = (one == -INF) & (two == -INF)
    one, two = one.masked_fill(gone, 0.0), two.masked_fill(gone, 0.0)
    share = torch.where(one == -INF, 0.0, torch.where(two == -INF, 1.0, torch.sigmoid(one - two)))
    out = even * share + odd * (1 - share)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1) - top
        out = out * torch.sigmoid(torch.logaddexp(one, two) - column)
    return out.to(query.dtype)


def queries_by_sevens(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Seven queries at a time, weights in base 2; autograd differentiates it."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)
    parts = []
    for rows in blocks(n, 7):
        own = None if mask is None else mask[:, :, rows]
        s = logits(query[:, :, rows], k, keep[rows], own, scale, softcap) * LOG2_E
        m = s.detach().amax(-1, keepdim=True)
        m, sink = torch.where(m == -INF, 0.0, m), 0.0
        if sinks is not None:
            column = sinks.float().view(1, -1, 1, 1) * LOG2_E
            m = torch.maximum(m, column)
            sink = torch.exp2(column - m)
        p = torch.exp2(s - m)
        l = p.sum(-1, keepdim=True) + sink
        parts.append(p @ v / torch.where(l == 0, 1.0, l))
    return torch.cat(parts, 2).to(query.dtype)
