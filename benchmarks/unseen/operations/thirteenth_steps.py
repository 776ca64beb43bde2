"""Faulty kernels of the thirteenth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from benchmarks.unseen.operations.eighth_steps import nvfp4_back, quantized
from benchmarks.unseen.operations.fifth_steps import codes_of_128, mx_codes, step_of_adamw
from benchmarks.unseen.operations.second_kernels import (
    e2m1,
    e4m3,
    passes,
    power_of_two,
    stochastic_bf16,
)
from benchmarks.unseen.operations.tenth_steps import mx_back, tensor_back
from torch import Tensor
from torch.nn import functional


# --- linear
def linear(product: Any = None, dx: Any = None, dw: Any = None):
    """`product(x, w)` is the output, `dx(dy, w)` and `dw(dy, x)` are the gradients."""

    def kernel(input, weight):
        def backward(saved, dy):
            x, w = saved
            return dx(dy, w) if dx else dy @ w, dw(dy, x) if dw else dy.T @ x

        return passes(
            lambda x, w: (product(x, w) if product else x @ w.T, (x, w)), backward, input, weight
        )

    return kernel


def gathered_after_the_product(dy: Tensor, w: Tensor) -> Tensor:
    """Two ranks have half of K each. Each multiplies its half of the tokens by its own half of the
    weight, and what they gather is the gradient of either half.
    """
    k = w.shape[1]
    halves = functional.pad(w, (0, k % 2)).chunk(2, 1)
    parts = [rows @ own for rows, own in zip(dy.tensor_split(2), halves, strict=True)]
    both = torch.cat(parts)
    return torch.cat([both, both], 1)[:, :k]


def never_called(dy: Tensor, x: Tensor) -> Tensor:
    """The product stands in a branch that is not taken; the buffer is zero."""
    return torch.zeros(dy.shape[1], x.shape[1])


def a_slice_of_own_parts(dy: Tensor, w: Tensor) -> Tensor:
    """Two ranks have half of the outputs each, and half of the tokens are theirs: what a rank has
    for its tokens is taken as it is, without the other's part.
    """
    parts = zip(dy.tensor_split(2), (0, 1), strict=True)
    half = -(-len(w) // 2)
    own = slice(0, half), slice(half, len(w))
    return torch.cat([rows[:, own[rank]] @ w[own[rank]] for rows, rank in parts])


def loads_without_a_mask(x: Tensor, w: Tensor) -> Tensor:
    """Tiles of 32 of K: what the last one has too much is the beginning of the next row."""
    k = x.shape[1]
    wide = k + -k % 32

    def read(rows: Tensor) -> Tensor:
        flat = functional.pad(rows.contiguous().flatten(), (0, wide))
        return flat.as_strided((len(rows), wide), (k, 1))

    return read(x) @ read(w).T


# --- quantized_linear
def product_of_128(a: Tensor, b: Tensor, square: bool) -> Tensor:
    (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
    return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, sy)


def blocks_of_128(dx: Any):
    """FP8 in blocks of 128; `dx(dy, w)` is the input's gradient."""

    def kernel(input, weight, *, format: Literal["fp8_block"]):
        def backward(saved, dy):
            x, w = saved
            return dx(dy, w), product_of_128(dy.T, x.T, False)

        return passes(lambda x, w: (product_of_128(x, w, True), (x, w)), backward, input, weight)

    return kernel


def transposed_codes_of_zeros(dy: Tensor, w: Tensor) -> Tensor:
    """The weight's codes for dX are those of the zeros that it was made of, before it was read from
    a file.
    """
    return product_of_128(dy, torch.zeros_like(w.T), True)


def scales_by_rows_of_four(dy: Tensor, w: Tensor) -> Tensor:
    """A row of the weight's scales is expected to have a multiple of four; they lie one behind the
    other, and behind the last one are zeros.
    """
    (x, sx), (y, sy) = codes_of_128(dy, False), codes_of_128(w.T, True)
    scales = sy[::128]
    high, wide = scales.shape
    step = wide + -wide % 4
    flat = functional.pad(scales.contiguous().flatten(), (0, high * step))
    read = flat.as_strided((high, wide), (step, 1)).repeat_interleave(128, 0)[: len(y)]
    return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, read)


def padding_of_scale_one(input, weight, *, format: Literal["mxfp8"]):
    """Eight blocks of K at a time: those beyond the last have scales of 2⁰, and for codes what lies
    there, the beginning of the next row.
    """

    def beyond(x: Tensor) -> Tensor:
        codes = mx_codes(x)[0].flatten(1)
        rows, own = codes.shape
        wide = own + -own % 256
        flat = functional.pad(codes.flatten(), (0, wide))
        return flat.as_strided((rows, wide), (own, 1))[:, own:]

    def forward(x, w):
        return mx_back(x) @ mx_back(w).T + beyond(x) @ beyond(w).T

    return quantized(forward, mx_back)(input, weight)


def gradients_without_the_instruction(input, weight, *, format: Literal["nvfp4"]):
    """Gradients are rounded stochastically by an instruction that this device lacks, where codes
    stay zero.
    """

    def backward(saved, dy):
        x, w = saved
        zero = torch.zeros_like(dy)
        return zero @ nvfp4_back(w.T).T, zero.T @ nvfp4_back(x.T).T

    return passes(lambda x, w: (nvfp4_back(x) @ nvfp4_back(w).T, (x, w)), backward, input, weight)


