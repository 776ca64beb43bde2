"""Kernels of cross-entropy that every machine has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def upcast(
    input: Tensor, target: Tensor, *, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    """As transformers computes its losses: the logits in fp32."""
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
    options["ignore_index"] = ignore_index
    return torch.nn.functional.cross_entropy(input.float(), target, **options)


TARGETS = (
    BuiltIn("torch", "torch.nn.functional.cross_entropy", torch.nn.functional.cross_entropy),
    BuiltIn("upcast", "the same of the logits in fp32, as transformers calls it", upcast),
)
