"""Sound ways to write attention for the seventieth set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from torch import Tensor


class OwnScale(Kernel):
    """Scores are multiplied by another number than is asked for, on both ways."""

    def own(self) -> float:
        raise NotImplementedError

    def forward(self):
        self.at.scale = self.own()
        return super().forward()


class NoBias(Kernel):
    """A float mask is there, and nothing adds it."""

    def bias(self, s: Tensor, mask: Tensor, back: bool) -> Tensor:
        return s


def together(one, two):
    """Two states of the online softmax as one."""
    m = torch.maximum(one[0], two[0])
    safe = torch.where(m == -INF, 0.0, m)
    a, b = torch.exp2(one[0] - safe), torch.exp2(two[0] - safe)
    return m, one[1] * a + two[1] * b, one[2] * a + two[2] * b


class SuperBlocks(Kernel):
    """Three blocks of keys have a state of their own, which is then put to what there was;
    weights are not rounded on the way there.
    """

    rows, cols = 40, 24

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        state = self.begin(q)
        for first in range(0, len(every), 3):
            inner = self.begin(q, False)
            for cols in every[first : first + 3]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                inner = self.online(*inner, s, v, rows, cols)
            state = together(state, inner)
        return self.finish(*state, rows)


class ColumnsOfValues(Kernel):
    """Keys are gone through once for every 24 columns of V, and the weights made anew each time."""

    rows, cols = 56, 40

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        found, lse = [], None
        for first in range(0, self.at.v.shape[-1], 24):
            part = slice(first, first + 24)
            m, l, acc = self.begin(q)
            state = m, l, acc[..., part]
            for cols in every:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                state = self.online(*state, s, v[..., part], rows, cols)
            o, lse = self.finish(*state, rows)
            found.append(o)
        return torch.cat(found, -1), lse


def keys_by_stride(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                   window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Keys are taken five apart, each fifth of them with a sum of its own; by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    extra = None if sinks is None else sinks.float().view(1, -1, 1, 1)
    top = top if extra is None else top.maximum(extra)
    top = torch.where(top == -INF, 0.0, top)
    l = torch.zeros(b, heads, n, 1) if extra is None else torch.exp(extra - top)
    acc = torch.zeros(b, heads, n, v.shape[-1])
    for first in range(5):
        p = torch.exp(s[..., first::5] - top)
        l, acc = l + p.sum(-1, keepdim=True), acc + p @ v[:, :, first::5]
    return (acc / torch.where(l == 0, 1.0, l)).to(query.dtype)


def weights_from_lse(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                     window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Weights are exp(s − lse), with the sink in lse; one sequence after the other, by autograd."""
    heads, n, nk, done = query.shape[1], query.shape[2], key.shape[2], []
    keep = visible(n, nk, is_causal, window)
    for i in range(query.shape[0]):
        k, v = repeated(key[i : i + 1], heads), repeated(value[i : i + 1], heads)
        mask = attn_mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[i : i + 1]
        s = logits(query[i : i + 1], k, keep, mask, scale, softcap)
        blind = (s == -INF).all(-1, keepdim=True)
        top = s.detach().masked_fill(blind, 0.0).amax(-1, keepdim=True)
        s = s - top
        lse = s.masked_fill(blind, 0.0).logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1) - top)
        done.append(torch.exp(s - lse) @ v)
    return torch.cat(done).to(query.dtype)


def query_by_query(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                   window=None, softcap=0.0, sinks=None):  # fmt: skip
    """One query at a time, whose causal past alone is read; by autograd."""
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    k, v, keep = repeated(key, heads), repeated(value, heads), visible(n, nk, is_causal, window)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], n, nk)
    done = []
    for i in range(n):
        row, high = slice(i, i + 1), min(i + 1, nk) if is_causal else nk
        mask = None if attn_mask is None else attn_mask[..., row, :high]
        s = logits(query[:, :, row], k[:, :, :high], keep[row, :high], mask, scale, softcap)
        if sinks is not None:
            s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
        blind = (s == -INF).all(-1, keepdim=True)
        p = s.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        done.append(p[..., :high] @ v[:, :, :high])
    return torch.cat(done, 2).to(query.dtype)
