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


def define(
    step: Seam, x: Tensors, options: Options, over: Any = over_root, product: bool = False
) -> Tensors:
    """T rows of D features, whose squares may be a `product`, which has two parts of a gradient."""
    rows = x["input"]
    squares = step("squares", rows * rows if product else rows.square())
    mean_square = step("mean_square", squares.mean(-1, keepdim=True))
    scaled = over(step, "inverse_rms", rows, mean_square, options["eps"])
    normalized = step("normalized", scaled)
    weights = step("weights", x["weight"].expand_as(rows))
    return {"output": normalized * weights}


def _over_norm(step: Seam, x: Tensors, options: Options) -> Tensors:
    """x / (‖x‖ / √D + eps) · w."""
    rows = x["input"]
    size = step("_size", rows.norm(2, -1, keepdim=True)) * rows.shape[-1] ** -0.5
    return {"output": rows / (size + options["eps"]) * x["weight"]}


EAGER = tuple(
    partial(define, over=over, product=product)
    for product in (False, True)
    for over in (times_rsqrt, over_sqrt)
)
RELATED = {"eps is added to the root mean square, not under its root": ("option", _over_norm)}


def arguments(x: Tensors, options: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As torch.nn.functional.rms_norm is called."""
    return (x["input"], (x["input"].shape[-1],), x["weight"]), {"eps": options["eps"]}
