"""GeGLU of two projections, y = gelu(gate) · up (arXiv 2002.05202)."""

from __future__ import annotations

import math
from typing import Any

import torch

from halfulp.operations.gated_unit import RELATED as RELATED
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
        below = step("_below", torch.sigmoid(2 * inner))
        density = 2 * below * (1 - below) * _TANH * (1 + 3 * 0.044715 * gate * gate)
    else:
        inner = step("_inner", gate * 0.5**0.5)
        # kernels take 1 + erf, which loses what a format does not hold beside 1: only what the step
        # makes of erf is added, so that the definition itself keeps the tail
        erf = torch.erf(inner.double())
        lost = (step("_erf", erf) - erf).to(inner)
        below = step("_below", 0.5 * torch.erfc(-inner) + 0.5 * lost)
        density = (-0.5 * gate * gate).exp() / math.sqrt(2 * math.pi)
    return gated(step, x, gate * below, below + gate * step("_density", density))


def _written_out(step: Seam, x: Tensors, options: Options) -> Tensors:
    """gelu(gate) · up, whose gradient is autograd's."""
    gate = x["gate"]
    if options["approximate"] == "tanh":
        below = step("_below", torch.sigmoid(2 * _TANH * (gate + 0.044715 * gate**3)))
    else:
        below = step("_below", 0.5 * torch.erfc(-(gate * 0.5**0.5)))
    return {"output": step("activated", gate * below) * x["up"]}


EAGER = (_written_out,)
