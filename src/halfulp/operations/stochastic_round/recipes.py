"""How stochastic rounding rounds: up with the probability of what is cut off."""

from __future__ import annotations

from halfulp.operations.seam import STOCHASTIC, Rounding

STOCK = Rounding("stochastic", {"rounded": STOCHASTIC})
FLOOR = Rounding("stochastic", {"rounded": STOCHASTIC})
