"""LayerNorm of rows, y = (x − mean) / √(var + eps) · w + b, as torch.nn.functional.layer_norm."""

from __future__ import annotations

from typing import Any

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors
from halfulp.operations.seam import inverse_root

SIGNATURE = "layer_norm(input, normalized_shape, weight, bias, eps)"
OPERANDS = (Operand("input", "T D"), Operand("weight", "D"), Operand("bias", "D"))
RESULTS = (Output("output", "T D"),)
SIZES = (Sizes.given(T=24, D=256), Sizes.given(T=40, D=1024), Sizes.given(T=33, D=250))
OPTIONS = {"eps": 1e-5}


def define(step: Seam, x: Tensors, options: Options) -> Tensors:
    """T rows of D features."""
    rows = x["input"]
    centered = step("centered", rows - step("mean", rows.mean(-1, keepdim=True)))
    variance = step("variance", step("squares", centered * centered).mean(-1, keepdim=True))
    inverse = inverse_root(step, "inverse_deviation", variance + options["eps"])
    normalized = step("normalized", centered * inverse)
    weighted = step("weighted", normalized * step("weights", x["weight"].expand_as(rows)))
    return {"output": weighted + step("biases", x["bias"].expand_as(rows))}


def arguments(x: Tensors, options: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As torch.nn.functional.layer_norm is called."""
    shape = (x["input"].shape[-1],)
    return (x["input"], shape, x["weight"], x["bias"]), {"eps": options["eps"]}
