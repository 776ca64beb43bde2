"""PyTorch's fused loss with a policy asked for by name.

`halfulp audit --op linear_cross_entropy benchmarks/findings/pytorch_options.py:accurate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

AUDITED = {"accurate": "linear_cross_entropy", "accurate_fp32": "linear_cross_entropy"}


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
