"""How the rotary embedding is rounded.

Stock is transformers' apply_rotary_pos_emb under bf16: cos and sin come from fp32 angles and are
rounded, as are both products and their gradients. The floor rounds nothing but its results.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, Rounding

STOCK = Rounding(
    "transformers",
    {
        name: OPERAND
        for step in ("straight", "crossed", "other", "back")
        for name in (step, f"grad_to_{step}")
    }
    | {"cos": OPERAND, "sin": OPERAND},
)
FLOOR = Rounding("results alone")
