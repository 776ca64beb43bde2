"""What `halfulp bench` measured, as data, as tables and as pictures: speed and error of a kernel
stand side by side.

A ratio is told only where it is clear: the quartiles of its rounds are no further apart than its
median is from 1, and so many rounds agree which kernel is faster that chance alone would seldom do
it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from halfulp.runs.machine import describe_machine, describe_versions
from halfulp.runs.results import Figure, Plain, Series, Table, plain_data

Quartiles: TypeAlias = tuple[float, float, float]
"""Lower quartile, median, upper quartile."""

BASELINE = "sdpa"
OWN = "halfulp"
GEMM = 2048
"""Rows and columns of the matrix product whose speed stands for the peak."""
_GRADIENTS = ("dQ", "dK", "dV")
_CHANCE = 0.05
_OWN_COLUMN = f"{OWN} ×"
_LONGEST_NAME = 24  # characters, in tables and pictures


@dataclass(frozen=True)
class Setting:
    """One size to measure at."""

    shape: tuple[int, int, int, int]  # B, H, N, D of the query
    is_causal: bool = False
    key_heads: int | None = None  # H of key and value; None: the query's
    n_key: int | None = None  # N of key and value; None: the query's

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """B, H, N, D of key and value."""
        b, h, n, d = self.shape
        return b, self.key_heads or h, self.n_key or n, d

    @property
    def work(self) -> float:
        """Operations of attention's products, forward and backward: 14·B·H·N·M·D with M keys, half
        of it if causal.
        """
        b, h, n, d = self.shape
        return 14.0 * b * h * n * self.key_shape[2] * d * (0.5 if self.is_causal else 1.0)

    def __str__(self) -> str:
        b, h, n, d = self.shape
        heads = f"{h}/{self.key_heads}" if self.key_heads else str(h)
        tokens = f"{n}x{self.n_key}" if self.n_key else str(n)
        return f"({b}, {heads}, {tokens}, {d}){' causal' if self.is_causal else ''}"


@dataclass(frozen=True)
class Timing:
    """What one kernel took at one size. Ratios are over what both kernels can do; None where the
    spread hides them.
    """

    kernel: str
    setting: Setting
    forward_ms: Quartiles
    backward_ms: Quartiles | None  # None: it has no backward pass here
    ratio: Quartiles | None  # times as fast as the baseline
    # times as fast as this kernel halfulp is; None also where halfulp was not timed
    halfulp_ratio: Quartiles | None
    gemm_share: Quartiles  # of the measured peak of a matrix product in the same dtype
    # relative L2 error of out, dQ, dK, dV over the floor's, first key head; where there is one
    errors: dict[str, float]

    @property
    def gradient_error(self) -> float | None:
        """The largest of the errors of dQ, dK and dV."""
        return max((self.errors[name] for name in _GRADIENTS if name in self.errors), default=None)


@dataclass(frozen=True)
class BenchResult(Plain):
    """All timings, and what they were made on."""

    BESIDE = ("tables", "figures")

    timings: tuple[Timing, ...]
    skipped: dict[str, str]  # kernel: why it was left out
    dtype: str
    rounds: int
    threads: int | None  # None: not on a CPU
    peak_gflops: Quartiles
    command: str
    machine: dict[str, Any] = field(default_factory=describe_machine)
    versions: dict[str, str] = field(default_factory=describe_versions)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: every timing, the tables and the figures."""
        timings = [
            {"kernel": t.kernel, "shape": list(t.setting.shape),
             "key_shape": list(t.setting.key_shape), "is_causal": t.setting.is_causal,
             "forward_ms": t.forward_ms, "backward_ms": t.backward_ms, "ratio": t.ratio,
             "halfulp_ratio": t.halfulp_ratio, "gemm_share": t.gemm_share, "errors": t.errors}
            for t in self.timings
        ]  # fmt: skip
        return super().as_dict() | {"timings": plain_data(timings)}

    @property
    def tables(self) -> list[Table]:
        """Return one table a size: speed and error in the same row. No cell is wider than 80
        columns leave room for.
        """
        own = (_OWN_COLUMN,) if any(t.kernel == OWN for t in self.timings) else ()
        columns = ("kernel", "fwd ms", "bwd ms", f"× {BASELINE}", *own, "gemm", "O", "grad")
        tables = []
        for setting, timings in self._by_setting().items():
            rows = tuple(tuple(_cells(timing)[name] for name in columns) for timing in timings)
            tables.append(
                Table(f"{setting}, {self.dtype}", columns, rows, self.caption(), self.command)
            )
        return tables

    @property
    def figures(self) -> list[Figure]:
        """Return two figures a size, speed and error; a kernel without a clear ratio has its name
        and no bar.
        """
        figures = []
        for setting, timings in self._by_setting().items():
            names = tuple(short_name(t.kernel) for t in timings)
            ratios = [
                (1.0,) * 3 if t.kernel == BASELINE else t.ratio or (math.nan,) * 3 for t in timings
            ]
            low, middle, high = (tuple(ratio[i] for ratio in ratios) for i in range(3))
            worst = tuple(
                math.nan if t.gradient_error is None else t.gradient_error for t in timings
            )
            speed = Series("speed", names, middle, low, high, "row")
            error = Series("error", names, worst, style="row")
            more = (self.caption(), self.command)
            figures.append(
                Figure(str(setting), "", f"speed over {BASELINE}'s (–: unclear)", (speed,), *more)
            )
            figures.append(Figure(str(setting), "", "gradient error over floor", (error,), *more))
        return figures

    def _by_setting(self) -> dict[Setting, list[Timing]]:
        found: dict[Setting, list[Timing]] = {}
        for timing in self.timings:
            found.setdefault(timing.setting, []).append(timing)
        return found

    def caption(self) -> str:
        """Return what every column means and how it was measured."""
        where = "" if self.threads is None else f", threads: {self.threads}"
        return (
            f"Interleaved rounds: {self.rounds}{where}. fwd, bwd: medians. × {BASELINE}: this"
            f" kernel's speed over {BASELINE}'s; halfulp ×: halfulp's over this kernel's; forward"
            " and backward together, median ± half the distance between the quartiles, and unclear"
            " where these are further apart than the median is from 1 or too few rounds agree"
            " which kernel is faster (sign test, 5 %). gemm: share of the peak, a product of"
            f" {GEMM} × {GEMM} ({self.peak_gflops[1]:.0f} Gflop/s), the roof of all but short"
            " sequences. O, grad: relative error of O, and the worst of dQ, dK and dV, over the"
            " floor's, first key head. The floor is the least for products of operands in this"
            " dtype: a kernel that multiplies in fp32 lies below 1."
        )


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of two or more values, the ends included."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def is_clear(ratios: Sequence[float]) -> bool:
    """Whether the median of the rounds' ratios may be told.

    Their quartiles must be no further apart than the median is from 1, for the ratio and for its
    inverse alike, and so many rounds on the median's side of 1 that fair coins would do it in at
    most 5 % of all cases. Two kernels that are the same seem different by this rule in 1 to 2 % of
    all cases; fewer than 6 rounds are never clear.
    """
    low, middle, high = quartiles(ratios)
    if high - low > abs(middle - 1) or 1 / low - 1 / high > abs(1 / middle - 1):
        return False
    n = len(ratios)
    agree = sum((ratio - 1) * (middle - 1) > 0 for ratio in ratios)
    as_lucky = sum(math.comb(n, k) for k in range(agree, n + 1)) / 2.0**n
    return 2 * as_lucky <= _CHANCE


