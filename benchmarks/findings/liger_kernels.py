"""Liger-Kernel's Triton kernels, run on a CPU by Triton's interpreter.

Needs the packages triton and liger-kernel. The interpreter computes in NumPy: what it rounds is
what the kernel's source says, but its sums and exponentials are not a GPU's to the last bit.
Liger's norms and gated units do not run in it (a float that a kernel calls `.to` of).
`halfulp audit --op rms_norm benchmarks/findings/liger_kernels.py:rms_norm`.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read where Liger's kernels are decorated, below

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from torch import Tensor

AUDITED = {
    "softmax": "softmax",
    "cross_entropy": "cross_entropy",
    "fused_linear_cross_entropy": "linear_cross_entropy",
}


def softmax(input: Tensor, _: int = -1) -> Tensor:
    """LigerSoftmax, over the last dimension."""
    return LigerSoftmaxFunction.apply(input)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
) -> Tensor:
    """LigerCrossEntropy; it writes the gradient over its input, so it is given a copy."""
    found = LigerCrossEntropyFunction.apply(
        input.clone(), target, None, ignore_index, lse_square_scale, label_smoothing, reduction
    )
    return found[0]


def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """LigerFusedLinearCrossEntropy, dW summed in the weight's dtype, as it is by default."""
    found = LigerFusedLinearCrossEntropyFunction.apply(
        input, weight, target, None, None, ignore_index, 0.0, label_smoothing, reduction
    )
    return found[0]
