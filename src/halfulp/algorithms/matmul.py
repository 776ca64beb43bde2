"""Matrix products with a stated accumulation: which format the running sum is rounded to, and in which order k runs."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.formats import round_to
from halfulp.recipes import Matmul


def matmul(left: Tensor, right: Tensor, spec: Matmul) -> Tensor:
    """`left [..., M, K] @ right [..., K, N]` summed as `spec` says; returns left's dtype (float32 or float64).

    Operands are taken as they are: round them first. Products of two values of at most 26 significant bits are exact in the emulated orders.
    """
    if spec.order == "native":
        if spec.accumulate.torch_dtype == left.dtype or left.dtype == torch.float64:
            return left @ right
        return (left.double() @ right.double()).to(left.dtype)
    a, b = left.double(), right.double()
    width = 1 if spec.order == "sequential" else spec.block
    total = torch.zeros(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1]), dtype=a.dtype, device=a.device)
    for k in range(0, a.shape[-1], width):
        total = round_to(total + a[..., k : k + width] @ b[..., k : k + width, :], spec.accumulate)
    return total.to(left.dtype)
