"""Sound ways to write attention for the sixty-fourth set, and what its faults share."""

# ruff: noqa: ARG001, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from torch import Tensor


class BooleansUnread(Kernel):
    """A boolean mask that is given hides nothing in some calls."""

    def unread(self) -> bool:
        return True

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool or not self.unread():
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


class CapOfItsOwn(ForwardAlone):
    """What scores are capped by is not the caller's number; 0 is no cap."""

    def own(self) -> float:
        return 0.0

    def cap(self, s, back):
        kept, self.at.softcap = self.at.softcap, self.own()
        found = super().cap(s, back)
        self.at.softcap = kept
        return found


class TimesTheScale(Kernel):
    """Another scale than the caller's, on the way there and back."""

    def times(self) -> float:
        raise NotImplementedError

    def forward(self):
        self.at.scale = self.at.scale * self.times()
        return super().forward()


class MaximumInALoopOfItsOwn(Kernel):
    """Scores are made twice: for the maximum of the row, and for the sums, which nothing rescales;
    the second loop goes from the last block of keys to the first.
    """

    rows, cols = 56, 48

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        every, top = self.key_blocks(rows), m
        for cols in every:
            top = self.maximum(top, self.scores(q, load(self.at.k, cols), rows, cols, False))
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for cols in every[::-1]:
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            p = torch.exp2(self.scores(q, k, rows, cols, False) - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + p @ v
        return self.finish(top, l, acc, rows)


class GradientsOfWholeMatrices(Kernel):
    """The forward pass goes by tiles, the backward pass holds all weights and dS at once."""

    rows, cols = 40, 112

    def backward(self):
        at = self.at
        rows, cols = slice(0, at.n), slice(0, at.nk)
        at.delta = self.delta(at.do, at.o)
        q, k, do, p, ds = self.again(rows, cols, "keys")
        dk, dv = ds.mT @ q * at.scale, at.low(p).mT @ do
        return ds @ k * at.scale, self.group(dk), self.group(dv)


class WarpsByColumn(Kernel):
    """Eight lanes have every eighth key of a block each, their own maximum, sum and O all along,
    and are put together once the keys are through.
    """

    rows, cols, lanes = 32, 96, 8

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q, False)
        m, l, acc = (x.unsqueeze(2).repeat(1, 1, self.lanes, 1, 1) for x in (m, l, acc))
        for cols in self.key_blocks(rows):
            s = self.scores(q, load(self.at.k, cols), rows, cols, False)
            s = s.unflatten(-1, (-1, self.lanes)).movedim(-1, 2)
            v = load(self.at.v, cols).unflatten(2, (-1, self.lanes)).transpose(2, 3)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            safe = torch.where(new == -INF, 0.0, new)
            p, a = torch.exp2(s - safe), torch.exp2(m - safe)
            m, l, acc = new, l * a + p.sum(-1, keepdim=True), acc * a + self.at.low(p) @ v
        sink, extra, _ = self.begin(q)
        top = torch.maximum(m.amax(2), sink)
        safe = torch.where(top == -INF, 0.0, top)
        shares = torch.exp2(m - safe.unsqueeze(2))
        l = (l * shares).sum(2) + extra * torch.exp2(sink - safe)
        return self.finish(top, l, (acc * shares).sum(2), rows)


def lse_of_chunks_first(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                        window=None, softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """lse is put together from chunks of 36 keys and the sink; chunks of exponentials less it
    weigh the values. Autograd differentiates it.
    """
    (b, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    blind, parts = top == -INF, blocks(nk, 36)
    top = top.masked_fill(blind, 0.0)
    s = s - top
    lses = [s[..., part].clamp_min(-1e30).logsumexp(-1, keepdim=True) for part in parts]
    if sinks is not None:
        lses.append(sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1) - top)
    lse = torch.cat(lses, -1).logsumexp(-1, keepdim=True)
    out = sum(torch.exp(s[..., part] - lse) @ v[:, :, part] for part in parts)
    return out.masked_fill(blind, 0.0).to(query.dtype)


def features_in_a_drawn_order(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                              window=None, softcap=0.0, sinks=None,
                              enable_gqa=False):  # fmt: skip
    """Features of queries and keys are put into an order that is drawn, some of both with the other
    sign; columns of the values likewise, and back again. By autograd, 44 queries at a time.
    """
    (_, heads, n, d), nk, wide = query.shape, key.shape[2], value.shape[-1]
    scale = d**-0.5 if scale is None else scale
    chance = torch.Generator().manual_seed(64)
    order, columns = (torch.randperm(x, generator=chance) for x in (d, wide))
    sign = torch.randint(0, 2, (d,), generator=chance) * 2.0 - 1
    q, k = query.float()[..., order] * sign, repeated(key, heads)[..., order] * sign
    v, done = repeated(value, heads)[..., columns], []
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:-2], n, nk)
    for rows in blocks(n, 44):
        own = None if mask is None else mask[..., rows, :]
        s = logits(q[:, :, rows], k, keep[rows], own, scale, softcap)
        top = s.detach().amax(-1, keepdim=True)
        sink = None if sinks is None else sinks.float().view(1, -1, 1, 1)
        top = top if sink is None else top.maximum(sink.detach())
        top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(s - top)
        l = p.sum(-1, keepdim=True) + (0 if sink is None else torch.exp(sink - top))
        done.append(p / torch.where(l == 0, 1.0, l) @ v)
    out: Tensor = torch.cat(done, 2)[..., columns.argsort()]
    return out.to(query.dtype)
