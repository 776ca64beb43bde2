"""The drift of a pair of runs, and what drifts of several seeds come to: slopes with their
intervals, how even they are, and ratios between them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from halfulp.chances import student_beyond
from halfulp.runs.results import Plain, plain_data


@dataclass(frozen=True)
class Distances:
    """How far the weights of two runs are apart, at every step that is compared."""

    max_difference: tuple[float, ...]  # over all weights
    wasserstein: tuple[float, ...]  # of the distributions of all weights together


@dataclass(frozen=True)
class Drift(Plain):
    """The distance between the weights of two runs, at every checkpoint that both have."""

    name: str  # what the two differ in
    seed: int  # of the data, which both share
    baseline: str  # folder
    run: str  # folder
    steps: tuple[int, ...]
    max_difference: tuple[float, ...]  # over all weights
    wasserstein: tuple[float, ...]  # of the distributions of all weights together
    tensors: Mapping[str, Distances]  # the same two for each tensor

    @property
    def slope(self) -> float:
        """Growth of the Wasserstein distance a step: least squares with an intercept; NaN for a
        single checkpoint.
        """
        return slope_of(self.steps, self.wasserstein)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval; the ends are NaN for fewer than 3 seeds."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.2g} (n = {self.count})"
        return f"{self.value:.2g} [{self.low:.2g}, {self.high:.2g}] (n = {self.count})"


@dataclass(frozen=True)
class DriftSummary(Plain):
    """One comparison over its seeds."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "difference", "seeds", "step", "largest", "Wasserstein", "slope", "95 %", "uneven"
    )  # fmt: skip

    name: str
    seeds: int
    steps: int  # the last that all seeds have
    max_difference: float  # there, mean over seeds
    wasserstein: float  # there, mean over seeds
    slope: Interval  # of the Wasserstein distance, a step
    # rms distance from the line over the last value, mean over seeds; NaN where that is 0
    unevenness: float

    def cells(self) -> tuple[Any, ...]:
        """The summary as a table's row."""
        slope, known = self.slope, not math.isnan(self.slope.low)
        return (
            self.name,
            self.seeds,
            self.steps,
            self.max_difference,
            self.wasserstein,
            slope.value,
            f"{_short(slope.low)} to {_short(slope.high)}" if known else "",
            f"{self.unevenness:.0%}" if math.isfinite(self.unevenness) else "",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; numbers that are not finite become None."""
        slope = self.slope
        ends = {"slope": slope.value, "slope_low": slope.low, "slope_high": slope.high}
        plain: dict[str, Any] = super().as_dict() | plain_data(ends)
        return plain


def _short(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-").replace("-", "−")


def summarize(name: str, drifts: Sequence[Drift]) -> DriftSummary:
    """Return what the drifts of one comparison, a seed each, come to at the last step that all
    have.
    """
    last = max(set.intersection(*(set(drift.steps) for drift in drifts)))
    at = [drift.steps.index(last) for drift in drifts]
    return DriftSummary(
        name,
        len(drifts),
        last,
        statistics.fmean(drift.max_difference[i] for drift, i in zip(drifts, at, strict=True)),
        statistics.fmean(drift.wasserstein[i] for drift, i in zip(drifts, at, strict=True)),
        interval_of([drift.slope for drift in drifts]),
        statistics.fmean(unevenness_of(drift.steps, drift.wasserstein) for drift in drifts),
    )


def slope_of(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line with an intercept; NaN for one step or infinite
    values.
    """
    if len(steps) < 2 or not np.isfinite(values).all():
        return math.nan
    x, y = np.array(steps, float), np.array(values, float)
    # about their mean the intercept drops out
    x -= x.mean()
    return float(x @ y / (x @ x))


def unevenness_of(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the rms distance of the values from their line, as a share of the last; NaN where that
    is 0.
    """
    if len(steps) < 3 or values[-1] == 0 or not np.isfinite(values).all():
        return math.nan
    x, y = np.array(steps, float), np.array(values, float)
    residual = y - y.mean() - slope_of(steps, values) * (x - x.mean())
    # the line took two degrees of freedom
    return float(np.sqrt(np.square(residual).sum() / (len(steps) - 2)) / abs(values[-1]))


def ratio_by_seed(
    over: Sequence[Drift], under: Sequence[Drift], figure: Callable[[Drift], float]
) -> Interval:
    """Return the ratio of one figure of two sets of drifts, matched by seed.

    The geometric mean over seeds with an interval of Student's t on the logarithm. Where a figure
    is not positive, that has no meaning: the value is then the ratio of the means, without an
    interval.
    """
    pairs = _matched(over, under, figure)
    if not pairs:
        return Interval(math.nan, math.nan, math.nan, 0)
    if not all(a > 0 and b > 0 for a, b in pairs):
        below = sum(b for _, b in pairs)
        return Interval(
            sum(a for a, _ in pairs) / below if below else math.nan, math.nan, math.nan, len(pairs)
        )
    return geometric_interval([a / b for a, b in pairs])


def difference_by_seed(
    one: Sequence[Drift], other: Sequence[Drift], figure: Callable[[Drift], float]
) -> Interval:
    """Return how much larger one figure of the first drifts is than of the others, matched by
    seed.
    """
    return interval_of([a - b for a, b in _matched(one, other, figure)])


def _matched(
    one: Sequence[Drift], other: Sequence[Drift], figure: Callable[[Drift], float]
) -> list[tuple[float, float]]:
    first, second = ({drift.seed: figure(drift) for drift in same} for same in (one, other))
    return [(value, second[seed]) for seed, value in first.items() if seed in second]


def geometric_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of positive ratios with its 95 % interval, Student's t on the
    logarithm.
    """
    # on the logarithm a ratio and its inverse are equally far from 1
    logs = interval_of([math.log(ratio) for ratio in ratios])
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.count)


def interval_of(values: Sequence[float]) -> Interval:
    """Return the mean with its 95 % interval by Student's t; the ends are NaN for fewer than 3
    values.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 3:
        return Interval(mean, math.nan, math.nan, count)
    half = student_beyond(0.025, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)
