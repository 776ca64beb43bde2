"""Lines, points and bars: the series of a figure on its axes, and scales that fit them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.legend import in_legend
from halfulp.report.svg import COLORS, INK, plain
from halfulp.report.text import tick_text

_DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1.5)),
    (0, (8, 3)),
    "-",
)
_MARKERS = "osD^vPX"

FigureData = Mapping[str, Any]


def set_scales(axes: Any, figure: FigureData) -> None:
    """Make axes logarithmic where the figure asks for it; powers of two are named as such."""
    numbers = [x for one in figure["series"] for x in one["x"]]
    if not figure["x_log"] or not all(isinstance(x, (int, float)) and x > 0 for x in numbers):
        pass
    elif _powers_of_two(numbers):
        axes.set_xscale("log", base=2)
        ticks = sorted(set(numbers))
        axes.set_xticks(ticks if len(ticks) <= 7 else ticks[::2], minor=False)
        axes.xaxis.set_major_formatter(_plain_ticks())
        axes.xaxis.set_minor_locator(_no_ticks())
    else:
        from matplotlib.ticker import LogLocator

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(_plain_ticks())
        axes.xaxis.set_minor_locator(_no_ticks())
    if figure["y_log"]:
        axes.set_yscale("log", nonpositive="mask")


def short_log_ticks(axis: Any, low: float, high: float) -> None:
    """Within a decade or so, numbers between the powers of ten are named as well, and all of them
    briefly: 3.6e-7.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 3, 4, 6)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 3:
        inside = [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    axis.set_ticks(inside)
    axis.set_minor_locator(NullLocator())
    digits = 3  # or as many more as tell the ticks apart
    while digits < 15 and len({tick_text(tick, digits) for tick in inside}) < len(inside):
        digits += 1
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, digits)))


def _powers_of_two(numbers: Sequence[float]) -> bool:
    return all(math.log2(x).is_integer() for x in numbers)


def _plain_ticks() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _number(y: float | None) -> float:
    return math.nan if y is None else float(y)


def draw_series(axes: Any, one: Mapping[str, Any], index: int) -> None:
    """Draw a line, or points, and its range; the index gives color, dashes and marker."""
    color, label = COLORS[index % len(COLORS)], plain(in_legend(one["label"]))
    y = [_number(value) for value in one["y"]]
    if one["low"] is not None and one["high"] is not None:
        low, high = ([_number(value) for value in one[side]] for side in ("low", "high"))
        if one["style"] == "points":
            below, above = _distances(y, low, high)
            axes.errorbar(
                one["x"], y, yerr=(below, above), fmt="none", ecolor=color, elinewidth=1, capsize=2
            )
        else:
            axes.fill_between(one["x"], low, high, color=color, alpha=0.18, linewidth=0)
    marked: dict[str, Any] = {"marker": _MARKERS[index % 7], "color": color, "label": label}
    if one["style"] == "points":
        axes.plot(one["x"], y, linestyle="none", markersize=5, **marked)
    else:
        # marks of many points would hide the line
        if len(y) > 12:
            marked["marker"] = None
        dashes = _DASHES[index % len(_DASHES)]
        axes.plot(one["x"], y, linestyle=dashes, markersize=4, zorder=3 - index / 100, **marked)


def _distances(
    y: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[list[float], list[float]]:
    below = [max(0.0, b - a) for a, b in zip(low, y, strict=True)]
    above = [max(0.0, b - a) for a, b in zip(y, high, strict=True)]
    return below, above


def draw_bars(axes: Any, figure: FigureData) -> None:
    """Grouped bars over names with a thin line from low to high; points on a logarithmic axis,
    which has no zero.
    """
    series = figure["series"]
    names = list(dict.fromkeys(str(x) for one in series for x in one["x"]))
    width = 0.8 / len(series)
    if figure["y_log"]:
        axes.set_yscale("log", nonpositive="mask")
    for i, one in enumerate(series):
        at = [names.index(str(x)) + (i - (len(series) - 1) / 2) * width for x in one["x"]]
        y = [_number(value) for value in one["y"]]
        if figure["y_log"]:
            draw_series(axes, {**one, "x": at, "style": "points"}, i)
            continue
        error = None
        if one["low"] is not None and one["high"] is not None:
            error = _distances(
                y, [_number(v) for v in one["low"]], [_number(v) for v in one["high"]]
            )
        style = {"ecolor": INK, "elinewidth": 0.8}
        label = plain(in_legend(one["label"]))
        axes.bar(
            at,
            y,
            width * 0.92,
            color=COLORS[i % len(COLORS)],
            label=label,
            yerr=error,
            error_kw=style,
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
