"""How NF4's round trip is rounded: the codes are the definition, the result is rounded."""

from halfulp.operations import Rounding

STOCK = Rounding("the codes")
FLOOR = Rounding("results alone")
