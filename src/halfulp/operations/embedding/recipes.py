"""How the gradient of an embedding is rounded: summed in fp32, rounded once. Nothing coarser is
stock.
"""

from __future__ import annotations

from halfulp.operations.seam import Rounding

STOCK = Rounding("summed in fp32")
FLOOR = Rounding("results alone")
