"""The second set of faults of operations that the search for causes was not written against.

Half are faults as public threads and commits tell them, each named with its thread; the other half
was drawn from a grid by a seed (second_grid.py). What each does wrong and the
names that say where were set down before anything ran.
"""

# ruff: noqa: ARG001, ARG005 - kernels and their parts have their operation's signatures

from __future__ import annotations

from typing import Any

import torch
from benchmarks.unseen import OperationFault
from benchmarks.unseen.operations import second_grid
from benchmarks.unseen.operations.second_kernels import (
    adamw_low,
    adamw_step,
    added,
    bf16,
    by_rows,
    cross_entropy,
    e4m3,
    embedding,
    geglu,
    layer_norm,
    linear_cross_entropy,
    mean,
    passes,
    quantize,
    quantized_linear,
    rms_norm,
    rope,
    router,
    softmax,
    stochastic_bf16,
    sum_rows,
    swiglu,
)
from torch import Tensor

FAULTS: list[OperationFault] = []
SOUND: list[OperationFault] = []


def fault(op: str, name: str, fn: Any, what: str, where: str, thread: str) -> None:
    assert thread
    FAULTS.append(OperationFault(op, name, fn, frozenset(what.split()), tuple(where.split())))


def sound(op: str, name: str, fn: Any) -> None:
    SOUND.append(OperationFault(op, name, fn, frozenset()))


def at(name: str, change: Any):
    """A seam that changes one stage."""
    return lambda stage, x: change(x) if stage == name else x


# --- norms
def of_another_tensor(input, normalized_shape, weight, eps):
    """dW after dX has been written where dY was."""

    def forward(x, w):
        r = torch.rsqrt(mean(x * x) + eps)
        return x * r * w, (x, w, r)

    def backward(saved, dy):
        x, w, r = saved
        wdy, normal = dy * w, x * r
        dx = r * (wdy - normal * mean(wdy * normal))
        return dx, (dx * normal).sum(0)

    return passes(forward, backward, input, weight)


def twice_the_mean(wdy, normal, r):
    return r * (wdy - 2 * mean(wdy) - normal * mean(wdy * normal))


def last_block_of_the_sum(wdy, normal, r):
    inner = (wdy * normal)[:, -32:].sum(-1, keepdim=True) / wdy.shape[-1]
    return r * (wdy - mean(wdy) - normal * inner)


fault("rms_norm", "variance_stored_for_inverse", rms_norm(back=lambda r: 1 / r**2),
      "exchanged missing factor", "inverse_rms mean_square rsqrt grad_input normalized",
      "FlagGems PR 5771: `tl.store(INV_RMS, rrms)` writes the variance")  # fmt: skip
fault("rms_norm", "divided_by_the_root_s_inverse", rms_norm(own=lambda x, r: x / r),
      "exchanged missing factor", "inverse_rms normalized mean_square",
      "llm-foundry PR 372: division by rsqrt")  # fmt: skip
fault("rms_norm", "dw_of_the_overwritten_gradient", of_another_tensor,
      "exchanged neighbor missing factor", "grad_weight weight grad_output",
      "unsloth PR 4550: dX aliases dY, which dW reads afterwards")  # fmt: skip
fault("layer_norm", "mean_subtracted_twice", layer_norm(dx=twice_the_mean),
      "factor missing", "mean centered grad_input", "tt-metal issue 53204, first bug")  # fmt: skip
fault("layer_norm", "one_block_of_the_inner_sum", layer_norm(dx=last_block_of_the_sum),
      "end missing", "normalized squares variance deviation grad_input",
      "tt-metal issue 53204, second bug: a nested acquire clears the running sum")  # fmt: skip
fault("layer_norm", "variance_down_the_rows",
      layer_norm(spread=lambda c: (c * c).mean(0, keepdim=True).mean(-1, keepdim=True).expand(
          len(c), 1)),
      "neighbor exchanged", "variance squares deviation",
      "mlir-aie PR 3419: statistics along the wrong axis")  # fmt: skip


# --- softmax and losses
def zeros_past_the_end(block: int):
    """exp(0 − m) for every column that fills up the last block."""

    def row_sum(terms: Tensor, m: Tensor) -> Tensor:
        more = -terms.shape[1] % block
        return terms.sum(-1, keepdim=True) + more * (-m).clamp_max(60).exp()

    return row_sum


