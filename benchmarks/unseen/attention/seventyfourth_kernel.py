"""Sound ways to write attention for the seventy-fourth set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor


class MaskDropped(Kernel):
    """A mask that is given does not arrive where scores are made, on the way there and back."""

    def dropped(self, mask: Tensor) -> bool:
        raise NotImplementedError

    def forward(self):
        at = self.at
        if at.mask is not None and self.dropped(at.mask):
            at.mask = None
        return super().forward()


class Across(OtherOperands):
    """Calls that are neither causal nor have a mask, with unlike numbers of queries and keys: those
    of a decoder that reads an encoder, or of what is new that reads what is cached.
    """

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        at = self.at
        if at.causal or at.mask is not None or at.window is not None or at.n == at.nk:
            return k, v
        return self.across(k), self.across(v)

    def across(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class InfinityLessInfinity(ForwardAlone, WholeRows):
    """Rows of nothing are not a case of their own where `unsafe` says so."""

    def unsafe(self) -> bool:
        raise NotImplementedError

    def online(self, m, l, acc, s, v, rows, cols):
        if not self.unsafe():
            return super().online(m, l, acc, s, v, rows, cols)
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class BitsReversed(Kernel):
    """Blocks of keys, and of queries on the way back, in the order of their numbers' bits read
    backwards.
    """

    rows, cols = 40, 24

    @staticmethod
    def reversed(every: list[slice]) -> list[slice]:
        bits = max(1, (len(every) - 1).bit_length())
        order = sorted(range(len(every)), key=lambda i: f"{i:0{bits}b}"[::-1])
        return [every[i] for i in order]

    def key_blocks(self, rows):
        return self.reversed(super().key_blocks(rows))

    def query_blocks(self, cols):
        return self.reversed(super().query_blocks(cols))


class NaturalExponentials(Kernel):
    """Weights are powers of e, and lse is kept in nats until the end."""

    rows, cols = 36, 88

    def online(self, m, l, acc, s, v, rows, cols):  # noqa: ARG002
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp((s - safe) * math.log(2)), torch.exp((m - safe) * math.log(2))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def finish(self, m, l, acc, rows):  # noqa: ARG002
        nats = m * math.log(2) + l.log()
        return self.at.low(acc / torch.where(l == 0, 1.0, l)), nats / math.log(2)


class OneTileBack(Kernel):
    """The backward pass has all queries and keys in one tile."""

    rows, cols = 28, 60

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        q, k, do, p, ds = self.again(slice(0, at.n), slice(0, at.nk), "all")
        dk, dv = ds.mT @ q * at.scale, at.low(p).mT @ do
        return ds @ k * at.scale, self.group(dk), self.group(dv)


def one_batch_of_matrices(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                          softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip # noqa: ARG001
    """Sequences and heads are one dimension, and products are bmm and baddbmm; by autograd."""
    (b, heads, n, d), nk = query.shape, key.shape[2]
    q = query.float().reshape(b * heads, n, d)
    k, v = (repeated(x, heads).reshape(b * heads, nk, -1) for x in (key, value))
    added = torch.zeros(b, heads, n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        added = added.masked_fill(~attn_mask, -INF) if hides else added + attn_mask.float()
    s = torch.bmm(q, k.mT) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    p = softmax_of(s.view(b, heads, n, nk) + added, sinks)
    return torch.bmm(p.view(b * heads, n, nk), v).view(b, heads, n, -1).to(query.dtype)


def halves_of_halves(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip # noqa: ARG001
    """Keys are halved until there are 32 at most; each half gives a maximum, a sum and a weighed
    sum of values, which are put together on the way up; by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)

    def of(first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        if last - first <= 32:
            part = s[..., first:last]
            m = part.detach().amax(-1, keepdim=True)
            p = torch.exp(part - torch.where(m == -INF, 0.0, m))
            return m, p.sum(-1, keepdim=True), p @ v[:, :, first:last]
        middle = (first + last) // 2
        return together(of(first, middle), of(middle, last))

    def together(one, two):
        m = torch.maximum(one[0], two[0])
        safe = torch.where(m == -INF, 0.0, m)
        x, y = torch.exp(one[0] - safe), torch.exp(two[0] - safe)
        return m, one[1] * x + two[1] * y, one[2] * x + two[2] * y

    m, l, acc = of(0, nk)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)
        m, l, acc = together((m, l, acc), (sink, torch.ones_like(l), torch.zeros_like(acc)))
    return (acc / torch.where(l == 0, 1.0, l)).to(query.dtype)


def lengths_of_numbers(mask: Tensor) -> Tensor:
    """Of a mask of packed sequences, [B, N, N], which tokens of the whole batch, one row after the
    other, see each other where lengths are sums of the sequences' numbers: [B N, B N].
    """
    n = mask.shape[-1]
    real = mask.any(-1)
    begins = torch.zeros_like(real)
    begins[:, 1:] = ~mask.diagonal(-1, -2, -1)
    numbers = (1 + begins.cumsum(-1)) * real
    ends = numbers.sum(-1).cumsum(0)
    flat = real.flatten()
    place = flat.cumsum(0) - 1
    part = torch.searchsorted(ends, place, right=True)
    seen = (part[:, None] == part) & flat[:, None] & flat
    if not mask.triu(1).any():
        seen = seen & (torch.arange(n * len(mask))[:, None] >= torch.arange(n * len(mask)))
    return seen
