"""PyTorch's fused loss with a policy asked for by name, AdamW with fused=True, and log-sum-exp.

`halfulp audit --op linear_cross_entropy benchmarks/findings/pytorch_options.py:accurate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

AUDITED = {
    "accurate": "linear_cross_entropy",
    "accurate_fp32": "linear_cross_entropy",
    "fused_step": "adamw_step",
    "fused_low": "adamw_low",
    "logsumexp": "benchmarks/findings/logsumexp",
    "logsumexp_upcast": "benchmarks/findings/logsumexp",
}


def _loss(dtype: torch.dtype | None, *operands: Tensor, **options: object) -> Tensor:
    chosen = torch.nn.LinearCrossEntropyOptions(acc_policy="accurate", acc_dtype=dtype)
    return torch.nn.functional.linear_cross_entropy(*operands, options=chosen, **options)


def accurate(
    input: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int, reduction: str
) -> Tensor:
    """acc_policy="accurate", and acc_dtype left alone."""
    return _loss(None, input, weight, target, ignore_index=ignore_index, reduction=reduction)


def accurate_fp32(
    input: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int, reduction: str
) -> Tensor:
    """acc_policy="accurate" with acc_dtype=torch.float32."""
    chosen = torch.float32
    return _loss(chosen, input, weight, target, ignore_index=ignore_index, reduction=reduction)


def _fused(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, **rates: float) -> None:
    at, grad = torch.tensor(float(step)), grad.to(param.dtype)
    torch._fused_adamw_([param], [grad], [m], [v], [], [at], amsgrad=False, maximize=False, **rates)


def fused_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    **rates: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step; its moments are in the weights' dtype."""
    moved = [x.to(param.dtype, copy=True) for x in (param, exp_avg, exp_avg_sq)]
    _fused(moved[0], grad, *moved[1:], step, **rates)
    return moved[0], moved[1].to(exp_avg.dtype), moved[2].to(exp_avg_sq.dtype)


def fused_low(
    param: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    **rates: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Some steps on weights in 16 bits."""
    moved = [x.to(param.dtype, copy=True) for x in (param, exp_avg, exp_avg_sq)]
    for number, grad in enumerate(grads):
        _fused(moved[0], grad, *moved[1:], step + number, **rates)
    return moved[0], moved[1].to(exp_avg.dtype), moved[2].to(exp_avg_sq.dtype)


def logsumexp(input: Tensor, dim: int) -> Tensor:
    """torch.logsumexp."""
    return torch.logsumexp(input, dim)


def logsumexp_upcast(input: Tensor, dim: int) -> Tensor:
    """In fp32, what autograd keeps too, then rounded."""
    return torch.logsumexp(input.float(), dim).to(input.dtype)
