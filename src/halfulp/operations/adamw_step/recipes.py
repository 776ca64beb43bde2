"""How a step of AdamW is rounded: in float32 throughout. Nothing coarser is stock."""

from __future__ import annotations

from halfulp.operations.seam import Rounding

STOCK = Rounding("float32")
FLOOR = Rounding("results alone")
