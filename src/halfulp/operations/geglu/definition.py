"""GeGLU of two projections, y = gelu(gate) · up (arXiv 2002.05202)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.operations.gated_unit import RELATED as OTHER_GATES
from halfulp.operations.gated_unit import gated
from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "geglu(gate, up, *, approximate)"
OPERANDS = (Operand("gate", "T D"), Operand("up", "T D"))
RESULTS = (Output("output", "T D"),)
SIZES = (Sizes.given(T=24, D=256), Sizes.given(T=16, D=1024), Sizes.given(T=33, D=250))
_TANH = math.sqrt(2 / math.pi)
OPTIONS: dict[str, Any] = {"approximate": "none"}  # or "tanh"


def define(step: Seam, x: Tensors, options: Options) -> Tensors:
    """T rows of D features."""
    gate = x["gate"].detach()
    if options["approximate"] == "tanh":
        inner = step("_inner", _TANH * (gate + 0.044715 * gate**3))
        lost = _lost(step, "_tanh", torch.tanh(inner.double())).to(inner)
        below = step("_below", (torch.sigmoid(2 * inner) + lost).clamp(min=0))
        density = 2 * below * (1 - below) * _TANH * (1 + 3 * 0.044715 * gate * gate)
    else:
        inner = step("_inner", gate * 0.5**0.5)
        lost = _lost(step, "_erf", torch.erf(inner.double())).to(inner)
        below = step("_below", (0.5 * torch.erfc(-inner) + lost).clamp(min=0))
        density = (-0.5 * gate * gate).exp() / math.sqrt(2 * math.pi)
    slope = below + gate * step("_density", density)
    slope = slope + _lost(step, "_twice_slope", 2 * slope.double() - 1).to(slope)
    return gated(step, x, gate * below, slope)


def _lost(step: Seam, name: str, x: Tensor) -> Tensor:
    """What the step takes from (1 + x) / 2, as which kernels compute a tail, or (oneDNN's) its
    slope: all that a format does not hold beside 1. The definition adds this to what it keeps.
    """
    inside = torch.where(x == -1, -1 + 2.0**-53, x)  # or −1 would lose nothing in any format
    return 0.5 * (step(name, inside) - inside)


def _written_out(step: Seam, x: Tensors, options: Options) -> Tensors:
    """gelu(gate) · up, whose gradient is autograd's."""
    gate = x["gate"]
    if options["approximate"] == "tanh":
        below = step("_below", torch.sigmoid(2 * _TANH * (gate + 0.044715 * gate**3)))
    else:
        below = step("_below", 0.5 * torch.erfc(-(gate * 0.5**0.5)))
    return {"output": step("activated", gate * below) * x["up"]}


def _beside_one(step: Seam, x: Tensors, options: Options, form: str = "") -> Tensors:
    """0.5 · gate · (1 + erf or tanh) · up, whose tail cancels."""
    gate = x["gate"]
    if (form or options["approximate"]) == "tanh":
        inside = step("_tanh", torch.tanh(_TANH * (gate + 0.044715 * gate**3)))
    else:
        inside = step("_erf", torch.erf(gate * 0.5**0.5))
    return {"output": step("activated", 0.5 * gate * (1 + inside)) * x["up"]}


EAGER = (_written_out, _beside_one)
RELATED = OTHER_GATES | {
    "activated: gelu's tanh form, written out, stands in place of the activation of gate": (
        "term-missing",
        partial(_beside_one, form="tanh"),
    )
}
