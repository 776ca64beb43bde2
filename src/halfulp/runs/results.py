"""What an experiment hands to whoever draws or prints it: plain data that turns into JSON and
nothing else.

Experiments compute and reports render; between them go figures and tables in the dictionary form of
this file, so that a picture can be drawn again from a file years later, without the code that
measured it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

Style: TypeAlias = Literal["line", "points", "bar", "row"]
Cell: TypeAlias = str | int | float | None
Progress: TypeAlias = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and what is being worked on."""


def plain_data(value: Any) -> Any:
    """Return a value as JSON has it: a dataclass by its fields, a number that is not finite as
    None.
    """
    if isinstance(value, Plain):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number_of(plain: float | None) -> float:
    """Return a number that `plain_data` wrote; NaN where that is None."""
    return math.nan if plain is None else float(plain)


class Plain:
    """A dataclass whose JSON form is its fields but those that `APART` names, and the properties
    that `BESIDE` names.
    """

    APART: ClassVar[tuple[str, ...]] = ()
    BESIDE: ClassVar[tuple[str, ...]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; numbers that are not finite become None."""
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        names = (*(f.name for f in fields if f.name not in self.APART), *self.BESIDE)
        return {name: plain_data(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Series(Plain):
    """One curve: y over x, with a range per point where there is one."""

    label: str
    x: tuple[float | str, ...]  # numbers, or names for bars and rows
    y: tuple[float, ...]  # the median where a point stands for several seeds
    low: tuple[float, ...] | None = None  # smallest of the seeds
    high: tuple[float, ...] | None = None  # largest of the seeds
    style: Style = "line"

    def __post_init__(self) -> None:
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.x):
                raise ValueError(
                    f"{name} of {len(values)} values: accepted are as many as x has, {len(self.x)}"
                )

    @classmethod
    def over(
        cls,
        label: str,
        x: Sequence[float | str],
        columns: Sequence[Sequence[float]],
        style: Style = "line",
    ) -> Series:
        """Return the median of several values at every x, with their range where there is more than
        one.
        """
        several = any(len(column) > 1 for column in columns)
        low, high = (tuple(map(end, columns)) if several else None for end in (min, max))
        return cls(label, tuple(x), tuple(map(_median, columns)), low, high, style)


@dataclass(frozen=True)
class Figure(Plain):
    """Curves that share their axes, with the command that measures them again."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    caption: str
    command: str
    x_log: bool = False
    y_log: bool = False


@dataclass(frozen=True)
class Table(Plain):
    """Rows of cells under named columns, with the command that measures them again."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str
    command: str

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row of {len(row)} cells: accepted are as many as columns, {len(self.columns)}"
                )


def _median(values: Sequence[float]) -> float:
    # a median sorts, and NaN has no place in an order
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def no_progress(fraction: float, message: str) -> None:
    """Report nothing: the default where a caller draws no bar."""


def part_of(progress: Progress, start: float, end: float, name: str = "") -> Progress:
    """Return the progress of a part of some work, from one fraction of it to another, whose
    messages begin with its name if it has one.
    """
    before = f"{name}: " if name else ""
    return lambda done, message: progress(start + (end - start) * done, before + message)
