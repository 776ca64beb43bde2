"""What gated units share: an activation with its slope, times what it gates."""

from __future__ import annotations

from torch import Tensor

from halfulp.operations.operation_data import Seam, Tensors


def gated(step: Seam, x: Tensors, value: Tensor, slope: Tensor) -> Tensors:
    """act(gate) · up, both of the activation's numbers known, since kernels compute either."""
    moved = step("_slope", slope) * (x["gate"] - x["gate"].detach())  # 0, whose gradient is not
    return {"output": step("activated", value + moved) * x["up"]}
