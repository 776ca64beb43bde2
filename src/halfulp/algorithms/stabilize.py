"""How a row is shifted before the exponential.

In exact arithmetic the shift cancels; in low precision it decides which weights are exactly 1 and
whether rescaling a running sum rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.recipes import Step


def row_shift(scores: Tensor, r_m: Tensor, step: Step) -> Tensor:
    """What one tile's rows are shifted by, `[..., rows, 1]`, from masked scores `[..., rows, cols]`
    and their maxima.

    `stabilized` is Qiu & Yao, Algorithm 1, lines 7 to 9; repeated maxima are counted inside the
    tile, as printed. Line 10 of the printed algorithm takes max(m, r_m), which would discard lines
    8 and 9; the running maximum here takes the shifted value, as the official code does.
    """
    shift = step.recipe.shift
    if shift.kind == "integer":
        # m − m_new is an integer then, and every rescale an exact power of two, which rounds
        # nothing
        return r_m.ceil()
    if shift.kind == "offset":
        return r_m + shift.offset
    if shift.kind == "stabilized":
        repeated = torch.ones_like(r_m, dtype=torch.bool)
        if not shift.unconditional:
            repeated = (scores >= step("tie_threshold", r_m - shift.tie_tolerance)).sum(
                dim=-1, keepdim=True
            ) > 1
        # no weight is exactly 1 any more. The price: far from 0 a whole row underflows, which the
        # audit's ties_many (β r_m) and ties_negative (γ r_m) look for
        factor = torch.where(r_m > 0, shift.beta, shift.gamma)
        # the scores of a masked row tie at −inf, and must stay there
        return torch.where(repeated & r_m.isfinite(), factor * r_m, r_m)
    return r_m
