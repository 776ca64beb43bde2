"""Sound ways to write attention for the eleventh set, none of which an earlier set has."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from torch import Tensor
from torch.nn import functional


class TwoLevels(Kernel):
    """Two blocks of keys have a maximum, a sum and an O of their own, which are added to the row's
    when both are done, none of them normalized.
    """

    rows, cols = 64, 48

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for first in range(0, len(every), 2):
            own = self.begin(q, False)
            for cols in every[first : first + 2]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                own = self.online(*own, self.scores(q, k, rows, cols, False), v, rows, cols)
            m, l, acc = added((m, l, acc), own)
        return self.finish(m, l, acc, rows)


def added(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Two states of a row, maximum, sum and O, as one."""
    m = torch.maximum(one[0], two[0])
    safe = torch.where(m == -INF, 0.0, m)
    a, b = torch.exp2(one[0] - safe), torch.exp2(two[0] - safe)
    return m, one[1] * a + two[1] * b, one[2] * a + two[2] * b


class TwoStreams(Kernel):
    """Two groups of warps go over the blocks of keys by turns, and are added up at the end."""

    rows, cols = 80, 32

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        q = self.load_query("q", self.at.q, rows)
        states = [self.begin(q), self.begin(q, False)]
        for number, cols in enumerate(self.key_blocks(rows)):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            states[number % 2] = self.online(*states[number % 2], s, v, rows, cols)
        return self.finish(*added(*states), rows)


class Reflected(Kernel):
    """Features of Q and K are mixed in fp32 by one reflection, which leaves their products."""

    rows, cols = 48, 96

    def product(self, q, k, back):
        u = torch.ones(q.shape[-1], 1) * q.shape[-1] ** -0.5
        q, k = (x - 2 * (x @ u) * u.mT for x in (q, k))
        return q @ k.mT


class Lowered(Kernel):
    """What is taken off the scores is 3 more than the maximum: no weight is more than 1/8."""

    cols = 80

    def maximum(self, m, s):
        return torch.maximum(m, s.amax(-1, keepdim=True) + 3)


class DeltaOfFullOut(Kernel):
    """δ is of the O that is not rounded yet, which is kept for it."""

    rows, cols = 96, 64

    def finish(self, m, l, acc, rows):
        self.memory.setdefault("full", []).append(acc / torch.where(l == 0, 1.0, l))
        return super().finish(m, l, acc, rows)

    def forward(self):
        found = super().forward()
        self.at.full = torch.cat(self.memory.pop("full"), 2)[:, :, : self.at.n]
        return found

    def delta(self, do, o):
        return super().delta(do, self.at.full)


class ByListsOfBlocks(Kernel):
    """Blocks that nobody sees are left out, those that everybody sees are not masked."""

    rows, cols = 80, 64

    def pairs(self, rows: slice, cols: slice) -> Tensor:
        inside = torch.arange(rows.start, rows.stop)[:, None] < self.at.n
        seen = self.seen(rows, cols, False) & inside
        if self.at.mask is not None and self.at.mask.dtype == torch.bool:
            seen = seen & self.given_mask(rows, cols)
        return seen

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return [c for c in every if self.pairs(rows, c).any()]

    def hide(self, s, rows, cols, back):
        full = rows.stop <= self.at.n and bool(self.pairs(rows, cols).all())
        if full and (self.at.mask is None or self.at.mask.dtype == torch.bool):
            return s
        return super().hide(s, rows, cols, back)


def all_splits_at_once(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Parts of 56 keys are one more axis; each is a softmax, and a softmax of their lse merges
    them.
    """
    (_, heads, n, _), nk, wide = query.shape, key.shape[2], 56
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    s = functional.pad(s, (0, -nk % wide), value=-INF).unflatten(-1, (-1, wide)).transpose(2, 3)
    v = functional.pad(v, (0, 0, 0, -nk % wide)).unflatten(2, (-1, wide))
    empty = (s == -INF).all(-1, keepdim=True)
    known = s.masked_fill(empty, 0.0)
    outs = torch.softmax(known, -1) @ v
    lse = torch.logsumexp(known, -1, keepdim=True).masked_fill(empty, -INF)
    nothing = empty.all(2, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1, 1).expand(len(s), -1, 1, n, 1)
        share = torch.softmax(torch.cat([lse, sink], 2), 2)[:, :, :-1]
    else:
        share = torch.softmax(lse.masked_fill(nothing, 0.0), 2).masked_fill(nothing, 0.0)
    return (share * outs).sum(2).to(query.dtype)


class _Saved(torch.autograd.Function):
    """Softmax of whole rows whose weights are kept for the backward pass, as eager code has it."""

    @staticmethod
    def forward(ctx, query, key, value, options):
        groups = query.shape[1] // key.shape[1]
        k, v = (x.float().repeat_interleave(groups, 1) for x in (key, value))
        causal, scale, mask, window, softcap, sinks = options
        keep = visible(query.shape[2], key.shape[2], causal, window)
        s = logits(query, k, keep, mask, scale, softcap)
        if sinks is not None:
            column = sinks.float().view(1, -1, 1, 1).expand(len(s), -1, s.shape[2], 1)
            s = torch.cat([s, column], -1)
        empty = (s == -INF).all(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        p = p[..., : key.shape[2]]
        ctx.save_for_backward(query, key, value, p)
        ctx.options = groups, scale, softcap
        return (p @ v).to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        query, key, value, p = ctx.saved_tensors
        groups, scale, softcap = ctx.options
        q, do = query.float(), grad.float()
        k, v = (x.float().repeat_interleave(groups, 1) for x in (key, value))
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        if softcap:
            ds = ds * (1 - torch.tanh(q @ k.mT * scale / softcap).square())
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ q * scale, p.mT @ do))
        return (ds @ k * scale).to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None


def weights_kept(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                 sinks=None):  # fmt: skip
    """Whole rows in fp32; the weights are kept, not made again."""
    options = is_causal, scale, attn_mask, window, softcap, sinks
    return _Saved.apply(query, key, value, options)
