"""Pictures: a figure's plain data becomes a small SVG that reads on a phone, on paper and in dark
mode.

A picture is drawn about as wide as a phone, so that its text stays legible wherever it is shown and
a page sets several side by side. Colors are Okabe and Ito's, told apart by every kind of color
vision; each line is also named at its own end and dashed in its own way, so that nothing depends on
color. The same data gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from halfulp.report.curves import FigureData, draw_bars, draw_series, set_scales, short_log_ticks
from halfulp.report.legend import (
    end_room,
    fits_end_labels,
    legend_above,
    legend_height,
    name_ends,
)
from halfulp.report.rows import draw_rows, is_rows
from halfulp.report.svg import (
    COLORS,
    INK,
    WIDTH,
    from_panel_edge,
    panel_width,
    plain,
    settings,
    write_png,
    write_svg,
)
from halfulp.report.text import FORBIDDEN, number_text, tick_text

Written = TypeVar("Written", str, bytes)
HEIGHT = 3.3  # inches
_LEFT, _BOTTOM, _TOP = 0.135, 0.155, 0.885  # of a panel: where the axes stand


def draw(figure: FigureData, *, inline: bool = True) -> str:
    """Return the SVG text of one figure.

    Args:
        figure: {"title", "x_label", "y_label", "x_log", "y_log", "series", "caption", "command"}; a
            series is {"label", "x", "y", "low", "high", "style"} with style "line", "points", "bar"
            or, alone, "row" and None for a missing number. Title, caption and command are not part
            of the picture, except as its accessible name.
        inline: for a page, in whose text and grid colors it is then drawn; else a file with a white
            ground.

    Raises:
        ValueError: there is no series, a style is unknown, or rows are not the only series.
    """
    return draw_panels([figure], columns=1, inline=inline)


def draw_panels(figures: Sequence[FigureData], *, columns: int = 2, inline: bool = False) -> str:
    """Return one SVG of several figures in a grid, each under its title where there is more than
    one.

    Raises:
        ValueError: there are no figures, or one cannot be drawn (see `draw`).
    """
    return _finished(figures, columns, partial(write_svg, inline=inline))


def draw_png(figure: FigureData) -> bytes:
    """Return the PNG of one figure on a white ground; see `draw`."""
    return _finished([figure], 1, lambda canvas, _title, _said: write_png(canvas))


def _finished(
    figures: Sequence[FigureData], columns: int, finish: Callable[[Any, str, str], Written]
) -> Written:
    """Draw figures in a grid, and return what becomes of the canvas, its title and its words."""
    if not figures:
        raise ValueError("figures of length 0: accepted is at least one")
    figures = [_writable(figure) for figure in figures]
    for figure in figures:
        _check(figure)
    import matplotlib
    from matplotlib.figure import Figure

    rows = math.ceil(len(figures) / columns)
    height = HEIGHT + max(legend_height(figure["series"]) for figure in figures)
    with matplotlib.rc_context(settings()):
        canvas = Figure(figsize=(WIDTH * columns, height * rows))
        for i, figure in enumerate(figures):
            axes = canvas.add_subplot(rows, columns, i + 1)
            _place(axes, divmod(i, columns), height, end_room(figure["series"]))
            _draw_axes(axes, figure, titled=len(figures) > 1)
        title = " · ".join(str(figure["title"]) for figure in figures)
        said = " ".join(_said(figure) for figure in figures)
        return finish(canvas, title, said)


def _writable(value: Any) -> Any:
    """A figure's data without characters that no page or font has."""
    if isinstance(value, str):
        return FORBIDDEN.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {key: _writable(inner) for key, inner in value.items()}
    return [_writable(inner) for inner in value] if isinstance(value, list | tuple) else value


def _said(figure: FigureData) -> str:
    """The figure for those who cannot see it: where every series begins and ends, and its range."""
    parts = []
    for one in figure["series"]:
        known = [(x, y) for x, y in zip(one["x"], one["y"], strict=True) if y is not None]
        if known and one["style"] in ("bar", "row"):
            values = ", ".join(f"{x} {number_text(y)}" for x, y in known)
            parts.append(f"{one['label']}: {values}.")
        elif known:
            (first, begin), (last, end) = known[0], known[-1]
            low, high = (number_text(edge([y for _, y in known])) for edge in (min, max))
            parts.append(
                f"{one['label']}: {number_text(begin)} at {first}, {number_text(end)} at {last};"
                f" between {low} and {high}."
            )
    return " ".join([f"{figure['y_label']} over {figure['x_label']}.", *parts])


def _check(figure: FigureData) -> None:
    if not figure["series"]:
        raise ValueError(f"figure {figure['title']!r} without series: accepted is at least one")
    for series in figure["series"]:
        if series["style"] not in ("line", "points", "bar", "row"):
            raise ValueError(f"style={series['style']!r}: accepted are line, points, bar, row")
    if len(figure["series"]) > 1 and any(one["style"] == "row" for one in figure["series"]):
        raise ValueError(
            f"figure {figure['title']!r} with rows and more: accepted is one series of rows"
        )


def _place(axes: Any, cell: tuple[int, int], height: float, room: float) -> None:
    """Fixed margins, so that panels align and the names at the right fit; `height` of a panel in
    inches.
    """
    width, total = axes.get_figure().get_size_inches()
    row, column = cell
    bottom = total - (row + 1) * height + _BOTTOM * HEIGHT
    place = (
        (column + _LEFT) * WIDTH,
        bottom,
        (1 - room - _LEFT) * WIDTH,
        (_TOP - _BOTTOM) * HEIGHT,
    )
    # left, bottom, width and height, as shares of the picture's width or height in turn
    axes.set_position([part / (total if i % 2 else width) for i, part in enumerate(place)])


def _draw_axes(axes: Any, figure: FigureData, *, titled: bool) -> None:
    series = figure["series"]
    bars = any(one["style"] == "bar" for one in series)
    if is_rows(series):
        draw_rows(axes, series[0], panel=panel_width(axes), color=COLORS[1], ink=INK)
    elif bars:
        draw_bars(axes, figure)
    else:
        set_scales(axes, figure)
        for i, one in enumerate(series):
            draw_series(axes, one, i)
    if fits_end_labels(series):
        name_ends(axes, series)
    elif len(series) > 1:
        legend_above(axes, series)
    _label_axes(axes, figure, titled=titled)


def _label_axes(axes: Any, figure: FigureData, *, titled: bool) -> None:
    """Say what y is above the axis rather than along it: read without turning the head, and no
    width is lost.
    """
    axes.set_xlabel(plain(figure["x_label"]))
    text = f"{figure['title']}: {figure['y_label']}" if titled else figure["y_label"]
    weight = "bold" if titled else "normal"
    axes.text(
        0,
        1.045,
        plain(text),
        transform=from_panel_edge(axes),
        ha="left",
        va="bottom",
        fontweight=weight,
    )
    from matplotlib.ticker import MaxNLocator

    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        # on so short an axis stand one power of ten or two, too few to read it by
        if axis.get_scale() == "log" and axis.get_transform().base == 10 and high < 30 * low:
            short_log_ticks(axis, low, high)
    if axes.get_yscale() == "linear" and not is_rows(figure["series"]):
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if max(map(abs, axes.get_ylim())) < 1e-2:  # a power above the axis would cover its name
            axes.yaxis.set_major_formatter(lambda y, _: tick_text(y))
    if axes.get_xscale() == "linear" and not any(
        one["style"] in ("bar", "row") for one in figure["series"]
    ):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
