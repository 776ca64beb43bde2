"""Rotary position embedding of queries or keys, x rotated by position · base^(−2i/D) (RoFormer)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "rope(input, positions, *, base, interleaved)"
OPERANDS = (
    Operand("input", "T H D"),
    Operand("positions", "T", dtype="int64", differentiable=False),
)
RESULTS = (Output("output", "T H D"),)
SIZES = (
    Sizes.given(T=24, H=2, D=64),
    Sizes.given(T=16, H=3, D=128),
    Sizes.given(T=33, H=1, D=40),
)
OPTIONS: dict[str, Any] = {
    "base": 10000.0,
    "interleaved": False,  # pairs are (i, i + D/2), or (2i, 2i + 1) where True
}


def define(step: Seam, x: Tensors, options: Options) -> Tensors:
    """T positions, H heads, D features. Angles are in the arithmetic of the operands: fp32 in every
    kernel, whose error at long positions is its own.
    """
    rows, half = x["input"], x["input"].shape[-1] // 2
    power = torch.arange(half, dtype=rows.dtype) * (-2.0 / rows.shape[-1])
    frequency = step("_frequency", options["base"] ** step("_exponent", power))
    positions = step("_positions", x["positions"].to(rows.dtype))[:, None]
    angle = step("_angle", positions * frequency)
    cos, sin = (step(n, t)[:, None, :] for n, t in (("cos", angle.cos()), ("sin", angle.sin())))
    first, second = _pairs(rows, options["interleaved"])

    def product(name: str, x: Tensor, factor: Tensor) -> Tensor:
        return step(name, step(f"to_{name}", x) * factor)  # whose gradient is a product too

    straight, crossed = product("straight", first, cos), product("crossed", second, sin)
    other, back = product("other", second, cos), product("back", first, sin)
    return {"output": _joined(straight - crossed, other + back, options["interleaved"])}


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([first, second], -1).flatten(-2)
    return torch.cat([first, second], -1)
