"""Kernels of linear layers that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def upcast(input: Tensor, weight: Tensor) -> Tensor:
    """The product in fp32, rounded once."""
    return torch.nn.functional.linear(input.float(), weight.float()).to(input.dtype)


TARGETS = (
    BuiltIn("torch", "torch.nn.functional.linear", torch.nn.functional.linear),
    BuiltIn("upcast", "the same in fp32, rounded once", upcast),
)
