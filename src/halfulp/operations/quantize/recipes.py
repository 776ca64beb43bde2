"""How a round trip is rounded: the codes are the definition, nothing else is rounded."""

from __future__ import annotations

from halfulp.operations.seam import Rounding

STOCK = Rounding("the standard's codes")
FLOOR = Rounding("results alone")
