"""How it is rounded.

Stock is the eager form, act(gate) * up: the activation is rounded before it is multiplied, and so
is its gradient; Φ is (1 + erf) / 2 or (1 + tanh) / 2 in fp32, as PyTorch's is, and 0 below −5.5;
its slope is summed beside 1 as well, as oneDNN's is. The floor rounds nothing but its results.
"""

from __future__ import annotations

from halfulp.formats import FP32
from halfulp.operations.seam import OPERAND, Rounding

_BESIDE_1 = dict.fromkeys(("_erf", "_tanh", "_twice_slope"), FP32)
STOCK = Rounding("eager", {"activated": OPERAND, "grad_activated": OPERAND, **_BESIDE_1})
FLOOR = Rounding("results alone")
