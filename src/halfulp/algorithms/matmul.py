"""Matrix products with a stated accumulation: which format the running sum is rounded to, and in which order k runs."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.formats import FP32, FP64, round_to
from halfulp.recipes import Matmul, Step


def product(left: Tensor, right: Tensor, step: Step) -> Tensor:
    """`left [..., M, K] @ right [..., K, N]` as the recipe of `step` sums products."""
    spec = step.recipe.matmul
    if spec.order == "native" and (spec.accumulate == FP32) == (left.dtype == torch.float32):
        return left @ right
    return matmul(left, right, spec, seed=step.next_seed("matmul"))


def matmul(left: Tensor, right: Tensor, spec: Matmul, *, seed: int = 0) -> Tensor:
    """`left [..., M, K] @ right [..., K, N]` summed as `spec` says; returns left's dtype (float32 or float64).

    Operands are taken as they are: round them first. In the emulated orders products and their addition to the running
    sum are done in float64 and then rounded. In sequential order that is free of double rounding where operands have at
    most 13 significant bits (bf16, fp16, fp8); with float32 operands it is met once in about 2²⁹ additions. `seed` is
    that of a stochastic accumulate format.

    Raises:
        ValueError: native order, float64 operands and fp32 accumulation, which no library gemm offers.
    """
    if spec.order == "native":
        if spec.accumulate == FP64:
            return (left.double() @ right.double()).to(left.dtype)
        if left.dtype != torch.float32:
            raise ValueError(f"left of dtype {left.dtype}: accepted is float32 where a native gemm accumulates in fp32")
        return left @ right
    a, b = left.double(), right.double()
    width = 1 if spec.order == "sequential" else spec.block
    total = a.new_zeros(()).expand((a[..., :0] @ b[..., :0, :]).shape)
    for i, k in enumerate(range(0, a.shape[-1], width)):
        exact = total + a[..., k : k + width] @ b[..., k : k + width, :]
        total = round_to(exact, spec.accumulate, seed=seed + i)
    return total.to(left.dtype)
