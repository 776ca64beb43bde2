"""How the loss of a linear layer is rounded.

Stock keeps the logits, and then their gradient, in the operands' dtype, as a linear layer before
cross-entropy in fp32 does, and Liger-Kernel chunk by chunk. The floor rounds its results alone.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding("logits and their gradient kept", {"logits": OPERAND, "grad_logits": OPERAND})
FLOOR = Rounding("results alone")
