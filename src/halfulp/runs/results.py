"""What an experiment hands to whoever draws or prints it: plain data that turns into JSON and
nothing else.

Experiments compute and reports render; between them go figures and tables in the dictionary form of
this file, so that a picture can be drawn again from a file years later, without the code that
measured it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Style: TypeAlias = Literal["line", "points", "bar", "row"]
Cell: TypeAlias = str | int | float | None
Progress: TypeAlias = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and what is being worked on."""


@dataclass(frozen=True)
class Series:
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

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; numbers that are not finite become None."""
        return {
            "label": self.label,
            "x": list(self.x),
            "y": plain_numbers(self.y),
            "low": None if self.low is None else plain_numbers(self.low),
            "high": None if self.high is None else plain_numbers(self.high),
            "style": self.style,
        }


@dataclass(frozen=True)
class Figure:
    """Curves that share their axes, with the command that measures them again."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    caption: str
    command: str
    x_log: bool = False
    y_log: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "x_log": self.x_log,
            "y_log": self.y_log,
            "series": [series.as_dict() for series in self.series],
            "caption": self.caption,
            "command": self.command,
        }


@dataclass(frozen=True)
class Table:
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

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; numbers that are not finite become None."""
        rows = [
            [_plain(cell) if isinstance(cell, float) else cell for cell in row] for row in self.rows
        ]
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": rows,
            "caption": self.caption,
            "command": self.command,
        }


def plain_numbers(values: Sequence[float]) -> list[float | None]:
    """Return the values as JSON has them: what is not finite becomes None."""
    return [_plain(value) for value in values]


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def no_progress(fraction: float, message: str) -> None:
    """Report nothing: the default where a caller draws no bar."""
