"""How cross-entropy is rounded.

Stock computes in fp32 and keeps the gradient of the loss in the operands' dtype from the forward
pass on, as Liger-Kernel's does; what reaches the loss then multiplies the rounded gradient. The
floor rounds nothing but its results.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding("gradient kept from the forward pass", {"unit_gradient": OPERAND})
FLOOR = Rounding("results alone")
