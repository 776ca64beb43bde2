"""What gated units share: an activation with its slope, times what it gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.operations.operation_data import Options, Seam, Tensors

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "the tanh form of gelu": partial(functional.gelu, approximate="tanh"),
    "x · sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu²": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "no function": lambda x: x,
}


def _other_gate(
    activation: Callable[[Tensor], Tensor], step: Seam, x: Tensors, _: Options
) -> Tensors:
    return {"output": step("activated", activation(x["gate"])) * x["up"]}


RELATED = {
    f"activated: {name} stands in place of the activation of gate": (
        "term-missing",
        partial(_other_gate, function),
    )
    for name, function in ACTIVATIONS.items()
}


def gated(step: Seam, x: Tensors, value: Tensor, slope: Tensor) -> Tensors:
    """act(gate) · up, both of the activation's numbers known, since kernels compute either."""
    moved = step("_slope", slope) * (x["gate"] - x["gate"].detach())  # 0, whose gradient is not
    return {"output": step("activated", value + moved) * x["up"]}
