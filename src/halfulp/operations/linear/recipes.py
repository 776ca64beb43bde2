"""How a linear layer is rounded: products and sums in fp32, each result once. Nothing coarser is
stock.
"""

from __future__ import annotations

from halfulp.operations.seam import Rounding

STOCK = Rounding("fp32 accumulators")
FLOOR = Rounding("results alone")
