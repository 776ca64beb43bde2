"""The third set of faults of operations that the search for causes was not written against.

Half are faults as public threads tell them, none of which an earlier set used, each named with its
thread; the other half was drawn from a grid by a seed (third_grid.py). What each
does wrong and the names that say where were set down before anything ran. All err more than 1.5 ×
their sound twin on an ordinary input (`python -m benchmarks.unseen.draw operations.third --check`).

Most are written as model code is: in fp32 between two casts, with the gradients of autograd.
"""

# ruff: noqa: ARG001, ARG005 - kernels and their parts have their operation's signatures

from __future__ import annotations

import math
from typing import Literal

import torch
from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_kernels as kernels
from benchmarks.unseen.operations import third_grid
from benchmarks.unseen.operations.second_kernels import (
    added,
    bf16,
    mean,
    passes,
    power_of_two,
    stochastic_bf16,
)
from benchmarks.unseen.operations.third_kernels import (
    FirstGradient,
    adamw,
    at,
    fp16,
    in_fp16,
    linear,
    straight,
    variant,
    with_scales,
)
from benchmarks.unseen.registering import registering
from torch import Tensor
from torch.nn import functional

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []

fault, sound = registering(FAULTS, SOUND)


# --- norms
def floored_eps(input, normalized_shape, weight, eps):
    return kernels.rms_norm()(input, normalized_shape, weight, max(eps, 1e-4))


def eps_after_the_root(input, normalized_shape, weight, eps):
    x = input.float()
    return (x * (torch.rsqrt(mean(x * x)) + eps) * weight.float()).to(input.dtype)


def weightless_dx(input, normalized_shape, weight, eps):
    def forward(x, w):
        r = torch.rsqrt(mean(x * x) + eps)
        return x * r * w, (x * r, r)

    def backward(saved, dy):
        normal, r = saved
        return r * (dy - normal * mean(dy * normal)), (dy * normal).sum(0)

    return passes(forward, backward, input, weight)


def sums_of_four_rows(wdy, normal, r):
    """`tl.sum(part)` over a block of rows, where each row's own sum is meant."""

    def block(x):
        return torch.cat([part.sum(0, keepdim=True).expand_as(part) for part in x.split(4)])

    return r * (wdy - block(mean(wdy)) - normal * block(mean(wdy * normal)))


def variance_by_difference(input, normalized_shape, weight, bias, eps):
    x = input.float()
    m = mean(x)
    r = torch.rsqrt((mean(x * x) - m * m).clamp_min(0) + eps)
    return ((x - m) * r * weight.float() + bias.float()).to(input.dtype)


fault("rms_norm", "eps_at_least_1e_4", floored_eps, "option limited",
      "eps mean_square inverse_rms",
      "nntrainer PR 4318: eps is floored so that fp16 holds it")  # fmt: skip
fault("rms_norm", "eps_after_the_root", eps_after_the_root, "option exchanged missing factor",
      "eps mean_square inverse_rms", "tilelang PR 1243: eps outside rsqrt", "float32")  # fmt: skip
fault("rms_norm", "backward_without_weight", weightless_dx, "missing factor option",
      "weight grad_normalized grad_input normalized grad_output",
      "llm.c PR 763, review: the weight is forgotten in the backward pass")  # fmt: skip
fault("layer_norm", "sums_over_a_block_of_rows", kernels.layer_norm(dx=sums_of_four_rows),
      "neighbor missing exchanged factor",
      "mean centered squares variance deviation normalized grad_input grad_normalized",
      "FlagGems PR 59: tl.sum without an axis", "float16")  # fmt: skip
fault("layer_norm", "variance_by_difference", variance_by_difference, "rounded summed missing",
      "variance squares mean deviation centered",
      "burn issue 5607: E[x²] − E[x]²", "float32")  # fmt: skip


# --- softmax and losses


def inner_in_fp16(input, dim=-1):
    def backward(w, dy):
        return (w * (dy - in_fp16(1)(w * dy)),)

    def forward(x):
        w = x.softmax(-1)
        return w, w

    return passes(forward, backward, input)


