"""Which curve is which: a name at each line's own end where there is room, else a legend above."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.svg import COLORS, from_panel_edge, plain, wrapped

_LEGEND_LINE = 0.2  # inches
_LEGEND_CHARACTERS = 52  # of a name in a legend of one column, on one line
_CHARACTER = 0.0152  # of a panel's width, for names at the ends of lines
_LONGEST_END_LABEL = 22  # characters; a longer name would leave too little for the data
_MOST_END_LABELS = 7


def end_room(series: Sequence[Mapping[str, Any]]) -> float:
    """What names at the ends of lines need of a panel's width; a small margin where there are
    none.
    """
    if not fits_end_labels(series):
        return 0.04  # half of "12000" at the last tick
    return 0.06 + _CHARACTER * max(len(str(one["label"])) for one in series)


def _legend_columns(series: Sequence[Mapping[str, Any]]) -> int:
    return 2 if max(len(str(one["label"])) for one in series) <= _LONGEST_END_LABEL else 1


def legend_height(series: Sequence[Mapping[str, Any]]) -> float:
    """Inches that a legend above the axes adds to a panel; none where names stand at the ends of
    lines.
    """
    if fits_end_labels(series) or len(series) < 2:
        return 0.0
    if (columns := _legend_columns(series)) > 1:
        return _LEGEND_LINE * math.ceil(len(series) / columns)
    return _LEGEND_LINE * sum(in_legend(one["label"]).count("\n") + 1 for one in series)


def in_legend(label: object) -> str:
    """A name as a legend has it: a long one on several lines."""
    return wrapped(label, _LEGEND_CHARACTERS)


def fits_end_labels(series: Sequence[Mapping[str, Any]]) -> bool:
    """Whether names stand at the ends of lines: few lines, short names."""
    longest = max((len(str(one["label"])) for one in series), default=0)
    several = 1 < len(series) <= _MOST_END_LABELS
    return (
        several and longest <= _LONGEST_END_LABEL and all(one["style"] == "line" for one in series)
    )


def name_ends(axes: Any, series: Sequence[Mapping[str, Any]]) -> None:
    """Name each line at its right end, moved apart where the ends are close, with a thread to its
    line.
    """
    axes.set_xlim(axes.get_xlim())  # fixed before heights are read off and threads are drawn
    axes.set_ylim(axes.get_ylim())
    ends = [end for i, one in enumerate(series) if (end := _last(axes, one, i)) is not None]
    heights = _apart([end[2] for end in ends], gap=0.078)
    for (index, x, y), height in zip(ends, heights, strict=True):
        color = COLORS[index % len(COLORS)]
        axes.plot(
            [x, 1.025, 1.06],
            [y, height, height],
            transform=axes.transAxes,
            clip_on=False,
            color=color,
            linewidth=0.8,
        )
        label = plain(series[index]["label"])
        axes.text(
            1.075, height, label, transform=axes.transAxes, va="center", ha="left", fontsize=9.5
        )


def _last(axes: Any, one: Mapping[str, Any], index: int) -> tuple[int, float, float] | None:
    """Index and the last drawn point of a line, in axes coordinates."""
    log_x, log_y = axes.get_xscale() == "log", axes.get_yscale() == "log"
    for x, y in zip(reversed(one["x"]), reversed(one["y"]), strict=True):
        if y is None or not math.isfinite(y) or (log_y and y <= 0) or (log_x and x <= 0):
            continue
        left, height = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        return index, float(left), float(height)
    return None


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions near the wanted ones, in the same order, at least `gap` apart and inside 0 to 1 if
    there is room.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], placed[-1] + gap) if placed else max(wanted[i], 0.0))
    # what moving apart has pushed beyond the top is pushed back down from there
    overflow = placed[-1] - 1.0 if placed else 0.0
    if overflow > 0:
        ceiling = 1.0
        for j in range(len(placed) - 1, -1, -1):
            placed[j] = min(placed[j], ceiling)
            ceiling = placed[j] - gap
    result = [0.0] * len(wanted)
    for j, i in enumerate(order):
        result[i] = placed[j]
    return result


def legend_above(axes: Any, series: Sequence[Mapping[str, Any]]) -> None:
    """A legend outside the axes, so that it never covers data."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.145),
        bbox_transform=from_panel_edge(axes),
        ncols=_legend_columns(series),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        fontsize=9.5,
        columnspacing=1.2,
    )
