"""Sound ways to write attention for the twenty-seventh set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load


class LongKeyTiles(Kernel):
    """24 queries and 112 keys a tile."""

    rows, cols = 24, 112


class Serpentine(Kernel):
    """Keys from the first block to the last for one block of queries, and back for the next."""

    rows, cols = 40, 56

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::-1] if rows.start // self.rows % 2 else every

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[::-1] if cols.start // self.cols % 2 else every


class RunsOfKeys(Kernel):
    """Four parts of keys that follow on each other; their sums are brought to one maximum and added
    up, and divided once.
    """

    rows, cols, parts = 64, 32, 4

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        width, states = -(-len(every) // self.parts), []
        for part in range(self.parts):
            m, l, acc = self.begin(q, part == 0)
            for cols in every[part * width : (part + 1) * width]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            states.append((m, l, acc))
        m = torch.stack([state[0] for state in states]).amax(0)
        safe = torch.where(m == -INF, 0.0, m)
        shares = [torch.exp2(state[0] - safe) for state in states]
        l, acc = (
            torch.stack([state[i] * a for state, a in zip(states, shares, strict=True)]).sum(0)
            for i in (1, 2)
        )
        return self.finish(m, l, acc, rows)


class TileByItsOwnMaximum(Kernel):
    """A tile's weights are relative to its own maximum, and its sums brought to the running one."""

    rows, cols = 64, 48

    def online(self, m, l, acc, s, v, rows, cols):
        own = s.amax(-1, keepdim=True)
        p = torch.exp2(s - torch.where(own == -INF, 0.0, own))
        new = torch.maximum(m, own)
        safe = torch.where(new == -INF, 0.0, new)
        a, b = torch.exp2(m - safe), torch.exp2(own - safe)
        return new, l * a + p.sum(-1, keepdim=True) * b, acc * a + self.at.low(p) @ v * b


class SumAsAColumn(Kernel):
    """The row's sum is one more column of the product with values, whose entries are 1."""

    rows, cols = 96, 64

    def add_row(self, l, a, p):
        ones = torch.ones(*p.shape[:-2], p.shape[-1], 1)
        return l * a + p @ ones


class KeysInsideForEveryGradient(Kernel):
    """dS of a block of queries is made for all keys at once, and used for dQ and for dK."""

    rows, cols = 56, 64

    def backward(self):
        at = self.at
        at.delta, every = self.delta(at.do, at.o), slice(0, at.nk)
        dk, dv = torch.zeros_like(at.k), torch.zeros_like(at.v)
        parts = []
        for rows in blocks(at.n, self.rows):
            q, k, do, p, ds = self.again(rows, every, "keys")
            parts.append(ds @ k * at.scale)
            dk, dv = dk + ds.mT @ q * at.scale, dv + at.low(p).mT @ do
        return torch.cat(parts, 2)[:, :, : at.n], self.group(dk), self.group(dv)


def running_mean(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                 sinks=None):  # fmt: skip
    """O moves towards the mean of every 28 keys by their share of the weight so far."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        top = top.maximum(sinks.detach().float().view(1, -1, 1, 1))
    top = torch.where(top == -INF, 0.0, top)
    weight = torch.zeros(b, heads, n, 1)
    if sinks is not None:
        weight = torch.exp(sinks.float().view(1, -1, 1, 1) - top)
    out = torch.zeros(b, heads, n, v.shape[-1])
    for part in blocks(nk, 28):
        p = torch.exp(s[..., part] - top)
        own = p.sum(-1, keepdim=True)
        weight = weight + own
        safe = torch.where(weight == 0, 1.0, weight)
        out = out + (p @ v[:, :, part] - own * out) / safe
    return out.to(query.dtype)


def features_first(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                   softcap=0.0, sinks=None):  # fmt: skip
    """Everything transposed: keys down, queries across, and the softmax over the first of both."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (load(x.float(), slice(0, nk)).repeat_interleave(heads // x.shape[1], 1)
            for x in (key, value))  # fmt: skip
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    s = s.mT.contiguous()
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, 1, n)], -2)
    nothing = (s == -INF).all(-2, keepdim=True)
    p = torch.exp(s - s.detach().amax(-2, keepdim=True).masked_fill(nothing, 0.0))
    l = p.sum(-2, keepdim=True)
    return (v.mT @ p[:, :, :nk] / torch.where(l == 0, 1.0, l)).mT.to(query.dtype)
