"""Linear layers of quantized operands that every machine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from halfulp.operations.operation_data import BuiltIn

_Scaled = Literal["fp8_tensor", "fp8_row"]


class _Linear(torch.autograd.Function):
    """The three products, each `multiply(a, b, format, weights)` of a bᵀ; `weights` says which of
    the two is a weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, multiply: Callable[..., Tensor], format: str
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.multiply, ctx.format = multiply, format
        return multiply(x, w, format, True).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, w), dy = ctx.saved_tensors, grads[0]
        grad_input = ctx.multiply(dy, w.mT, ctx.format, True).to(x.dtype)
        return grad_input, ctx.multiply(dy.mT, x.mT, ctx.format, False).to(w.dtype), None, None


def dequantized(input: Tensor, weight: Tensor, *, format: str) -> Tensor:
    """Codes by torch's casts, brought back to fp32 and multiplied there."""
    out: Tensor = _Linear.apply(input, weight, _dequantized, format)  # type: ignore[no-untyped-call]
    return out


def scaled_mm(input: Tensor, weight: Tensor, *, format: _Scaled) -> Tensor:
    """torch._scaled_mm of codes and scales, which pads nothing: sizes that it does not take are
    padded by zeros here.
    """
    out: Tensor = _Linear.apply(input, weight, _scaled_mm, format)  # type: ignore[no-untyped-call]
    return out


def _dequantized(a: Tensor, b: Tensor, format: str, weights: bool) -> Tensor:
    first, second = _back(a, format, False), _back(b, format, weights)
    return first @ second.mT


def _back(x: Tensor, format: str, weight: bool) -> Tensor:
    """What the codes of a matrix stand for."""
    x = x.float()
    if format in ("fp8_tensor", "fp8_row"):
        return _scaled_back(x, format)
    if format == "fp8_block" and weight:
        strips = [torch.split(strip, 128, 1) for strip in torch.split(x, 128)]
        return torch.cat([torch.cat([_scaled_back(s, "fp8_tensor") for s in t], 1) for t in strips])
    size = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}[format]
    whole = x.abs().amax() / (448 * 6)
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    blocks = padded.view(len(x), -1, size)
    return _block(blocks, format, whole).flatten(1)[:, : x.shape[1]]


def _scaled_back(x: Tensor, format: str) -> Tensor:
    codes, scale = _codes(x, format)
    return codes.float() * scale


def _block(x: Tensor, format: str, whole: Tensor) -> Tensor:
    """Blocks `[rows, blocks, size]`."""
    largest = x.abs().amax(-1, keepdim=True)
    if format == "fp8_block":
        return _scaled_back(x, "fp8_row")
    if format == "nvfp4":
        scale = (largest / (6 * torch.where(whole == 0, 1.0, whole))).to(torch.float8_e4m3fn)
        scale = scale.float() * whole
    else:
        scale = torch.exp2(torch.frexp(largest)[1] - 1.0 - (8 if format == "mxfp8" else 2))
    scaled = x / torch.where(scale == 0, 1.0, scale)
    if format == "mxfp8":
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    size = scaled.abs().clamp_max(6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / step).round() * step * scaled.sign() * scale


def _codes(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax() if format == "fp8_tensor" else x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / 448)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _scaled_mm(a: Tensor, b: Tensor, format: str, _: bool) -> Tensor:
    rows, columns, dtype = len(a), len(b), a.dtype
    a, b = (torch.nn.functional.pad(x.float(), _to_sixteen(x)) for x in (a, b))
    (first, scale_a), (second, scale_b) = (_codes(x, format) for x in (a, b))
    if format == "fp8_row":
        scale_b = scale_b.mT.contiguous()
    product: Tensor = torch._scaled_mm(
        first, second.mT, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype
    )
    return product[:rows, :columns]


def _to_sixteen(x: Tensor) -> tuple[int, int, int, int]:
    return 0, -x.shape[1] % 16, 0, -len(x) % 16


TARGETS = (
    BuiltIn("dequantized", "codes by torch's casts, multiplied in fp32", dequantized),
    BuiltIn("scaled_mm", "torch._scaled_mm (fp8_tensor and fp8_row)", scaled_mm),
)
