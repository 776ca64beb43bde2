"""Tables on a terminal: no figure is cut, however narrow it is."""

import io

import pytest
from rich.console import Console

from halfulp.report.terminal import print_table

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