fault("softmax", "maximum_at_least_zero",
      softmax(maximum=lambda x: x.amax(-1, keepdim=True).clamp_min(0.0)),
      "limited overflow", "maximum shifted terms row_sum",
      "flashinfer issue 2822: maxima that begin at 0, all logits negative")  # fmt: skip
fault("cross_entropy", "mean_over_all_tokens",
      cross_entropy(count=lambda kept, target: target.numel()),
      "factor option", "loss grad_input input ignore_index reduction unit_gradient",
      "ROCm/TransformerEngine PR 336: divided by all tokens where some are ignored")  # fmt: skip
fault("cross_entropy", "ignores_minus_100_only", cross_entropy(hidden=-100),
      "option", "ignore_index", "chainer PR 2716: a label to ignore that is fixed")  # fmt: skip
fault("linear_cross_entropy", "phantom_tokens",
      linear_cross_entropy(loss=cross_entropy(row_sum=zeros_past_the_end(128))),
      "end missing neighbor factor", "row_sum lse logits loss terms",
      "verl PR 5349: columns past the vocabulary add exp(0)")  # fmt: skip
fault("linear_cross_entropy", "weight_gradient_bf16_per_chunk", linear_cross_entropy(low=bf16),
      "summed", "weight", "axolotl PR 1601, Liger-Kernel PR 1391")  # fmt: skip
fault("linear_cross_entropy", "first_token_s_gradient",
      linear_cross_entropy(weigh=lambda dy: dy[:1].expand_as(dy)),
      "neighbor exchanged missing", "grad_loss grad_input grad_weight grad_output loss",
      "Liger-Kernel PR 1298: one upstream gradient for all tokens")  # fmt: skip


# --- gated units, rope
fault("swiglu", "gradients_to_integers",
      swiglu(lambda name, x: x.round() if name in ("grad_gate", "grad_up") else x),
      "rounded codes", "gate up",
      "tilelang-ascend PR 936, review: CAST_RINT where bf16 is meant")  # fmt: skip
fault("geglu", "steps_bf16", geglu(lambda name, x: bf16(x) if name in ("inner", "below", "slope")
                                   else x),
      "rounded", "inner below slope",
      "FlagGems PR 5424: what follows x stays in bf16 in both passes")  # fmt: skip
fault("geglu", "always_tanh", geglu(always="tanh"), "option", "approximate",
      "mistral.rs PR 1867: GELU mapped to its tanh form")  # fmt: skip
fault("geglu", "slope_without_density", geglu(slope=lambda g, p, density: p + 0.5 * g * density),
      "missing factor", "slope below inner grad_gate gate density",
      "tt-metal issue 35971: the derivative's second term")  # fmt: skip
fault("swiglu", "sigmoid_by_bf16_tanh",
      swiglu(sigmoid=lambda g: 0.5 + 0.5 * bf16(torch.tanh(bf16(0.5 * g)))),
      "rounded", "sigmoid", "cudnn-frontend PR 645: tanh.approx.bf16x2")  # fmt: skip


