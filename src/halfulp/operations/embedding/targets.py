"""Kernels of embeddings that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def upcast(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Of the table in fp32, so that the gradient is summed there."""
    return torch.nn.functional.embedding(input, weight.float(), padding_idx).to(weight.dtype)


TARGETS = (
    BuiltIn("torch", "torch.nn.functional.embedding", torch.nn.functional.embedding),
    BuiltIn("upcast", "the same of the table in fp32", upcast),
)