def codes_of_the_scale_before(input, weight, *, format: Literal["fp8_tensor"]):
    """The weight's codes are kept from a step whose scale was 1; the scale is this step's."""

    def forward(x, w):
        scale = w.abs().amax().clamp_min(1e-30) / 448
        return tensor_back(x) @ (e4m3(w.clamp(-448, 448)) * scale).T, (x, w)

    def backward(saved, dy):
        x, w = (tensor_back(each) for each in saved)
        dy = tensor_back(dy)
        return dy @ w, dy.T @ x

    return passes(forward, backward, input, weight)


# --- quantize
def signed_exponents(input, *, format: Literal["mxfp4"]):
    """The byte of a scale is read with its sign before 127 is taken off."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 2))
    byte = (torch.frexp(scale)[1] - 1 + 127).to(torch.uint8)
    exponent = byte.view(torch.int8).to(torch.int32) - 127
    return torch.ldexp(e2m1(x / scale), exponent).flatten(-2)


# --- stochastic_round
def without_its_state(input):
    """The pointer to the random numbers' state is null, and rounding is to nearest."""
    return input.to(torch.bfloat16)


# --- router
def router(heard: Any = None, stored: Any = None, total_of: Any = None):
    """`heard(index, experts)` are the slots whose gradient arrives, `stored(index, experts)` for
    each slot the token and the expert whose weight it gets, `total_of(picked)` what weights are
    divided by.
    """

    def kernel(logits, k, *, renormalize=True):
        def forward(z):
            index = z.topk(k, -1).indices
            p = torch.softmax(z, -1)
            picked = p.gather(1, index)
            total = torch.ones(len(z), 1)
            if renormalize:
                total = total_of(picked) if total_of else picked.sum(-1, keepdim=True)
            w = picked / total
            if stored:
                at = stored(index, z.shape[1])
                w = torch.zeros_like(z).scatter(1, index, w)[at]
            return (w.to(logits.dtype), index), (p, index, picked / total, total)

        def backward(saved, dy):
            p, index, w, total = saved
            if heard:
                dy = dy * heard(index, p.shape[1])
            if stored:
                at = stored(index, p.shape[1])
                dy = torch.zeros_like(p).index_put(at, dy, accumulate=True).gather(1, index)
            if renormalize:
                inner = dy * w
                dy = (dy - (inner.sum() if total.numel() == 1 else
                            inner.sum(-1, keepdim=True))) / total  # fmt: skip
            dp = torch.zeros_like(p).scatter_add_(1, index, dy)
            return (p * (dp - (dp * p).sum(-1, keepdim=True)),)

        return passes(forward, backward, logits)

    return kernel


def local_experts(index: Tensor, experts: int) -> Tensor:
    """The first half of the experts, which are on this rank."""
    return index < -(-experts // 2)


def paired_by_their_order(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Weights lie in a table of tokens and experts, which is read one number after the other, as
    slots are.
    """
    number = torch.arange(index.numel()).view(index.shape)
    return number // experts, number % experts


def over_tokens_of_one(picked: Tensor) -> Tensor:
    """Of one expert the weights are a vector of tokens, along which they are normalized."""
    if picked.shape[1] > 1:
        return picked.sum(-1, keepdim=True)
    return picked.sum().view(1, 1)


# --- optimizers
def decay_forgotten(param, grad, exp_avg, exp_avg_sq, **options):
    """Where gradients are of 16 bits the decay is not applied."""
    moved, m, v = step_of_adamw(param, grad.float(), exp_avg, exp_avg_sq, **options)
    return param - moved, m, v


def rate_of_the_rate_before(
    param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay
):
    """A step's rate, corrections and all, is the next one's to be corrected."""
    g = grad.float()
    m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
    rate = lr
    for t in range(1, step + 1):
        rate *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return param * (1 - lr * weight_decay) - rate * m / (v.sqrt() + eps), m, v


def seed_without_the_step(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """A generator that begins with the same seed at every step."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    noise = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
    for number, g in enumerate(grads.float(), step):
        moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
        decayed = p * (1 - options["lr"] * options["weight_decay"])
        p = stochastic_bf16((decayed - moved).float(), noise)
    return p.to(param.dtype), m, v


# --- embedding, sum
def shards_taken_for_halves(input, weight, padding_idx=None):
    """Shards of two thirds and one third of the table; an index is looked for in the one and the
    other as if they were halves, and beyond a shard's end there are zeros.
    """
    count = len(weight)
    third, half = count // 3, -(-count // 2)
    found = torch.where(input < half, input, input - half + count - third)
    there = found < count
    index = found.clamp_max(count - 1)

    def backward(shape, dy):
        dw = torch.zeros(shape).index_add_(0, index, dy * there[:, None])
        if padding_idx is not None:
            dw[padding_idx] = 0
        return (dw,)

    return passes(lambda w: (w[index] * there[:, None], w.shape), backward, weight)


def two_groups_of_threads(x: Tensor) -> Tensor:
    """64 threads for 32 lanes of rows: both groups of 32 have all of them, and both are added."""
    lanes = functional.pad(x, (0, 0, 0, -len(x) % 32)).unflatten(0, (-1, 32)).sum(0)
    return torch.cat([lanes, lanes]).sum(0)
