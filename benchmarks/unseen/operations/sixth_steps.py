"""Faulty kernels of the sixth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

from typing import Any, Literal

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.fifth_steps import codes_of_128, e5m2, nvfp4
from benchmarks.unseen.operations.second_kernels import by_rows, e4m3, passes, stochastic_bf16
from torch import Tensor
from torch.nn import functional


# --- linear
def stale_tile(a: Tensor, b: Tensor) -> Tensor:
    """Tiles of 32 of K, the last of which keeps what the one before it had beyond the end."""
    total, x, y = (torch.zeros(n) for n in ((len(a), b.shape[1]), (len(a), 32), (32, b.shape[1])))
    for start in range(0, a.shape[1], 32):
        part, other = a[:, start : start + 32], b[start : start + 32]
        x[:, : part.shape[1]], y[: len(other)] = part, other
        total = total + x @ y
    return total


def vectors_of_the_input(a: Tensor, b: Tensor) -> Tensor:
    """16 outputs at a time: lane j multiplies by A[m, k + j] in the place of A[m, k]."""
    total, (rows, width) = a @ b, a.shape
    flat = torch.cat([a.flatten(), torch.zeros(16)])
    whole = b.shape[1] // 16 * 16
    for j in range(16):
        total[:, j:whole:16] = flat[j : j + rows * width].view(rows, width) @ b[:, j:whole:16]
    return total


# --- quantized_linear
def without_identity_scales(input, weight, *, format: Literal["fp8_row"]):
    """The block scales of the instruction stay 0, which stands for 2⁻¹²⁷."""

    def forward(x, w):
        return by_rows(x) @ by_rows(w).T * 2.0**-127, (x, w)

    def backward(saved, dy):
        x, w = saved
        return by_rows(dy) @ by_rows(w.T).T, by_rows(dy.T) @ by_rows(x.T).T

    return passes(forward, backward, input, weight)


def blockwise(scaled: Any):
    """Products of blocks of 128, to which the output's product applies its scales by `scaled`."""

    def product(a, b, square, how):
        (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
        total = torch.zeros(len(a), len(b))
        for k in range(x.shape[1]):
            total = total + how(x[:, k] @ y[:, k].T, sx[:, k], sy[:, k])
        return total

    def right(z, sx, sy):
        return z * sx[:, None] * sy

    def kernel(input, weight, *, format: Literal["fp8_block"]):
        def backward(saved, dy):
            x, w = saved
            return product(dy, w.T, True, right), product(dy.T, x.T, False, right)

        return passes(lambda x, w: (product(x, w, True, scaled), (x, w)), backward, input, weight)

    return kernel


def scales_of_the_wave_before(z: Tensor, sx: Tensor, sy: Tensor) -> Tensor:
    """Of 32 rows the second 16 are multiplied by the scales of the first 16 as well."""
    again, first = torch.ones_like(sx), torch.arange(len(sx)) % 32 < 16
    again[16:] = torch.where(first[16:], 1.0, sx[:-16])
    return z * (sx * again)[:, None] * sy


def scales_by_launched_blocks(z: Tensor, sx: Tensor, sy: Tensor) -> Tensor:
    """Tiles of 16 × 16, launched in pairs: the rows' scales are those of the launched block."""
    row, column = torch.arange(len(sx))[:, None], torch.arange(len(sy))
    tile = row // 16 * 2 + column // 16 % 2
    return z * sx[(tile * 16 + row % 16).clamp_max(len(sx) - 1)] * sy


def clipped_to_448(input, weight, *, format: Literal["fp8_row"]):
    """Gradients in E5M2, scaled to 57344 and held within E4M3's 448."""

    def gradient(x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 57344
        return e5m2((x / scale).clamp(-448, 448)) * scale

    def backward(saved, dy):
        x, w = saved
        return gradient(dy) @ by_rows(w.T).T, gradient(dy.T) @ by_rows(x.T).T

    return passes(lambda x, w: (by_rows(x) @ by_rows(w).T, (x, w)), backward, input, weight)


def maximum_of_the_first_tile(input, weight, *, format: Literal["fp8_row"]):
    """A row's scale is of its first 64 numbers' maximum; what is beyond saturates."""

    def quantized(x):
        scale = x[:, :64].abs().amax(-1, keepdim=True) / 448
        scale = torch.where(scale == 0, 1.0, scale)
        return e4m3((x / scale).clamp(-448, 448)) * scale

    def backward(saved, dy):
        x, w = saved
        return by_rows(dy) @ by_rows(w.T).T, by_rows(dy.T) @ by_rows(x.T).T

    return passes(lambda x, w: (quantized(x) @ quantized(w).T, (x, w)), backward, input, weight)


# --- quantize
def subnormals_by_two_steps(input, *, format: Literal["mxfp8_e4m3", "mxfp4"]):
    """Below the smallest normal number the step is twice the format's."""
    most, least, step = (8, 2.0**-6, 2.0**-9) if "8" in format else (2, 1.0, 0.5)

    def code(x):
        right = e4m3(x.clamp(-448, 448)) if most == 8 else kernels.e2m1(x)
        return torch.where(x.abs() < least, (x / (2 * step)).round() * (2 * step), right)

    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, kernels.power_of_two(amax, most))
    return (code(x / scale) * scale).flatten(-2)


def scale_without_carry(x: Tensor, whole: Tensor) -> Tensor:
    """E4M3 scales whose mantissa wraps to 0 where it rounds up to the next power of two."""
    scale = (x.abs().amax(-1, keepdim=True) / (6 * whole)).clamp_max(448)
    exponent = torch.frexp(scale)[1] - 1
    mantissa = (torch.ldexp(scale, -exponent) * 8 - 8).round()
    wrong = torch.ldexp(1 + torch.where(mantissa == 8, 0.0, mantissa) / 8, exponent)
    return torch.where(scale < 2.0**-6, e4m3(scale), wrong)


def scales_not_rebiased(input, *, format: Literal["nvfp4"]):
    """E4M3's exponents are shifted into a wider field without the difference of the biases; codes
    are right.
    """
    right: Tensor = nvfp4()(input, format=format)
    return right * 2.0**-112


# --- stochastic_round
def seeded_anew(input):
    """A generator that every call seeds with 0."""
    chance = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 1 << 16, input.shape, dtype=torch.int32, generator=chance)
    return stochastic_bf16(input.float(), noise).to(torch.bfloat16)


