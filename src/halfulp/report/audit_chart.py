"""An audit as a picture: the worst error on every probe input, over the stock recipe's and over the
floor's, beside the bounds that the verdict goes by.

A dot's shape is the verdict on its probe, so that one sees which inputs make the verdict and by how
much; the line to its left ends at what the error is at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.svg import INK, WIDTH, plain, settings, wrapped, write_svg
from halfulp.report.text import times_text

_MARKS = {"sound": ("o", "#009E73"), "stock": ("D", "#E69F00"), "defect": ("X", "#D55E00")}
_ROW = 0.2  # inches
_HEAD, _FOOT = 0.68, 0.3  # inches
_LEFT, _GAP, _RIGHT = 0.345, 0.035, 0.985  # of the picture
_NAME = 23  # characters of a probe's name on one line
_PANELS = (("times_stock", "stock_at_least", "stock"), ("times_floor", "floor_at_least", "floor"))


def draw_audit(figure: Mapping[str, Any]) -> str:
    """Return the inline SVG of an audit's errors.

    Args:
        figure: {"kind": "audit", "title", "rows", "bounds", "caption", "command"}; a row is
            {"probe", "grade", "figure", "times_stock", "stock_at_least", "times_floor",
            "floor_at_least"}, None where a number is missing; bounds are {"stock", "floor"}, or
            None where the file does not say them.

    Raises:
        ValueError: there are no rows.
    """
    rows, bounds = figure["rows"], figure["bounds"] or {}
    if not rows:
        raise ValueError(f"rows of {figure['title']!r}: accepted is at least one probe")
    import matplotlib
    from matplotlib.figure import Figure

    names = [plain(wrapped(row["probe"], _NAME)) for row in rows]
    lines = [name.count("\n") + 1 for name in names]
    at = [sum(lines[:i]) + (lines[i] - 1) / 2 for i in range(len(rows))]
    total = _HEAD + _FOOT + _ROW * sum(lines)
    wide = (_RIGHT - _LEFT - _GAP) / 2
    with matplotlib.rc_context(settings()):
        canvas = Figure(figsize=(WIDTH, total))
        for i, (key, lower, against) in enumerate(_PANELS):
            left = _LEFT + i * (wide + _GAP)
            axes = canvas.add_axes((left, _FOOT / total, wide, 1 - (_HEAD + _FOOT) / total))
            known = [row[key] for row in rows if row[key] is not None and 0 < row[key] < math.inf]
            top = max([3.0, 1.3 * bounds.get(against, 1.0), *known])
            _scale(axes, min([0.7, *known]) / 1.25, 1.6 * top)
            _draw_rows(axes, [(row["grade"], row[key], row[lower]) for row in rows], at, 1.3 * top)
            _bound(axes, bounds.get(against), against)
            axes.set_ylim(sum(lines) - 0.4, -0.6)
            axes.set_yticks(at, names if i == 0 else [""] * len(at))
            axes.tick_params(axis="y", labelsize=8.5)
        _legend(canvas, {row["grade"] for row in rows})
        return write_svg(canvas, str(figure["title"]), _said(rows), inline=True)


def _draw_rows(
    axes: Any,
    rows: Sequence[tuple[str, float | None, float | None]],
    at: Sequence[float],
    beyond: float,
) -> None:
    """Draw (grade, error, least error) a row; an error that is not finite stands at `beyond`."""
    for grade, (marker, color) in _MARKS.items():
        shown = [
            (min(error, beyond), least, y)
            for (own, error, least), y in zip(rows, at, strict=True)
            if own == grade and error is not None
        ]
        ranges = [(least, error, y) for error, least, y in shown if least and least < error]
        if ranges:
            low, high, rows_at = zip(*ranges, strict=True)
            axes.hlines(rows_at, low, high, color=color, linewidth=1.4, alpha=0.7, zorder=3)
        if shown:
            errors, _, rows_at = zip(*shown, strict=True)
            style = {"marker": marker, "color": color, "markersize": 5.5, "linestyle": "none"}
            axes.plot(errors, rows_at, zorder=4, clip_on=False, **style)
    for (grade, error, _), y in zip(rows, at, strict=True):
        if error is None:
            text = "not finite, or leans" if grade == "defect" else "–"
            axes.text(0.03, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)


def _scale(axes: Any, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = math.log10(high / low)
    digits = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 2.2 else (1,)
    step = max(1, math.ceil(decades / 4))
    ticks = [digit * 10.0**power for power in range(-12, 16, step) for digit in digits]
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="x", labelsize=8.5)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def _bound(axes: Any, bound: float | None, against: str) -> None:
    if bound is not None:
        axes.axvspan(axes.get_xlim()[0], bound, color="#009E73", alpha=0.1, linewidth=0, zorder=0)
        axes.axvline(bound, color=INK, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
    place = {"transform": axes.transAxes, "va": "bottom"}
    axes.text(0, 1 + 0.2 / _height(axes), f"× {against}", fontsize=9.5, fontweight="bold", **place)
    if bound is not None:
        meaning = "a defect beyond" if against == "stock" else "sound up to"
        axes.text(0, 1 + 0.04 / _height(axes), f"{meaning} {bound:g}", fontsize=8.5, **place)


def _height(axes: Any) -> float:
    """Inches of the axes."""
    return float(axes.get_position().height * axes.get_figure().get_size_inches()[1])


def _legend(canvas: Any, grades: set[str]) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = [
        Line2D([], [], marker=marker, color=color, linestyle="none", markersize=5.5, label=grade)
        for grade, (marker, color) in _MARKS.items()
        if grade in grades
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.4, alpha=0.7, label="at least"))
    canvas.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=4,
        frameon=False,
        borderaxespad=0.3,
        borderpad=0,
        fontsize=9,
        columnspacing=1.2,
        handletextpad=0.4,
    )


def _said(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture for those who cannot see it."""
    return " ".join(
        f"{row['probe']}: {row['grade']}, {row['figure']} {times_text(row['times_stock'])} × stock,"
        f" {times_text(row['times_floor'])} × floor."
        for row in rows
    )
