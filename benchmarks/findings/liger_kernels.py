"""Liger-Kernel's Triton kernels, run on a CPU by Triton's interpreter.

Needs the packages triton and liger-kernel. The interpreter computes in NumPy: what it rounds is
what the kernel's source says, but its sums and exponentials are not a GPU's to the last bit. It
hands over floats as Python's; here they become float32 scalars, as compiled kernels have them. It
has no libdevice either: rsqrt and tanh are NumPy's here.
`halfulp audit --op rms_norm benchmarks/findings/liger_kernels.py:rms_norm`.
"""

from __future__ import annotations

import os
from typing import Literal

os.environ["TRITON_INTERPRET"] = "1"  # read where Liger's kernels are decorated, below

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import geglu as geglu_module
from liger_kernel.ops import layer_norm as layer_norm_module
from liger_kernel.ops import rms_norm as rms_norm_module
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor
from triton.runtime import interpreter

_converted = interpreter._implicit_cvt


def _scalar(given):
    if isinstance(given, float):
        handle = interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _converted(given)


def _unary(function):
    def call(x):
        return tl.tensor(interpreter.interpreter_builder.unary_op(x.handle, function), x.type)

    return call


interpreter._implicit_cvt = _scalar
for module in (geglu_module, layer_norm_module, rms_norm_module):
    for name, function in {"rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh}.items():
        if hasattr(module, name):
            setattr(module, name, _unary(function))

AUDITED = {
    "rms_norm": "rms_norm",
    "rms_norm_gemma": "rms_norm",
    "rms_norm_none": "rms_norm",
    "layer_norm": "layer_norm",
    "rope": "rope",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "softmax": "softmax",
    "cross_entropy": "cross_entropy",
    "fused_linear_cross_entropy": "linear_cross_entropy",
}


def rms_norm(input: Tensor, _: object, weight: Tensor, eps: float) -> Tensor:
    """LigerRMSNorm as of Llama; dX in a tensor of its own."""
    return LigerRMSNormFunction.apply(input, weight, eps, 0.0, "llama", False)


def rms_norm_gemma(input: Tensor, _: object, weight: Tensor, eps: float) -> Tensor:
    """LigerRMSNorm as of Gemma, all in fp32, with the weight itself."""
    return LigerRMSNormFunction.apply(input, weight, eps, 0.0, "gemma", False)


def rms_norm_none(input: Tensor, _: object, weight: Tensor, eps: float) -> Tensor:
    """LigerRMSNorm that casts nothing up."""
    return LigerRMSNormFunction.apply(input, weight, eps, 0.0, "none", False)


def layer_norm(input: Tensor, _: object, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LigerLayerNorm."""
    return LigerLayerNormFunction.apply(input, weight, bias, eps)


def rope(input: Tensor, positions: Tensor, *, base: float) -> Tensor:
    """Liger's rope with fp32 angles, cos and sin in the operands' format, as transformers calls it;
    for keys as for queries.
    """
    width = input.shape[-1]
    frequency = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))
    angle = positions[:, None].float() * frequency
    angle = torch.cat([angle, angle], -1)[None]
    cos, sin = angle.cos().to(input.dtype), angle.sin().to(input.dtype)
    rows = input.transpose(0, 1)[None]  # [1, H, T, D]
    query, _ = LigerRopeFunction.apply(rows.clone(), rows.detach().clone(), cos, sin)
    return query[0].transpose(0, 1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """LigerSwiGLUMLP's product; it writes gradients over its inputs, so it is given copies."""
    return LigerSiLUMulFunction.apply(gate.clone(), up.clone())


def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["tanh"]) -> Tensor:  # noqa: ARG001
    """LigerGEGLUMLP's product, which knows tanh alone."""
    return LigerGELUMulFunction.apply(gate.clone(), up.clone())


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
