"""A quantizer's round trip: values in a block format, with the scales of its standard (OCP MX, or
NVFP4 with a scale a tensor).
"""

from __future__ import annotations

from typing import Any

import torch

from halfulp.formats import round_to
from halfulp.operations.operation_data import Operand, Options, Output, Seam, Sizes, Tensors

SIGNATURE = "quantize(input, *, format)"
OPERANDS = (Operand("input", "T D", differentiable=False),)
RESULTS = (Output("output", "T D", dtype="float32", differentiable=False),)
SIZES = (Sizes.given(T=16, D=128), Sizes.given(T=16, D=512), Sizes.given(T=9, D=96))
OPTIONS: dict[str, Any] = {"format": "mxfp8_e4m3"}


def define(step: Seam, x: Tensors, options: Options) -> Tensors:
    """T rows of D numbers, blocks along D; the numbers that the codes stand for come back."""
    found = round_to(x["input"].float(), options["format"])
    return {"output": step("values", found.to(x["input"].dtype))}


def read(returned: Any, *_: Any) -> Tensors:
    """What comes back in another dtype holds the same numbers."""
    if not isinstance(returned, torch.Tensor):
        raise ValueError(f"{type(returned).__name__}: expected a tensor")
    return {"output": returned.float()}
