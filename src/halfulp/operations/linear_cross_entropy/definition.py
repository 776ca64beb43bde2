"""Cross-entropy of x Wᵀ without the logits in memory, as torch.nn.functional.linear_cross_entropy
and Liger-Kernel's fused loss.
"""

from __future__ import annotations

from typing import Any

from halfulp.operations.cross_entropy import definition as of_logits
from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = (
    "linear_cross_entropy(input, weight, target, *, ignore_index, reduction, label_smoothing)"
)
OPERANDS = (
    Operand("input", "T K"),
    Operand("weight", "V K"),
    Operand("target", "T", dtype="int64", differentiable=False),
)
RESULTS = (Output("loss", "T", dtype="float", rows=1),)
SIZES = (
    Sizes.given(T=24, K=64, V=256),
    Sizes.given(T=48, K=128, V=2048),
    Sizes.given(T=33, K=66, V=250),
)
OPTIONS: dict[str, Any] = {"ignore_index": -100, "reduction": "none", "label_smoothing": 0.0}


def define(step: Seam, x: Tensors, options: Options) -> Tensors:
    """T rows of K features, a vocabulary of V."""
    logits = step("logits", x["input"] @ x["weight"].mT)
    operands = {"input": logits, "target": x["target"]}
    return of_logits.define(step, operands, {**options, "lse_square_scale": 0.0})


read = of_logits.read