def mass_exchanged(lse, x, share):
    """(1 − ε) / C for every other class, ε / C in the gradient."""
    right = lse - x.mean(-1)
    return straight(right * ((1 - share) / share if share else 1.0), right)


def first_gradient(
    input, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0, lse_square_scale=0.0
):
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
    }
    return FirstGradient.apply(variant()(input, target, **options))


def ignored_from_the_end(
    input, weight, target, *, ignore_index=-100, reduction="none", label_smoothing=0.0
):
    z = (input.float() @ weight.float().T).to(input.dtype).float()
    wrapped = torch.where(target < 0, target % z.shape[1], target)
    hidden = ignore_index if ignore_index >= 0 else -1
    return variant()(
        z, wrapped, ignore_index=hidden, reduction=reduction, label_smoothing=label_smoothing
    ).to(input.dtype)


fault("softmax", "backward_sum_in_fp16", inner_in_fp16, "summed", "inner",
      "MIOpen PR 3427: the backward pass adds fp16 to fp16", "float16")  # fmt: skip
fault("softmax", "row_sum_in_fp16", kernels.softmax(row_sum=lambda terms, m: in_fp16(1)(terms)),
      "summed", "row_sum",
      "mxnet issue 14072: reductions in the input's format", "float16")  # fmt: skip
fault("cross_entropy", "mass_of_other_classes", variant(smooth=mass_exchanged),
      "option factor exchanged", "label_smoothing loss own others lse",
      "aprender PR 2199: (1 − ε) / C in the place of ε / C", "float32")  # fmt: skip
fault("cross_entropy", "ignored_tokens_are_smoothed",
      variant(hard=lambda loss, smooth, kept: torch.where(kept, loss, smooth)), "option missing",
      "ignore_index label_smoothing loss grad_input input",
      "Liger-Kernel PR 198: label smoothing with ignored tokens")  # fmt: skip
fault("cross_entropy", "penalty_without_gradient", variant(penalty=lambda z: z.detach()),
      "missing option", "lse_square_scale lse unit_gradient grad_input input",
      "ml-cross-entropy PR 43: lse had no gradient")  # fmt: skip
fault("cross_entropy", "gradient_of_the_first_token", first_gradient,
      "neighbor exchanged missing", "grad_loss loss grad_input input unit_gradient grad_output",
      "Liger-Kernel issue 678: reduction 'none' multiplies by one number")  # fmt: skip
fault("linear_cross_entropy", "ignored_from_the_end", ignored_from_the_end, "option neighbor",
      "ignore_index", "pytorch PR 176338, review: −100 indexes a class from the end")  # fmt: skip


# --- gated units, rope, routers
def activated_in_16_bits(gate, up):
    act = functional.silu(gate.float()).to(gate.dtype)
    return (act.float() * up.float()).to(gate.dtype)


def one_plus_tanh(gate, up, *, approximate="none"):
    g = gate.float()
    if approximate != "tanh":
        return kernels.geglu()(gate, up)
    inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    half = 0.5 * g
    return ((half * torch.tanh(inner) + half) * up.float()).to(gate.dtype)


def slope_of_a_coarse_tanh(g, p, density):
    t = bf16(2 * p - 1)
    return p + g * 0.5 * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 0.134145 * g * g)


def coarse_slope(gate, up, *, approximate="none"):
    slope = slope_of_a_coarse_tanh if approximate == "tanh" else None
    return kernels.geglu(slope=slope)(gate, up, approximate=approximate)


def always_interleaved(input, positions, *, base, interleaved=False):
    return kernels.rope()(input, positions, base=base, interleaved=True)


def raw_where_not_renormalized(logits, k, *, renormalize=True):
    z = logits.float()
    p = z.softmax(-1)
    index = z.topk(k, -1).indices
    w = p.gather(1, index)
    w = w / w.sum(-1, keepdim=True) if renormalize else z.gather(1, index)
    return w.to(logits.dtype), index


