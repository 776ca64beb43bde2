"""Sound ways to write attention for the sixty-seventh set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel, and functions name
# the options of the call

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor
from torch.nn import functional


class OneSoftmax(ForwardAlone):
    """All scores lie in memory, and one kernel makes the softmax of them, a row after the other."""

    def behind(self, s: Tensor) -> Tensor:
        """[B, H, N, 1]: what else enters a row's maximum."""
        raise NotImplementedError

    def maximum(self, m, s):
        return torch.maximum(super().maximum(m, s), self.behind(s))

    def forward(self):
        at = self.at
        rows, cols = slice(0, at.n), slice(0, at.nk)
        s = self.scores(at.q, at.k, rows, cols, False)
        return self.finish(*self.online(*self.begin(at.q), s, at.v, rows, cols), rows)


class MaskOfAll(EveryBlock):
    """The diagonal and the mask that is given are one matrix, which is added in both passes."""

    def laid_out(self, whole: Tensor) -> Tensor:
        """[B, H, N, Nk] of what is to be added."""
        raise NotImplementedError

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)

    def whole(self) -> Tensor:
        at = self.at
        keep = visible(at.n, at.nk, at.causal, None)
        added = torch.zeros(1, 1, at.n, at.nk).masked_fill(~keep, -INF)
        if at.mask is None:
            return added
        if at.mask.dtype == torch.bool:
            return added + torch.zeros(at.mask.shape).masked_fill(~at.mask, -INF)
        return added + at.mask.float() * LOG2_E

    def hide(self, s, rows, cols, back):
        if "added" not in self.memory:
            self.memory["added"] = self.laid_out(self.whole())
        tile = self.memory["added"][..., rows, cols]
        tile = functional.pad(tile, (0, s.shape[3] - tile.shape[3], 0, s.shape[2] - tile.shape[2]))
        return s.masked_fill(~self.seen(rows, cols, back), -INF) + tile


def weighed(weights: Callable[[Tensor], Tensor]):
    """Eager attention by autograd, whose weights are made of hidden and visible scores; sinks have
    no part in it.
    """

    def call(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
             window=None, softcap=0.0, sinks=None):  # fmt: skip
        (_, heads, n, _), nk = query.shape, key.shape[2]
        k, v = repeated(key, heads), repeated(value, heads)
        s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
        return (weights(s) @ v).to(query.dtype)

    return call


class BitReversedBlocks(Kernel):
    """Blocks of keys in the order of their numbers' bits read backwards; so are queries'."""

    rows, cols = 44, 36

    @staticmethod
    def reversed_bits(every: list[slice]) -> list[slice]:
        many = max(len(every) - 1, 1).bit_length()
        order = sorted(range(len(every)), key=lambda i: f"{i:0{many}b}"[::-1])
        return [every[i] for i in order]

    def key_blocks(self, rows):
        return self.reversed_bits(super().key_blocks(rows))

    def query_blocks(self, cols):
        return self.reversed_bits(super().query_blocks(cols))


class MaximumFirst(Kernel):
    """Keys are gone through once for the maximum, and once more for sums that nothing rescales."""

    rows, cols = 88, 48

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        start, tiles = m, []
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            tiles.append((self.scores(q, k, rows, cols, False), v))
            m = torch.maximum(m, tiles[-1][0].amax(-1, keepdim=True))
        safe = torch.where(m == -INF, 0.0, m)
        l = l * torch.exp2(start - safe)
        for s, v in tiles:
            p = torch.exp2(s - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + self.at.low(p) @ v
        return self.finish(m, l, acc, rows)


class ScaledAsItIsLoaded(Kernel):
    """Queries are multiplied by the scale and log₂ e in fp32, before the product."""

    rows, cols = 60, 80

    def product(self, q, k, back):
        return (q * (self.at.scale * LOG2_E)) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s


def weights_from_logsumexp(query, key, value, *, is_causal, scale, attn_mask=None,
                           enable_gqa=False, window=None, softcap=0.0, sinks=None):  # fmt: skip
    """exp(s − lse) of scores less the largest one, where lse has the sink in it; 36 queries at a
    time, by autograd.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    done = []
    for part in s.split(36, 2):
        nothing = (part == -INF).all(-1, keepdim=True)
        part = part.masked_fill(nothing, 0.0)
        top = part.detach().amax(-1, keepdim=True)
        part = part - top
        lse = part.logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1) - top)
        done.append(torch.exp(part - lse).masked_fill(nothing, 0.0) @ v)
    return torch.cat(done, 2).to(query.dtype)


def every_third_key(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                    window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Keys 0, 3, 6 … have a sum and an O, as have 1, 4, 7 … and 2, 5, 8 …; a sink is the first sum.
    By autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        top = top.maximum(sink.detach())
    top = torch.where(top == -INF, 0.0, top)
    l = torch.zeros(b, heads, n, 1) if sinks is None else torch.exp(sink - top)
    o = torch.zeros(b, heads, n, v.shape[-1])
    for first in range(min(3, nk)):
        p = torch.exp(s[..., first::3] - top)
        l, o = l + p.sum(-1, keepdim=True), o + p @ v[:, :, first::3]
    return (o / torch.where(l == 0, 1.0, l)).to(query.dtype)


def axes_exchanged(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                   window=None, softcap=0.0, sinks=None):  # fmt: skip
    """The second axis is the tokens', and the third the heads'; where that would not fit the other
    arguments, as the caller has it.
    """
    fits = query.shape[2] == key.shape[2] and attn_mask is None and sinks is None
    q, k, v = (x.transpose(1, 2) if fits else x for x in (query, key, value))
    (_, heads, n, _), nk = q.shape, k.shape[2]
    k, v = repeated(k, heads), repeated(v, heads)
    s = logits(q, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    o = (softmax_of(s, sinks) @ v).to(query.dtype)
    return o.transpose(1, 2) if fits else o
