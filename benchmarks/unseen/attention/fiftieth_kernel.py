"""Sound ways to write attention for the fiftieth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from torch import Tensor


class MaskChanged(Kernel):
    """A boolean mask is another than the caller's, on the way there and back."""

    def changed(self, mask: Tensor) -> Tensor:
        """What takes the place of a mask with a row for every query, a column for every key."""
        raise NotImplementedError

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            at.mask = self.changed(at.mask.expand(*at.mask.shape[:-2], at.n, at.nk))
        return super().forward()


class OnesWhereHidden(Kernel):
    """What a boolean mask hides scores one more, on the way there and back."""

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        one = (~self.given_mask(rows, cols)).float()
        return self.bias(s, one, back).masked_fill(~self.seen(rows, cols, back), -INF)


class DistanceInCrossAttention(Kernel):
    """Where there are other keys than queries a learned bias of their distance is added."""

    both_ways, buckets, farthest = True, 32, 128

    def bucket(self, far: Tensor) -> Tensor:
        """T5's: half of the buckets are exact, the others grow with the logarithm."""
        many, first = self.buckets, torch.zeros_like(far)
        if self.both_ways:
            many //= 2
            first, far = (far > 0) * many, far.abs()
        else:
            far = -far.clamp_max(0)
        exact = many // 2
        grown = torch.log(far.clamp_min(1) / exact) / math.log(self.farthest / exact)
        grown = exact + (grown * (many - exact)).long()
        return first + torch.where(far < exact, far, grown.clamp_max(many - 1))

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None and at.window is None and not at.causal and at.n != at.nk:
            chance = torch.Generator().manual_seed(5)
            table = torch.randn(self.buckets, at.q.shape[1], generator=chance)
            i, j = torch.arange(rows.start, rows.stop), torch.arange(cols.start, cols.stop)
            s = self.bias(s, table[self.bucket(j - i[:, None])].permute(2, 0, 1), back)
        return super().hide(s, rows, cols, back)


class KeysByTheThird(Kernel):
    """A block's scores are made in three products, of a third of its keys each, and the softmax
    goes on once for all of them; the last block of keys comes first.
    """

    rows, cols = 36, 132

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[-1:] + every[:-1]

    def product(self, q, k, back):
        return torch.cat([q @ part.mT for part in k.split(44, 2)], -1)


class DiagonalOutwards(Kernel):
    """The blocks of keys nearest to the queries' own places come first, the farthest last; likewise
    the queries of a block of keys.
    """

    rows, cols = 76, 28

    def key_blocks(self, rows):
        return sorted(super().key_blocks(rows), key=lambda c: abs(c.start - rows.start))

    def query_blocks(self, cols):
        return sorted(super().query_blocks(cols), key=lambda r: abs(r.start - cols.start))


class TreesOfSums(Kernel):
    """Row sums are halved till one is left, and what blocks of queries give dK and dV is added up
    two by two.
    """

    rows, cols = 20, 64

    def add_row(self, l, a, p):
        while p.shape[-1] > 1:
            half = p.shape[-1] // 2
            p = p[..., :half] + p[..., half : 2 * half]
        return l * a + p

    def key_gradients(self, cols):
        parts = [tuple(torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))]
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            parts.append((ds.mT @ q, self.at.low(p).mT @ do))
        while len(parts) > 1:
            odd = parts[len(parts) // 2 * 2 :]
            pairs = zip(parts[: len(parts) - len(odd) : 2], parts[1::2], strict=True)
            parts = [(a + c, b + d) for (a, b), (c, d) in pairs] + odd
        dk, dv = parts[0]
        return dk * self.at.scale, dv


def one_einsum_for_a_group(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                           softcap=0.0, sinks=None):  # fmt: skip
    """Key heads and those that share them are two dimensions, and values are weighed by
    exp(s − lse), which are taken against the maximum, 60 keys at a time, by autograd.
    """
    (b, heads, n, d), (groups, nk) = query.shape, key.shape[1:3]
    share = heads // groups
    q = query.view(b, groups, share, n, d) if query.is_contiguous() else query.unflatten(
        1, (groups, share))  # fmt: skip
    s = torch.einsum("bgrid,bgjd->bgrij", q.float() * scale, key.float())
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.flatten(1, 2).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.float()
    top = s.detach().amax(-1, keepdim=True)
    nothing = top == -INF
    top = top.masked_fill(nothing, 0.0)
    s = s - top
    lse = s.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1) - top
        lse = torch.where(nothing, sink, torch.logaddexp(lse, sink))
    v, out = value.float(), 0.0
    for part in blocks(nk, 60):
        p = torch.exp(s[..., part] - lse).unflatten(1, (groups, share))
        out = out + torch.einsum("bgrij,bgjd->bgrid", p, v[:, :, part])
    return out.flatten(1, 2).to(query.dtype)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, v, sink):
        m = s.amax(-1, keepdim=True)
        m = torch.where(m == -INF, 0.0, m) if sink is None else m.maximum(sink)
        p = torch.exp(s - m)
        l = p.sum(-1, keepdim=True) + (0 if sink is None else torch.exp(sink - m))
        p = p / torch.where(l == 0, 1.0, l)
        ctx.save_for_backward(p, v)
        return p @ v

    @staticmethod
    def backward(ctx, grad):
        p, v = ctx.saved_tensors
        dp = grad @ v.mT
        return p * (dp - (p * dp).sum(-1, keepdim=True)), p.mT @ grad, None


def softmax_and_values_in_one(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                              softcap=0.0, sinks=None):  # fmt: skip
    """The softmax and its product with V are one function with a backward pass of its own, which
    keeps P; scores are autograd's.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    sink = None if sinks is None else sinks.detach().float().view(1, -1, 1, 1)
    return _Whole.apply(s, v, sink).to(query.dtype)
