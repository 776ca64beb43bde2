"""The named recipes: published kernels and code, the floor of a format, and halfulp's own."""

from __future__ import annotations

from typing import Any

from halfulp import formats
from halfulp.formats import Format
from halfulp.recipes.recipe import STEPS, Algorithm, Matmul, Recipe, Shift


def uniform(fmt: Format, algorithm: Algorithm = "flash2", **changes: Any) -> Recipe:
    """Every intermediate rounded to `fmt`, products summed in fp32: plain code on tensors of that
    dtype.
    """
    compute = "float64" if fmt.mantissa_bits > formats.FP32.mantissa_bits else "float32"
    accumulate = formats.FP64 if compute == "float64" else formats.FP32
    every: dict[str, Any] = dict.fromkeys(STEPS, fmt)
    structure: dict[str, Any] = {
        "algorithm": algorithm,
        "compute": compute,
        "matmul": Matmul(accumulate),
    }
    if algorithm == "standard":  # autograd keeps P itself
        structure |= {
            "backward_weights": "maximum",
            "delta_from": "probabilities",
            "gradient_scale_at": "scores",
        }
    named = {"name": f"{fmt.name.upper()}_UNIFORM_{algorithm.upper()}"}
    return Recipe(**(named | every | structure | changes))


def flash2(fmt: Format, **changes: Any) -> Recipe:
    """The stock kernel's recipe in `fmt`: operands and results rounded, all else fp32 (Dao 2023,
    Algorithms 1, 2).
    """
    rounded = (*_READ, *_WRITTEN, "weights_operand", "probabilities_operand", "grad_scores")
    every: dict[str, Any] = dict.fromkeys(rounded, fmt)
    return Recipe(**({"name": f"{fmt.name.upper()}_FLASH2"} | every | changes))


def floor(fmt: Format) -> Recipe:
    """The least that a kernel with `fmt` operands and results must round; in fp64, with δ and l
    free of error.
    """
    whole: dict[str, Any] = {"matmul": Matmul(formats.FP64), "block_query": None, "block_key": None}
    consistent: dict[str, Any] = {
        "row_sum_from": "rounded",
        "lse_from": "exact",
        "delta_from": "probabilities",
    }
    return flash2(fmt, name=f"{fmt.name.upper()}_FLOOR", compute="float64", **whole, **consistent)


_READ = ("query", "key", "value", "grad_out")
_WRITTEN = ("out", "grad_query", "grad_key", "grad_value")
_INTEGER_SHIFT: dict[str, Any] = {
    "base": "2",
    "shift": Shift("integer"),
    "row_sum_from": "rounded",
    "backward_weights": "rounded",
}

FP64 = Recipe("FP64", compute="float64", matmul=Matmul(formats.FP64))
FP32 = Recipe("FP32")
# What autocast makes of softmax(q @ k.mT * scale) @ v. On a GPU the softmax is in fp32 and
# everything else bf16; on a CPU the softmax gives bf16, so that autograd keeps P rounded.
BF16_STANDARD = flash2(
    formats.BF16,
    name="BF16_STANDARD",
    algorithm="standard",
    block_query=None,
    block_key=None,
    product=formats.BF16,
    scores=formats.BF16,
    backward_weights="maximum",
    delta_from="probabilities",
    grad_probabilities=formats.BF16,
    gradient_scale_at="scores",
    scaled_grad_scores=formats.BF16,
)
BF16_STANDARD_CPU = BF16_STANDARD.with_(name="BF16_STANDARD_CPU", probabilities=formats.BF16)
# As attention is often written by hand: softmax(q.float() @ k.float().mT * scale).to(q.dtype) @ v.
BF16_STANDARD_FP32 = BF16_STANDARD.with_(
    name="BF16_STANDARD_FP32",
    product=formats.FP32,
    scores=formats.FP32,
    grad_scores=formats.FP32,
    scaled_grad_scores=formats.FP32,
)
BF16_FLASH1 = flash2(
    formats.BF16, name="BF16_FLASH1", algorithm="flash1", backward_weights="maximum"
)
BF16_FLASH2 = flash2(formats.BF16)
# The official code of Qiu & Yao: every tensor bf16. Its stabilized variant also counts tiles above
# the diagonal, which are skipped here, as rows with a repeated negative maximum.
BF16_AUTHORS = uniform(
    formats.BF16, name="BF16_AUTHORS", row_sum_floor=1e-10, gradient_scale_at="probabilities"
)
BF16_AUTHORS_STABILIZED = BF16_AUTHORS.with_(
    name="BF16_AUTHORS_STABILIZED", shift=Shift("stabilized", beta=2.0, tie_tolerance=1e-3)
)
BF16_PAPER_STABILIZED = BF16_AUTHORS.with_(
    name="BF16_PAPER_STABILIZED", shift=Shift("stabilized", beta=7.0), row_sum_floor=0.0
)
# lse and dV come from the weights before rounding: bf16(bf16(w) / l) would round twice, alike in
# all of a diffuse row. What dS's weights are divided by is balanced against the rounding of a row's
# largest weight.
BF16_HALFULP = flash2(
    formats.BF16,
    name="BF16_HALFULP",
    delta_from="residual",
    residual_bits=8,
    lse_from="exact",
    grad_value_from="lse",
    divisor_from="balanced",
    **_INTEGER_SHIFT,
)
FP16_FLASH2 = flash2(formats.FP16)
# The forward pass in fp8 as FlashAttention-3 has it, plus a pre-scale of the weights; the backward
# pass in bf16.
FP8_FLASH = flash2(
    formats.BF16,
    name="FP8_FLASH",
    **dict.fromkeys(("query", "key", "value", "weights_operand"), formats.OCP_E4M3),
    input_scaling="tensor",
    weights_scale=256.0,
)
TORCH_CPU_FLASH = flash2(  # query blocks of 256, or of 64 below 768 and 32 below 192 queries
    formats.BF16,
    name="TORCH_CPU_FLASH",
    algorithm="torch_cpu",
    block_query=256,
    block_key=512,
    grad_accumulator=formats.BF16,
)
BF16_FLOOR = floor(formats.BF16)
FP16_FLOOR = floor(formats.FP16)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in list(globals().values()) if isinstance(recipe, Recipe)
}
