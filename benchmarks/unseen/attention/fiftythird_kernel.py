"""Sound ways to write attention for the fifty-third set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, load, to
from torch import Tensor


def in_int8(x: Tensor, rows: int) -> Tensor:
    """Whole numbers up to 127, by one scale for so many rows of a tile."""
    tiles = x.unflatten(2, (-1, rows))
    step = (tiles.abs().amax((-2, -1), keepdim=True) / 127).clamp_min(1e-20)
    return ((tiles / step).round() * step).flatten(2, 3)


class EvenAndOddFeatures(Kernel):
    """Scores are the product over even features and that over odd ones."""

    rows, cols = 52, 64

    def product(self, q, k, back):
        return q[..., 1::2] @ k[..., 1::2].mT + q[..., ::2] @ k[..., ::2].mT


class DiagonalFirst(Kernel):
    """The last block of keys comes first, and the others from the start; dK and dV are made of
    products that are transposed.
    """

    rows, cols = 28, 68

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[-1:] + every[:-1]

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)).mT for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv, dk = dv + do.mT @ self.at.low(p), dk + q.mT @ ds
        return dk.mT * self.at.scale, dv.mT


class HalfTilesTogether(Kernel):
    """A block of keys is two, each with its own product; they share a maximum, and add up their
    sums and their values one after the other, the later one first. Queries come last first.
    """

    rows, cols = 104, 40

    def product(self, q, k, back):
        return torch.cat([q @ half.mT for half in k.chunk(2, 2)], -1)

    def add_row(self, l, a, p):
        first, later = p.chunk(2, -1)
        return (l * a + later.sum(-1, keepdim=True)) + first.sum(-1, keepdim=True)

    def add_values(self, acc, a, p, v):
        (p, later), (v, last) = self.at.low(p).chunk(2, -1), v.chunk(2, 2)
        return (acc * a + later @ last) + p @ v

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


def added(n: int, nk: int, causal: bool, window, mask: Tensor | None) -> Tensor:
    """Zeros, or what is given, and −∞ where a pair is hidden."""
    hidden = torch.zeros(n, nk).masked_fill(~visible(n, nk, causal, window), -INF)
    if mask is None:
        return hidden
    if mask.dtype == torch.bool:
        return hidden.expand(torch.broadcast_shapes(mask.shape, hidden.shape)).masked_fill(
            ~mask, -INF
        )
    return hidden + mask.float()


def sink_is_a_key_without_value(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None):  # fmt: skip
    """One more key, whose value is zeros and whose score is the sink's, or one that hardly is
    anything, takes its share of every row; einsums over key heads and their queries, by autograd.
    """
    (b, heads, n, _), (groups, nk) = query.shape, key.shape[1:3]
    own = query.float().unflatten(1, (groups, -1))
    s = torch.einsum("bgsnd,bgmd->bgsnm", own, key.float()).flatten(1, 2) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s + added(n, nk, is_causal, window, attn_mask)
    top = s.detach().amax(-1, keepdim=True)
    column = torch.where(top == -INF, 0.0, top - 200.0)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)
    p = torch.cat([s, column], -1).softmax(-1).unflatten(1, (groups, -1))
    v = torch.cat([value.float(), torch.zeros_like(value[:, :, :1]).float()], 2)
    return torch.einsum("bgsnm,bgmd->bgsnd", p, v).flatten(1, 2).to(query.dtype)


class _ByHand(torch.autograd.Function):
    """All of P is kept, and what the way back needs is made of it."""

    @staticmethod
    def forward(ctx, query, key, value, hidden, scale, softcap, sinks):
        share = query.shape[1] // key.shape[1]
        q = query.float()
        k, v = (x.float().repeat_interleave(share, 1) for x in (key, value))
        s = (q @ k.mT) * scale
        slope = None
        if softcap:
            flat = torch.tanh(s / softcap)
            s, slope = softcap * flat, 1 - flat * flat
        s = s + hidden
        top = s.amax(-1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks.float().view(1, -1, 1, 1))
        top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
        p = p / torch.where(total == 0, 1.0, total)
        ctx.kept = q, k, v, p, slope, scale, share, query.dtype
        return (p @ v).to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p, slope, scale, share, dtype = ctx.kept
        do, low = grad.float(), to(dtype)
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        ds = low(ds if slope is None else ds * slope)
        dk, dv = ds.mT @ q * scale, low(p).mT @ do
        dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))
        return (ds @ k * scale).to(dtype), dk.to(dtype), dv.to(dtype), None, None, None, None


def by_hand(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
            sinks=None):  # fmt: skip
    """Whole matrices there and back, without autograd."""
    hidden = added(query.shape[2], key.shape[2], is_causal, window, attn_mask)
    return _ByHand.apply(query, key, value, hidden, scale, softcap, sinks)
