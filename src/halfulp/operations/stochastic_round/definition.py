"""Stochastic rounding of float32 to 16 bits: unbiased, each element with a number of its own."""

from __future__ import annotations

from typing import Any

import torch

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "stochastic_round(input)"
OPERANDS = (Operand("input", "T D", dtype="float32", differentiable=False),)
RESULTS = (
    Output("output", "T D", differentiable=False),
    # means of what came out: near those of what went in where elements round independently
    Output("row_mean", "T", dtype="float32", differentiable=False, rows=0),
    Output("column_mean", "D", dtype="float32", differentiable=False, rows=0),
)
SIZES = (Sizes.given(T=64, D=64), Sizes.given(T=128, D=256), Sizes.given(T=63, D=77))


def define(step: Seam, x: Tensors, _: Options) -> Tensors:
    """T rows of D numbers."""
    rounded = step("rounded", x["input"])
    return {"output": rounded, "row_mean": rounded.mean(1), "column_mean": rounded.mean(0)}


def read(returned: Any, *_: Any) -> Tensors:
    """What came out, and its means."""
    if not isinstance(returned, torch.Tensor) or returned.ndim != 2:
        raise ValueError(f"{type(returned).__name__}: expected a tensor of the input's shape")
    exact = returned.double()
    means = {"row_mean": exact.mean(1).float(), "column_mean": exact.mean(0).float()}
    return {"output": returned, **means}