def short_name(kernel: str) -> str:
    """Return a kernel's name as tables and pictures hold it: of a file its own name, and no more
    than 24 characters.
    """
    name = kernel.replace("\\", "/").rpartition("/")[2]
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _cells(timing: Timing) -> dict[str, str]:
    """A row by its columns' names."""
    return {
        "kernel": short_name(timing.kernel),
        "fwd ms": _milliseconds(timing.forward_ms),
        "bwd ms": _milliseconds(timing.backward_ms),
        f"× {BASELINE}": "1" if timing.kernel == BASELINE else _ratio(timing.ratio),
        _OWN_COLUMN: "1" if timing.kernel == OWN else _ratio(timing.halfulp_ratio),
        "gemm": f"{100 * timing.gemm_share[1]:.0f} %",
        "O": _error(timing.errors.get("out")),
        "grad": _error(timing.gradient_error),
    }


def _error(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _milliseconds(values: Quartiles | None) -> str:
    if values is None:
        return "none"
    return f"{values[1]:.1f}" if values[1] < 1000 else f"{values[1]:.0f}"


def _ratio(values: Quartiles | None) -> str:
    if values is None:
        return "unclear"
    low, middle, high = values
    digits = 2 if middle < 10 else 1
    return f"{middle:.{digits}f} ± {(high - low) / 2:.{digits}f}"
