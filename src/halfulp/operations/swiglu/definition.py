"""SwiGLU of two projections, y = silu(gate) · up (arXiv 2002.05202)."""

from __future__ import annotations

import torch

from halfulp.operations.gated_unit import RELATED as RELATED
from halfulp.operations.gated_unit import gated
from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "swiglu(gate, up)"
OPERANDS = (Operand("gate", "T D"), Operand("up", "T D"))
RESULTS = (Output("output", "T D"),)
SIZES = (Sizes.given(T=24, D=256), Sizes.given(T=16, D=1024), Sizes.given(T=33, D=250))


def define(step: Seam, x: Tensors, _: Options) -> Tensors:
    """T rows of D features."""
    gate = x["gate"].detach()
    sigmoid = step("_sigmoid", torch.sigmoid(gate))
    slope = sigmoid * (1 + gate * step("_one_less", 1 - sigmoid))
    return gated(step, x, gate * sigmoid, slope)


def _written_out(step: Seam, x: Tensors, _: Options) -> Tensors:
    """gate · sigmoid(gate) · up, whose gradient is autograd's."""
    sigmoid = step("_sigmoid", torch.sigmoid(x["gate"]))
    return {"output": step("activated", x["gate"] * sigmoid) * x["up"]}


def _divided(step: Seam, x: Tensors, _: Options) -> Tensors:
    """gate / (1 + exp(−gate)) · up, whose exponential overflows where the gate is far below 0."""
    return {"output": step("activated", x["gate"] / (1 + torch.exp(-x["gate"]))) * x["up"]}


EAGER = (_written_out, _divided)
