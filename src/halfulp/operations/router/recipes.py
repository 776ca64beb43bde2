"""How a router is rounded: softmax in fp32, as transformers' routers are, results once."""

from __future__ import annotations

from halfulp.operations.seam import Rounding

STOCK = Rounding("softmax in fp32")
FLOOR = Rounding("results alone")
