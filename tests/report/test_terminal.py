"""Tables on a terminal: no figure is cut, however narrow it is."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from halfulp.report.panels import draw
from halfulp.report.terminal import console, print_act, print_table
from halfulp.report.text import FORBIDDEN, HIDDEN, visible

TABLE = {
    "title": "Speed",
    "columns": ["kernel", "forward ms", "backward ms", "× sdpa", "O"],
    "rows": [
        ["sdpa", 12.5, 1234.0, "1", "1.07"],
        ["halfulp:exact_delta", 3.5, None, "3.21 (3.18–3.26)", "12345.67"],
    ],
    "caption": "nine rounds",
}


def shown(table, width):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_table(table, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_figure_is_cut(width):
    text = shown(TABLE, width)
    for cell in (
        "12.5",
        "1234",
        "1.07",
        "3.21 (3.18–3.26)",
        "12345.67",
        "halfulp:exact_delta",
        "backward ms",
    ):
        assert cell in text
    assert max(map(len, text.splitlines())) <= width


def test_what_fits_is_one_table():
    assert shown(TABLE, 80).count("halfulp:exact_delta") == 1


def test_columns_that_do_not_fit_follow_under_the_first_column():
    lines = shown(TABLE, 40).splitlines()
    assert sum(line.startswith("halfulp:exact_delta") for line in lines) > 1
    assert sum(line.strip() == "Speed" for line in lines) == 1


def test_a_terminal_too_narrow_for_two_columns_wraps_and_loses_nothing():
    text = "".join(shown(TABLE, 20).split())
    assert sum(text.count(digit) for digit in "123456789") >= sum(
        str(cell).count(digit) for row in TABLE["rows"] for cell in row for digit in "123456789"
    )


def test_long_text_wraps():
    text = shown(TABLE | {"columns": ["name", "text"], "rows": [["a", "word " * 40 + "end"]]}, 40)
    assert text.count("word") == 40
    assert "end" in text


HOSTILE = "\x1b[2J\x1b]0;title\x07[red]bold[/red] :smile: \x9b31m \u202etxt\udc80 [/]"


def test_nobodys_text_does_more_than_be_read(capsys):
    """Escapes and markup in a kernel's message once reached the terminal."""
    table = {"title": HOSTILE, "columns": [HOSTILE, "b"], "rows": [[HOSTILE, 1.0]]}
    print_table(table | {"caption": HOSTILE}, console())
    print_act({"number": 1, "title": HOSTILE, "seconds": 1.0, "finding": HOSTILE})
    said = "".join(capsys.readouterr().out.split())
    assert HIDDEN.search(said) is None
    assert said.count("[red]bold[/red]:smile:") >= 5
    assert said.count(r"\x1b[2J\x1b]0;title") >= 5


def test_what_is_shown_is_shown_once():
    assert visible("δ ∞ 日本 e\u0301\n\t") == "δ ∞ 日本 e\u0301\n\t"
    assert visible("\x1b\x9b\u202e\udc80\r") == r"\x1b\x9b\u202e\udc80\r"
    assert visible(visible(HOSTILE)) == visible(HOSTILE)
    assert visible(Path("a\x1bb")) == r"a\x1bb"


def test_a_picture_holds_no_character_that_a_page_may_not():
    """Half of a surrogate pair in a label once ended a page."""
    series = {"label": HOSTILE, "x": [1, 2], "y": [1.0, 2.0], "low": None, "high": None}
    figure = {"title": HOSTILE, "x_label": HOSTILE, "y_label": "y", "x_log": False}
    figure |= {"y_log": False, "caption": "", "command": "", "series": [series | {"style": "line"}]}
    assert FORBIDDEN.search(draw(figure)) is None
