"""Heat maps: the picture's own pixels say what the numbers said."""

from __future__ import annotations

import base64
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from typing import Any

import pytest

from halfulp.report import heatmap
from halfulp.report.heatmap import BLUE, MISSING, ORANGE, WHITE, draw_heat_map, draw_picture
from halfulp.report.html import page
from halfulp.report.ledger import ledger_page


def figure(**changes: Any) -> dict[str, Any]:
    plain = {
        "kind": "heat map",
        "title": "A <map>",
        "x_label": "key & query",
        "y_label": "row",
        "values": [[-1.0, 0.0, 1.0], [None, 5.0, -5.0]],
        "low": -1.0,
        "high": 1.0,
        "caption": "what it shows",
        "command": "halfulp claims A9",
    }
    return plain | changes


def pixels(svg: str) -> list[list[tuple[int, ...]]]:
    """The first image's pixels, by a decoder of unfiltered 8-bit RGB."""
    source = re.search(r"data:image/png;base64,([^\"]+)", svg)
    assert source is not None
    data, chunks = base64.b64decode(source[1]), {}
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + size
    width, height, depth, color, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, color) == (8, 2)
    raw = zlib.decompress(chunks[b"IDAT"])
    rows = [raw[i * (3 * width + 1) : (i + 1) * (3 * width + 1)] for i in range(height)]
    assert all(row[0] == 0 for row in rows)
    return [[tuple(row[1 + 3 * j : 4 + 3 * j]) for j in range(width)] for row in rows]


def test_pixels_have_the_colors_of_their_numbers() -> None:
    assert pixels(draw_heat_map(figure())) == [[BLUE, WHITE, ORANGE], [MISSING, ORANGE, BLUE]]
    halfway = pixels(draw_heat_map(figure(values=[[0.5]])))[0][0]
    assert halfway == tuple(round((w + o) / 2) for w, o in zip(WHITE, ORANGE, strict=True))


def test_the_picture_is_whole_escaped_and_the_same_every_time() -> None:
    svg = draw_heat_map(figure())
    assert svg == draw_heat_map(figure())
    root = ET.fromstring(svg)
    assert root.get("aria-label") == "A <map>"
    assert [text.text for text in root.iter("text")].count("key & query") == 1
    assert "http" not in svg


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"values": []}, "at least one number"),
        ({"values": [[]]}, "at least one number"),
        ({"values": [[1.0], [1.0, 2.0]]}, "one length"),
        ({"low": 1.0}, "low below high"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        draw_heat_map(figure(**change))


def test_a_page_draws_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmap, "draw", lambda curves: f"<svg>{curves['title']}</svg>")
    assert draw_picture({"title": "curves"}) == "<svg>curves</svg>"
    block = {"kind": "figures", "figures": [figure(), {"title": "curves", "caption": "c", "command": ""}]}
    text = page("t", "l", [{"heading": "h", "blocks": [block]}])
    assert "data:image/png" in text
    assert "<svg>curves</svg>" in text


def test_the_ledger_shows_the_pictures_of_the_claims_that_have_some() -> None:
    plain = {"id": "A9", "statement": "alike", "paper": "", "measured": "m", "rule": "r", "verdict": "reproduced"}
    plain |= {"command": "halfulp claims A9", "seconds": 1.0}
    without = ledger_page([plain | {"pictures": []}], "halfulp claims")
    assert ledger_page([plain], "halfulp claims") == without
    assert "<svg" not in without
    shown = ledger_page([plain | {"pictures": [figure()]}], "halfulp claims")
    assert "A9: alike" in shown
    assert shown.count("<svg") == 1
