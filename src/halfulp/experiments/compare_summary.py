"""What drifts of several seeds come to: slopes with their intervals, how even they are, and ratios
between them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from halfulp.chances import student_beyond


class Curve(Protocol):
    """The part of a drift that a summary reads."""

    @property
    def seed(self) -> int:
        """Of the data."""
        ...

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the checkpoints."""
        ...

    @property
    def wasserstein(self) -> tuple[float, ...]:
        """At these steps."""
        ...

    @property
    def max_difference(self) -> tuple[float, ...]:
        """At these steps."""
        ...


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
class DriftSummary:
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
        ends = (
            ""
            if math.isnan(self.slope.low)
            else f"{_short(self.slope.low)} to {_short(self.slope.high)}"
        )
        spread = math.nan if math.isnan(self.unevenness) else self.unevenness
        return (
            self.name,
            self.seeds,
            self.steps,
            self.max_difference,
            self.wasserstein,
            self.slope.value,
            ends,
            f"{spread:.0%}" if math.isfinite(spread) else "",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; numbers that are not finite become None."""
        numbers = {
            "max_difference": self.max_difference,
            "wasserstein": self.wasserstein,
            "slope": self.slope.value,
            "slope_low": self.slope.low,
            "slope_high": self.slope.high,
            "unevenness": self.unevenness,
        }
        plain = {key: x if math.isfinite(x) else None for key, x in numbers.items()}
        return {"name": self.name, "seeds": self.seeds, "steps": self.steps} | plain


def _short(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-").replace("-", "−")


def summarize(name: str, drifts: Sequence[Curve]) -> DriftSummary:
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
        interval_of([slope_of(drift.steps, drift.wasserstein) for drift in drifts]),
        statistics.fmean(unevenness_of(drift.steps, drift.wasserstein) for drift in drifts),
    )


def slope_of(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line with an intercept; NaN for one step or infinite
    values.
    """
    if len(steps) < 2 or not np.isfinite(values).all():
        return math.nan
    x, y = np.array(steps, float), np.array(values, float)
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
    return float(np.sqrt(np.square(residual).sum() / (len(steps) - 2)) / abs(values[-1]))


def slope_ratio(over: Sequence[Curve], under: Sequence[Curve]) -> Interval:
    """Return how many times as steep the first drifts are as the second: `ratio_by_seed`."""
    return ratio_by_seed(over, under, lambda drift: slope_of(drift.steps, drift.wasserstein))


def distance_ratio(over: Sequence[Curve], under: Sequence[Curve]) -> Interval:
    """Return how many times as far apart the first end as the second: `ratio_by_seed`."""
    return ratio_by_seed(over, under, lambda drift: drift.wasserstein[-1])


def ratio_by_seed(
    over: Sequence[Curve], under: Sequence[Curve], figure: Callable[[Curve], float]
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
    one: Sequence[Curve], other: Sequence[Curve], figure: Callable[[Curve], float]
) -> Interval:
    """Return how much larger one figure of the first drifts is than of the others, matched by
    seed.
    """
    return interval_of([a - b for a, b in _matched(one, other, figure)])


def _matched(
    one: Sequence[Curve], other: Sequence[Curve], figure: Callable[[Curve], float]
) -> list[tuple[float, float]]:
    first, second = ({drift.seed: figure(drift) for drift in same} for same in (one, other))
    return [(value, second[seed]) for seed, value in first.items() if seed in second]


def geometric_interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of positive ratios with its 95 % interval, Student's t on the
    logarithm.
    """
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
