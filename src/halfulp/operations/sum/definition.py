"""A sum over the first dimension, as torch.sum: of a gradient over tokens, of gradients over
micro-batches.
"""

from __future__ import annotations

from typing import Any

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "sum(input, dim)"
OPERANDS = (Operand("input", "T D"),)
RESULTS = (Output("output", "D", dtype="float"),)
SIZES = (Sizes.given(T=64, D=64), Sizes.given(T=512, D=64), Sizes.given(T=65, D=33))


def define(step: Seam, x: Tensors, _: Options) -> Tensors:
    """T rows of D features, summed over rows."""
    return {"output": step("terms", x["input"]).sum(0)}


def arguments(x: Tensors, _: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As torch.sum is called."""
    return (x["input"], 0), {}
