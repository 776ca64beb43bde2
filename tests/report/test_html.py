"""Pages: well formed, one file, nothing fetched, nothing unescaped."""

import re

import pytest

from halfulp.report.html import page
from halfulp.report.svg import checked
from halfulp.report.tables import BADGES, laid_out
from halfulp.report.text import (
    cell_text,
    duration_text,
    number_text,
    percent_text,
    power_text,
    relative_text,
    tick_text,
    times_text,
)
from tests.report.markup import Page, problems

EVIL = "<script>alert(1)</script>\"'&<b onload=x>"
FIGURE = {
    "title": EVIL,
    "x_label": EVIL,
    "y_label": EVIL,
    "x_log": False,
    "y_log": False,
    "series": [
        {"label": EVIL, "x": [1, 2], "y": [1.0, 2.0], "low": None, "high": None, "style": "line"}
    ],
    "caption": EVIL,
    "command": EVIL,
}
EVERY_BLOCK = [
    {"kind": "text", "text": EVIL},
    {"kind": "heading", "text": EVIL},
    {"kind": "list", "items": [EVIL, EVIL]},
    {"kind": "facts", "pairs": [(EVIL, EVIL)]},
    {"kind": "code", "text": EVIL, "caption": EVIL},
    {"kind": "command", "command": EVIL},
    {
        "kind": "table",
        "title": EVIL,
        "columns": [EVIL, "verdict"],
        "rows": [[EVIL, EVIL]],
        "caption": EVIL,
        "command": EVIL,
    },
    {"kind": "figures", "figures": [FIGURE, FIGURE | {"caption": "another"}]},
    {"kind": "details", "summary": EVIL, "blocks": [{"kind": "text", "text": EVIL}]},
]


def section(*blocks, heading="One", finding="It holds."):
    return {"heading": heading, "finding": finding, "blocks": blocks}


def test_every_text_is_escaped():
    html = page(
        EVIL, EVIL, [section(*EVERY_BLOCK, heading=EVIL, finding=EVIL)] * 2, meta=EVIL, footer=EVIL
    )
    assert problems(html) == []
    found = Page(html)
    assert found.tags.count("script") == 1, "the page's own"
    assert "b" not in found.tags
    assert found.text.count("<script>alert(1)</script>") >= 2 * len(EVERY_BLOCK)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("<p>open", "never closed"),
        ("<p><b></p></b>", "closes"),
        ("<script>x</script>", "<script> that is not the page's own"),
        ("<script src='https://a.b/c.js'></script>", "src="),
        ("<p aria-describedby='x'>y</p>", "described by"),
        ("<img src='https://a.b/c.png'>", "src="),
        ("<a href='https://a.b'>x</a>", "href="),
        ("<a href='#nowhere'>x</a>", "not there"),
        ("<p onclick='x()'>y</p>", "onclick"),
        ("<p style='background:url(x.png)'>y</p>", "style="),
        ("<style>@import 'x.css';</style>", "fetches"),
        ("<p id='a'></p><p id='a'></p>", "twice"),
        ("<link rel='stylesheet'>", "<link>"),
    ],
)
def test_the_reader_sees_a_planted_fault(body, says):
    assert any(
        says in problem for problem in problems(f"<!DOCTYPE html><html><body>{body}</body></html>")
    )


def test_the_document_names_itself():
    html = page("A title", "What it shows.", [section()], meta="today")
    assert '<html lang="en">' in html
    assert "<title>A title</title>" in html
    assert 'name="viewport" content="width=device-width' in html
    assert '<meta charset="utf-8">' in html
    assert Page(html).tags.count("h1") == 1


def test_the_style_serves_phone_dark_mode_and_print():
    html = page("t", "l", [])
    for part in (
        "max-width: 40rem",
        "prefers-color-scheme: dark",
        "@media print",
        "break-inside: avoid",
    ):
        assert part in html


def test_contents_link_to_every_section_with_its_finding():
    html = page(
        "t", "l", [section(heading="The failure"), section(heading="The failure", finding="Twice.")]
    )
    found = Page(html)
    assert len(found.links) == len(set(found.links)) == 2
    assert found.text.count("Twice.") == 2, "in the contents and in the section"
    assert problems(html) == []


def test_a_single_section_needs_no_contents():
    assert "nav" not in Page(page("t", "l", [section()])).tags


@pytest.mark.parametrize("word", sorted(BADGES))
def test_a_verdict_is_a_badge_with_a_sign(word):
    tone, sign = BADGES[word]
    table = {"kind": "table", "columns": ["what", "verdict"], "rows": [["x", word]]}
    html = page("t", "l", [section(table)])
    assert f'<span class="badge {tone}">{sign} {word}</span>' in html
    assert (
        "span" not in Page(page("t", "l", [section(table | {"columns": ["what", "other"]})])).tags
    )


def test_a_table_is_as_wide_as_its_cells_need():
    """Where a row has no room it becomes a card; a table of few short cells stays one."""
    small = {"columns": ["n", "x"], "rows": [["a", 1.0]]}
    texts = {"columns": ["what", "why"], "rows": [["a" * 30, "b " * 40]]}
    wide = {"columns": list("abcdefgh"), "rows": [["x" * 16] * 8]}
    assert [laid_out(one).stacks for one in (small, texts, wide)] == ["", "phone", "always"]
    assert not laid_out(small).tools
    assert laid_out(small | {"rows": [["a", 1.0]] * 8}).tools


