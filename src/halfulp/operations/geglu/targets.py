"""Kernels of GeGLU that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def eager(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """As GemmaMLP of transformers."""
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def fused(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """In fp32, rounded once."""
    found = torch.nn.functional.gelu(gate.float(), approximate=approximate) * up.float()
    return found.to(gate.dtype)


TARGETS = (
    BuiltIn("torch", "torch.nn.functional.gelu(gate) * up", eager),
    BuiltIn("fused", "the same in fp32, rounded once", fused),
)
