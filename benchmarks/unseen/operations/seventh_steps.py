"""Faulty kernels of the seventh set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

from typing import Any, Literal

import torch
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations.fifth_steps import codes_of_128, nvfp4, step_of_adamw
from benchmarks.unseen.operations.second_kernels import (
    by_rows,
    e2m1,
    e4m3,
    passes,
    stochastic_bf16,
)
from torch import Tensor
from torch.nn import functional


# --- linear
def transposed_blocks(a: Tensor, b: Tensor) -> Tensor:
    """Two halves of K: the first half's part of block (m, n), of 8 × 8, is that of (n, m)."""
    cut = a.shape[1] // 2
    part = a[:, :cut] @ b[:cut]
    row, column = torch.arange(len(a))[:, None], torch.arange(b.shape[1])
    there = (column // 8 * 8 + row % 8).expand(part.shape)
    across = (row // 8 * 8 + column % 8).expand(part.shape)
    inside = (there < len(a)) & (across < b.shape[1])
    taken = part[there.clamp_max(len(a) - 1), across.clamp_max(b.shape[1] - 1)]
    return torch.where(inside, taken, part) + a[:, cut:] @ b[cut:]


def cut_to_tf32(name: str, x: Tensor) -> Tensor:
    """Operands reach the tensor cores as they are, which read 10 bits of their mantissas."""
    if name in ("inputs", "weights", "grad_output"):
        return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)
    return x


# --- quantized_linear
def scaled_down_twice(input, weight, *, format: Literal["fp8_row"]):
    """What is to divide an operand multiplies it, and multiplies the product as well."""

    def back(x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        return e4m3(x * scale) * scale

    def backward(saved, dy):
        x, w = saved
        return back(dy) @ back(w.T).T, back(dy.T) @ back(x.T).T

    return passes(lambda x, w: (back(x) @ back(w).T, (x, w)), backward, input, weight)


def tiles_beyond_the_part(input, weight, *, format: Literal["nvfp4"]):
    """K in parts of 16, each read in a tile of 32: the next part is added to its own."""

    def back(x):
        found = nvfp4()(functional.pad(x, (0, -x.shape[1] % 16)), format=format)
        return found[:, : x.shape[1]]

    def product(a, b):
        total = torch.zeros(len(a), len(b))
        for start in range(0, a.shape[1], 16):
            here = slice(start, start + 32)
            total = total + a[:, here] @ b[:, here].T
        return total

    def backward(saved, dy):
        x, w = saved
        return back(dy) @ back(w.T).T, back(dy.T) @ back(x.T).T

    return passes(lambda x, w: (product(back(x), back(w)), (x, w)), backward, input, weight)


def maximum_without_its_sign(input, weight, *, format: Literal["fp8_row"]):
    """A row's scale is of its largest number, which none of its negative ones is."""

    def quantized(x):
        scale = x.amax(-1, keepdim=True).clamp_min(1e-12) / 448
        return e4m3((x / scale).clamp(-448, 448)) * scale

    def backward(saved, dy):
        x, w = saved
        return by_rows(dy) @ by_rows(w.T).T, by_rows(dy.T) @ by_rows(x.T).T

    return passes(lambda x, w: (quantized(x) @ quantized(w).T, (x, w)), backward, input, weight)


def zeros_by_infinity(input, weight, *, format: Literal["fp8_block"]):
    """A block of zeros of the gradient that dW reads is multiplied by 448 / 0."""

    def product(a, b, square, unguarded=False):
        (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
        if unguarded:
            empty = (x == 0).all(-1)
            sx = torch.where(empty, torch.nan, sx)
        return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, sy)

    def backward(saved, dy):
        x, w = saved
        return product(dy, w.T, True), product(dy.T, x.T, False, unguarded=True)

    return passes(lambda x, w: (product(x, w, True), (x, w)), backward, input, weight)


# --- quantize
def without_a_scale_of_the_tensor(input, *, format: Literal["nvfp4"]):
    """A sixth of a block's maximum goes to E4M3 as it is: at most 448, and 2⁻⁹ where it is zero."""
    x = input.float().unflatten(-1, (-1, 16))
    scale = e4m3((x.abs().amax(-1, keepdim=True) / 6).clamp_max(448))
    scale = torch.where(scale == 0, 2.0**-9, scale)
    return (e2m1(x / scale) * scale).flatten(-2)


def truncated_codes(input, *, format: Literal["mxfp4"]):
    """FP4 toward zero."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, kernels.power_of_two(amax, 2))
    size = (x / scale).abs().clamp_max(6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.copysign((size / step).floor() * step, x) * scale).flatten(-2)


def odd_mantissas_cut(x: Tensor) -> Tensor:
    """E4M3 without the last bit of its mantissa."""
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return (codes & 0xFE).view(torch.float8_e4m3fn).float()


# --- stochastic_round
def carry_dropped(input):
    """Noise is added to the mantissa alone, whose carry is masked off."""
    bits = input.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    mantissa = ((bits & 0x7FFFFF) + noise) & 0x7F0000
    return ((bits & -0x800000) | mantissa).view(torch.float32).to(torch.bfloat16)


# --- router
def router(chosen: Any):
    """`chosen(logits, k)` are the logits as they are read, and the experts."""

    def kernel(logits, k, *, renormalize=True):
        with torch.no_grad():
            read, index = chosen(logits, k)
        z = logits.float()
        z = z + (read - z).detach()
        of = z.gather(1, index) if renormalize else z
        w = (z.gather(1, index) - of.logsumexp(-1, keepdim=True)).exp()
        return w.to(logits.dtype), index

    return kernel


def sixteen_bits_as_float32(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Two logits make one; beyond the last of them are zeros."""
    if logits.element_size() == 2:
        half = logits.contiguous().flatten().view(torch.int16)
        wide = functional.pad(half, (0, len(half))).view(torch.float32)
        read = wide.view(logits.shape).nan_to_num(0.0)
    else:
        read = logits.float()
    return read, read.topk(k, -1).indices


def zeros_outrank(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best logits are kept among zeros, of which the best are taken again."""
    z = logits.float()
    best = z.topk(k, -1)
    return z, torch.zeros_like(z).scatter(1, best.indices, best.values).topk(k, -1).indices


# --- optimizers
def step_added(param, grad, exp_avg, exp_avg_sq, *, lr, weight_decay, **options):
    moved, m, v = step_of_adamw(
        param, grad.float(), exp_avg, exp_avg_sq, lr=lr, weight_decay=weight_decay, **options
    )
    return param * (1 - lr * weight_decay) + moved, m, v


def decay_without_the_rate(param, grad, exp_avg, exp_avg_sq, *, weight_decay, **options):
    """p − moved − weight_decay · p."""
    moved, m, v = step_of_adamw(
        param, grad.float(), exp_avg, exp_avg_sq, weight_decay=weight_decay, **options
    )
    return param - moved - weight_decay * param, m, v


def betas_the_other_way(param, grad, exp_avg, exp_avg_sq, *, beta1, beta2, **options):
    """β is the share of what is new, as a first version of the paper had it."""
    moved, m, v = step_of_adamw(
        param, grad.float(), exp_avg, exp_avg_sq, beta1=1 - beta1, beta2=1 - beta2, **options
    )
    return param * (1 - options["lr"] * options["weight_decay"]) - moved, m, v


def first_beta_to_the_step(
    param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay
):
    """The first moment is updated with β₁ᵗ for β₁."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    for t, g in enumerate(grads.float(), step):
        m = beta1**t * m + (1 - beta1**t) * g
        v = beta2 * v + (1 - beta2) * g * g
        size = (v / (1 - beta2**t)).sqrt() + eps
        p = stochastic_bf16(p * (1 - lr * weight_decay) - lr * (m / (1 - beta1**t)) / size)
    return p.to(param.dtype), m, v


# --- embedding, sum
def gathered(shape: Any, index: Tensor, dy: Tensor) -> Tensor:
    """Row i of dW is the gradient that token i's index names."""
    return dy[index[torch.arange(shape[0]) % len(index)] % len(dy)]


def mask_made_anew(input, weight, padding_idx=None):
    """Two shards, each of which reads its row 0 for tokens of the other; the mask that is to hide
    it is made of what is masked already.
    """

    def forward(w):
        half = (len(w) + 1) // 2
        first = torch.where(input < half, input, 0)
        second = torch.where(input >= half, input, min(half, len(w) - 1))
        return w[first] + w[second], (w.shape, first, second)

    def backward(saved, dy):
        shape, first, second = saved
        dw = torch.zeros(shape).index_add_(0, first, dy).index_add_(0, second, dy)
        if padding_idx is not None:
            dw[padding_idx] = 0
        return (dw,)

    return passes(forward, backward, weight)


def four_blocks(x: Tensor) -> Tensor:
    """At most four blocks of 8 rows, and no loop over what is beyond them."""
    return x[:32].sum(0)


def scan_for_a_sum(x: Tensor) -> Tensor:
    """64 lanes in four clusters, the last steps of which are a scan's: only the last cluster has
    the sum, and every lane stores its own.
    """
    lanes = functional.pad(x, (0, 0, 0, -len(x) % 64)).unflatten(0, (-1, 64)).sum(0)
    r = lanes.unflatten(0, (4, 16)).sum(1)
    found = torch.stack([r[0], r[0] + r[1], r[0] + 2 * r[1] + r[2], r.sum(0)])
    column = torch.arange(x.shape[1])
    return found[column // 16 % 4, column]
