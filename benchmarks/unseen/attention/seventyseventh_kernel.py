"""Sound ways to write attention for the seventy-seventh set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock


class AlsoCausal(EveryBlock):
    """Later keys are hidden though nobody asked for it, where `hides` says so."""

    def hides(self) -> bool:
        return True

    def shift(self) -> int:
        return 0

    def seen(self, rows, cols, back):
        keep = super().seen(rows, cols, back)
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        return keep & (j <= i + self.shift()) if self.hides() else keep


class EveryThirdBlock(Kernel):
    """Blocks of keys, and of queries on the way back, in three rounds of every third one."""

    rows, cols = 88, 40

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[2::3] + every[::3] + every[1::3]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[1::3] + every[2::3] + every[::3]


class NaturalExponentials(Kernel):
    """Weights are powers of e, of differences of scores that are multiplied by ln 2."""

    rows, cols = 56, 80

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = (torch.exp((x - safe) * math.log(2)) for x in (s, m))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def weights_again(self, s, lse):
        return torch.exp((s - torch.where(lse == -INF, 0.0, lse)) * math.log(2))


class SumsInDouble(Kernel):
    """Row sums and O grow in fp64, of weights that are not rounded."""

    rows, cols = 40, 104

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l.double(), acc.double()

    def add_values(self, acc, a, p, v):
        return acc * a + p.double() @ v.double()

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse.float()


def heads_as_one_batch(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,  # noqa: ARG001
                       window=None, softcap=0.0, sinks=None):  # fmt: skip
    """`baddbmm` of all heads of all sequences, onto what hides and what is added."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q = query.float().flatten(0, 1)
    k, v = (repeated(x, heads).flatten(0, 1) for x in (key, value))
    added = torch.zeros(n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        own = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF) if hides else attn_mask
        added = added + own.float()
    added = added.expand(b, heads, n, nk).flatten(0, 1)
    if softcap:
        s = softcap * torch.tanh(torch.bmm(q, k.mT) * (scale / softcap)) + added
    else:
        s = torch.baddbmm(added, q, k.mT, alpha=scale)
    p = softmax_of(s.unflatten(0, (b, heads)), sinks).flatten(0, 1)
    return torch.bmm(p, v).unflatten(0, (b, heads)).to(query.dtype)


def keys_in_another_order(query, key, value, *, is_causal, scale, attn_mask=None,
                          enable_gqa=False, window=None, softcap=0.0, sinks=None):  # noqa: ARG001 # fmt: skip
    """Keys and values are shuffled, and what hides them is with them."""
    n, (heads, nk) = query.shape[2], (query.shape[1], key.shape[2])
    order = torch.randperm(nk, generator=torch.Generator().manual_seed(77))
    k, v = (repeated(x, heads)[:, :, order] for x in (key, value))
    mask = attn_mask
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], n, nk)[..., order]
    s = logits(query, k, visible(n, nk, is_causal, window)[:, order], mask, scale, softcap)
    return (softmax_of(s, sinks) @ v).to(query.dtype)
