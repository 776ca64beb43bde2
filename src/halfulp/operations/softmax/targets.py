"""Kernels of softmax that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def upcast(input: Tensor, dim: int) -> Tensor:
    """As transformers' attention: in fp32, then rounded."""
    return torch.nn.functional.softmax(input, dim, dtype=torch.float32).to(input.dtype)


TARGETS = (
    BuiltIn("torch", "torch.nn.functional.softmax", torch.nn.functional.softmax),
    BuiltIn("upcast", "torch.nn.functional.softmax in fp32, as transformers calls it", upcast),
)
