"""Heat maps: a table of numbers as colors, for the page and its two color schemes.

The cells are one small PNG inside the SVG, a few kilobytes where thousands of rectangles would be hundreds. The scale
runs from blue over white to orange, which every kind of color vision tells apart; its ends are written beside the bar.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from halfulp.report.figures import draw

BLUE, WHITE, ORANGE, MISSING = (0, 114, 178), (250, 250, 248), (213, 94, 0), (150, 150, 150)
_SIDE, _LEFT, _TOP = 236, 46, 8  # points: the map's longer side, and where it stands
_STEPS = 64  # of the color bar


def draw_picture(figure: Mapping[str, Any]) -> str:
    """Return the inline SVG of a figure or, where its "kind" says so, of a heat map.

    Raises:
        ValueError: it cannot be drawn; see `draw` and `draw_heat_map`.
    """
    return draw_heat_map(figure) if figure.get("kind") == "heat map" else draw(figure)


def draw_heat_map(figure: Mapping[str, Any]) -> str:
    """Return the inline SVG of a heat map.

    Args:
        figure: {"kind": "heat map", "title", "x_label", "y_label", "values", "low", "high", "caption", "command"};
            values are rows of equal length, the first on top, None where there is no number; what lies outside low to
            high has the color of that end. A title that says more than the axes is the page's, not the picture's.

    Raises:
        ValueError: there are no values, rows differ in length, or low is not below high.
    """
    values, low, high = figure["values"], figure["low"], figure["high"]
    columns = len(values[0]) if values else 0
    if not columns or any(len(row) != columns for row in values):
        raise ValueError(
            f"values of heat map {figure['title']!r}: accepted are rows of one length, at least one number"
        )
    if not low < high:
        raise ValueError(f"low={low}, high={high}: accepted is low below high")
    pixels = [[_color(value, low, high) for value in row] for row in values]
    scale = _SIDE / max(columns, len(values))
    width, height = columns * scale, len(values) * scale
    bar = [[_color(high - (high - low) * i / (_STEPS - 1), low, high)] for i in range(_STEPS)]
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
    images = _image(pixels, _LEFT, _TOP, width, height) + _image(bar, right + 16, _TOP, 10, height)
    return (
        f'<svg role="img" aria-label="{escape(str(figure["title"]))}" viewBox="0 0 353 {bottom + 40:g}" '
        f'style="font-size:10.5px">{images}{"".join(texts)}</svg>'
    )


def _color(value: float | None, low: float, high: float) -> tuple[int, int, int]:
    """Blue at low, white in the middle, orange at high."""
    if value is None:
        return MISSING
    share = 2 * (min(max(value, low), high) - low) / (high - low) - 1
    end = ORANGE if share > 0 else BLUE
    red, green, blue = (round(w + abs(share) * (e - w)) for w, e in zip(WHITE, end, strict=True))
    return red, green, blue


def _text(x: float, y: float, text: object, anchor: str) -> str:
    said = escape(str(text))
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="currentColor">{said}</text>'


def _image(pixels: Sequence[Sequence[tuple[int, int, int]]], x: float, y: float, width: float, height: float) -> str:
    source = base64.b64encode(_png(pixels)).decode()
    return (
        f'<image x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{source}"/>'
    )


def _png(pixels: Sequence[Sequence[tuple[int, int, int]]]) -> bytes:
    """An 8-bit RGB PNG (ISO/IEC 15948), every row unfiltered."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(channel for pixel in row for channel in pixel) for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
