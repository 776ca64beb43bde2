"""A linear layer, y = x Wᵀ, whose three products (y, dX and dW) take operands in a quantized format
and give 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "quantized_linear(input, weight, *, format)"
OPERANDS = (Operand("input", "T K"), Operand("weight", "N K"))
RESULTS = (Output("output", "T N"),)
SIZES = (
    Sizes.given(T=32, K=160, N=48),
    Sizes.given(T=64, K=512, N=160),
    Sizes.given(T=33, K=130, N=50),
)
OPTIONS: dict[str, Any] = {"format": "fp8_row"}

_SQUARE = 128
_Quantized = Callable[[Tensor, str], Tensor]


def define(step: Seam, x: Tensors, options: Options) -> Tensors:
    """The linear layer itself; each product's operands pass the seam along the dimension that it
    sums over, so that the exact value is the mathematical one and what quantizing must lose is the
    floor's error.

    `format`: "fp8_tensor", "fp8_row" (E4M3 with a float32 scale a tensor, or a row of what is
    summed), "fp8_block" (1 × 128, weights 128 × 128; DeepSeek-V3, arXiv 2412.19437), "mxfp8",
    "mxfp4" (OCP Microscaling Formats 1.0), "nvfp4" (blocks of 16 with E4M3 scales and a float32
    scale a tensor; arXiv 2509.25149).
    """
    quantized = partial(_quantized, step, options["format"])
    output: Tensor = _Products.apply(x["input"], x["weight"], quantized)  # type: ignore[no-untyped-call]
    return {"output": output}


def _quantized(step: Seam, format: str, x: Tensor, role: str) -> Tensor:
    """An operand in its format, blocks along the last dimension; `role` is "input", "weight" or
    "gradient".
    """
    name = f"{format}_{role}"
    if format == "fp8_tensor":
        return step(name, x.reshape(1, -1)).reshape(x.shape)
    if format == "fp8_block" and role == "weight":
        return _in_squares(partial(step, name), x)
    return step(name, x.contiguous())


def _in_squares(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A matrix changed square by square, each square a row of what is changed."""
    rows, columns = x.shape
    # with zeros, which leave a square's largest number and with it its scale as they are
    padded = functional.pad(x, (0, -columns % _SQUARE, 0, -rows % _SQUARE))
    high, wide = padded.shape[0] // _SQUARE, padded.shape[1] // _SQUARE
    squares = padded.view(high, _SQUARE, wide, _SQUARE).transpose(1, 2).reshape(high * wide, -1)
    back = change(squares).view(high, wide, _SQUARE, _SQUARE).transpose(1, 2)
    return back.reshape(padded.shape)[:rows, :columns]


class _Products(torch.autograd.Function):
    """Every operand is quantized where it is used, since the blocks of each product lie along
    another dimension.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, quantized: _Quantized) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.quantized = quantized
        return quantized(x, "input") @ quantized(w, "weight").mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), q, dy = ctx.saved_tensors, ctx.quantized, grads[0]
        grad_input = q(dy, "gradient") @ q(w.mT, "weight").mT
        return grad_input, q(dy.mT, "gradient") @ q(x.mT, "input").mT, None
