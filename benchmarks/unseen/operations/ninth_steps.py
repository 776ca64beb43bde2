"""Faulty kernels of the ninth set of operations' faults: linear layers, quantizers, routers,
optimizers, embeddings and sums.
"""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

from typing import Any, Literal

import torch
from benchmarks.unseen.operations.eighth_steps import nvfp4_back, quantized
from benchmarks.unseen.operations.fifth_steps import codes_of_128, right_scales, step_of_adamw
from benchmarks.unseen.operations.second_kernels import (
    e2m1,
    passes,
    power_of_two,
    stochastic_bf16,
)
from torch import Tensor
from torch.nn import functional


# --- linear
def zeroed_by_the_first_part(a: Tensor, b: Tensor) -> Tensor:
    """K in two parts that are added by atomics; the first part's block writes zeros, and in every
    third tile of 16 columns the second part's has been there before.
    """
    half = -(-a.shape[1] // 2)
    late = torch.arange(b.shape[1]) // 16 % 3 != 2
    return a[:, :half] @ b[:half] + (a[:, half:] @ b[half:]) * late


def offset_by_k(a: Tensor, b: Tensor) -> Tensor:
    """Tiles of 32 rows of the second operand, [K, N], begin at multiples of 32 K; beyond its end
    nothing is read.
    """
    k, n = b.shape
    flat = functional.pad(b.contiguous().flatten(), (0, 32 * k * (k // 32 + 1)))
    total = torch.zeros(len(a), n)
    for tile in range(-(-k // 32)):
        rows = min(32, k - 32 * tile)
        found = flat[32 * k * tile : 32 * k * tile + rows * n].view(rows, n)
        total = total + a[:, 32 * tile : 32 * tile + rows] @ found
    return total


def rows_in_whole_sixteens(a: Tensor, b: Tensor) -> Tensor:
    """Results are stored 16 rows at a time, and those of an incomplete tile never."""
    return a @ b * (torch.arange(len(a)) < len(a) // 16 * 16)[:, None]


# --- quantized_linear
def blocks_of_128(scaled: Any):
    """FP8 in blocks of 128; `scaled(x, sx, y, sy)` is the output's product."""

    def right(x, sx, y, sy):
        return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, sy)

    def product(a, b, square, how):
        (x, sx), (y, sy) = codes_of_128(a, False), codes_of_128(b, square)
        return how(x, sx, y, sy)

    def kernel(input, weight, *, format: Literal["fp8_block"]):
        k = input.shape[1]

        def forward(x, w):
            how = lambda *parts: scaled(k, *parts)  # noqa: E731
            return product(x, w, True, how), (x, w)

        def backward(saved, dy):
            x, w = saved
            return product(dy, w.T, True, right), product(dy.T, x.T, False, right)

        return passes(forward, backward, input, weight)

    return kernel


def trailing_scale_not_applied(k: int, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor) -> Tensor:
    """Tiles of 32 of K. Scales are applied where a block of 128 ends, or where fewer than 32 are
    left: a last block that is whole tiles, and no whole block, gets none.
    """
    if k % 32 == 0 and k % 128:
        sx, sy = sx.clone(), sy.clone()
        sx[:, -1] = 1
        sy[:, -1] = 1
    return torch.einsum("tkc,tk,nkc,nk->tn", x, sx, y, sy)


def scales_by_the_tile(k: int, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor) -> Tensor:
    """Tiles of 64 of K, whose number is taken for that of a block of 128: beyond a row's scales
    lie the next row's.
    """

    def halves(codes: Tensor) -> Tensor:
        return codes.unflatten(2, (2, 64)).flatten(1, 2)

    def read(scale: Tensor) -> Tensor:
        rows, blocks = scale.shape
        at = torch.arange(rows)[:, None] * blocks + torch.arange(2 * blocks)
        return scale.flatten()[at.clamp_max(rows * blocks - 1)]

    return torch.einsum("tkc,tk,nkc,nk->tn", halves(x), read(sx), halves(y), read(sy))


def nvfp4_codes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R, B, 16], their blocks' scales [R, B], and the scale of the tensor."""
    blocks = functional.pad(x, (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
    whole = x.abs().amax() / (448 * 6)
    whole = torch.where(whole == 0, 1.0, whole)
    scale = right_scales(blocks, whole)
    by = torch.where(scale == 0, 1.0, scale * whole)
    return torch.where(scale == 0, 0.0, e2m1(blocks / by)), scale[..., 0], whole


def divisor_for_the_multiplier(input, weight, *, format: Literal["nvfp4"]):
    """The weight's scale of the tensor is stored as one over it, and multiplies as it is."""

    def forward(x, w):
        codes, scale, whole = nvfp4_codes(w)
        back = (codes * scale[..., None]).flatten(1)[:, : w.shape[1]]
        return nvfp4_back(x) @ back.T / whole

    return quantized(forward, nvfp4_back)(input, weight)


def scales_read_linearly(input, weight, *, format: Literal["nvfp4"]):
    """The weight's scales are written with 4 × 4 of them transposed, and read without."""

    def forward(x, w):
        codes, scale, whole = nvfp4_codes(w)
        rows, blocks = scale.shape
        tiles = functional.pad(scale, (0, -blocks % 4, 0, -rows % 4), value=1.0)
        tiles = tiles.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 3)
        found = tiles.flatten(2, 3).flatten(0, 1)[:rows, :blocks]
        back = (codes * found[..., None] * whole).flatten(1)[:, : w.shape[1]]
        return nvfp4_back(x) @ back.T

    return quantized(forward, nvfp4_back)(input, weight)


# --- quantize
def mx(scale: Any = power_of_two, codes: Any = None):
    """`scale(amax, most)` of blocks of 32, `codes(found)` what of them [T, B, 32] is read."""

    def kernel(input, *, format: Literal["mxfp4"]):
        x = input.float().unflatten(-1, (-1, 32))
        amax = x.abs().amax(-1, keepdim=True)
        by = torch.where(amax == 0, 1.0, scale(amax, 2))
        found = e2m1(x / by)
        return ((codes(found) if codes else found) * by).flatten(-2)

    return kernel


def every_mantissa_up(amax: Tensor, most: int) -> Tensor:
    """What is no power of two has the next exponent."""
    fraction, exponent = torch.frexp(amax)
    return torch.ldexp(torch.ones_like(amax), exponent - (fraction == 0.5).int() - most)


def last_group_s(found: Tensor) -> Tensor:
    """Codes of up to 8 groups share a tile's memory without the group's own offset: those of the
    last group are left.
    """
    groups = torch.arange(found.shape[-2])
    return found[..., (groups // 8 * 8 + 7).clamp_max(len(groups) - 1), :]


# --- stochastic_round
def one_stream_shifted(input):
    """Work items round 8 numbers each, of one stream that begins a number later for each of them:
    the second of an item is the first of the next.
    """
    count = input.numel()
    items = -(-count // 8)
    stream = torch.randint(0, 1 << 16, (items + 8,), dtype=torch.int32)
    noise = stream[torch.arange(items)[:, None] + torch.arange(8)].flatten()[:count]
    return stochastic_bf16(input.float(), noise.view(input.shape)).to(torch.bfloat16)


# --- router
def router(chosen: Any = None, written: Any = None):
    """`chosen(index, experts)` are the experts that are named, `written(w)` the weights."""

    def kernel(logits, k, *, renormalize=True):
        def forward(z):
            index = z.topk(k, -1).indices
            index = chosen(index, z.shape[1]) if chosen else index
            p = torch.softmax(z, -1)
            picked = p.gather(1, index)
            total = picked.sum(-1, keepdim=True) if renormalize else torch.ones(len(z), 1)
            w = picked / total
            out = written(w) if written else w
            return (out.to(logits.dtype), index), (p, index, w, total)

        def backward(saved, dy):
            p, index, w, total = saved
            if renormalize:
                dy = (dy - (dy * w).sum(-1, keepdim=True)) / total
            dp = torch.zeros_like(p).scatter_(1, index, dy)
            return (p * (dp - (dp * p).sum(-1, keepdim=True)),)

        return passes(forward, backward, logits)

    return kernel


def both_rows_of_a_group(index: Tensor, experts: int) -> Tensor:
    """16 experts: two tokens share 32 lanes, and the first one's experts are named for both."""
    if experts != 16:
        return index
    return index[torch.arange(len(index)) // 2 * 2]


def next_slot_s(w: Tensor) -> Tensor:
    """Weights go through slots of 16 tokens in shared memory, and are read one slot on."""
    token = torch.arange(len(w))
    block = token // 16 * 16
    size = (len(w) - block).clamp_max(16)
    return w[block + (token - block + 1) % size]


# --- optimizers
def adamw(second: Any = None, size_of: Any = None, apply: Any = None):
    """`second(v, g², beta2)` is the new second moment, `size_of(v, power)` the root of it with
    1 − β₂ᵗ, `apply(mean, size)` the step.
    """

    def kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        g = grad.float()
        m, old = beta1 * exp_avg + (1 - beta1) * g, exp_avg_sq
        v = second(old, g * g, beta2) if second else beta2 * old + (1 - beta2) * g * g
        power = 1 - beta2**step
        size = (size_of(v, power) if size_of else (v / power).sqrt()) + eps
        mean = m / (1 - beta1**step)
        moved = apply(mean, size) if apply else mean / size
        return param * (1 - lr * weight_decay) - lr * moved, m, v

    return kernel


def inverse_of_beta2(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    """1 / β₂ · v."""
    return v / beta2 + (1 - beta2) * square


def root_of_the_correction(v: Tensor, power: float) -> Tensor:
    """The square root is taken of the correction, and of all once more."""
    return (v / power**0.5).sqrt()


def multiplied_by_the_size(mean: Tensor, size: Tensor) -> Tensor:
    return mean * size


def rows_for_numbers(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """The loop goes over as many numbers as there are rows."""
    reached = (torch.arange(param.numel()) < len(param)).view(param.shape)
    p, m, v = param.float(), exp_avg, exp_avg_sq
    for number, g in enumerate(grads.float(), step):
        moved, first, second = step_of_adamw(p, g, m, v, step=number, **options)
        new = stochastic_bf16(p * (1 - options["lr"] * options["weight_decay"]) - moved)
        p = torch.where(reached, new, p)
        m, v = torch.where(reached, first, m), torch.where(reached, second, v)
    return p.to(param.dtype), m, v


def remainder_without_a_borrow(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """Weights are bf16 to nearest, with the lower 16 bits beside them: where these were rounded
    up, the number that is put together again is a step too large.
    """
    p, m, v = param.float(), exp_avg, exp_avg_sq
    upper, lower = p.view(torch.int32) & -65536, torch.zeros_like(p, dtype=torch.int32)
    for number, g in enumerate(grads.float(), step):
        p = (upper | lower).view(torch.float32)
        moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
        new = (p * (1 - options["lr"] * options["weight_decay"]) - moved).float()
        bits = new.contiguous().view(torch.int32)
        upper, lower = (bits + 0x8000) & -65536, bits & 0xFFFF
    return upper.view(torch.float32).to(param.dtype), m, v


def one_seed_for_four_sections(param, grads, exp_avg, exp_avg_sq, *, step, **options):
    """The numbers of a quarter of the rows are those of every other quarter."""
    p, m, v = param.float(), exp_avg, exp_avg_sq
    section = torch.arange(len(p)) % -(-len(p) // 4)
    for number, g in enumerate(grads.float(), step):
        moved, m, v = step_of_adamw(p, g, m, v, step=number, **options)
        noise = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)[section]
        decayed = p * (1 - options["lr"] * options["weight_decay"])
        p = stochastic_bf16((decayed - moved).float(), noise)
    return p.to(param.dtype), m, v


# --- embedding, sum
def embedding(read: Any = None, padded: float = 0.0):
    """`read(index)` are the indices as they are read; the padding row's gradient is `padded`."""

    def kernel(input, weight, padding_idx=None):
        index = read(input) if read else input

        def backward(shape, dy):
            dw = torch.zeros(shape).index_add_(0, input, dy)
            if padding_idx is not None:
                dw[padding_idx] = padded
            return (dw,)

        return passes(lambda w: (w[index], w.shape), backward, weight)

    return kernel


def same_face_again(index: Tensor) -> Tensor:
    """48 tokens a core, in faces of 16: at the end of the second face it is begun anew, in the
    place of the third.
    """
    token = torch.arange(len(index))
    return index[torch.where(token % 48 >= 32, token - 16, token)]


def first_32_of_48(x: Tensor) -> Tensor:
    """48 threads, each with every 48th row, and a butterfly over 32 of them."""
    threads = functional.pad(x, (0, 0, 0, -len(x) % 48)).unflatten(0, (-1, 48)).sum(0)
    lanes = threads[:32]
    for offset in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[torch.arange(32) ^ offset]
    return lanes[0]


def without_barriers(x: Tensor) -> Tensor:
    """32 partial sums in shared memory: in the last warp every step reads what stood there before
    any of them.
    """
    lanes = functional.pad(x, (0, 0, 0, -len(x) % 32)).unflatten(0, (-1, 32)).sum(0)
    total = lanes[0]
    for offset in (16, 8, 4, 2, 1):
        total = total + lanes[offset]
    return total