def test_a_cell_leads_to_the_details_of_its_section_then_to_a_section():
    cells = [[{"text": name, "to": name, "note": "below"}] for name in ("One", "Two", "nowhere")]
    table = {"kind": "table", "columns": ["name"], "rows": cells}
    details = {"kind": "details", "summary": "One", "blocks": []}
    html = page("t", "l", [section(table, details, details, heading="A"), section(heading="Two")])
    assert problems(html) == []
    assert Page(html).links[2:] == ["#a-one", "#two"]
    assert Page(html).text.count("below") == 3


def test_long_names_may_break_and_short_ones_do_not():
    html = page(
        "t", "l", [section({"kind": "text", "text": "BF16_PAPER_STABILIZED[out=e8m2] a_b"})]
    )
    assert "BF16_<wbr>PAPER_<wbr>STABILIZED[<wbr>out=<wbr>e8m2] a_b" in html


@pytest.mark.parametrize(
    ("svg", "says"),
    [
        ("<svg><script>x</script></svg>", "<script>"),
        ("<svg><g onload='x'/></svg>", "onload"),
        ("<svg><use href='https://a.b/c.svg#d'/></svg>", "href"),
        ("<svg><image href='c.png'/></svg>", "href"),
        ("<svg><g style='fill: url(https://a.b)'/></svg>", "style"),
        ("<svg><g></svg>", "not well-formed"),
    ],
)
def test_a_picture_that_does_more_than_draw_is_refused(svg, says):
    with pytest.raises(ValueError, match=says):
        checked(svg)


def test_tables_are_tables():
    rows = [
        ["a", 1.5, "short"],
        ["b", None, "a sentence that is long enough to be given some room of its own"],
    ]
    table = {
        "kind": "table",
        "title": "T",
        "columns": ["name", "figure", "note"],
        "rows": rows,
        "command": "halfulp x",
    }
    html = page("t", "l", [section(table)])
    assert html.count('scope="col"') == 3
    assert html.count('scope="row"') == 2
    assert '<td role="cell" data-column="figure" class="number">1.5</td>' in html
    assert '<td role="cell" data-column="figure" class="number">–</td>' in html
    assert '<td role="cell" data-column="note" class="wide">' in html
    assert "Repeat: <code>halfulp x</code>" in html


@pytest.mark.parametrize(
    "texts", [["1.6e-3", "2"], ["+109.0 … +110.0"], ["3 ×", "12%"], ["∞", "−1"]]
)
def test_numbers_stand_flush_right(texts):
    table = {"kind": "table", "columns": ["n", "x"], "rows": [["r", text] for text in texts]}
    assert page("t", "l", [section(table)]).count('class="number"') == 1 + len(texts)


@pytest.mark.parametrize("texts", [["one"], ["1 failed, 1 drifting"], ["NaN at step 1700"], [None]])
def test_words_do_not(texts):
    table = {"kind": "table", "columns": ["n", "x"], "rows": [["r", text] for text in texts]}
    assert 'class="number"' not in page("t", "l", [section(table)])


def test_a_shared_command_and_caption_are_said_once():
    figures = [
        FIGURE | {"title": name, "caption": "same", "command": "halfulp demo"} for name in "abc"
    ]
    text = Page(page("t", "l", [section({"kind": "figures", "figures": figures})])).text
    assert text.count("halfulp demo") == 1
    assert text.count("same") == 1


def test_control_characters_are_replaced():
    html = page("t", "a\x00b\x1bc\ud800d", [])
    assert not re.search(r"[\x00-\x08\x1b]", html)
    assert "a\ufffdb\ufffdc\ufffdd" in html
    html.encode()


def test_an_unknown_block_is_refused():
    with pytest.raises(ValueError, match="kind='video': accepted are text, "):
        page("t", "l", [section({"kind": "video"})])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (3, "3"),
        ("a", "a"),
        (0.0, "0"),
        (1.23456, "1.23"),
        (99999.4, "99999"),
        (123456.0, "1.2e5"),
        (0.00123, "1.2e-3"),
        (-4.5e-9, "-4.5e-9"),
        (float("inf"), "∞"),
        (float("-inf"), "−∞"),
        (float("nan"), "NaN"),
        (0.05, "0.05"),
    ],
)
def test_cells_read_as_people_write(value, text):
    assert cell_text(value) == text


def test_other_numbers():
    assert power_text(0.0016) == "1.6e-3"
    assert power_text(None) == "–"
    assert [times_text(x) for x in (None, 1.0, 1.804, 104.2)] == ["–", "1.00", "1.80", "104"]
    assert [times_text(6e298), relative_text(6e298), relative_text(0.0016)] == ["∞", "∞", "1.6e-3"]
    assert [percent_text(x) for x in (1.0, 0.99999, 0.984, 0.0)] == [
        "100 %",
        "> 99.9 %",
        "98.4 %",
        "0 %",
    ]
    assert [duration_text(x) for x in (0.4, 119.4, 120, 3671)] == [
        "0 s",
        "119 s",
        "2 min 0 s",
        "61 min 11 s",
    ]
    assert number_text(-0.5) == "-0.5"
    assert [tick_text(x) for x in (1.05e-15, 3e-7, 0.006, 2000.0, 3e12)] == [
        "1.05e-15",
        "3e-7",
        "0.006",
        "2e3",
        "3e12",
    ]
