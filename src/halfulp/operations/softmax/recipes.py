"""How softmax is rounded.

Stock computes in fp32, rounds its result, and takes the gradient from the rounded result, as
PyTorch does. The floor rounds nothing but its results.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding("gradient from the rounded result", {"kept": OPERAND})
FLOOR = Rounding("results alone")