fault("swiglu", "activated_in_16_bits", activated_in_16_bits, "rounded", "activated",
      "mojo_opset PR 461: silu(a).to(a.dtype) * b")  # fmt: skip
fault("geglu", "one_plus_tanh", one_plus_tanh, "rounded limited",
      "inner below activated output approximate", "tt-metal issue 56517: 1 + tanh cancels",
      "float32")  # fmt: skip
fault("geglu", "slope_of_a_coarse_tanh", coarse_slope, "rounded", "slope below inner gate",
      "tt-metal issue 35885: 1 − tanh² of a tanh in bf16")  # fmt: skip
fault("rope", "angles_in_fp16", kernels.rope(at("frequency positions angle", fp16)), "rounded",
      "frequency angle position cos sin", "gpt-neox issue 1003", "float16")  # fmt: skip
fault("rope", "always_interleaved", always_interleaved, "option exchanged neighbor",
      "interleaved", "lattice issue 392: pairs (2 i, 2 i + 1) for (i, i + d / 2)")  # fmt: skip
fault("router", "raw_where_not_renormalized", raw_where_not_renormalized,
      "option missing exchanged",
      "renormalize probabilities powers row_sum weights chosen logits",
      "sglang PR 35160: weights are the logits themselves")  # fmt: skip


# --- optimizers


def eps_before_correction(
    param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay
):
    return adamw(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        size=lambda v, two, eps: (v.sqrt() + eps) / math.sqrt(two),
    )


def second_in_bf16(param, grads, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
    return adamw(
        param,
        grads,
        exp_avg,
        exp_avg_sq,
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        second=bf16,
        stored=stochastic_bf16,
    )


def hashed(input: Tensor) -> Tensor:
    """Random bits that are a function of the number alone."""
    own = input.float().contiguous().view(torch.int32).to(torch.int64)
    bits = (own * 2654435761 >> 7) % 65536
    return stochastic_bf16(input.float(), bits.to(torch.int32)).to(torch.bfloat16)


fault("adamw_step", "eps_before_correction", eps_before_correction, "option factor exchanged",
      "eps size moved update second", "torchani PR 261, pytorch PR 22628", "float32")  # fmt: skip
fault("adamw_low", "second_moment_in_bf16", second_in_bf16, "rounded summed",
      "second exp_avg_sq size moment",
      "halo PR 30, review: a bf16 second moment, to nearest")  # fmt: skip
fault("stochastic_round", "bits_of_the_value", hashed, "random", "",
      "triton PR 9693: the seed is made of the value's bits")  # fmt: skip


# --- quantizers and linear layers
def rounded_up_from_seven_quarters(amax: Tensor, most: int) -> Tensor:
    if most == 8:
        return power_of_two(amax, most)
    bits = (amax.contiguous().view(torch.int32) + (1 << 21)) & 0x7F800000
    return bits.view(torch.float32) / 4


def away_from_zero(x: Tensor) -> Tensor:
    size = x.abs().clamp_max(6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step + 0.5).floor() * step, x)


def ties_away(input, *, format: Literal["mxfp8_e4m3", "mxfp4"]):
    if "8" in format:
        return kernels.quantize()(input, format=format)
    x = input.float().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1, keepdim=True)
    s = torch.where(amax == 0, 1.0, power_of_two(amax, 2))
    return (away_from_zero(x / s) * s).flatten(-2)


