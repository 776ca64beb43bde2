"""RMSNorm of rows, y = x / √(mean x² + eps) · w, as torch.nn.functional.rms_norm."""

from __future__ import annotations

from functools import partial
from typing import Any

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors
from halfulp.operations.seam import over_root, over_sqrt, times_rsqrt

SIGNATURE = "rms_norm(input, normalized_shape, weight, eps)"
OPERANDS = (Operand("input", "T D"), Operand("weight", "D"))
RESULTS = (Output("output", "T D"),)
SIZES = (Sizes.given(T=24, D=256), Sizes.given(T=40, D=1024), Sizes.given(T=33, D=250))
OPTIONS = {"eps": 1e-6}


def define(step: Seam, x: Tensors, options: Options, over: Any = over_root) -> Tensors:
    """T rows of D features."""
    rows = x["input"]
    mean_square = step("mean_square", step("squares", rows.square()).mean(-1, keepdim=True))
    scaled = over(step, "inverse_rms", rows, mean_square, options["eps"])
    normalized = step("normalized", scaled)
    weights = step("weights", x["weight"].expand_as(rows))
    return {"output": normalized * weights}


EAGER = (partial(define, over=times_rsqrt), partial(define, over=over_sqrt))


def arguments(x: Tensors, options: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As torch.nn.functional.rms_norm is called."""
    return (x["input"], (x["input"].shape[-1],), x["weight"]), {"eps": options["eps"]}
