"""How RMSNorm is rounded.

Stock is what LlamaRMSNorm (transformers) does under autograd: the row is normalized in fp32 and
rounded before it is multiplied by the weight, and so are the products that make up both gradients.
The floor rounds nothing but its results.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding(
    "LlamaRMSNorm",
    {"normalized": OPERAND, "grad_normalized": OPERAND, "grad_weights": OPERAND},
)
FLOOR = Rounding("results alone")
