"""Optimizers of 16-bit weights that every machine has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfulp.formats import round_to
from halfulp.operations.adamw_step.targets import by_hand, by_torch
from halfulp.operations.operation_data import BuiltIn

Moved = tuple[Tensor, Tensor, Tensor]


def torch_plain(
    param: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Moved:
    """torch.optim.AdamW on the weights as they are, and its moments in their dtype."""
    return _by_torch(param, grads, exp_avg, exp_avg_sq, dtype=param.dtype, **options)


def master(
    param: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Moved:
    """torch.optim.AdamW on a float32 copy."""
    return _by_torch(param, grads, exp_avg, exp_avg_sq, dtype=torch.float32, **options)


def stochastic(
    param: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int, **options: Any
) -> Moved:
    """Each step in fp32, rounded stochastically by numbers of torch's generator."""
    name = str(param.dtype).removeprefix("torch.")
    for number, grad in enumerate(grads, step):
        moved, exp_avg, exp_avg_sq = by_hand(
            param.float(), grad, exp_avg, exp_avg_sq, step=number, **options
        )
        if name != "float32":
            seed = int(torch.randint(2**31, ()))
            fmt = {"bfloat16": "bf16", "float16": "fp16"}[name]
            moved = round_to(moved, fmt, rounding="stochastic", seed=seed)
        param = moved.to(param.dtype)
    return param, exp_avg, exp_avg_sq


def _by_torch(
    param: Tensor, grads: Tensor, *moments: Tensor, dtype: torch.dtype, **options: Any
) -> Moved:
    found = by_torch(param.to(dtype), grads, *(x.to(dtype) for x in moments), **options)
    return found[0].to(param.dtype), found[1].float(), found[2].float()


TARGETS = (
    BuiltIn("torch", "torch.optim.AdamW on 16-bit weights", torch_plain),
    BuiltIn("master", "torch.optim.AdamW on a float32 copy", master),
    BuiltIn("stochastic", "in fp32, rounded stochastically after every step", stochastic),
)
