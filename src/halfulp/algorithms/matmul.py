"""Matrix products with a stated accumulation: which format the running sum is rounded to, and in
which order k runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.algorithms import arithmetic
from halfulp.formats import FP32, FP64, round_to
from halfulp.recipes import Matmul, Step


def product(left: Tensor, right: Tensor, step: Step) -> Tensor:
    """`left [..., M, K] @ right [..., K, N]` as the recipe of `step` sums products."""
    spec = step.recipe.matmul
    # a library's gemm sums in its operands' dtype; whatever else is asked for must be emulated
    if spec.order == "native" and (spec.accumulate == FP32) == (left.dtype == torch.float32):
        return _native(left, right)
    return matmul(left, right, spec, seed=step.next_seed("matmul"))


def matmul(left: Tensor, right: Tensor, spec: Matmul, *, seed: int = 0) -> Tensor:
    """`left [..., M, K] @ right [..., K, N]` summed as `spec` says; returns left's dtype (float32
    or float64).

    Operands are taken as they are: round them first. In native order float32 products on a CPU are
    the native library's, which has the bits of sequential order in FP32; without it, and elsewhere,
    they are torch's. In the emulated orders every addition to the running sum is rounded once:
    exactly computed in sequential order on float32 operands (a fused multiply-add), to float64
    first otherwise. `seed` is that of a stochastic accumulate format.

    Raises:
        ValueError: native order, float64 operands and fp32 accumulation, which no library gemm
            offers.
    """
    if spec.order == "native":
        if spec.accumulate == FP64:
            return (left.double() @ right.double()).to(left.dtype)
        if left.dtype != torch.float32:
            raise ValueError(
                f"left of dtype {left.dtype}: accepted is float32 where a native gemm accumulates"
                " in fp32"
            )
        return _native(left, right)
    sequential = spec.order == "sequential"
    if sequential and spec.accumulate == FP32 and arithmetic.compiled(left, right):
        return arithmetic.product(left, right)
    # a product of two fp32 numbers has 48 bits at most: in fp64 it is exact
    a, b = left.double(), right.double()
    width = 1 if sequential else spec.block
    # an fp64 sum rounded to nearest and then to the format is rounded twice; to odd first, the
    # second rounding is as of the exact sum (Boldo & Melquiond 2008)
    add = arithmetic.sum_to_odd if sequential and left.dtype == torch.float32 else torch.add
    total = a.new_zeros(()).expand((a[..., :0] @ b[..., :0, :]).shape)
    for i, k in enumerate(range(0, a.shape[-1], width)):
        exact = add(total, a[..., k : k + width] @ b[..., k : k + width, :])
        # a seed for every step, or the stochastic roundings of one element would all fall alike
        total = round_to(exact, spec.accumulate, seed=seed + i)
    return total.to(left.dtype)


def _native(left: Tensor, right: Tensor) -> Tensor:
    return arithmetic.product(left, right) if arithmetic.compiled(left, right) else left @ right
