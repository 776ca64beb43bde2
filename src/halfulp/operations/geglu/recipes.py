"""How it is rounded.

Stock is the eager form, act(gate) * up: the activation is rounded before it is multiplied, and so
is its gradient. The floor rounds nothing but its results.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding("eager", {"activated": OPERAND, "grad_activated": OPERAND})
FLOOR = Rounding("results alone")
