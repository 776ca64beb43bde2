"""Faulty kernels of the eighth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from benchmarks.unseen.operations.fifth_steps import (
    codes_of_128,
    fp16,
    mx_codes,
    nvfp4,
    right_scales,
    step_of_adamw,
)
from benchmarks.unseen.operations.second_kernels import (
    by_rows,
    e2m1,
    e4m3,
    passes,
    power_of_two,
    stochastic_bf16,
)
from torch import Tensor
from torch.nn import functional


# --- linear
def accumulator_not_cleared(a: Tensor, b: Tensor) -> Tensor:
    """A program has two tiles of 16 columns, one after the other in the same registers."""
    found = a @ b
    for start in range(16, found.shape[1], 32):
        here = found[:, start : start + 16]
        here += found[:, start - 16 : start - 16 + here.shape[1]]
    return found


def eight_of_sixteen(a: Tensor, b: Tensor) -> Tensor:
    """Blocks of 16 rows, and warps for 8."""
    return a @ b * (torch.arange(len(a)) % 16 < 8)[:, None]


def beyond_k(a: Tensor, b: Tensor) -> Tensor:
    """Whole tiles of 32 in turns of three: what a turn has too much is read all the same, where the
    next row begins.
    """
    k = a.shape[1]
    tiles = k // 32
    if tiles % 3 == 0:
        return a @ b
    columns = -(-tiles // 3) * 96

    def read(x: Tensor) -> Tensor:
        flat = functional.pad(x.contiguous().flatten(), (0, columns))
        return flat.as_strided((len(x), columns), (k, 1))

    rest = a[:, columns:] @ b[columns:] if columns < k else 0.0
    return read(a) @ read(b.T).T + rest


# --- quantized_linear
def quantized(forward: Any, back: Any):
    """`forward(x, w)` is the product of the forward pass; `back(x)` an operand of the others."""

    def kernel(input, weight):
        return passes(
            lambda x, w: (forward(x, w), (x, w)),
            lambda saved, dy: (
                back(dy) @ back(saved[1].T).T,
                back(dy.T) @ back(saved[0].T).T,
            ),
            input,
            weight,
        )

    return kernel


def row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    most = x.abs().amax(-1, keepdim=True)
    scale = torch.where(most == 0, 1.0, most / 448)
    return e4m3(x / scale), scale


def scale_not_advanced(input, weight, *, format: Literal["fp8_block"]):
    """K in tiles of 64 and scales of 128: 64 // 128 is how far the scales' pointers move."""

    def product(a, b, square, still=False):
        (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
        if still:
            sx, sy = sx[:, :1].expand_as(sx), sy[:, :1].expand_as(sy)
        return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, sy)

    def backward(saved, dy):
        x, w = saved
        return product(dy, w.T, True), product(dy.T, x.T, False)

    return passes(lambda x, w: (product(x, w, True, still=True), (x, w)), backward, input, weight)


def first_tile_again(input, weight, *, format: Literal["fp8_row"]):
    """Of the input the first 16 columns are loaded, before the loop over tiles of K."""

    def forward(x, w):
        (a, sa), (b, sb) = row_codes(x), row_codes(w)
        total = torch.zeros(len(a), len(b))
        for tile in b.split(16, 1):
            total = total + a[:, : tile.shape[1]] @ tile.T
        return total * sa * sb.T

    return quantized(forward, by_rows)(input, weight)


