"""Kernels of RMSNorm that every machine has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def llama(input: Tensor, _: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """As LlamaRMSNorm of transformers: normalized in fp32, rounded, then times the weight."""
    rows = input.float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return weight * rows.to(input.dtype)


def gemma(input: Tensor, _: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """As Gemma's RMSNorm, whose product with the weight is in fp32 too."""
    rows = input.float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * weight.float()).to(input.dtype)


TARGETS = (
    BuiltIn("torch", "torch.nn.functional.rms_norm", torch.nn.functional.rms_norm),
    BuiltIn("llama", "LlamaRMSNorm of transformers, written out", llama),
    BuiltIn("gemma", "Gemma's RMSNorm with the weight itself, written out", gemma),
)
