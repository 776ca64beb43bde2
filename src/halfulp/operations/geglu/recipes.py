"""How it is rounded.

Stock is the eager form, act(gate) * up: the activation is rounded before it is multiplied, and so
is its gradient; Φ is (1 + erf) / 2 or (1 + tanh) / 2 in fp32, as PyTorch's is, and 0 below −5.5.
The floor rounds nothing but its results.
"""

from __future__ import annotations

from halfulp.formats import FP32
from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding("eager", {"activated": OPERAND, "grad_activated": OPERAND,
                           "_erf": FP32, "_tanh": FP32})  # fmt: skip
FLOOR = Rounding("results alone")
