"""Sound ways to write attention for the seventy-second set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor

sound = attention(Kernel)


class OwnScale(Kernel):
    """The scale is not the caller's, on the way there and back."""

    def own(self) -> float:
        raise NotImplementedError

    def forward(self):
        self.at.scale = self.own()
        return super().forward()


class MaximumFirst(Kernel):
    """The largest score of a row is looked for in all blocks before the first one is weighed, so
    that nothing is ever rescaled; weights are not rounded.
    """

    rows, cols = 56, 40

    def row(self, rows):
        q, tiles = self.load_query("q", self.at.q, rows), []
        m, l, acc = self.begin(q)
        top = m
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            tiles.append((s, v))
            top = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, v in tiles:
            p = torch.exp2(s - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + p @ v
        return self.finish(top, l, acc, rows)


class CompensatedSums(Kernel):
    """What is lost when a block is added to O and to l is kept and added to the next one."""

    rows, cols = 88, 24

    @staticmethod
    def added(total: Tensor, lost: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        part = part - lost
        new = total + part
        return new, (new - total) - part

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        lost_l, lost = torch.zeros_like(l), torch.zeros_like(acc)
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            new = self.maximum(m, s)
            safe = torch.where(new == -INF, 0.0, new)
            p, a = torch.exp2(s - safe), torch.exp2(m - safe)
            l, lost_l = self.added(l * a, lost_l * a, p.sum(-1, keepdim=True))
            acc, lost = self.added(acc * a, lost * a, p @ v)
            m = new
        return self.finish(m, l, acc, rows)


class ThereAndBack(Kernel):
    """Even tiles of queries go over the keys forwards, odd ones backwards, with exponentials of e;
    the way back is as the fifth set's.
    """

    rows, cols = 40, 64

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::-1] if rows.start // self.rows % 2 else every

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe, nats = torch.where(new == -INF, 0.0, new), math.log(2)
        p, a = torch.exp((s - safe) * nats), torch.exp((m - safe) * nats)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


def in_double_precision(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                        window=None, softcap=0.0, sinks=None):  # fmt: skip
    """All of it in float64, by autograd, a sequence at a time."""
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    done, keep = [], visible(n, nk, is_causal, window)
    for b in range(query.shape[0]):
        q, k, v = (x[b : b + 1].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        s = q @ k.mT * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s.masked_fill(~keep, -INF)
        if attn_mask is not None:
            every = attn_mask.expand(query.shape[0], *attn_mask.shape[-3:])
            own = every[b : b + 1]
            s = s.masked_fill(~own, -INF) if own.dtype == torch.bool else s + own.double()
        if sinks is not None:
            sink = sinks.double().view(1, -1, 1, 1).expand(1, heads, n, 1)
            s = torch.cat([s, sink], -1)
        nothing = (s == -INF).all(-1, keepdim=True)
        p = s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        done.append(p[..., :nk] @ v)
    return torch.cat(done).to(query.dtype)


def keys_by_their_remainder(query, key, value, *, is_causal, scale, attn_mask=None,
                            enable_gqa=False, window=None, softcap=0.0,
                            sinks=None):  # fmt: skip
    """Keys lie in five classes by what their number leaves when divided by 5, next to each other,
    and the weights of the whole row follow; by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    order = torch.cat([torch.arange(first, nk, 5) for first in range(5)])
    k, v = (repeated(x[:, :, order], heads) for x in (key, value))
    keep = visible(n, nk, is_causal, window)[:, order]
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)[..., order]
    p = softmax_of(logits(query, k, keep, mask, scale, softcap), sinks)
    out, first = 0.0, 0
    for rest in range(5):
        many = len(range(rest, nk, 5))
        out = out + p[..., first : first + many] @ v[:, :, first : first + many]
        first += many
    return out.to(query.dtype)
