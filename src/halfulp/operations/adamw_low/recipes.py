"""How weights of 16 bits are stepped: stock rounds them stochastically after every step, the floor
keeps a float32 master and rounds what it returns. Rounding every step to nearest is neither: what
is below half an ulp is never applied.
"""

from __future__ import annotations

from halfulp.operations.seam import OPERAND, STOCHASTIC, Rounding

STOCK = Rounding("stochastic after every step", {"stored": STOCHASTIC})
FLOOR = Rounding("a float32 master", {"returned": OPERAND})
