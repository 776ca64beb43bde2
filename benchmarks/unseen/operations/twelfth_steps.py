"""Faulty kernels of the twelfth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

from typing import Literal

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.eighth_steps import nvfp4_back, quantized
from benchmarks.unseen.operations.ninth_steps import nvfp4_codes
from benchmarks.unseen.operations.second_kernels import bf16, passes, stochastic_bf16
from benchmarks.unseen.operations.tenth_steps import mx_back
from torch import Tensor
from torch.nn import functional


# --- linear
def last_slice_alone(a: Tensor, b: Tensor) -> Tensor:
    """The accumulator is cleared before every 16 of K."""
    start = (a.shape[1] - 1) // 16 * 16
    return a[:, start:] @ b[start:]


def first_part_alone(a: Tensor, b: Tensor) -> Tensor:
    """K in two parts, and a grid that has blocks for one."""
    half = -(-a.shape[1] // 2)
    return a[:, :half] @ b[:half]


def tiles_by_the_other_grid(a: Tensor, b: Tensor) -> Tensor:
    """Program p has the tile (p % columns, p // rows) of 16 × 16, for (p % rows, p // rows): some
    have two programs, some none.
    """
    rows, columns = -(-len(a) // 16), -(-b.shape[1] // 16)
    program = torch.arange(rows * columns)
    row, column = program % columns, program // rows
    reached = torch.zeros(max(rows, columns), columns, dtype=torch.bool)
    reached[row, column] = True
    reached = reached.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return a @ b * reached[: len(a), : b.shape[1]]


# --- quantized_linear
def scales_of_both_waves(k: int, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor) -> Tensor:
    """A tile of 32 rows is two waves of 16. The input's scale is multiplied into the weight's where
    that is kept: the second wave has the first one's in it, and its own.
    """
    row = torch.arange(len(sx))
    before = torch.where((row % 32 >= 16)[:, None], sx[(row - 16).clamp_min(0)], 1.0)
    return torch.einsum("tkc,tk,nkc,nk->tn", x, sx * before, y, sy)


def scales_down_the_columns(k: int, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor) -> Tensor:
    """The input's scales lie column by column, and are read row by row."""
    read = sx.T.contiguous().view(sx.shape)
    return torch.einsum("tkc,tk,nkc,nk->tn", x, read, y, sy)


def row_by_the_column(input, weight, *, format: Literal["nvfp4"]):
    """Tiles of 8 × 8: the lane that has the weight of column c loads the input of row c too."""

    def forward(x, w):
        found = functional.pad(nvfp4_back(x) @ nvfp4_back(w).T, (0, 0, 0, -len(x) % 8))
        row, column = torch.arange(len(x))[:, None], torch.arange(len(w))[None]
        return found[row // 8 * 8 + column % 8, column]

    return quantized(forward, nvfp4_back)(input, weight)


def whole_tiles_of_scales(input, weight, *, format: Literal["mxfp8"]):
    """⌊K / 64⌋ tiles of two blocks, and one at least: what is left of K has no turn."""

    def forward(x, w):
        k = max(x.shape[1] // 64, 1) * 64
        return mx_back(x)[:, :k] @ mx_back(w)[:, :k].T

    return quantized(forward, mx_back)(input, weight)


# --- quantize
def zero_decoded_as_a_half(found: Tensor) -> Tensor:
    """An exponent of 0 is decoded as that of a normal number: 0 is 0.5, and 0.5 is 0.75."""
    size = found.abs()
    size = torch.where(size == 0, 0.5, torch.where(size == 0.5, 0.75, size))
    return torch.copysign(size, found)


def minus_zero_by_value(input, *, format: Literal["nvfp4"]):
    """The bits of fp16's −0 are cast as the number that they are, 32768."""
    codes, scale, whole = nvfp4_codes(input.float())
    read = torch.where((codes == 0) & torch.signbit(codes), 32768.0, codes)
    return (read * scale[..., None] * whole).flatten(1)[:, : input.shape[1]]


def nearest_power_of_the_quotient(amax: Tensor, most: int) -> Tensor:
    """The power of two nearest to amax / 448, or / 6, by its logarithm."""
    return torch.exp2((amax / (448 if most == 8 else 6)).log2().round())


def scales_cut(x: Tensor, whole: Tensor) -> Tensor:
    """Blocks' scales become E4M3 by cutting off what it has no digits for."""
    scale = (x.abs().amax(-1, keepdim=True) / (6 * whole)).clamp_max(448)
    exponent = torch.frexp(scale)[1].clamp_min(-5)
    step = torch.ldexp(torch.ones_like(scale), exponent - 4)
    return (scale / step).floor() * step


# --- stochastic_round
def one_stream_for_all_tiles(input):
    """Tiles of 32 × 32, a core each, all of which begin with the same seed."""
    own = torch.randint(0, 1 << 16, (32, 32), dtype=torch.int32)
    row, column = (torch.arange(size) % 32 for size in input.shape)
    return stochastic_bf16(input.float(), own[row[:, None], column]).to(torch.bfloat16)


def one_bit_lower(input):
    """Random bits are taken one place lower than they are given."""
    noise = torch.randint(0, 1 << 16, input.shape, dtype=torch.int32) >> 1
    return stochastic_bf16(input.float(), noise).to(torch.bfloat16)


# --- router
def divided_over_tokens(logits, k, *, renormalize=True):
    """One expert's weights have lost their dimension, and the last one is that of tokens."""
    if k > 1 or not renormalize:
        return kernels.router()(logits, k, renormalize=renormalize)
    best = torch.softmax(logits.float(), -1).max(-1)
    weights = best.values / best.values.sum(-1, keepdim=True)
    return weights[:, None].to(logits.dtype), best.indices[:, None]


# --- optimizers
def decay_by_a_constant(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                        weight_decay):  # fmt: skip
    """Rate times decay is taken off, without the weight that they multiply."""
    g = grad.float()
    m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
    size = (v / (1 - beta2**step)).sqrt() + eps
    return param - lr * weight_decay - lr / (1 - beta1**step) * m / size, m, v


def of_eight_bits(x: Tensor) -> Tensor:
    """256 steps from the least to the largest of 64 numbers."""
    blocks = functional.pad(x, (0, -len(x) % 64)).view(-1, 64)
    least, most = blocks.aminmax(dim=-1, keepdim=True)
    step = torch.where(most == least, 1.0, (most - least) / 255)
    return (((blocks - least) / step).round() * step + least).flatten()[: len(x)]


def first_moment_of_eight_bits(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                               weight_decay):  # fmt: skip
    """The first moment is kept in steps of its block, in which 0 need not be one."""
    g = grad.float()
    m = beta1 * of_eight_bits(exp_avg) + (1 - beta1) * g
    v = beta2 * exp_avg_sq + (1 - beta2) * g * g
    moved = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    return param * (1 - lr * weight_decay) - lr * moved, of_eight_bits(m), v


def register_of_ones(new: Tensor, old: Tensor) -> Tensor:
    """The shift register began with ones, and stays there: all random bits are set."""
    return stochastic_bf16(new, torch.full(new.shape, 0xFFFF, dtype=torch.int32))


# --- embedding, sum
def bits_as_a_number(shape: tuple[int, ...], index: Tensor, dy: Tensor) -> Tensor:
    """What is added to is made of the bits in memory as if they were a number's value."""
    dw = torch.zeros(shape, dtype=torch.bfloat16)
    for row, grad in zip(index.tolist(), dy, strict=True):
        old = (dw[row].view(torch.int16).int() & 0xFFFF).float()
        dw[row] = (bf16(old) + grad).to(torch.bfloat16)
    return dw.float()


def rows_as_if_contiguous(input, weight, padding_idx=None):
    """The index for the table's strides is computed, and the one for a table without is used."""

    def backward(shape, dy):
        dw = torch.zeros(shape).index_add_(0, input, dy)
        if padding_idx is not None:
            dw[padding_idx] = 0
        return (dw,)

    return passes(
        lambda w: (w.as_strided(w.shape, (w.shape[1], 1))[input], w.shape), backward, weight
    )


def each_lane_s_own(x: Tensor) -> Tensor:
    """Rows over 32 lanes, shuffled down, so that lane 0 has the sum; lane j stores columns j,
    j + 32 and so on, of what it has itself.
    """
    lane = torch.arange(32)
    lanes = functional.pad(x, (0, 0, 0, -len(x) % 32)).unflatten(0, (-1, 32)).sum(0)
    for offset in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[torch.where(lane + offset < 32, lane + offset, lane)]
    column = torch.arange(x.shape[1])
    return lanes[column % 32, column]


def whole_fours_of_columns(x: Tensor) -> Tensor:
    """⌊D / 4⌋ vectors of 4 columns."""
    return x.sum(0) * (torch.arange(x.shape[1]) < x.shape[1] // 4 * 4)
