"""Sound ways to write attention for the thirty-second set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, e4m3, fp16, load
from torch import Tensor
from torch.nn import functional


def q4_0(x: Tensor) -> Tensor:
    """Four bits a number, from −8 to 7 times what 32 neighbors share in fp16, as llama.cpp has it:
    the largest of them in magnitude is −8 times it.
    """
    many = x.shape[-1]
    whole = functional.pad(x, (0, -many % 32)).unflatten(-1, (-1, 32))
    top = whole.gather(-1, whole.abs().argmax(-1, keepdim=True))
    step = fp16(top / -8)
    code = (whole / torch.where(step == 0, 1.0, step) + 8.5).floor().clamp(0, 15) - 8
    return (code * step).flatten(-2)[..., :many]


def by_one_scale(x: Tensor, scale: float) -> Tensor:
    """Codes of E4M3 of a multiple of x, and x again from them; past 448 they stay there."""
    return e4m3((x * scale).clamp(-448, 448)) / scale


def at_random(x: Tensor) -> Tensor:
    """Rounded to bf16, up or down by chance, so that the mean is right."""
    bits = x.contiguous().view(torch.int32)
    chance = torch.randint_like(bits, 1 << 16)
    return ((bits + chance) & -(1 << 16)).view(torch.float32)


class FlatTiles(Kernel):
    """72 queries and 20 keys a tile."""

    rows, cols = 72, 20


class ThirteenParts(Parts):
    """Every thirteenth block of ten keys belongs to one part."""

    rows, cols, parts = 44, 10, 13


class FromTheMiddle(Kernel):
    """The second half of the blocks of keys comes first; queries likewise."""

    rows, cols = 32, 40

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[len(every) // 2 :] + every[: len(every) // 2]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[len(every) // 2 :] + every[: len(every) // 2]


class FinerQueriesBackward(Kernel):
    """The forward pass has 96 queries a tile, the backward pass has 24."""

    rows, cols = 96, 56

    def backward(self):
        self.rows = 24
        return super().backward()


class SumsAsProducts(Kernel):
    """Row sums come from the product with a column of ones beside the values, in fp32."""

    rows, cols = 48, 72

    def add_row(self, l, a, p):
        return l * a + p @ torch.ones(p.shape[-1], 1)


class KeyGradientsOfTwoHalves(Kernel):
    """Queries of either half make their own part of dK and dV; the parts are added in fp32."""

    rows, cols = 40, 64

    def key_gradients(self, cols):
        every, total = self.query_blocks(cols), []
        for own in (every[::2], every[1::2]):
            dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
            for rows in own:
                q, _, do, p, ds = self.again(rows, cols, "keys")
                dk, dv = dk + ds.mT @ q, dv + self.at.low(p).mT @ do
            total.append((dk * self.at.scale, dv))
        return total[0][0] + total[1][0], total[0][1] + total[1][1]


def rows_in_blocks_of_sixty(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                            softcap=0.0, sinks=None):  # fmt: skip
    """Rows in blocks of 60, each with all of its keys and a log-sum-exp of its own."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep, done = visible(n, nk, is_causal, window), []
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)
    for part in blocks(n, 60):
        own = None if mask is None else mask[:, :, part]
        s = logits(query[:, :, part], k, keep[part], own, scale, softcap)
        hidden = (s == -INF).all(-1, keepdim=True)
        s = s.masked_fill(hidden, 0.0)
        lse = s.logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1))
        done.append(torch.exp(s - lse).masked_fill(hidden, 0.0) @ v)
    return torch.cat(done, 2).to(query.dtype)


def powers_of_two(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                  softcap=0.0, sinks=None):  # fmt: skip
    """All in base 2: scores in bits, their largest rounded up, weights and sums in fp32."""
    (b, heads, n, _), shared, nk = query.shape, key.shape[1], key.shape[2]
    bit = 1 / math.log(2)
    k, v = (x.float().repeat_interleave(heads // shared, 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap) * bit
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1) * bit
        s, v = torch.cat([column, s], -1), functional.pad(v, (0, 0, 1, 0))
    top = s.detach().amax(-1, keepdim=True).ceil()
    p = torch.exp2(s - torch.where(top == -INF, 0.0, top))
    l = p.sum(-1, keepdim=True)
    return (p @ v / torch.where(l == 0, 1.0, l)).to(query.dtype).reshape(b, heads, n, -1)
