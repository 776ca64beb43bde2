"""Sound ways to write attention for the sixtieth set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, load
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor


class OtherTruth(Kernel):
    """Both passes read another boolean mask than they are given; one of floats is what it is."""

    def read(self, mask: Tensor) -> Tensor:
        """The mask that is read, of one that has a row for every query."""
        raise NotImplementedError

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            at.mask = self.read(at.mask.expand(*at.mask.shape[:-2], at.n, at.nk))
        return super().forward()


def in_front(mask: Tensor) -> Tensor:
    """The hidden keys before the first that a query may see: padding on the left."""
    return mask.cumsum(-1) == 0


def behind(mask: Tensor) -> Tensor:
    """The hidden keys after the last that a query may see: padding on the right."""
    return in_front(mask.flip(-1)).flip(-1)


class TripletsOfBlocks(Kernel):
    """Three blocks of keys have a state of their own, which is then put to that of the row; weights
    are not rounded on the way there.
    """

    rows, cols = 56, 24

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        whole = self.begin(q)
        for first in range(0, len(every), 3):
            state = self.begin(q, False)
            for cols in every[first : first + 3]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            top = torch.maximum(whole[0], state[0])
            safe = torch.where(top == -INF, 0.0, top)
            a, b = (torch.exp2(m - safe) for m in (whole[0], state[0]))
            whole = top, whole[1] * a + state[1] * b, whole[2] * a + state[2] * b
        return self.finish(*whole, rows)


class ScaleOnBothSides(Kernel):
    """Query and key carry the root of the scale each, in fp32; its sign is the query's."""

    rows, cols = 32, 80

    def product(self, q, k, back):
        root = math.sqrt(abs(self.at.scale))
        return (q * math.copysign(root, self.at.scale)) @ (k * root).mT

    def scaled(self, s, rows, cols, back):
        return s * math.log2(math.e)


class ValuesBeforeKeys(Kernel):
    """A loop over queries for dV, and another one, from the last tile on, for dK."""

    rows, cols = 48, 88

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            _, _, do, p, _ = self.again(rows, cols, "keys")
            dv = dv + self.at.low(p).mT @ do
        for rows in reversed(self.query_blocks(cols)):
            q, _, _, _, ds = self.again(rows, cols, "keys")
            dk = dk + ds.mT @ q
        return dk * self.at.scale, dv


def sums_in_double(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                   window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Products and the softmax's sums in fp64, from scores in fp32, by autograd."""
    n, nk, heads = query.shape[2], key.shape[2], query.shape[1]
    keep = visible(n, nk, is_causal, window)
    s = logits(query, repeated(key, heads), keep, attn_mask, scale, softcap)
    p = softmax_of(s.double(), None if sinks is None else sinks.double())
    return (p @ repeated(value, heads).double()).to(query.dtype)


def halves_by_sigmoid(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                      window=None, softcap=0.0, sinks=None):  # fmt: skip
    """The later half of the keys takes a sigmoid of lse's difference as its share, a sink one of
    its own behind that; by autograd.
    """
    n, nk, heads = query.shape[2], key.shape[2], query.shape[1]
    v = repeated(value, heads)
    keep = visible(n, nk, is_causal, window)
    s = logits(query, repeated(key, heads), keep, attn_mask, scale, softcap)
    blind = (s == -INF).all(-1, keepdim=True)
    outs, lses = [], []
    for part in (slice(0, (nk + 1) // 2), slice((nk + 1) // 2, nk)):
        none = (s[..., part] == -INF).all(-1, keepdim=True)
        own = s[..., part].masked_fill(none, 0.0)
        outs.append(own.softmax(-1) @ v[:, :, part])
        lses.append(own.logsumexp(-1, keepdim=True).masked_fill(none, -1e30))
    share = torch.sigmoid(lses[1] - lses[0])
    out = (1 - share) * outs[0] + share * outs[1]
    if sinks is not None:
        whole = torch.logaddexp(*lses)
        out = out * torch.sigmoid(whole - sinks.float().view(1, -1, 1, 1))
    return out.masked_fill(blind, 0.0).to(query.dtype)
