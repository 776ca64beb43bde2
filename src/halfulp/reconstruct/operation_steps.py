"""The steps of a definition on some calls: their names in words, shapes and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfulp.operations import PLACE, OperationCalls, Tensors, changed, defined, first_calls

OPERAND, RESULT = "operand_", "result_"  # before the names of what is read and written


def said(name: str) -> str:
    """A step, its gradient or a result in words."""
    if name.startswith((OPERAND, RESULT)):
        return name.removeprefix(OPERAND).removeprefix(RESULT)
    back = "the gradient of " if name.startswith("grad_") else ""
    return back + name.removeprefix("grad_").lstrip(PLACE)


def shapes_of_steps(calls: OperationCalls, define: Any = None) -> dict[str, torch.Size]:
    """The steps of the definition on these calls, forward and backward, and their shapes."""
    shapes: dict[str, torch.Size] = {}

    def seen(name: str, exact: Tensor) -> Tensor:
        shapes.setdefault(name, exact.shape)  # a step of both passes may be transposed in the other
        return exact

    changed(first_calls(calls, 1), seen, define)
    return {n: shape for n, shape in shapes.items() if not n.startswith(RESULT)}


def values_of_steps(calls: OperationCalls) -> Tensors:
    """What the steps of the forward pass are on the first of these calls."""
    values: Tensors = {}

    def seen(name: str, exact: Tensor) -> Tensor:
        if not name.startswith("grad_"):
            values[name] = exact.detach().float()
        return exact

    defined(first_calls(replace(calls, grads={}), 1), seen)
    return values
