"""Faulty kernels of the fourteenth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

from typing import Any, Literal

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.eighth_steps import quantized, row_codes
from benchmarks.unseen.operations.fifth_steps import codes_of_128, mx_codes
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
def linear(weight_gradient: Any):
    """`weight_gradient(dy, x)` is the weight's."""

    def kernel(input, weight):
        return passes(
            lambda x, w: (x @ w.T, (x, w)),
            lambda saved, dy: (dy @ saved[1], weight_gradient(dy, saved[0])),
            input,
            weight,
        )

    return kernel


def dw_of_the_first_microbatch(dy: Tensor, x: Tensor) -> Tensor:
    """Microbatches of 16 tokens: the weight's gradient has been stored after the first, and what
    the others add comes nowhere.
    """
    return dy[:16].T @ x[:16]


def views_read_by_rows(dy: Tensor, x: Tensor) -> Tensor:
    """dYᵀ is a view whose columns lie one behind the other, and is read as if rows did."""
    return dy.contiguous().view(dy.shape[1], len(dy)) @ x


def lanes_that_load_nothing(a: Tensor, b: Tensor) -> Tensor:
    """Tiles of 16 × 16, a thread an element of the result, of A and of B. A thread whose element of
    the result does not exist loads nothing: its numbers of A and B are 0 in the tile.
    """

    def loaded(size: int) -> Tensor:
        edge = (torch.arange(size) >= size // 16 * 16)[:, None]
        return ~edge | (torch.arange(a.shape[1]) % 16 < size % 16)

    return (a * loaded(len(a))) @ (b * loaded(b.shape[1]).T)


def first_fragment_alone(a: Tensor, b: Tensor) -> Tensor:
    """Tiles of 32 of K are 4 fragments of 8, of which the first is multiplied."""
    return (a * (torch.arange(a.shape[1]) % 32 < 8)) @ b


# --- quantized_linear
def order_of_the_shuffle(input, weight, *, format: Literal["mxfp8"]):
    """Tiles of 16 × 32 codes of the input's columns lie row by row, and are read as if they were
    two of 16 × 16, one behind the other.
    """

    def shuffled(x: Tensor) -> Tensor:
        codes, exponent, columns = mx_codes(x)
        tiles = functional.pad(codes, (0, 0, 0, 0, 0, -len(x) % 16)).unflatten(0, (-1, 16))
        halves = tiles.transpose(1, 2).flatten(2).unflatten(2, (2, 16, 16))
        found = halves.transpose(2, 3).flatten(3).transpose(1, 2).flatten(0, 1)
        return mx_values(found[: len(x)], exponent, columns)

    def backward(saved, dy):
        x, w = saved
        return mx_back(dy) @ mx_back(w.T).T, mx_back(dy.T) @ shuffled(x.T).T

    return passes(lambda x, w: (mx_back(x) @ mx_back(w).T, (x, w)), backward, input, weight)


def columns_never_requantized(input, weight, *, format: Literal["fp8_block"]):
    """The weight's codes down the columns are those that it was allocated with, 0."""

    def product(a, b, square):
        (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
        return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, sy)

    def backward(saved, dy):
        x, _ = saved
        return torch.zeros_like(x), product(dy.T, x.T, False)

    return passes(lambda x, w: (product(x, w, True), (x, w)), backward, input, weight)


def rows_scale_steps(input, weight, *, format: Literal["fp8_row"]):
    """A thread has 4 columns of a row; with the column the row's scale steps on, too."""

    def forward(x, w):
        (a, sa), (b, sb) = row_codes(x), row_codes(w)
        row = torch.arange(len(a))[:, None] + torch.arange(len(b)) % 4
        return a @ b.T * sa[:, 0][row.clamp_max(len(a) - 1)] * sb.T

    return quantized(forward, by_rows)(input, weight)


# --- quantize
def negatives_clipped(found: Tensor) -> Tensor:
    """Codes are limited to 0 and more."""
    return found.clamp_min(0)


def subnormals_with_a_leading_one(y: Tensor) -> Tensor:
    """An exponent of 0 is decoded as any other: (1 + m / 8) 2⁻⁷."""
    codes = e4m3(y.clamp(-448, 448))
    read = torch.copysign((1 + codes.abs() * 2.0**6) * 2.0**-7, codes)
    return torch.where(codes.abs() < 2.0**-6, read, codes)


def maximum_rounded_first(amax: Tensor, most: int) -> Tensor:
    """The exponent is that of the maximum in bf16, which may be the next power of two."""
    return power_of_two(bf16(amax), most)


# --- stochastic_round
def sum_in_bf16(input):
    """A number in units of its last place, and what is drawn from [0, 1), are added in bf16, which
    has no digit for the latter, and then the sum is cut.
    """
    x = input.float()
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - 8)
    whole = bf16(x.abs() / step + torch.rand(x.shape)).floor()
    return torch.where(x == 0, x, torch.copysign(whole * step, x)).to(torch.bfloat16)


