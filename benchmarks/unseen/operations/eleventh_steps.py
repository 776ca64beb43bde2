"""Faulty kernels of the eleventh set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from benchmarks.unseen.operations.eighth_steps import nvfp4_back, quantized, row_codes
from benchmarks.unseen.operations.fifth_steps import fp16, mx_codes, step_of_adamw
from benchmarks.unseen.operations.ninth_steps import nvfp4_codes
from benchmarks.unseen.operations.second_kernels import (
    bf16,
    by_rows,
    e4m3,
    passes,
    power_of_two,
    stochastic_bf16,
)
from benchmarks.unseen.operations.tenth_steps import mx_back, mx_values
from torch import Tensor
from torch.nn import functional


# --- linear
def grid_of_the_floor(a: Tensor, b: Tensor) -> Tensor:
    """⌊M / 16⌋ · ⌊N / 16⌋ blocks: what lies beyond is never written."""
    rows, columns = torch.arange(len(a)), torch.arange(b.shape[1])
    reached = (rows < len(a) // 16 * 16)[:, None] & (columns < b.shape[1] // 16 * 16)
    return a @ b * reached


def packed_additions(a: Tensor, b: Tensor) -> Tensor:
    """K in two parts, the second added to the first in pairs of fp16: where there is something
    already, the upper one of the pair is not added to.
    """
    half = -(-a.shape[1] // 2)
    lower = torch.arange(b.shape[1]) % 2 == 0
    return a[:, :half] @ b[:half] + (a[:, half:] @ b[half:]) * lower


def parts_in_the_output(a: Tensor, b: Tensor) -> Tensor:
    """Four parts of K are added to an output of bf16."""
    size = -(-a.shape[1] // 4)
    total = torch.zeros(len(a), b.shape[1])
    for start in range(0, a.shape[1], size):
        total = bf16(total + bf16(a[:, start : start + size] @ b[start : start + size]))
    return total


# --- quantized_linear
def columns_into_the_next_row(input, weight, *, format: Literal["mxfp8"]):
    """Tiles of 64 columns whose store is bounded in rows alone: what a tile has beyond N, zeros,
    lies on the first columns of the next row.
    """

    def forward(x, w):
        found = mx_back(x) @ mx_back(w).T
        found[1:, : min(-len(w) % 64, len(w))] = 0
        return found

    return quantized(forward, mx_back)(input, weight)


def blocks_across_rows(input, weight, *, format: Literal["mxfp8"]):
    """A tensor is cut into blocks of 32 from its first number to its last, whatever its rows."""

    def back(x):
        flat = x.contiguous().view(1, -1)
        return mx_values(*mx_codes(flat)).view(x.shape)

    return quantized(lambda x, w: back(x) @ back(w).T, back)(input, weight)


def small_scales_vanish(input, weight, *, format: Literal["nvfp4"]):
    """Scales are widened by a shift that takes them for 2⁻⁶ and more; lesser ones are read as 0."""

    def forward(x, w):
        codes, scale, whole = nvfp4_codes(w)
        scale = torch.where(scale < 2.0**-6, 0.0, scale)
        back = (codes * scale[..., None] * whole).flatten(1)[:, : w.shape[1]]
        return nvfp4_back(x) @ back.T

    return quantized(forward, nvfp4_back)(input, weight)


def read_past_k(input, weight, *, format: Literal["fp8_row"]):
    """Tiles of 32 of K without a bound: past the last column lie the codes of the next row."""

    def forward(x, w):
        (a, sa), (b, sb) = row_codes(x), row_codes(w)
        k = a.shape[1]
        wide = k + -k % 32

        def read(codes):
            flat = functional.pad(codes.contiguous().flatten(), (0, wide))
            return flat.as_strided((len(codes), wide), (k, 1))

        return read(a) @ read(b).T * sa * sb.T

    return quantized(forward, by_rows)(input, weight)


# --- quantize
def ceiling_of_the_logarithm(amax: Tensor, most: int) -> Tensor:
    """2 to the ceiling of log2 amax: nothing is more than 1."""
    fraction, exponent = torch.frexp(amax)
    return torch.ldexp(torch.ones_like(amax), exponent - (fraction == 0.5).int())


def top_binade_saturates(y: Tensor) -> Tensor:
    """An exponent of 15 is taken for what IEEE's formats have there."""
    return torch.where(y.abs() >= 256, torch.copysign(torch.tensor(448.0), y), e4m3(y))


def nan_at_128(amax: Tensor, most: int) -> Tensor:
    """The scale, not its byte, is compared with the number that means NaN."""
    scale = power_of_two(amax, most)
    return torch.where(scale == 128, math.nan, scale)


