"""Heat maps: a table of numbers as colors, for the page and its two color schemes.

All cells of one color are one path, so that thousands of them stay small. The scale runs from blue
over white to orange, which every kind of color vision tells apart; its ends are written beside the
bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from halfulp.report.figures import draw

BLUE, WHITE, ORANGE, MISSING = (0, 114, 178), (250, 250, 248), (213, 94, 0), (150, 150, 150)
_SIDE, _LEFT, _TOP = 236, 46, 8  # points: the map's longer side, and where it stands
_LEVELS = 16  # of color on either side of white


def draw_picture(figure: Mapping[str, Any]) -> str:
    """Return the inline SVG of a figure or, where its "kind" says so, of a heat map.

    Raises:
        ValueError: it cannot be drawn; see `draw` and `draw_heat_map`.
    """
    return draw_heat_map(figure) if figure.get("kind") == "heat map" else draw(figure)


def draw_heat_map(figure: Mapping[str, Any]) -> str:
    """Return the inline SVG of a heat map.

    Args:
        figure: {"kind": "heat map", "title", "x_label", "y_label", "values", "low", "high",
            "caption", "command"}; values are rows of equal length, the first on top, None where
            there is no number; what lies outside low to high has the color of that end. A title
            that says more than the axes is the page's, not the picture's.

    Raises:
        ValueError: there are no values, rows differ in length, or low is not below high.
    """
    values, low, high = figure["values"], figure["low"], figure["high"]
    columns = len(values[0]) if values else 0
    if not columns or any(len(row) != columns for row in values):
        raise ValueError(
            f"values of heat map {figure['title']!r}: accepted are rows of one length, at least one"
            " number"
        )
    if not low < high:
        raise ValueError(f"low={low}, high={high}: accepted is low below high")
    levels = [[_level(value, low, high) for value in row] for row in values]
    scale = _SIDE / max(columns, len(values))
    width, height = columns * scale, len(values) * scale
    bar = [[level] for level in range(_LEVELS, -_LEVELS - 1, -1)]
    right, bottom = _LEFT + width, _TOP + height
    middle_x, middle_y = _LEFT + width / 2, _TOP + height / 2
    texts = (
        _text(middle_x, bottom + 30, figure["x_label"], "middle"),
        f'<g transform="rotate(-90 {_LEFT - 34:g} {middle_y:g})">'
        f"{_text(_LEFT - 34, middle_y, figure['y_label'], 'middle')}</g>",
        _text(_LEFT, bottom + 13, "0", "middle"),
        _text(right, bottom + 13, f"{columns - 1}", "middle"),
        _text(_LEFT - 6, _TOP + 9, "0", "end"),
        _text(_LEFT - 6, bottom, f"{len(values) - 1}", "end"),
        _text(right + 32, _TOP + 9, f"{high:g}", "start"),
        _text(right + 32, bottom, f"{low:g}".replace("-", "−"), "start"),
    )
    cells = _cells(levels, _LEFT, _TOP, width, height) + _cells(bar, right + 16, _TOP, 10, height)
    return (
        f'<svg role="img" aria-label="{escape(str(figure["title"]))}" viewBox="0 0 353'
        f' {bottom + 40:g}" style="font-size:10.5px">{cells}{"".join(texts)}</svg>'
    )


def _level(value: float | None, low: float, high: float) -> int | None:
    """How far from the middle, in steps of color: −_LEVELS at low, _LEVELS at high."""
    if value is None:
        return None
    return round(_LEVELS * (2 * (min(max(value, low), high) - low) / (high - low) - 1))


def _color(level: int | None) -> str:
    """Blue at the lowest level, white in the middle, orange at the highest."""
    share = (level or 0) / _LEVELS
    end = ORANGE if share > 0 else BLUE
    mixed = (
        MISSING
        if level is None
        else [round(w + abs(share) * (e - w)) for w, e in zip(WHITE, end, strict=True)]
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _text(x: float, y: float, text: object, anchor: str) -> str:
    said = escape(str(text))
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="currentColor">{said}</text>'


def _cells(
    levels: Sequence[Sequence[int | None]], x: float, y: float, width: float, height: float
) -> str:
    """Cells as paths in units of a cell, one a color; neighbors of one color in a row are one
    rectangle.
    """
    paths: dict[str, list[str]] = {}
    for row, line in enumerate(levels):
        start = 0
        for column in range(1, len(line) + 1):
            if column == len(line) or line[column] != line[start]:
                paths.setdefault(_color(line[start]), []).append(
                    f"M{start} {row}h{column - start}v1H{start}z"
                )
                start = column
    drawn = "".join(
        f'<path fill="{color}" d="{"".join(parts)}"/>' for color, parts in sorted(paths.items())
    )
    scale = f"scale({width / len(levels[0]):.4g} {height / len(levels):.4g})"
    return f'<g transform="translate({x:g} {y:g}) {scale}" shape-rendering="crispEdges">{drawn}</g>'