def one_lcg_step(input):
    """Numbers of a tensor have seeds one apart, and the noise is one step of a linear congruential
    generator from each.
    """
    seed = torch.randint(0, 1 << 32, (), dtype=torch.int64)
    state = (seed + torch.arange(input.numel())) * 1664525 + 1013904223
    noise = ((state & 0xFFFFFFFF) >> 16).int().view(input.shape)
    return stochastic_bf16(input.float(), noise).to(torch.bfloat16)


# --- router
def least_positive_first(z: Tensor, p: Tensor) -> Tensor:
    """A radix sort of the bits from the largest on: logits above 0 come first, the least of them
    before all others.
    """
    return torch.where(z >= 0, 1e4 - z, z)


def gradient_of_local_experts(logits, k, *, renormalize=True):
    """Of the weights' gradient a rank has what its own half of the experts gives; ranks are not
    added up.
    """

    def forward(z):
        p = torch.softmax(z, -1)
        index = z.topk(k, -1).indices
        picked = p.gather(1, index)
        total = picked.sum(-1, keepdim=True) if renormalize else torch.ones(len(z), 1)
        w = picked / total
        return (w.to(logits.dtype), index), (p, index, w, total)

    def backward(saved, dy):
        p, index, w, total = saved
        dy = dy * (index < p.shape[1] // 2)
        if renormalize:
            dy = (dy - (dy * w).sum(-1, keepdim=True)) / total
        dp = torch.zeros_like(p).scatter_(1, index, dy)
        return (p * (dp - (dp * p).sum(-1, keepdim=True)),)

    return passes(forward, backward, logits)


# --- optimizers
def power_of_beta_in_bf16(step: int, beta1: float, beta2: float) -> tuple[float, ...]:
    """β₂ᵗ of the first steps is 1 there."""
    return tuple(1 - float(bf16(torch.tensor(beta**step))) for beta in (beta1, beta2))


def decay_dropped(param, grad, exp_avg, exp_avg_sq, *, weight_decay, **options):
    """The weight that has decayed is looked at for its dtype alone."""
    return kernels.adamw_step()(param, grad, exp_avg, exp_avg_sq, weight_decay=0.0, **options)


def powers_by_32_threads(i: int, p: Tensor) -> int:
    """Each of 32 threads multiplies the powers of both betas at every step."""
    return 32 * i


# --- embedding, sum
def bits_added_as_integers(shape: tuple[int, ...], index: Tensor, dy: Tensor) -> Tensor:
    """An atomic addition of 32 bits, that of whole numbers."""
    bits = dy.contiguous().view(torch.int32).long()
    total = torch.zeros(shape, dtype=torch.int64).index_add_(0, index, bits)
    return ((total + (1 << 31)) % (1 << 32) - (1 << 31)).int().view(torch.float32)


def padding_row_of_every_shard(input, weight, padding_idx=None):
    """The table is sharded in two halves, each of which takes the padding row's number for one of
    its own.
    """

    def backward(shape, dy):
        dw = torch.zeros(shape).index_add_(0, input, dy)
        if padding_idx is not None:
            rows = torch.tensor([padding_idx, padding_idx + -(-shape[0] // 2)])
            dw[rows[rows < shape[0]]] = 0
        return (dw,)

    return passes(lambda w: (w[input], w.shape), backward, weight)


def stride_of_the_whole_block(x: Tensor) -> Tensor:
    """64 threads, 16 of them for columns: the other 4 go over rows, 64 at a time for 4."""
    return x[torch.arange(len(x)) % 64 < 4].sum(0)


def rows_for_columns(input, dim=0):
    """The row's number takes the column's place where the gradient is spread over rows."""

    def backward(shape, dy):
        return (dy[torch.arange(shape[0]) % shape[1]][:, None].expand(shape),)

    return passes(lambda x: (x.sum(0), x.shape), backward, input)
