"""Keys whose scores, or scores and values, have a factor, told by ratios of weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfulp.algorithms.problem import LOG2_E
from halfulp.calls import Call
from halfulp.reconstruct.exact import scores_of
from halfulp.reconstruct.ranges import ranges

OFF = 0.2  # of what the ratios of the worst key are: from there on a key is off
LEFT = 0.15  # of the ratios' variance that the factor may leave
NEAR = 0.05  # of a factor that the scale makes
ALL_BUT = 0.1  # of a score: what is left of keys that are 0


def scaled_keys(call: Call, log: Tensor, weight: Tensor) -> tuple[str, str]:
    """In words which keys, fewer than half, have scores of another factor, with the cause. Rows of
    `log`arithms of ratios are held against their median, which such keys do not move as they move
    the sum.
    """
    middle = torch.where(weight > 0, log, math.nan).nanmedian(-1, keepdim=True).values
    rest = (log - middle.nan_to_num(0.0)) * weight
    each = rest.square().sum((0, 1, 2)) / weight.sum((0, 1, 2)).clamp_min(1)
    some = each > OFF**2 * each.max()
    if 2 * int(some.sum()) >= len(some):
        return "", ""
    scores = torch.where(weight > 0, scores_of(call), 0.0) * some
    # V of these keys shows as weight
    both = torch.stack([scores.flatten(), ((weight > 0) * some).flatten().to(rest.dtype)], -1)
    slope, more = torch.linalg.lstsq(both, rest.flatten()[:, None]).solution[:, 0].tolist()
    left = rest.flatten() - both @ torch.tensor([slope, more], dtype=rest.dtype)
    factor, of_scale = 1 + slope, (1 / call.scale, call.scale, LOG2_E, 1 / LOG2_E)
    of_value = factor > 0 and abs(more - math.log(factor)) < NEAR * abs(more)
    if not of_value:
        slope = float((rest * scores).sum() / scores.square().sum().clamp_min(1e-300))
        left, factor = (rest - slope * scores).flatten(), 1 + slope
    if float(left.square().sum()) > LEFT * float(rest.square().sum()):
        return "", ""
    told = f"scores of keys {ranges(some.nonzero().flatten())} of {len(some)}"
    if of_value:
        return f"{told}, and V of these, are {factor:.4g} × what they should be", "scale"
    cause = "key-tail" if abs(factor) < ALL_BUT else "operand"  # as where K is off there
    if any(abs(factor / x - 1) < NEAR for x in of_scale):  # it is missing, twice, or of a base
        cause = "scale"
    return f"{told} are {factor:.4g} × what they should be", cause
