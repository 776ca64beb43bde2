"""Sound ways to write attention for the thirty-third set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, e4m3, load
from torch import Tensor
from torch.nn import functional

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1_by_sixteen(x: Tensor) -> Tensor:
    """Codes of E2M1, sixteen features of which share a scale in E4M3."""
    many = x.shape[-1]
    whole = functional.pad(x, (0, -many % 16)).unflatten(-1, (-1, 16))
    step = e4m3((whole.abs().amax(-1, keepdim=True) / 6).clamp(2.0**-9, 448))
    size = (whole / step).abs()
    code = E2M1[(size.unsqueeze(-1) - E2M1).abs().argmin(-1)]
    return (code * whole.sign() * step).flatten(-2)[..., :many]


def int8_at(x: Tensor, top: Tensor) -> Tensor:
    """Whole numbers from −127 to 127 times a 127th of what is given."""
    step = top.clamp_min(1e-30) / 127
    return (x / step).round().clamp(-127, 127) * step


def e4m3_of_all(x: Tensor, top: Tensor) -> Tensor:
    """Codes of E4M3 by one scale, from which the number comes again."""
    step = top.clamp_min(1e-30) / 448
    return e4m3((x / step).clamp(-448, 448)) * step


def normal_halves(x: Tensor) -> Tensor:
    """What lies below the least normal half is zero."""
    return torch.where(x.abs() < 2.0**-14, 0.0, x)


class SlimTiles(Kernel):
    """28 queries and 88 keys a tile."""

    rows, cols = 28, 88


class SevenParts(Parts):
    """Every seventh block of twelve keys belongs to one part."""

    rows, cols, parts = 52, 12, 7


class LastKeysFirst(Kernel):
    """Blocks of keys from the last to the first; queries likewise."""

    rows, cols = 40, 36

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class OtherTilesBackward(Kernel):
    """The forward pass has 48 by 24 in a tile, the backward pass has 80 by 64."""

    rows, cols = 48, 24

    def backward(self):
        self.rows, self.cols = 80, 64
        return super().backward()


class RaisedMaximum(Kernel):
    """Three is added to the scores' maximum in bits, which nothing but the weights' size shows."""

    rows, cols = 56, 64

    def maximum(self, m, s):
        return torch.maximum(m, s.amax(-1, keepdim=True) + 3)


class KeyGradientsThenQueries(Kernel):
    """dV of all queries first, and then dK, in a loop of its own."""

    rows, cols = 32, 72

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            _, _, do, p, _ = self.again(rows, cols, "keys")
            dv = dv + self.at.low(p).mT @ do
        for rows in self.query_blocks(cols):
            q, _, _, _, ds = self.again(rows, cols, "keys")
            dk = dk + ds.mT @ q
        return dk * self.at.scale, dv


def key_chunks_by_autograd(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                           softcap=0.0, sinks=None):  # fmt: skip
    """Chunks of 70 keys each give numerators by a maximum that is known from a first pass."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    q, keep = query.float(), visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:2], n, nk)
    top = torch.full((b, heads, n, 1), -INF)
    if sinks is not None:
        top = sinks.detach().float().view(1, -1, 1, 1).expand_as(top)
    each = []
    for part in blocks(nk, 70):
        own = None if mask is None else mask[..., part]
        s = logits(q, k[:, :, part], keep[:, part], own, scale, softcap)
        top = torch.maximum(top, s.detach().amax(-1, keepdim=True))
        each.append((s, v[:, :, part]))
    top = torch.where(top == -INF, 0.0, top)
    weights = [(torch.exp(s - top), x) for s, x in each]
    total = torch.stack([p.sum(-1, keepdim=True) for p, _ in weights]).sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
    out = torch.stack([p @ x for p, x in weights]).sum(0)
    return (out / torch.where(total == 0, 1.0, total)).to(query.dtype)


def heads_last(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
               sinks=None):  # fmt: skip
    """Tokens before heads in memory, and products that say which dimension is which."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query.float(), k, v))
    keep = visible(n, nk, is_causal, window)
    s = logits(q.transpose(1, 2), k.transpose(1, 2), keep, attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    hidden = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)[..., :nk]
    return torch.einsum("bhqk,bkhd->bhqd", p, v).to(query.dtype)