# --- stochastic_round
def three_bits_below(input):
    """Three random bits, and zeros below them: a sixteenth of a step too little."""
    noise = torch.randint(0, 8, input.shape, dtype=torch.int32) << 13
    return stochastic_bf16(input.float(), noise).to(torch.bfloat16)


# --- router
def total_without_the_last(logits, k, *, renormalize=True):
    """Weights are stored and read again for their sum, the last one before it has arrived."""

    def forward(z):
        index = z.topk(k, -1).indices
        p = torch.softmax(z, -1)
        picked = p.gather(1, index)
        total = torch.ones(len(z), 1)
        if renormalize:
            total = picked[:, : max(k - 1, 1)].sum(-1, keepdim=True)
        return ((picked / total).to(logits.dtype), index), (p, index, picked)

    def backward(saved, dy):
        p, index, picked = saved
        if renormalize:
            total = picked.sum(-1, keepdim=True)
            dy = (dy - (dy * picked / total).sum(-1, keepdim=True)) / total
        dp = torch.zeros_like(p).scatter_(1, index, dy)
        return (p * (dp - (dp * p).sum(-1, keepdim=True)),)

    return passes(forward, backward, logits)


# --- optimizers
def adamw(first: Any = None, step_of: Any = None):
    """`first(m, g, beta1, step)` is the new first moment, `step_of(m, v, one, two, eps)` what the
    rate multiplies, `one` and `two` being 1 − βᵗ.
    """

    def kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        g = grad.float()
        m = first(exp_avg, g, beta1, step) if first else beta1 * exp_avg + (1 - beta1) * g
        v = beta2 * exp_avg_sq + (1 - beta2) * g * g
        one, two = 1 - beta1**step, 1 - beta2**step
        moved = step_of(m, v, one, two, eps) if step_of else m / one / ((v / two).sqrt() + eps)
        return param * (1 - lr * weight_decay) - lr * moved, m, v

    return kernel


def eps_taken_off(m: Tensor, v: Tensor, one: float, two: float, eps: float) -> Tensor:
    return m / one / ((v / two).sqrt() - eps)


def one_less_the_correction(m: Tensor, v: Tensor, one: float, two: float, eps: float) -> Tensor:
    """√(1 − (1 − β₂ᵗ)) for √(1 − β₂ᵗ)."""
    return math.sqrt(1 - two) / one * m / (v.sqrt() + eps)


def beta1_to_the_step(m: Tensor, g: Tensor, beta1: float, step: int) -> Tensor:
    return beta1**step * m + (1 - beta1**step) * g


def moments_in_bf16(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """Both moments are kept in the weights' format, to nearest."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    for number, g in enumerate(grads.float(), step):
        moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
        m, v = bf16(m), bf16(v)
        p = stochastic_bf16(p * (1 - options["lr"] * options["weight_decay"]) - moved)
    return p.to(param.dtype), m, v


def carry_by_or(new: Tensor, old: Tensor) -> Tensor:
    """The rounded mantissa is joined to the exponent by |: a carry into an odd one is lost."""
    number = new.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, new.shape, dtype=torch.int32)
    mantissa = (number & 0x7FFFFF) + noise
    return (((number & -0x800000) | mantissa) & -65536).view(torch.float32)


# --- embedding, sum
def padding_reads_zeros(input, weight, padding_idx=None):
    """The row of the padding is taken for zeros, whatever is in the table."""

    def forward(w):
        rows = w[input]
        if padding_idx is not None:
            rows = rows.masked_fill((input == padding_idx)[:, None], 0.0)
        return rows, w.shape

    def backward(shape, dy):
        dw = torch.zeros(shape).index_add_(0, input, dy)
        if padding_idx is not None:
            dw[padding_idx] = 0
        return (dw,)

    return passes(forward, backward, weight)


def tiles_of_the_floor(rows: Tensor) -> Tensor:
    """⌊T / 32⌋ tiles of tokens."""
    return rows * (torch.arange(len(rows)) < len(rows) // 32 * 32)[:, None]


def token_by_token_in_fp16(shape: Any, index: Tensor, dy: Tensor) -> Tensor:
    dw = torch.zeros(shape)
    for row, grad in zip(index.tolist(), dy, strict=True):
        dw[row] = fp16(dw[row] + grad)
    return dw


def first_tile_of_rows(x: Tensor) -> Tensor:
    """16 rows are a tile, of which the first alone is added up."""
    return x[:16].sum(0)