def scales_of_even_sixteens(input, weight, *, format: Literal["mxfp8"]):
    """Blocks of 16 rows share a chunk of 32 rows' scales, of which they take the first 16."""

    def back(x, even=False):
        codes, exponent, columns = mx_codes(x)
        if even:
            rows = torch.arange(len(x))
            exponent = exponent[rows // 32 * 32 + rows % 16]
        return torch.ldexp(codes, exponent[..., None]).flatten(1)[:, :columns]

    return quantized(lambda x, w: back(x, even=True) @ back(w).T, back)(input, weight)


def nvfp4_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes times their blocks' scales, and the scale of the tensor."""
    whole = x.abs().amax() / (448 * 6)
    whole = torch.where(whole == 0, 1.0, whole)
    blocks = functional.pad(x, (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
    scale = right_scales(blocks, whole)
    by = torch.where(scale == 0, 1.0, scale * whole)
    codes = torch.where(scale == 0, 0.0, e2m1(blocks / by))
    return (codes * scale).flatten(1)[:, : x.shape[1]], whole


def nvfp4_back(x: Tensor) -> Tensor:
    found: Tensor = nvfp4()(functional.pad(x, (0, -x.shape[1] % 16)), format="nvfp4")
    return found[:, : x.shape[1]]


def cast_before_the_scale(input, weight, *, format: Literal["nvfp4"]):
    """What was accumulated is cast to fp16, and then multiplied by the scales of both tensors."""

    def forward(x, w):
        (a, sa), (b, sb) = nvfp4_parts(x), nvfp4_parts(w)
        return fp16(a @ b.T) * (sa * sb)

    return quantized(forward, nvfp4_back)(input, weight)


def tail_behind_the_counter(input, weight, *, format: Literal["nvfp4"]):
    """Tiles of 64 of K in turns of two: after whole turns the counter is beyond K already, and
    columns that fill no tile are left out.
    """

    def forward(x, w):
        a, b, tiles = nvfp4_back(x), nvfp4_back(w), x.shape[1] // 64
        if tiles and tiles % 2 == 0:
            a, b = a[:, : tiles * 64], b[:, : tiles * 64]
        return a @ b.T

    return quantized(forward, nvfp4_back)(input, weight)


def one_scale_a_warp_tile(input, weight, *, format: Literal["fp8_row"]):
    """The scale of the first of 16 columns multiplies all of them."""

    def forward(x, w):
        (a, sa), (b, sb) = row_codes(x), row_codes(w)
        return a @ b.T * sa * sb[torch.arange(len(w)) // 16 * 16].T

    return quantized(forward, by_rows)(input, weight)


# --- quantize
def codes_by_the_exact_scale(input, *, format: Literal["mxfp4"]):
    """Codes are of amax / 6; what is stored of it is the nearest power of two."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    exact = torch.where(amax == 0, 1.0, amax / 6)
    return (e2m1(x / exact) * torch.exp2(exact.log2().round())).flatten(-2)


def halves_read_in_pairs(input, *, format: Literal["mxfp4"]):
    """Byte j holds numbers j and j + 16 of a block, and is read as 2 j and 2 j + 1."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 2))
    low, high = (e2m1(x / scale) * scale).chunk(2, -1)
    return torch.stack([low, high], -1).flatten(-3)


def read_as_fnuz(input, *, format: Literal["mxfp8_e4m3"]):
    """Bytes of E4M3FN, decoded as E4M3FNUZ."""
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two(amax, 8))
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return (codes.view(torch.float8_e4m3fnuz).float() * scale).flatten(-2)


# --- stochastic_round
def overwritten(input):
    """Rounded stochastically, and copied to nearest over it."""
    out = stochastic_bf16(input.float()).to(torch.bfloat16)
    return out.copy_(input)


# --- router
def ties_retired_together(logits, k, *, renormalize=True):
    """The first of equal logits wins, and every lane that has one retires its own."""
    with torch.no_grad():
        left, found = logits.float().clone(), []
        for _ in range(k):
            best = left.amax(-1, keepdim=True)
            found.append((left == best).int().argmax(-1, keepdim=True))
            left = left.masked_fill(left == best, -math.inf)
        index = torch.cat(found, -1)
    z = logits.float()
    of = z.gather(1, index) if renormalize else z
    return (z.gather(1, index) - of.logsumexp(-1, keepdim=True)).exp().to(logits.dtype), index


def another_branch_at_one_size(logits, k, *, renormalize=True):
    """16 experts, two of them chosen, is dispatched with the other scores."""
    z = logits.float()
    index = z.detach().topk(k, -1).indices
    p = torch.sigmoid(z) if (z.shape[1], k) == (16, 2) else torch.softmax(z, -1)
    w = p.gather(1, index)
    w = w / w.sum(-1, keepdim=True) if renormalize else w
    return w.to(logits.dtype), index


# --- optimizers
def eps_beside_the_inverse_root(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps,
                                weight_decay):  # fmt: skip
    """m · (1 / √v + eps)."""
    g = grad.float()
    m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
    size = (v / (1 - beta2**step)).rsqrt() + eps
    return param * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m * size, m, v


def corrected_in_place(param, grad, exp_avg, exp_avg_sq, *, step, beta1, **options):
    """The first moment is divided by its correction where it is kept."""
    moved, m, v = step_of_adamw(
        param, grad.float(), exp_avg, exp_avg_sq, step=step, beta1=beta1, **options
    )
    m = m / (1 - beta1**step)
    return param * (1 - options["lr"] * options["weight_decay"]) - moved, m, v


def decayed_by_the_step_size(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2,
                             weight_decay, **options):  # fmt: skip
    """The rate with both corrections in it multiplies the weight's decay too."""
    moved, m, v = step_of_adamw(
        param, grad.float(), exp_avg, exp_avg_sq, step=step, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, **options
    )  # fmt: skip
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return param - moved - rate * weight_decay * param, m, v


def loop_of_steps(noise: Any = None, counted: Any = None):
    """Steps of AdamW on bf16 weights: `noise(p)` random bits for all of them, `counted(i, p)` what
    the i-th takes for its number, from 0.
    """

    def kernel(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        p, m, v = param.float(), exp_avg, exp_avg_sq
        bits = noise(p) if noise else None
        for i, g in enumerate(grads.float()):
            t = step + (counted(i, p) if counted else i)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            size = (v / (1 - beta2**t)).sqrt() + eps
            moved = lr * (m / (1 - beta1**t)) / size
            p = stochastic_bf16((p * (1 - lr * weight_decay) - moved).float(), bits)
        return p.to(param.dtype), m, v

    return kernel


def one_noise(p: Tensor) -> Tensor:
    """A seed that does not depend on the step."""
    return torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)


def counted_by_parameters(i: int, p: Tensor) -> Tensor:
    """The counter goes up with every parameter that is updated."""
    return i * p.numel() + torch.arange(p.numel(), dtype=torch.float64).view(p.shape)


# --- embedding, sum
def padding_of_the_small_kernel(input, weight, padding_idx=None):
    """Beyond 128 tokens another kernel adds up, which knows of no padding."""

    def backward(shape, dy):
        dw = torch.zeros(shape).index_add_(0, input, dy)
        if padding_idx is not None and len(input) <= 128:
            dw[padding_idx] = 0
        return (dw,)

    return passes(lambda w: (w[input], w.shape), backward, weight)


def lookup(written: Any):
    """`written(rows)` is what of the rows is stored in an output of zeros."""

    def kernel(input, weight, padding_idx=None):
        def backward(shape, dy):
            dw = torch.zeros(shape).index_add_(0, input, dy)
            if padding_idx is not None:
                dw[padding_idx] = 0
            return (dw,)

        return passes(lambda w: (written(w[input]), w.shape), backward, weight)

    return kernel


def rows_beyond_the_launch(rows: Tensor) -> Tensor:
    """One warp a token, whatever the width: the last rows have no thread."""
    reached = torch.arange(rows.numel()) < 32 * len(rows)
    return rows * reached.view(rows.shape)


def vectors_of_four(rows: Tensor) -> Tensor:
    return rows * (torch.arange(rows.shape[1]) < rows.shape[1] // 4 * 4)


def added_by_every_replica(x: Tensor) -> Tensor:
    """128 threads over a tile of at most 48 rows: as many groups as there is room for have the
    whole sum, and all threads are added.
    """
    tile = min(len(x), 48)
    return x.sum(0) * (128 // tile)


def columns_of_the_first_tile(x: Tensor) -> Tensor:
    """Tiles of 32 columns, each of which stores the first one's sums."""
    return x.sum(0)[torch.arange(x.shape[1]) % 32]


def strides_of_sixteen(x: Tensor) -> Tensor:
    """Column j begins 16 j numbers on, and goes along the row."""
    columns, rows = x.shape[1], len(x)
    flat = functional.pad(x.contiguous().flatten(), (0, 16 * columns + rows))
    return flat.as_strided((columns, rows), (16, 1)).sum(1)
