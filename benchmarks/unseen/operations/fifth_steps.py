"""Faulty kernels of the fifth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

from typing import Any, Literal

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.second_kernels import (
    by_rows,
    e2m1,
    e4m3,
    passes,
    power_of_two,
    stochastic_bf16,
    to,
)
from torch import Tensor
from torch.nn import functional

fp16, e5m2 = map(to, (torch.float16, torch.float8_e5m2))


# --- linear
def linear(product: Any, gradients: Any = torch.matmul):
    def kernel(input, weight):
        return passes(
            lambda x, w: (product(x, w.T), (x, w)),
            lambda saved, dy: (gradients(dy, saved[1]), gradients(dy.T, saved[0])),
            input,
            weight,
        )

    return kernel


def parts_that_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Three parts of K, each read in whole blocks of 32: the last reaches into the next part."""
    size, total = -(-a.shape[1] // 3), torch.zeros(len(a), b.shape[1])
    for start in range(0, a.shape[1], size):
        here = slice(start, start + -(-size // 32) * 32)
        total = total + a[:, here] @ b[here]
    return total


def accumulated_in_fp16(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(len(a), b.shape[1])
    for start in range(0, a.shape[1], 16):
        here = slice(start, start + 16)
        total = fp16(total + a[:, here] @ b[here])
    return total


# --- quantized_linear
def codes_of_128(x: Tensor, square: bool) -> tuple[Tensor, Tensor]:
    """E4M3 codes [R, B, 128] and a scale [R, B] for 128 of a row, or for a square of 128."""
    rows, columns = x.shape
    blocks = functional.pad(x, (0, -columns % 128)).unflatten(1, (-1, 128))
    most = blocks.abs().amax(-1)
    if square:
        tall = functional.pad(most, (0, 0, 0, -rows % 128)).unflatten(0, (-1, 128)).amax(1)
        most = tall.repeat_interleave(128, 0)[:rows]
    scale = torch.where(most == 0, 1.0, most / 448)
    return e4m3(blocks / scale[..., None]), scale


def scales_of_the_first_slice(input, weight, *, format: Literal["fp8_block"]):
    """K in two slices, whose blocks' scales are counted from the start of each."""

    def product(a, b, square):
        (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
        count, total = x.shape[1], torch.zeros(len(a), len(b))
        for k in range(count):
            scale = k % -(-count // 2)
            total = total + x[:, k] @ y[:, k].T * sx[:, scale, None] * sy[None, :, scale]
        return total

    def backward(saved, dy):
        x, w = saved
        return product(dy, w.T, True), product(dy.T, x.T, False)

    return passes(lambda x, w: (product(x, w, True), (x, w)), backward, input, weight)


def beyond_e5m2(input, weight, *, format: Literal["fp8_row"]):
    """Gradients in E5M2, whose largest number is taken for 98304: 57344 is."""

    def gradient(x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 98304
        return e5m2(x / scale) * scale

    def backward(saved, dy):
        x, w = saved
        return gradient(dy) @ by_rows(w.T).T, gradient(dy.T) @ by_rows(x.T).T

    return passes(lambda x, w: (by_rows(x) @ by_rows(w).T, (x, w)), backward, input, weight)


def mx_codes(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """E4M3 codes [R, B, 32], the scales' exponents [R, B], and how many columns there are."""
    blocks = functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    most = blocks.abs().amax(-1)
    exponent = torch.where(most == 0, 0, torch.frexp(most)[1] - 9)
    codes = e4m3(torch.ldexp(blocks, -exponent[..., None]).clamp(-448, 448))
    return codes, exponent, x.shape[1]


def raw_scale_bytes(input, weight, *, format: Literal["mxfp8"]):
    """Of fewer than 8 outputs, whole blocks' scales are their bytes as numbers, 127 for 2⁰."""

    def back(x, raw=False):
        codes, exponent, columns = mx_codes(x)
        scale = torch.ldexp(torch.ones(exponent.shape), exponent)
        if raw:
            whole = torch.arange(exponent.shape[1]) < columns // 32
            scale = torch.where(whole, exponent + 127.0, scale)
        return (codes * scale[..., None]).flatten(1)[:, :columns]

    def backward(saved, dy):
        x, w = saved
        return back(dy) @ back(w.T).T, back(dy.T) @ back(x.T).T

    return passes(lambda x, w: (back(x) @ back(w, len(w) < 8).T, (x, w)), backward, input, weight)


# --- quantize
def maximum_onto_one(amax: Tensor, most: int) -> Tensor:
    """2 to the floor of log2 amax, and nothing less."""
    return power_of_two(amax, 0 if most == 8 else most)


def right_scales(x: Tensor, whole: Tensor) -> Tensor:
    return e4m3((x.abs().amax(-1, keepdim=True) / (6 * whole)).clamp_max(448))


def nvfp4(scales: Any = right_scales, divisor: Any = None):
    """E2M1 in blocks of 16, E4M3 scales, and one scale of the tensor."""

    def kernel(input, *, format: Literal["nvfp4"]):
        x = input.float()
        whole = x.abs().amax() / (448 * 6)
        whole = torch.where(whole == 0, 1.0, whole)
        blocks = x.unflatten(-1, (-1, 16))
        scale = scales(blocks, whole)
        by = divisor(scale, whole) if divisor else scale * whole
        codes = torch.where(scale == 0, 0.0, e2m1(blocks / torch.where(by == 0, 1.0, by)))
        return (codes * (scale * whole)).flatten(-2)

    return kernel


def of_32_beyond_the_first(x: Tensor, whole: Tensor) -> Tensor:
    """The first 32 lanes have a maximum for each half of them, all others one for 32."""
    most = x.abs().amax(-1)
    pairs = functional.pad(most, (0, most.shape[-1] % 2)).unflatten(-1, (-1, 2)).amax(-1)
    most[..., 2:] = pairs.repeat_interleave(2, -1)[..., 2 : most.shape[-1]]
    return e4m3((most[..., None] / (6 * whole)).clamp_max(448))


def subnormal_as_normal(scale: Tensor, whole: Tensor) -> Tensor:
    """Scales below E4M3's smallest normal number are decoded with a leading one."""
    wrong = (1 + scale * 2.0**9 / 8) * 2.0**-7
    return torch.where((scale > 0) & (scale < 2.0**-6), wrong, scale) * whole


def without_the_tensor_s_scale(scale: Tensor, whole: Tensor) -> Tensor:
    return scale


# --- stochastic_round
def state_replayed(input):
    """32 work items, each of which begins its random numbers anew for every element of its own."""
    own = torch.randint(0, 1 << 16, (32,), dtype=torch.int32)
    noise = own[torch.arange(input.numel()) % 32].view(input.shape)
    return stochastic_bf16(input.float(), noise).to(torch.bfloat16)


def away_from_zero(input):
    """Up where what is cut off exceeds a random number of 4 bits: half a step of them too often."""
    bits = input.contiguous().view(torch.int32)
    up = (bits & 0xFFFF) > (torch.randint(0, 16, bits.shape, dtype=torch.int32) << 12)
    kept = (bits & -65536) + (up.to(torch.int32) << 16)
    return kept.view(torch.float32).to(torch.bfloat16)


# --- router
def below_32(z: Tensor, p: Tensor) -> Tensor:
    """One expert a thread of the warp; those beyond are never proposed."""
    return p.masked_fill(torch.arange(p.shape[-1]) >= 32, -1.0)


def never_renormalized(logits, k, *, renormalize=True):
    return kernels.router()(logits, k, renormalize=False)


# --- optimizers
def step_of_adamw(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay):
    """What a step moves by, and the new moments."""
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    size = (v / (1 - beta2**step)).sqrt() + eps
    return lr * (m / (1 - beta1**step)) / size, m, v


def decay_after_the_step(param, grad, exp_avg, exp_avg_sq, *, lr, weight_decay, **options):
    """The step is decayed with the weight."""
    moved, m, v = step_of_adamw(
        param, grad.float(), exp_avg, exp_avg_sq, lr=lr, weight_decay=weight_decay, **options
    )
    return (param - moved) * (1 - lr * weight_decay), m, v


def cut_to_bf16(x: float) -> float:
    return float((torch.tensor(x).view(torch.int32) & -65536).view(torch.float32))


def betas_cut_to_bf16(param, grad, exp_avg, exp_avg_sq, *, beta1, beta2, **options):
    """0.9 is 0.8984, 0.999 is 0.9961."""
    options |= {"beta1": cut_to_bf16(beta1), "beta2": cut_to_bf16(beta2)}
    moved, m, v = step_of_adamw(param, grad.float(), exp_avg, exp_avg_sq, **options)
    return param * (1 - options["lr"] * options["weight_decay"]) - moved, m, v


def counter_in_bf16(param, grad, exp_avg, exp_avg_sq, *, step, **options):
    """256 + 1 is 256."""
    count = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(min(step, 300)):
        count += 1
    moved, m, v = step_of_adamw(
        param, grad.float(), exp_avg, exp_avg_sq, step=float(count), **options
    )
    return param * (1 - options["lr"] * options["weight_decay"]) - moved, m, v


def low_loop(decayed: Any):
    """Steps of AdamW on bf16 weights, each rounded stochastically."""

    def kernel(param, grads, exp_avg, exp_avg_sq, *, step, **options):
        p, m, v = param.float(), exp_avg, exp_avg_sq
        for number, g in enumerate(grads.float(), step):
            moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
            p = decayed(p * (1 - options["lr"] * options["weight_decay"])) - moved
            p = stochastic_bf16(p)
        return p.to(param.dtype), m, v

    return kernel


def one_seed_for_all_rows(p: Tensor) -> Tensor:
    return torch.randint(0, 1 << 16, (1, p.shape[1]), dtype=torch.int32).expand(p.shape)


# --- embedding, sum
def mean_of_the_tokens(shape: Any, index: Tensor, dy: Tensor) -> Tensor:
    counts = torch.bincount(index, minlength=shape[0]).clamp_min(1)
    return torch.zeros(shape).index_add_(0, index, dy) / counts[:, None]


def stored_by_one_seed(shape: Any, index: Tensor, dy: Tensor) -> Tensor:
    """dW is rounded stochastically, every row of it by the same random numbers."""
    dw = torch.zeros(shape).index_add_(0, index, dy)
    return stochastic_bf16(dw, one_seed_for_all_rows(dw))


def tail_counted_twice(x: Tensor) -> Tensor:
    """The rows past a whole block are read with the 16 that end with the last one."""
    whole = len(x) // 16 * 16
    total = x[:whole].sum(0)
    return total if whole == len(x) else total + x[max(len(x) - 16, 0) :].sum(0)


def first_face_unwritten(x: Tensor) -> Tensor:
    """The first 16 results of all are zero."""
    total = x.sum(0)
    total[:16] = 0
    return total
