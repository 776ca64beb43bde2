"""Routers that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn


def mixtral(logits: Tensor, k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """As MixtralSparseMoeBlock: softmax in fp32, topk, renormalized."""
    weights, indices = torch.softmax(logits, -1, dtype=torch.float32).topk(k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), indices


def chosen_first(logits: Tensor, k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The choice first, of the logits; then the softmax of those or of all."""
    rows = logits.float()  # once: a second cast would round each part of the gradient
    best, indices = rows.topk(k, -1)
    if renormalize:
        return torch.softmax(best, -1), indices
    return (best - rows.logsumexp(-1, keepdim=True)).exp(), indices


TARGETS = (
    BuiltIn("mixtral", "softmax in fp32 and topk, as transformers' Mixtral", mixtral),
    BuiltIn("chosen_first", "topk of the logits, then their softmax", chosen_first),
)
