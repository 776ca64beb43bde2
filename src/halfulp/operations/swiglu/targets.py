"""Kernels of SwiGLU that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def eager(gate: Tensor, up: Tensor) -> Tensor:
    """As LlamaMLP of transformers."""
    return torch.nn.functional.silu(gate) * up


def fused(gate: Tensor, up: Tensor) -> Tensor:
    """In fp32, rounded once."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


TARGETS = (
    BuiltIn("torch", "torch.nn.functional.silu(gate) * up", eager),
    BuiltIn("fused", "the same in fp32, rounded once", fused),
)
