"""What a rounding explains of a kernel's error at most, by how results change with its step.

A search computes a call in hundreds of ways, most of which have nothing to do with the error; to
first order an inner product tells which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from halfulp.operations import OperationCalls, Recorded, Rounding, Slope, Tensors
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.operation_mistakes import Alter
from halfulp.reconstruct.operation_steps import OPERAND, RESULT
from halfulp.reconstruct.operation_ways import FAILS, Way

SUMS = frozenset({"sum-low", "grad-sum-low"})
"""Causes whose steps do nothing but enter a sum: results are linear in them, and where terms cancel
large beside them.
"""


class Slopes:
    """Of one call in one arithmetic: how far towards the kernel a step moves what fails.
    `UnlikeError` where the definition has no slopes.
    """

    def __init__(
        self,
        recorded: Recorded,
        base: Rounding,
        left: Tensors,  # the kernel less that arithmetic, by what fails
        errors: Mapping[str, float],  # squared, of the kernel
        small: bool = True,  # whether what explains them moves results by little
    ) -> None:
        self.calls: OperationCalls = recorded.calls
        self.small = small
        self.recipe = base.change(self.calls.dtype)
        self.scales = [(float(x.square().sum()), errors[n]) for n, x in left.items()]
        self.by_name: dict[str, list[Slope]] = {}
        for slope in recorded.slopes([{n: x} for n, x in left.items()]):
            name = OPERAND + slope.name if slope.given else slope.name
            self.by_name.setdefault(name, []).append(slope)

    def gain(self, way: Way) -> float:
        """The share of the error, the mean of what fails, that a way explains at most; 1 where that
        is not known.
        """
        if not _is_local(way) or not (self.small or way.cause in SUMS):
            return 1.0
        ((name, alter),) = way.steps.items()
        inner = [0.0] * len(self.scales)
        for slope in self.by_name.get(name, ()):
            try:
                moved = (self._altered(slope, name, alter) - slope.after).flatten()
            except FAILS:
                return 1.0
            for at, along in enumerate(slope.along):
                if along is not None:
                    inner[at] += float(torch.dot(moved, along.flatten()))
        if not all(map(math.isfinite, (*inner, *(left for left, _ in self.scales)))):
            return 1.0
        gains = list[float]()
        for (left, error), found in zip(self.scales, inner, strict=True):
            # an error of this inner product is at least that long
            towards = min(max(found, 0.0), left)
            gains.append((2 * towards - towards**2 / max(left, 1e-300)) / max(error, 1e-300))
        return sum(gains) / max(1, len(gains))

    def _altered(self, slope: Slope, name: str, alter: Alter) -> Tensor:
        if not slope.given:
            return self.recipe(name, alter(slope.before))
        given = self.calls.operands | self.calls.grads
        return alter(slope.before).to(given[slope.name].dtype).to(slope.before.dtype)


def _is_local(way: Way) -> bool:
    """Whether a way is a rounding of one step everywhere, and nothing else: a second one rounds
    what the first has made, and errs otherwise.
    """
    if CAUSES[way.cause].kind != "rounding" or len(way.steps) != 1:
        return False
    if any(name.startswith(RESULT) for name in way.steps) or not way.may_be_in_part:
        return False
    return not (
        way.formats or way.of_calls or way.region or way.only or way.operands or way.results
    )
