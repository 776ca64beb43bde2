"""An embedding, rows of a table by index, as torch.nn.functional.embedding: its gradient sums what
reaches equal indices.
"""

from __future__ import annotations

from typing import Any

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "embedding(input, weight, padding_idx)"
OPERANDS = (
    Operand("input", "T", dtype="int64", differentiable=False),
    Operand("weight", "V D"),
)
RESULTS = (Output("output", "T D"),)
SIZES = (
    Sizes.given(T=64, V=16, D=32),
    Sizes.given(T=512, V=32, D=64),
    Sizes.given(T=65, V=17, D=33),
)
OPTIONS: dict[str, Any] = {"padding_idx": None}


def define(step: Seam, x: Tensors, options: Options) -> Tensors:
    """T tokens of a vocabulary of V, D features."""
    index, table = x["input"], x["weight"]
    if options["padding_idx"] is not None:
        padded = index.new_tensor(range(len(table)))[:, None] == options["padding_idx"]
        table = table.detach() * padded + table * ~padded
    return {"output": step("rows", table[index])}