# --- router
def router(weigh: Any):
    """`weigh(z)` are the probabilities, of which those of the chosen experts are taken."""

    def kernel(logits, k, *, renormalize=True):
        z = logits.float()
        index = z.topk(k, -1).indices
        w = weigh(z).gather(-1, index)
        if renormalize:
            w = w / w.sum(-1, keepdim=True)
        return w.to(logits.dtype), index

    return kernel


def softmax_twice(z: Tensor) -> Tensor:
    return z.softmax(-1).softmax(-1)


def bias_added_and_taken_off(z: Tensor) -> Tensor:
    """A score is recovered from what experts were chosen by, its sum with a bias of 12."""
    return (z.softmax(-1) + 12.0) - 12.0


def one_expert_over_tokens(logits, k, *, renormalize=True):
    """The best expert alone comes without a dimension of its own: weights are divided by their
    sum over tokens.
    """
    p = logits.float().softmax(-1)
    w, index = p.topk(k, -1)
    if renormalize:
        w = w / w.sum(0 if k == 1 else -1, keepdim=True)
    return w.to(logits.dtype), index


# --- optimizers
def corrections_multiply(step: int, one: float, two: float) -> tuple[float, float]:
    """Both moments are multiplied by 1 − βᵗ."""
    return 1 / (1 - one**step), 1 / (1 - two**step)


def corrections_without_the_step(step: int, one: float, two: float) -> tuple[float, float]:
    return 1 - one, 1 - two


def low_steps(root_kept: bool = False, corrected: Any = lambda power: 1 - power):
    """Steps of AdamW on weights that are rounded stochastically after each."""

    def kernel(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        p, m, v = param.float(), exp_avg.clone(), exp_avg_sq.clone()
        for t, g in enumerate(grads.float(), step):
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            size = v.sqrt() / corrected(beta2**t) ** 0.5 + eps
            v = v.sqrt() + eps if root_kept else v
            moved = lr * (m / corrected(beta1**t)) / size
            p = stochastic_bf16(p * (1 - lr * weight_decay) - moved)
        return p.to(param.dtype), m, v

    return kernel


def one_taken_off_twice(power: float) -> float:
    return 1 - (1 - power)


# --- embedding, sum
def stride_of_whole_tiles(input, weight, padding_idx=None):
    """Rows begin at multiples of the width that is filled up to 32."""

    def forward(w):
        width = w.shape[1]
        stride = -(-width // 32) * 32
        flat = functional.pad(w.flatten(), (0, len(w) * (stride - width)))
        return flat[input[:, None] * stride + torch.arange(width)], w.shape

    def backward(shape, dy):
        dw = torch.zeros(shape).index_add_(0, input, dy)
        if padding_idx is not None:
            dw[padding_idx] = 0
        return (dw,)

    return passes(forward, backward, weight)


def last_tile_not_zeroed(shape: Any, index: Tensor, dy: Tensor) -> Tensor:
    """Whole tiles of 32 rows of dW are zeroed; the rest is added to what the buffer held."""
    dw, whole = torch.zeros(shape), shape[0] // 32 * 32
    held = dy.flatten()[: (shape[0] - whole) * shape[1]]
    dw.flatten()[whole * shape[1] :][: len(held)] = held
    return dw.index_add_(0, index, dy)


def last_chunk(x: Tensor) -> Tensor:
    """Chunks of 16 rows, each of which assigns the result."""
    return x.split(16)[-1].sum(0)


def butterfly(x: Tensor) -> Tensor:
    """Warps of 32 rows that exchange; of a partial one a lane that is not there gives one's own."""
    total = torch.zeros_like(x[0])
    for lanes in x.split(32):
        n = torch.arange(len(lanes))
        for step in (16, 8, 4, 2, 1):
            other = torch.where((n ^ step) < len(lanes), n ^ step, n)
            lanes = lanes + lanes[other]
        total = total + lanes[0]
    return total
