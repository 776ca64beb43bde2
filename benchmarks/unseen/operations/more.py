"""The second half of first.py, and what both are written with."""

# ruff: noqa: ARG001 - kernels have their operation's signature

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from benchmarks.unseen import OperationFault
from torch import Tensor
from torch.nn import functional

FAULTS_MORE: list[OperationFault] = []
SOUND_MORE: list[OperationFault] = []


def fault(op: str, name: str, fn: Any, what: str, where: str) -> None:
    FAULTS_MORE.append(OperationFault(op, name, fn, frozenset(what.split()), tuple(where.split())))


def sound(op: str, name: str, fn: Any) -> None:
    SOUND_MORE.append(OperationFault(op, name, fn, frozenset()))


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *tensors):
        ctx.own = backward
        out, ctx.saved = forward(*tensors)
        return out

    @staticmethod
    def backward(ctx, grad):
        return None, None, *ctx.own(ctx.saved, grad)


def passes(forward: Any, backward: Any, *tensors: Tensor) -> Tensor:
    """forward(*tensors) -> out, saved; backward(saved, grad) -> a gradient a tensor."""
    return _Passes.apply(forward, backward, *tensors)


def to(fmt: torch.dtype):
    return lambda x: x.to(fmt).float()


bf16, fp16, e4m3, e5m2 = map(
    to, (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
)


def added_low(x: Tensor, rounding: Any, width: int) -> Tensor:
    """A sum over the last dimension, its running value rounded after every `width` terms."""
    total = torch.zeros_like(x[..., :1])
    for part in x.split(width, -1):
        total = rounding(total + part.sum(-1, keepdim=True))
    return total


# --- rope
def turn(frequency=None, position=None, back=-1.0, table=None):
    def kernel(input, positions, *, base, interleaved=False):
        width = input.shape[-1]
        f = base ** (-torch.arange(0, width, 2).float() / width)
        f = frequency(f) if frequency else f
        p = position(positions.float()) if position else positions.float()
        angle = p[:, None] * f
        cos, sin = (x[:, None] for x in (angle.cos(), angle.sin()))
        cos, sin = (table(x) if table else x for x in (cos, sin))

        def rotate(x, sign):
            x = x.float()
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            pair = a * cos - sign * b * sin, b * cos + sign * a * sin
            return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

        return passes(lambda x: (rotate(x, 1.0).to(x.dtype), x.dtype),
                      lambda dtype, dy: (rotate(dy, back).to(dtype),), input)  # fmt: skip

    return kernel


fault("rope", "frequency_bf16", turn(frequency=bf16), "rounded", "frequency angle position base")
fault("rope", "positions_fp16", turn(position=fp16), "rounded", "position angle")
fault("rope", "backward_turns_on", turn(back=1.0), "exchanged missing factor",
      "input grad angle")  # fmt: skip
fault("rope", "table_of_2048", turn(position=lambda p: p.clamp_max(2047)), "limited", "position")
fault("rope", "cos_sin_e4m3", turn(table=e4m3), "rounded", "cos sin")
sound("rope", "by_pairs", turn())


# --- swiglu, geglu
def gated(act, slope, swap=False):
    """act(gate) · up with a backward pass that recomputes."""

    def kernel(gate, up, **options):
        def forward(g, u):
            return (act(g.float()) * u.float()).to(g.dtype), (g, u)

        def backward(saved, dy):
            g, u = saved
            dy = dy.float()
            grads = (dy * u.float() * slope(g.float())).to(g.dtype), (
                dy * act(g.float())).to(g.dtype)  # fmt: skip
            return grads[::-1] if swap else grads

        return passes(forward, backward, gate, up)

    return kernel


def silu(x):
    return x * torch.sigmoid(x)


def silu_slope(x):
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def low_tanh(x):
    return x * 0.5 * (1 + bf16(torch.tanh(x / 2)))


def low_slope(x):
    s = bf16(torch.sigmoid(x))
    return s * (1 + x * (1 - s))


def gelu(x):
    return functional.gelu(x)


def erf_slope(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(
        2 * math.pi)  # fmt: skip


def slope_of(function):
    def slope(x):
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            return torch.autograd.grad(function(own).sum(), own)[0]

    return slope


def tanh_gelu(x):
    return functional.gelu(x, approximate="tanh")


def either(erf, tanh):
    return lambda gate, up, *, approximate="none": (tanh if approximate == "tanh" else erf)(
        gate, up
    )


def quick(x):
    return x * torch.sigmoid(1.702 * x)


def limited(x):
    return silu(x.clamp_max(7.0))


right_tanh = gated(tanh_gelu, slope_of(tanh_gelu))
fault("swiglu", "sigmoid_by_low_tanh", gated(low_tanh, silu_slope), "rounded",
      "activated sigmoid gate")  # fmt: skip
fault("swiglu", "gradients_exchanged", gated(silu, silu_slope, swap=True), "exchanged", "gate up")
fault("swiglu", "gate_limited_to_7", gated(limited, slope_of(limited)), "limited", "gate activated")
fault("swiglu", "slope_of_low_sigmoid", gated(silu, low_slope), "rounded",
      "gate slope sigmoid activated")  # fmt: skip
fault("swiglu", "slope_without_second_term", gated(silu, torch.sigmoid), "missing",
      "gate slope activated")  # fmt: skip
fault("geglu", "backward_of_tanh", either(gated(gelu, slope_of(tanh_gelu)), right_tanh), "option",
      "approximate gate")  # fmt: skip
fault("geglu", "quick_gelu", either(gated(quick, slope_of(quick)), right_tanh), "option factor",
      "approximate gate activated")  # fmt: skip
sound("swiglu", "recomputed", gated(silu, silu_slope))
sound("geglu", "both_formulas", either(gated(gelu, erf_slope), right_tanh))


# --- linear, sum, embedding
def linear(split=None, dw=None, dy=None, width=64):
    def kernel(input, weight):
        def forward(x, w):
            parts = zip(x.float().split(width, -1), w.float().split(width, -1), strict=True)
            out = 0.0
            for a, b in parts:
                out = out + (split or _same)(a @ b.mT)
            return out.to(x.dtype), (x, w)

        def backward(saved, g):
            x, w = saved
            g = dy(g.float()) if dy else g.float()
            return (g @ w.float()).to(x.dtype), (dw or _product)(g, x.float()).to(w.dtype)

        return passes(forward, backward, input, weight)

    return kernel


def _same(x):
    return x


def _product(g, x):
    return g.mT @ x


def micro_batches(g, x):
    total = 0.0
    for a, b in zip(g.split(8), x.split(8), strict=True):
        total = bf16(total + a.mT @ b)
    return total


def whole_rows(g, x):
    whole = len(x) // 16 * 16 or len(x)
    return g[:whole].mT @ x[:whole]


fault("linear", "split_k_bf16", linear(split=bf16, width=16), "summed rounded",
      "output products sum")  # fmt: skip
fault("linear", "dw_of_micro_batches_bf16", linear(dw=micro_batches), "summed", "weight")
fault("linear", "gradient_e5m2", linear(dy=e5m2), "rounded", "output input weight")
fault("linear", "dw_of_whole_tiles", linear(dw=whole_rows), "end", "weight T")
sound("linear", "split_k", linear())


def gathered(accumulate=True, factor=1.0, padded=True, rounding=_same, width=1):
    def kernel(input, weight, padding_idx=None):
        def forward(w):
            return (w.float()[input] * factor).to(w.dtype), w

        def backward(w, dy):
            dw, dy = torch.zeros_like(w, dtype=torch.float32), dy.float() * factor
            if accumulate:
                for rows, part in zip(input.split(width), dy.split(width), strict=True):
                    dw = rounding(dw.index_add(0, rows, part))
            else:
                dw[input] = dy
            if padding_idx is not None and padded:
                dw[padding_idx] = 0
            return (dw.to(w.dtype),)

        return passes(forward, backward, weight)

    return kernel


fault("embedding", "last_token_wins", gathered(accumulate=False), "missing summed", "weight")
fault("embedding", "padding_keeps_gradient", gathered(padded=False), "option", "padding")
fault("embedding", "segments_added_in_bf16", gathered(rounding=bf16, width=8), "summed rounded",
      "weight")  # fmt: skip
sound("embedding", "index_add", gathered(width=64))


def blocks_of_rows(rounding=_same, whole=False, width=32):
    def kernel(input, dim):
        rows = input.float().movedim(dim, 0)
        rows = rows[: len(rows) // width * width or None] if whole else rows
        parts = [rounding(part.sum(0)) for part in rows.split(width)]
        while len(parts) > 1:  # a tree
            parts = [rounding(sum(parts[i : i + 2])) for i in range(0, len(parts), 2)]
        return parts[0]

    return kernel


fault("sum", "tree_in_bf16", blocks_of_rows(bf16, width=4), "summed rounded",
      "output terms input")  # fmt: skip
fault("sum", "whole_blocks", blocks_of_rows(whole=True), "end", "input T output")


# --- router
def router(power=None, norm=None, choice=None):
    def kernel(logits, k, *, renormalize=True):
        rows = logits.float()
        p = power(rows) if power else torch.softmax(rows, -1)
        _, indices = (choice(rows) if choice else p).topk(k, -1)
        weights = p.gather(-1, indices)
        if renormalize:
            weights = weights / (norm(weights) if norm else weights.sum(-1, keepdim=True))
        return weights, indices

    return kernel


def low_softmax(rows):
    return torch.softmax(rows.bfloat16(), -1).float()


fault("router", "softmax_bf16", router(power=low_softmax), "rounded", "weights powers sum")
fault("router", "renormalized_detached", router(norm=lambda w: w.sum(-1, keepdim=True).detach()),
      "missing", "sum logits weights")  # fmt: skip
fault("router", "renormalized_with_eps", router(norm=lambda w: w.sum(-1, keepdim=True) + 1e-3),
      "factor option", "sum weights renormalize")  # fmt: skip
fault("router", "choice_by_bf16_softmax", router(choice=low_softmax), "rounded",
      "shortfall weights indices choice logits")  # fmt: skip


# --- optimizers
def adamw(size=None, decay=None, kept=None, corrected=None):
    def kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        wide = grad.float() + (weight_decay * param if decay == "l2" else 0)
        first = beta1 * exp_avg + (1 - beta1) * wide
        second = beta2 * exp_avg_sq + (1 - beta2) * wide * wide
        second = kept(second) if kept else second
        root = (second / (1 - beta2**step)).sqrt()
        root = size(second / (1 - beta2**step), eps) if size else root + eps
        mean = first / (1 if corrected else 1 - beta1**step)
        share = 0 if decay == "l2" else lr * weight_decay
        return param * (1 - share) - lr * mean / root, first, second

    return kernel


fault("adamw_step", "eps_inside_root", adamw(size=lambda v, eps: (v + eps).sqrt()), "option", "eps")
fault("adamw_step", "decay_in_gradient", adamw(decay="l2"), "option", "decay")
fault("adamw_step", "second_moment_bf16", adamw(kept=bf16), "rounded", "second exp_avg_sq")
fault("adamw_step", "first_uncorrected", adamw(corrected=True), "missing option factor",
      "step beta1 first exp_avg update")  # fmt: skip
sound("adamw_step", "written_out", adamw())


def low_steps(noise):
    def kernel(param, grads, exp_avg, exp_avg_sq, *, step, **constants):
        moved = param.float()
        for number, grad in enumerate(grads, step):
            moved, exp_avg, exp_avg_sq = adamw()(
                moved, grad, exp_avg, exp_avg_sq, step=number, **constants)  # fmt: skip
            bits = moved.contiguous().view(torch.int32) + noise(moved.shape)
            moved = (bits & -65536).view(torch.float32)
        return moved.to(param.dtype), exp_avg, exp_avg_sq

    return kernel


def noise_of_rows(shape):
    return torch.randint(0, 2**16, (*shape[:-1], 1), dtype=torch.int32).expand(shape)


fault("adamw_low", "noise_of_a_row", low_steps(noise_of_rows), "random", "row mean update param")
sound("adamw_low", "noise_of_elements", low_steps(
    lambda shape: torch.randint(0, 2**16, tuple(shape), dtype=torch.int32)))  # fmt: skip


def drawn(bits):
    def kernel(input):
        noise = torch.randint(0, 2**bits, input.shape, dtype=torch.int32) << (16 - bits)
        kept = (input.contiguous().view(torch.int32) + noise) & -65536
        return kept.view(torch.float32).bfloat16()

    return kernel


fault("stochastic_round", "noise_of_3_bits", drawn(3), "random rounded", "")


# --- quantizers
Microscaled = Literal["mxfp8_e4m3", "mxfp8_e5m2"]


def microscaled(away=False, size=32):
    """MXFP8 by hand: a power of two a block, then E4M3 or E5M2."""

    def kernel(input, *, format: Microscaled):
        wide = format == "mxfp8_e5m2"
        fmt, top = (torch.float8_e5m2, 15) if wide else (torch.float8_e4m3fn, 8)
        parts = []
        for x in input.float().split(size, -1):
            largest = x.abs().amax(-1, keepdim=True)
            exponent = torch.frexp(largest)[1] - 1 - top
            scale = torch.exp2(exponent.float().clamp(-127, 127))
            y = (x / scale).clamp(-torch.finfo(fmt).max, torch.finfo(fmt).max)
            if away:  # ties away from zero: half a step is a bit more
                y = y * (1 + 2**-20)
            parts.append(y.to(fmt).float() * scale)
        return torch.cat(parts, -1)

    return kernel


fault("quantize", "ties_away", microscaled(away=True), "codes rounded", "")
fault("quantize", "blocks_of_64", microscaled(size=64), "scale", "")
sound("quantize", "by_torch", microscaled())


def by_rows(back, product=None):
    def kernel(input, weight, *, format: Literal["fp8_row"]):
        multiply = product or (lambda a, b: a @ b.mT)

        def backward(saved, dy):
            x, w = saved
            dy = dy.float()
            return (multiply(back(dy), back(w.float().mT)).to(x.dtype),
                    multiply(back(dy.mT), back(x.float().mT)).to(w.dtype))  # fmt: skip

        return passes(lambda x, w: (multiply(back(x.float()), back(w.float())).to(x.dtype), (x, w)),
                      backward, input, weight)  # fmt: skip

    return kernel


def scaled(x, dim=-1, most=448.0):
    largest = x.abs().amax(dim, keepdim=True) if dim is not None else x.abs().amax()
    t = (largest / most).clamp_min(1e-30)
    return e4m3(x / t) * t


def floored(x):
    """A scale that is a power of 2, the one below, so that the largest codes saturate."""
    t = torch.exp2((x.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30).log2().floor())
    return e4m3((x / t).clamp(-448, 448)) * t


def short_sums(a, b):
    """Sums over 16 products cut to 8 bits, as accumulators without a rounding are."""
    total = 0.0
    for x, y in zip(a.split(16, -1), b.split(16, -1), strict=True):
        total = (total + x @ y.mT).view(torch.int32) & -65536
        total = total.view(torch.float32)
    return total


fault("quantized_linear", "scale_of_tensor", by_rows(lambda x: scaled(x, None)), "scale", "")
fault("quantized_linear", "scale_power_of_2_below", by_rows(floored), "scale codes limited", "")
fault("quantized_linear", "sums_of_8_bits", by_rows(scaled, short_sums), "summed", "")
sound("quantized_linear", "by_rows", by_rows(scaled))
