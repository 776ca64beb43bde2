"""Optimizers that every machine has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn

Moved = tuple[Tensor, Tensor, Tensor]


def by_torch(
    param: Tensor,
    grads: Iterable[Tensor],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Moved:
    """Steps of torch.optim.AdamW in the dtype of what it is given, its state put where it was."""
    stepped = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW(
        [stepped], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
    )
    state = {"step": torch.tensor(float(step - 1)), "exp_avg": exp_avg.clone()}
    optimizer.state[stepped] = state | {"exp_avg_sq": exp_avg_sq.clone()}
    for grad in grads:
        stepped.grad = grad.to(param.dtype)
        optimizer.step()
    moved = optimizer.state[stepped]
    return stepped.detach(), moved["exp_avg"], moved["exp_avg_sq"]


def adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Moved:
    """torch.optim.AdamW."""
    return by_torch(param, [grad], exp_avg, exp_avg_sq, **options)


def by_hand(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Moved:
    """In fp32, decayed last."""
    wide = grad.float()
    first = beta1 * exp_avg + (1 - beta1) * wide
    second = beta2 * exp_avg_sq + (1 - beta2) * wide * wide
    size = second.sqrt() / (1 - beta2**step) ** 0.5 + eps
    move = first / (1 - beta1**step) / size + weight_decay * param
    return param - lr * move, first, second


TARGETS = (
    BuiltIn("torch", "torch.optim.AdamW", adamw),
    BuiltIn("by_hand", "written out in fp32, decayed last", by_hand),
)
