"""How a linear layer of quantized operands is rounded: every operand of a product once, by the
scales of its format, sums in fp32, each result once.

Stock is what is trained with: in 8 bits gradients are E5M2 (TransformerEngine's hybrid recipe),
but E4M3 in blocks (arXiv 2412.19437, 2506.08027); in 4 bits they are rounded stochastically (arXiv
2502.20586, 2509.25149). The floor rounds gradients as it does the other operands.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.formats import (
    FP32,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    OCP_E4M3,
    OCP_E5M2,
    BlockFormat,
)
from halfulp.operations.seam import Rounding

FORMATS = {
    "fp8_tensor": BlockFormat("fp8", OCP_E4M3, None, FP32),
    "fp8_row": BlockFormat("fp8", OCP_E4M3, None, FP32),
    "fp8_block": BlockFormat("fp8", OCP_E4M3, 128, FP32),
    "mxfp8": MXFP8_E4M3,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
_OPERANDS = {f"{n}_{role}": f for n, f in FORMATS.items() for role in ("input", "weight")}
_OPERANDS["fp8_block_weight"] = FORMATS["fp8_row"]  # a row there is a square
_E5M2 = OCP_E5M2.with_(overflow="saturate")


def _trained(name: str, fmt: BlockFormat) -> BlockFormat:
    if name in ("fp8_tensor", "fp8_row"):
        return replace(fmt, element=_E5M2)
    if name in ("mxfp4", "nvfp4"):
        return replace(fmt, element=fmt.element.with_(rounding="stochastic"))
    return fmt


STOCK = Rounding(
    "gradients E5M2, or in 4 bits stochastic",
    _OPERANDS | {f"{n}_gradient": _trained(n, f) for n, f in FORMATS.items()},
)
FLOOR = Rounding(
    "operands rounded once", _OPERANDS | {f"{n}_gradient": f for n, f in FORMATS.items()}
)
