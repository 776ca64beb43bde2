"""Heat maps: the cells that the picture draws say what the numbers said."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from halfulp.report import heatmap
from halfulp.report.heatmap import BLUE, MISSING, ORANGE, WHITE, draw_heat_map, draw_picture
from halfulp.report.html import page
from halfulp.report.ledger import ledger_page
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


def cells(svg: str) -> list[list[tuple[int, ...]]]:
    """The colors of the map's cells, read back from its paths; every cell must be drawn once."""
    group = next(iter(ET.fromstring(svg).iter("g")))
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for path in group.iter("path"):
        color = tuple(bytes.fromhex(path.attrib["fill"].removeprefix("#")))
        shape = path.attrib["d"]
        pieces = re.findall(r"M(\d+) (\d+)h(\d+)v1H(\d+)z", shape)
        assert "".join(f"M{x} {y}h{n}v1H{x}z" for x, y, n, _ in pieces) == shape
        for x, y, n, _ in pieces:
            for column in range(int(x), int(x) + int(n)):
                assert (int(y), column) not in found
                found[int(y), column] = color
    rows, columns = (1 + max(place[i] for place in found) for i in (0, 1))
    return [[found[row, column] for column in range(columns)] for row in range(rows)]


def test_cells_have_the_colors_of_their_numbers() -> None:
    assert cells(draw_heat_map(figure())) == [[BLUE, WHITE, ORANGE], [MISSING, ORANGE, BLUE]]
    halfway = cells(draw_heat_map(figure(values=[[0.5]])))[0][0]
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
    monkeypatch.setattr(
        heatmap, "draw", lambda curves: f"<svg><title>{curves['title']}</title></svg>"
    )
    assert draw_picture({"title": "curves"}) == "<svg><title>curves</title></svg>"
    block = {
        "kind": "figures",
        "figures": [figure(), {"title": "curves", "caption": "c", "command": ""}],
    }
    text = page("t", "l", [{"heading": "h", "blocks": [block]}])
    assert text.count("<path") > 3
    assert problems(text) == []
    assert "<svg><title>curves</title></svg>" in text


def test_the_ledger_shows_the_pictures_of_the_claims_that_have_some() -> None:
    plain = {
        "id": "A9",
        "statement": "alike",
        "paper": "",
        "measured": "m",
        "rule": "r",
        "history": "",
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
