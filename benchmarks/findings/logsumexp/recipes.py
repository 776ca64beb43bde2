"""How log-sum-exp is rounded: in fp32 throughout, its result once, for the backward pass never."""

from halfulp.operations import Rounding

STOCK = Rounding("in fp32")
FLOOR = Rounding("results alone")
