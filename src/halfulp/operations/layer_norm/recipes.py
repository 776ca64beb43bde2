"""How LayerNorm is rounded.

Stock computes in fp32 and rounds the normalized row before weight and bias, as kernels do that save
it for the backward pass; the products that make up dW are then rounded too. The floor rounds
nothing but its results.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding(
    "normalized row kept",
    {"normalized": OPERAND, "grad_normalized": OPERAND, "grad_weights": OPERAND},
)
FLOOR = Rounding("results alone")
