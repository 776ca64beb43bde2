"""Losses of linear layers that every machine has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.operations.operation_data import BuiltIn


def eager(input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """As transformers computes its losses: a linear layer, then the logits in fp32."""
    return functional.cross_entropy(functional.linear(input, weight).float(), target, **options)


def upcast(input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """All of it in fp32."""
    logits = functional.linear(input.float(), weight.float())
    return functional.cross_entropy(logits, target, **options)


def torch_chunked(
    input: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int, reduction: str
) -> Tensor:
    """torch.nn.functional.linear_cross_entropy in chunks, where this PyTorch has it; with label
    smoothing it does not work in chunks.
    """
    if not hasattr(functional, "linear_cross_entropy"):
        raise NotImplementedError("this PyTorch has no torch.nn.functional.linear_cross_entropy")
    chunks = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(
        input, weight, target, options=chunks, ignore_index=ignore_index, reduction=reduction
    )


TARGETS = (
    BuiltIn("eager", "logits of the operands' dtype, their loss in fp32", eager),
    BuiltIn("upcast", "all of it in fp32", upcast),
    BuiltIn("torch_chunked", "torch.nn.functional.linear_cross_entropy in chunks", torch_chunked),
)
