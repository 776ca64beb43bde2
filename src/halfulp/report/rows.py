"""Bars that lie: one row a name, with its range and its value in digits, for many names on a
phone's width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.svg import plain, wrapped
from halfulp.report.text import times_text

_CHARACTER = 0.0165  # of a panel's width, for the names at the left
_MARGIN = 0.03
_BAR = 0.66  # of a row's height
_SMALL = 9.5  # points
_WIDEST_NAMES = 0.45  # of a panel's width
_LONGEST = int((_WIDEST_NAMES - _MARGIN) / _CHARACTER)  # characters of a line of a name


def draw_rows(axes: Any, one: Mapping[str, Any], *, panel: float, color: str, ink: str) -> None:
    """Draw a series of names from top to bottom, a line at 1 where it is among the values, a dash
    for a missing one.

    Args:
        axes: where to draw; its left edge moves to the right until the names fit.
        one: a series' plain data, {"x": names, "y", "low", "high"}.
        panel: width of a panel as a fraction of the picture.
        color: of the bars.
        ink: of ranges, values and the line.
    """
    from matplotlib.ticker import MaxNLocator

    names = [plain(wrapped(name, _LONGEST)) for name in one["x"]]
    longest = max((len(line) for name in names for line in name.split("\n")), default=0)
    _make_room(axes, longest, panel)
    values = [math.nan if y is None else float(y) for y in one["y"]]
    lows, highs = ([*(one[side] or values)] for side in ("low", "high"))
    at = range(len(names))
    axes.barh(at, [0.0 if math.isnan(y) else y for y in values], _BAR, color=color)
    ends = []
    for row, y, low, high in zip(at, values, lows, highs, strict=True):
        if not math.isnan(y) and low is not None and high is not None and high > low:
            axes.plot([low, high], [row, row], color=ink, linewidth=0.8)
        ends.append(0.0 if math.isnan(y) else max(y, y if high is None else float(high)))
    right = max([end for end in ends if math.isfinite(end)], default=0.0) or 1.0
    for row, y, end in zip(at, values, ends, strict=True):
        text = times_text(None if math.isnan(y) else y)
        axes.text(
            min(end, right) + 0.02 * right, row, text, va="center", ha="left", fontsize=_SMALL
        )
    if right >= 1:
        axes.axvline(1.0, color=ink, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0.9)
    axes.set_xlim(0, 1.2 * right)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(at, names)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["bottom"].set_visible(False)


def _make_room(axes: Any, longest: int, panel: float) -> None:
    box = axes.get_position()
    edge = math.floor(box.x0 / panel) * panel
    left = edge + min(_WIDEST_NAMES, _MARGIN + _CHARACTER * longest) * panel
    axes.set_position([left, box.y0, box.x1 - left, box.height])


def is_rows(series: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a figure is one series of rows."""
    return len(series) == 1 and series[0]["style"] == "row"