def unpadded_offsets(scale: Tensor) -> Tensor:
    """Scales are stored by rows of their own length and read by rows of a multiple of 4."""
    n, wide = scale.shape[:2]
    read = torch.arange(n)[:, None] * (-(-wide // 4) * 4) + torch.arange(wide)
    return scale.flatten()[read.clamp_max(n * wide - 1)][..., None]


fault("quantize", "scale_up_from_1_75", kernels.quantize(scale=rounded_up_from_seven_quarters),
      "scale", "", "vllm PR 43557, review: MXFP4's exponent is rounded up at 0.75")  # fmt: skip
fault("quantize", "ties_away_from_zero", ties_away, "codes", "",
      "aiter PR 3992: `>=` at midpoints")  # fmt: skip
fault("quantize", "scales_by_unpadded_rows", kernels.quantize(at("scale", unpadded_offsets)),
      "scale neighbor", "",
      "MSLK PR 339, aiter PR 2900: scales' strides with and without padding")  # fmt: skip
fault("quantized_linear", "scale_up_to_a_power_of_two",
      with_scales(lambda s: torch.exp2(s.log2().ceil())), "scale factor", "",
      "transformers issue 47030: UE8M0 scales for codes of other scales")  # fmt: skip
fault("linear", "split_k_in_bf16", linear(128), "summed rounded", "output products",
      "modular issue 7165: partial sums in the output's format")  # fmt: skip
fault("linear", "dots_accumulate_in_bf16", linear(32, 32, 32), "summed",
      "output products input weight", "pytorch PR 188998: tl.dot without out_dtype")  # fmt: skip


# --- embedding, sums
def indices_of_the_next_batch(shape, index, dy):
    """The last tokens of a batch of 32 read the indices of the next one."""
    at = torch.arange(len(index))
    late = (at % 32 >= 28) & (at + 32 < len(index))
    moved = index[torch.where(late, at + 32, at)]
    return torch.zeros(shape).index_add_(0, moved, dy)


def in_stages(x):
    return torch.stack([bf16(part.sum(0)) for part in x.split(32)]).sum(0)


fault("embedding", "indices_of_the_next_batch",
      kernels.embedding(total=indices_of_the_next_batch), "neighbor exchanged random missing",
      "weight rows",
      "pytorch PR 187687: shared memory is filled again while it is read")  # fmt: skip
fault("sum", "stages_in_bf16",
      kernels.sum_rows(total=in_stages),
      "summed rounded", "output terms input",
      "tt-metal PR 43367: the first stage is stored in bf16")  # fmt: skip
fault("sum", "grows_in_fp16", kernels.sum_rows(total=added(fp16, 1)), "summed overflow",
      "output terms input", "cactus PR 344", "float16")  # fmt: skip

FAULTS += third_grid.FAULTS


# --- sound kernels, written otherwise
def eager_rms(input, normalized_shape, weight, eps):
    x = input.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)


def eager_layer_norm(input, normalized_shape, weight, bias, eps):
    x = input.float()
    centered = x - mean(x)
    normal = centered * torch.rsqrt(mean(centered * centered) + eps)
    return (normal * weight.float() + bias.float()).to(input.dtype)


def eager_geglu(gate, up, *, approximate="none"):
    g = gate.double()
    inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    act = (
        g * torch.sigmoid(2 * inner)
        if approximate == "tanh"
        else g * 0.5 * torch.erfc(-g * math.sqrt(0.5))
    )
    return (act * up.double()).to(gate.dtype)


def eager_router(logits, k, *, renormalize=True):
    p = logits.float().softmax(-1)
    index = logits.float().topk(k, -1).indices
    w = p.gather(1, index)
    return (w / w.sum(-1, keepdim=True) if renormalize else w).to(logits.dtype), index


sound("rms_norm", "eager", eager_rms)
sound("rms_norm", "eager_fp32", eager_rms, "float32")
sound("layer_norm", "eager", eager_layer_norm, "float16")
sound("softmax", "by_hand", kernels.softmax(), "float16")
sound("cross_entropy", "modules", variant())
sound("cross_entropy", "by_hand_fp32", kernels.cross_entropy(), "float32")
sound("swiglu", "by_hand", kernels.swiglu(), "float32")
sound("geglu", "in_fp64", eager_geglu)
sound("rope", "by_hand", kernels.rope(), "float16")
sound("router", "eager", eager_router)
sound("adamw_step", "by_hand", kernels.adamw_step())
sound("linear", "by_hand", linear(), "float16")
sound("embedding", "by_hand", kernels.embedding(), "float32")
sound("sum", "by_hand", kernels.sum_rows(), "float16")
