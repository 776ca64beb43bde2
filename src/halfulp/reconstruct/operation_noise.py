"""Which step's random errors make calls differ: of each step's, rounded by random numbers or off by
random parts of itself, the variances that results would have, held against those of some calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfulp.operations import (
    STOCHASTIC,
    OperationCalls,
    OperationResult,
    Rounding,
    Tensors,
    sizes_of,
)
from halfulp.reconstruct.operation_mistakes import Region, fitting
from halfulp.reconstruct.operation_steps import RESULT
from halfulp.reconstruct.operation_trials import Trial, square
from halfulp.reconstruct.operation_ways import Way, random_ways

CALLS = 9  # of a kernel, and of every step's noise
MOST = 0.3  # share of an error that differs from call to call, from which on noise is the question
SURE = 0.1  # of the log-likelihood by element, that a rounding may fall short of any noise
JUST = 1.5  # times the variance, up to which that holds
AS_LARGE = 2.5  # times the variance that a rounding makes, or a share of it
LEAST = 0.01  # of the mean variance: of what is rounded up once in a thousand times
NOISE, NO_NOISE = 0.3, 0.03  # shares of a way's variance from or up to which an index has its noise


@dataclass(frozen=True)
class Noise:
    """The step that noise is of."""

    cause: str  # its key in `CAUSES`
    text: str
    share: float  # of the variance that the smaller has of the larger


def noise_of(run: Callable[[OperationCalls], OperationResult | None], one: Trial) -> Noise | None:
    """The noise of a kernel on a call; None where it gives the same twice, as all do where the
    recipe rounds by no random numbers, or errs by far more.
    """
    if _is_stochastic(one.calls.operation.stock):
        return None
    again = run(one.calls)
    if again is None or all(
        _apart(one, again.tensors[n].double(), n) < MOST * one.errors[n] for n in one.failing
    ):
        return None
    results = [again, *(run(one.calls) for _ in range(CALLS - 2))]
    given = [one.kernel, *({n: x.double() for n, x in r.tensors.items()} for r in results if r)]
    own = _Spread.of(one, given)
    found = [
        tried
        for way in random_ways(one.calls)
        if one.concerns(one.calls.operation.floor, way)
        for tried in _tried(one, way, own)
    ]
    if not found:
        return None
    likely = max(x[0] for x in found)
    rounded = [
        x
        for x in found
        if x[1].cause and x[0] >= likely - SURE * own.count * (max(x[2], 1 / x[2]) < JUST)
    ]
    best = max(rounded, key=lambda x: x[0], default=None)
    if best is not None and 1 / AS_LARGE < best[2] < AS_LARGE:
        return Noise(best[1].cause, str(best[1]), min(best[2], 1 / best[2]))
    _, way, size = max((x for x in found if not x[1].cause), key=lambda x: x[0])
    text = f"calls differ as if {way} by random parts of {100 * size**0.5:.2g} % of itself"
    return Noise("unstable", text, 0.0)


def _is_stochastic(recipe: Rounding) -> bool:
    """Whether a recipe rounds by random numbers."""
    return any(f == STOCHASTIC or getattr(getattr(f, "element", f), "rounding", "") == "stochastic"
               for f in recipe.steps.values())  # fmt: skip


def _apart(one: Trial, x: Tensor, name: str) -> float:
    return square(x - one.kernel[name])


@dataclass(frozen=True)
class _Spread:
    """Variances of what fails from call to call: of elements, and of their sums along each
    dimension, which tell what a row shares from what each element has.
    """

    elements: Tensors
    sums: list[Tensor]

    @classmethod
    def of(cls, one: Trial, given: list[Tensors]) -> _Spread:
        """Of some calls' results."""
        elements, sums = {}, []
        for name in one.failing:
            x = torch.stack([own[name] for own in given]).nan_to_num(0.0, 0.0, 0.0)
            elements[name] = x.var(0)
            signs = one.exact[name].nan_to_num(0.0, 0.0, 0.0).sign()
            sums += [(x * signs).sum(d + 1).var(0) for d in range(1, signs.ndim)]
        return cls(elements, sums)

    @property
    def parts(self) -> list[Tensor]:
        """All of them."""
        return [*self.elements.values(), *self.sums]

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(x.numel() for x in self.parts)

    def likely(self, other: _Spread) -> tuple[float, float]:
        """The log-likelihood of these variances where the other ones are due, and by how much they
        are larger, as the mean of each tensor's.
        """
        total = 0.0
        for own, due in zip(self.parts, other.parts, strict=True):
            least = LEAST * float(own.mean()) + 1e-300
            due = due + least
            total += -0.5 * float((due.log() + (own + least) / due).sum())
        sizes = [
            max(1e-30, float(x.sum() / other.elements[n].sum().clamp_min(1e-300)))
            for n, x in self.elements.items()
        ]
        return total, math.exp(sum(map(math.log, sizes)) / len(sizes))

    def times(self, by: float) -> _Spread:
        """So many times as large."""
        return _Spread({n: x * by for n, x in self.elements.items()}, [x * by for x in self.sums])


def _tried(one: Trial, way: Way, own: _Spread) -> list[tuple[float, Way, float]]:
    """How likely a way makes the noise, everywhere, in one pass alone, and in regions that show."""
    base = one.calls.operation.floor
    due = _made(one, base, way)
    if due is None:
        return []
    found = [(way, due)]
    backward = {n.startswith("grad_") for n in one.failing}
    for alone in ("forward", "backward") if len(backward) > 1 else ():
        of = replace(way, alone=alone)
        if (made := _made(one, base, of)) is not None:
            found.append((of, made))
    for region in _regions(one, own, due)[:4]:
        of = replace(way, region=region)
        if (made := _made(one, base, of)) is not None:
            found.append((of, made))
    rows = []
    for of, made in found:
        likely, size = own.likely(made)
        if not way.cause:  # of no known size
            likely, _ = own.likely(made.times(size))
        rows.append((likely, of, size))
    return rows


def _made(one: Trial, base: Rounding, way: Way) -> _Spread | None:
    # rare roundings of a result by one step take many calls to be seen
    count = CALLS * (8 if any(n.startswith(RESULT) for n in way.steps) else 1)
    given = [one.emulated(base, (way,)) for _ in range(count)]
    return None if any(x is None for x in given) else _Spread.of(one, [x for x in given if x])


def _regions(one: Trial, own: _Spread, due: _Spread) -> list[Region]:
    """Where alone results have the noise."""
    shapes, found = one.calls.operation.shapes_of_results, []
    for symbol in sizes_of(one.calls):
        for name, x in own.elements.items():
            if symbol not in shapes[name].split():
                continue
            dim = 1 + shapes[name].split().index(symbol)
            other = [d for d in range(x.ndim) if d != dim]
            a, b = (t.sum(other) for t in (x, due.elements[name]))
            here, clean = a > NOISE * b, a < NO_NOISE * b
            if here.any() and clean.any():
                found += fitting(symbol, here, clean)
    return found
