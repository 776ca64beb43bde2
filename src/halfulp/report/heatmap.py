"""Heat maps: a table of numbers as colors, for the page and its two color schemes.

The scale runs from blue over white to orange, which every kind of color vision tells apart; its
ends are written beside the bar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from halfulp.report.audit_chart import draw_audit
from halfulp.report.panels import Written, draw, draw_png
from halfulp.report.svg import GRID, WIDTH, plain, settings, write_png, write_svg
from halfulp.report.text import number_text

BLUE, WHITE, ORANGE, MISSING = "#0072b2", "#fafaf8", "#d55e00", "#969696"
_SIDE = 3.2  # inches: the map's longer side
_LEFT, _TOP, _BOTTOM = 0.62, 0.1, 0.55  # inches: where it stands
_BAR = (0.2, 0.14)  # inches from the map, and wide


def draw_picture(figure: Mapping[str, Any]) -> str:
    """Return the inline SVG of a figure or of what its "kind" says: a heat map, an audit.

    Raises:
        ValueError: it cannot be drawn; see `draw`, `draw_heat_map` and `draw_audit`.
    """
    kinds = {"heat map": draw_heat_map, "audit": draw_audit}
    return kinds.get(figure.get("kind", ""), draw)(figure)


def picture_files(figure: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return a figure or heat map as an SVG file and as a PNG, on a white ground.

    Raises:
        ValueError: it cannot be drawn; see `draw` and `draw_heat_map`.
    """
    if figure.get("kind") == "heat map":
        return draw_heat_map(figure, inline=False), _finished(
            figure, lambda canvas, _title, _said: write_png(canvas)
        )
    return draw(figure, inline=False), draw_png(figure)


def draw_heat_map(figure: Mapping[str, Any], *, inline: bool = True) -> str:
    """Return the SVG of a heat map, for a page or, not inline, as a file with a white ground.

    Args:
        figure: {"kind": "heat map", "title", "x_label", "y_label", "values", "low", "high",
            "caption", "command"}; values are rows of equal length, the first on top, None where
            there is no number; what lies outside low to high has the color of that end. A title
            that says more than the axes is the page's, not the picture's.

    Raises:
        ValueError: there are no values, rows differ in length, or low is not below high.
    """
    return _finished(figure, partial(write_svg, inline=inline))


def _finished(figure: Mapping[str, Any], finish: Callable[[Any, str, str], Written]) -> Written:
    """Draw a heat map, and return what becomes of the canvas, its title and its words."""
    values, low, high = figure["values"], figure["low"], figure["high"]
    columns = len(values[0]) if values else 0
    if not columns or any(len(row) != columns for row in values):
        raise ValueError(
            f"values of heat map {figure['title']!r}: accepted are rows of one length, at least one"
            " number"
        )
    if not low < high:
        raise ValueError(f"low={low}, high={high}: accepted is low below high")
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    numbers = [[math.nan if value is None else float(value) for value in row] for row in values]
    scale = _SIDE / max(columns, len(values))
    width, height = columns * scale, len(values) * scale
    total = _TOP + height + _BOTTOM
    # an odd number of colors, so that one in the middle is white itself
    scheme = LinearSegmentedColormap.from_list("halfulp", [BLUE, WHITE, ORANGE], N=257)
    colors = scheme.with_extremes(bad=MISSING)
    with matplotlib.rc_context(settings()):
        canvas = Figure(figsize=(WIDTH, total))

        def axes_at(left: float, wide: float) -> Any:
            return canvas.add_axes((left / WIDTH, _BOTTOM / total, wide / WIDTH, height / total))

        axes = axes_at(_LEFT, width)
        drawn = axes.imshow(
            numbers,
            cmap=colors,
            norm=Normalize(low, high, clip=True),
            interpolation="none",
            aspect="auto",
        )
        axes.set_xticks(sorted({0, columns - 1}))
        axes.set_yticks(sorted({0, len(values) - 1}))
        axes.set_xlabel(plain(figure["x_label"]))
        axes.set_ylabel(plain(figure["y_label"]))
        bar = canvas.colorbar(drawn, cax=axes_at(_LEFT + width + _BAR[0], _BAR[1]))
        bar.set_ticks([low, high], labels=[f"{end:g}".replace("-", "−") for end in (low, high)])
        for each in (axes, bar.ax):
            each.grid(visible=False)
            each.tick_params(length=0)
            for spine in each.spines.values():
                spine.set_color(GRID)
        return finish(canvas, str(figure["title"]), _said(figure, numbers))


def _said(figure: Mapping[str, Any], numbers: Sequence[Sequence[float]]) -> str:
    known = [value for row in numbers for value in row if not math.isnan(value)]
    size = f"{len(numbers)} rows ({figure['y_label']}) of {len(numbers[0])} ({figure['x_label']})"
    if not known:
        return f"{size}, no numbers."
    return f"{size}, from {number_text(min(known))} to {number_text(max(known))}."
