"""Heat maps: the cells that the picture draws say what the numbers said."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from PIL import Image

from halfulp.report import heatmap
from halfulp.report.heatmap import BLUE, MISSING, ORANGE, WHITE, draw_heat_map, draw_picture
from halfulp.report.html import page
from halfulp.report.ledger_page import ledger_page
from tests.report.markup import problems


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


def cells(svg: str) -> list[list[str]]:
    """The colors of the map's cells, read back from its picture, which has a pixel a cell."""
    (address,) = re.findall(r'href="data:image/png;base64,([^"]+)"', svg)[:1]
    pixels = Image.open(io.BytesIO(base64.b64decode(address))).convert("RGB")
    wide, high = pixels.size
    return [["#" + bytes(pixels.getpixel((x, y))).hex() for x in range(wide)] for y in range(high)]


def alike(color: str, other: str) -> bool:
    """Whether two colors are equal to a level of a channel, which is how a color map rounds."""
    channels = zip(bytes.fromhex(color[1:]), bytes.fromhex(other[1:]), strict=True)
    return all(abs(one - two) <= 1 for one, two in channels)


def test_cells_have_the_colors_of_their_numbers() -> None:
    found = cells(draw_heat_map(figure()))
    wanted = [[BLUE, WHITE, ORANGE], [MISSING, ORANGE, BLUE]]
    assert [len(row) for row in found] == [3, 3]
    rows = zip(found, wanted, strict=True)
    assert all(alike(*pair) for row in rows for pair in zip(*row, strict=True))
    (halfway,) = cells(draw_heat_map(figure(values=[[0.5]])))[0]
    assert alike(halfway, "#e8ac7c")  # the mean of white and orange


def test_the_picture_is_whole_escaped_and_the_same_every_time() -> None:
    svg = draw_heat_map(figure())
    assert svg == draw_heat_map(figure())
    root = ET.fromstring(svg)
    assert root.get("aria-label") == "A <map>"
    shown = [text.text for text in root.iter() if text.tag.endswith("text")]
    assert shown.count("key & query") == 1
    assert {"1", "−1"} <= set(shown), "the ends of the scale"
    assert "from -5 to 5" in "".join(root.itertext())
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
    monkeypatch.setattr(
        heatmap, "draw", lambda curves: f"<svg><desc>{curves['title']}</desc></svg>"
    )
    assert draw_picture({"title": "curves"}) == "<svg><desc>curves</desc></svg>"
    block = {
        "kind": "figures",
        "figures": [figure(), {"title": "curves", "caption": "c", "command": ""}],
    }
    text = page("t", "l", [{"heading": "h", "blocks": [block]}])
    assert text.count("<image") >= 1
    assert problems(text) == []
    assert "<svg><desc>curves</desc></svg>" in text


def test_the_ledger_shows_the_pictures_of_the_claims_that_have_some() -> None:
    plain = {
        "id": "A9",
        "statement": "alike",
        "paper": "",
        "measured": "m",
        "rule": "r",
        "history": "",
        "estimates": "share 1 [0.29, 1] (n = 3)",
        "source": "papers",
        "verdict": "reproduced",
    }
    plain |= {"command": "halfulp claims A9", "seconds": 1.0}
    without = ledger_page([plain | {"pictures": []}], "halfulp claims")
    assert ledger_page([plain], "halfulp claims") == without
    assert "<svg" not in without
    shown = ledger_page([plain | {"pictures": [figure()]}], "halfulp claims")
    assert "A9: alike" in shown
    assert shown.count("<svg") == 1
