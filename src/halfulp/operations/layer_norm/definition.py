"""LayerNorm of rows, y = (x − mean) / √(var + eps) · w + b, as torch.nn.functional.layer_norm."""

from __future__ import annotations

from functools import partial
from typing import Any

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors
from halfulp.operations.seam import over_root, over_sqrt, times_rsqrt

SIGNATURE = "layer_norm(input, normalized_shape, weight, bias, eps)"
OPERANDS = (Operand("input", "T D"), Operand("weight", "D"), Operand("bias", "D"))
RESULTS = (Output("output", "T D"),)
SIZES = (Sizes.given(T=24, D=256), Sizes.given(T=40, D=1024), Sizes.given(T=33, D=250))
OPTIONS = {"eps": 1e-5}


def define(
    step: Seam,
    x: Tensors,
    options: Options,
    over: Any = over_root,
    spread: str = "squares",
    weighted: bool = False,
) -> Tensors:
    """T rows of D features; `weighted` before they are divided."""
    rows = x["input"]
    # autograd adds the parts of a gradient in the order of their making, reversed
    first = rows.var(-1, keepdim=True, unbiased=False) if spread == "var first" else None
    mean = step("mean", rows.mean(-1, keepdim=True))
    centered = step("centered", rows - step("_means", mean.expand_as(rows)))
    if spread == "squares":
        # of the centered row: E[x²] − mean² cancels where the mean is large
        variance = step("variance", step("squares", centered.square()).mean(-1, keepdim=True))
    else:
        last = rows.var(-1, keepdim=True, unbiased=False) if first is None else first
        variance = step("variance", last)
    kept = step("_kept_centered", centered)
    weights = step("weights", x["weight"].expand_as(rows))
    if weighted:
        kept = step("weighted", weights * kept)
    scaled = over(step, "inverse_deviation", kept, variance, options["eps"])
    normalized, biases = step("normalized", scaled), step("biases", x["bias"].expand_as(rows))
    if weighted:
        return {"output": normalized + biases}
    return {"output": step("weighted", normalized * weights) + biases}


EAGER = tuple(
    partial(define, over=over, spread=spread, weighted=weighted)
    for spread in ("squares", "var", "var first")
    for over in (times_rsqrt, over_sqrt)
    for weighted in (False, True)
)


def _over_std(step: Seam, x: Tensors, options: Options) -> Tensors:
    """(x − mean) / (std + eps), std being that of a sample, as torch.Tensor.std has it."""
    rows = x["input"]
    centered = step("centered", rows - step("mean", rows.mean(-1, keepdim=True)))
    deviation = step("_deviation", rows.std(-1, keepdim=True) + options["eps"])
    return {"output": x["weight"] * centered / deviation + x["bias"]}


RELATED = {
    "the deviation is a sample's, of D − 1, and eps is added to it, not under its root": (
        "factor",
        _over_std,
    )
}


def arguments(x: Tensors, options: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As torch.nn.functional.layer_norm is called."""
    shape = (x["input"].shape[-1],)
    return (x["input"], shape, x["weight"], x["bias"]), {"eps": options["eps"]}
