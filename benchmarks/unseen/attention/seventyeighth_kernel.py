"""Sound ways to write attention for the seventy-eighth set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch import Tensor


class Appended(EveryBlock, OtherOperands):
    """Rows that belong to nobody stand behind the keys, and some queries see them whatever the
    masks are.
    """

    def behind(self, x: Tensor) -> Tensor:
        """The rows, of K or of V."""
        raise NotImplementedError

    def shown(self, i: Tensor) -> Tensor:
        """Whether queries i [rows, 1] see them, as what [B, H, rows, keys] broadcasts with."""
        raise NotImplementedError

    def read(self, k, v):
        return tuple(torch.cat([x, self.behind(x)], 2) for x in (k, v))

    def inside(self, j, back):
        return j < self.memory["keys"]

    def hide(self, s, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)
        past = (j >= self.memory["keys"]) & (j < self.at.nk)
        return torch.where(past & self.shown(i), s, super().hide(s, rows, cols, back))

    def odd(self) -> Tensor:
        """Every second sequence."""
        return (torch.arange(self.at.q.shape[0]) % 2 == 1)[:, None, None, None]


class RotatedBlocks(Kernel):
    """Tiles of queries begin at different blocks of keys, and go round; queries likewise."""

    rows, cols = 88, 40

    @staticmethod
    def turned(every: list[slice], by: int) -> list[slice]:
        first = by % max(len(every), 1)
        return every[first:] + every[:first]

    def key_blocks(self, rows):
        return self.turned(super().key_blocks(rows), rows.start // self.rows + 1)

    def query_blocks(self, cols):
        return self.turned(super().query_blocks(cols), cols.start // self.cols + 1)


class EvenAndOddFeatures(Kernel):
    """Scores are products of even and of odd features, O is made of two halves of a tile's keys."""

    rows, cols = 40, 88

    def product(self, q, k, back):
        return q[..., ::2] @ k[..., ::2].mT + q[..., 1::2] @ k[..., 1::2].mT

    def add_values(self, acc, a, p, v):
        half, p = v.shape[2] // 2, self.at.low(p)
        return acc * a + (p[..., half:] @ v[:, :, half:] + p[..., :half] @ v[:, :, :half])


def weights_from_logsumexp(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                           softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Weights are exp(s − lse), with lse of all keys and the sink, by autograd."""
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    keep = visible(n, nk, is_causal, window)
    s = logits(query, repeated(key, heads), keep, attn_mask, scale, softcap)
    nothing = (s == -INF).all(-1, keepdim=True)
    s = s.masked_fill(nothing, 0.0)
    lse = s.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1).expand_as(lse))
    p = torch.exp(s - lse).masked_fill(nothing, 0.0)
    return (p @ repeated(value, heads)).to(query.dtype)


def halved_by_recursion(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                        softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Keys are halved until 30 or fewer are left; halves have a maximum, a sum and an unnormalized
    O each, and are put together on the way up, by autograd.
    """
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    keep = visible(n, nk, is_causal, window)
    s = logits(query, repeated(key, heads), keep, attn_mask, scale, softcap)
    v = repeated(value, heads)

    def part(first: int, last: int):
        if last - first > 30:
            middle = (first + last) // 2
            (m, l, o), (m2, l2, o2) = part(first, middle), part(middle, last)
            top = torch.maximum(m, m2)
            a, b = torch.exp(m - top), torch.exp(m2 - top)
            return top, l * a + l2 * b, o * a + o2 * b
        own = s[..., first:last]
        m = own.detach().amax(-1, keepdim=True).clamp_min(-1e30)
        p = torch.exp(own - m)
        return m, p.sum(-1, keepdim=True), p @ v[:, :, first:last]

    m, l, o = part(0, nk)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        top = m.maximum(sink.detach())
        l, o = l * torch.exp(m - top) + torch.exp(sink - top), o * torch.exp(m - top)
    return (o / torch.where(l == 0, 1.0, l)).to(query.dtype)


def keys_in_a_drawn_order(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                          softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Keys, values and what hides them are put into another order, drawn once, by autograd."""
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    order = torch.randperm(nk, generator=torch.Generator().manual_seed(78))
    keep = visible(n, nk, is_causal, window)[:, order]
    mask = attn_mask
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], nk)[..., order]
    k, v = repeated(key, heads)[:, :, order], repeated(value, heads)[:, :, order]
    return (softmax_of(logits(query, k, keep, mask, scale, softcap), sinks) @ v).to(query.dtype)