def counted_in_integers(base: float, width: int) -> Tensor:
    return base ** -((torch.arange(0, width, 2) // 4 * 4).double() / width)


fault("rope", "integer_division", rope(frequency=counted_in_integers),
      "neighbor missing factor", "frequency angle base",
      "LeetCUDA issue 289: an integer quotient in the exponent")  # fmt: skip


# --- routers, optimizers
fault("router", "softmax_of_the_chosen_always", router(always=True), "option missing",
      "renormalize", "Megatron-LM issue 894: softmax after top-k")  # fmt: skip
fault("router", "probabilities_bf16_before_the_choice",
      router(at("probabilities", bf16), choose=lambda z, p: bf16(p)),
      "rounded", "chosen powers probabilities row_sum weights",
      "OpenMythos PR 41, review: cast back before gather and renormalization")  # fmt: skip
fault("adamw_step", "no_bias_correction", adamw_step(correct=lambda step, one, two: (1.0, 1.0)),
      "factor missing option", "mean size first second moved step update beta",
      "oneflow PR 5960")  # fmt: skip
fault("adamw_low", "to_nearest_at_every_step", adamw_low(lambda new, old: bf16(new)),
      "rounded random", "param update stored moved returned new",
      "tt-metal PR 33076: bf16 weights with neither random numbers nor a remainder")  # fmt: skip
fault("adamw_step", "decay_in_the_gradient", adamw_step(l2=True), "option missing",
      "weight_decay decayed first second", "FlagGems issue 4988, the other way round")  # fmt: skip


def four_bits_too_low(input: Tensor) -> Tensor:
    bits = torch.randint(0, 1 << 12, input.shape, dtype=torch.int32)
    return stochastic_bf16(input.float(), bits).to(torch.bfloat16)


fault("stochastic_round", "random_bits_misaligned", four_bits_too_low, "random rounded", "",
      "oneDNN PR 2903: the random number ends below the digits that are cut")  # fmt: skip


# --- quantizers, embedding, linear layers
def nearest_power(amax: Tensor, most: int) -> Tensor:
    """The scale so rounded that the block's largest number exceeds the format."""
    return torch.exp2(torch.log2(amax / (448.0 if most == 8 else 6.0)).round())


def early_saturation(y: Tensor) -> Tensor:
    return torch.where(y.abs() >= 256, torch.copysign(torch.tensor(448.0), y), e4m3(y))


fault("quantize", "scale_to_nearest", quantize(scale=nearest_power), "scale", "",
      "mlx PR 4353: E8M0 scales rounded to nearest saturate")  # fmt: skip
fault("quantize", "saturates_from_256", quantize(fp8=early_saturation), "codes limited", "",
      "sglang PR 40581: software E4M3 saturates at 256")  # fmt: skip


def last_block_unscaled(a: Tensor, b: Tensor) -> Tensor:
    whole = a.shape[1] // 32 * 32
    if whole == a.shape[1]:
        return a @ b
    return a[:, :whole] @ b[:whole] + (a[:, whole:] @ b[whole:]) * 0.5


fault("quantized_linear", "trailing_block_of_another_scale",
      quantized_linear(add=last_block_unscaled), "scale end factor", "",
      "FBGEMM issue 6159: the trailing block of K is never scaled")  # fmt: skip


def scales_out_of_order(dy: Tensor, x: Tensor) -> Tensor:
    scale = x.T.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return by_rows(dy.T) @ (e4m3(x.T / scale) * scale.roll(1, 0)).T


fault("quantized_linear", "scales_of_other_columns", quantized_linear(dw=scales_out_of_order),
      "scale neighbor factor", "",
      "torchao PR 4229: the activation's scales keep their orientation in dW")  # fmt: skip
fault("embedding", "added_in_bf16",
      embedding(total=lambda shape, index, dy: torch.stack(
          [added(bf16, 1)(dy[index == i]) if (index == i).any() else torch.zeros(shape[1])
           for i in range(shape[0])])),
      "summed", "weight rows", "tt-metal PR 53386: read-modify-write in bf16")  # fmt: skip
fault("embedding", "padding_index_unread", embedding(unread=True), "option", "padding_idx",
      "FlagGems PR 3683, review: padding_idx is not used in the backward pass")  # fmt: skip

FAULTS += second_grid.FAULTS


# --- sound kernels, written otherwise
def pairwise(x: Tensor) -> Tensor:
    """Sums of two halves each, in fp32."""
    return x.sum(0) if len(x) < 4 else pairwise(x[: len(x) // 2]) + pairwise(x[len(x) // 2 :])


def by_blocks_online(terms: Tensor, m: Tensor) -> Tensor:
    return torch.stack([part.sum(-1) for part in terms.split(64, -1)]).sum(0)[:, None]


def of_bits(input: Tensor) -> Tensor:
    return stochastic_bf16(input.float()).to(torch.bfloat16)


sound("rms_norm", "by_hand", rms_norm())
sound("rms_norm", "pairwise", rms_norm(total=pairwise))
sound("layer_norm", "by_hand", layer_norm(total=pairwise))
sound("softmax", "by_blocks", softmax(row_sum=by_blocks_online))
sound("cross_entropy", "by_hand", cross_entropy())
sound("linear_cross_entropy", "chunks_of_8", linear_cross_entropy())
sound("swiglu", "by_hand", swiglu())
sound("geglu", "stable_tail", geglu())
sound("rope", "frequencies_fp64", rope())
sound("router", "by_hand", router())
sound("embedding", "by_index_add", embedding())
sound("sum", "pairwise", sum_rows(total=pairwise))
sound("quantized_linear", "by_rows", quantized_linear())
sound("quantize", "by_hand", quantize())
