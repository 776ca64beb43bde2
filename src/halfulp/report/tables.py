"""Tables of a page: which cells are numbers, badges or links, and how narrow a screen may be.

A row that does not fit beside its neighbors is set as a card, every cell below its column's name,
so that nothing lies off the screen. How much room a table needs is counted in characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfulp.report.text import cell_text

BADGES: dict[str, tuple[str, str]] = {
    "sound": ("good", "✓"),
    "stock": ("warn", "●"),
    "defect": ("bad", "✗"),
    "forward sound": ("good", "✓"),
    "forward stock": ("warn", "●"),
    "incomplete": ("bad", "!"),
    "error": ("bad", "!"),
    "survived": ("good", "✓"),
    "drifting": ("warn", "●"),
    "bitwise equal": ("good", "✓"),
    "within rounding": ("good", "✓"),
    "beyond rounding": ("bad", "✗"),
    "failed": ("bad", "✗"),
    "reproduced": ("good", "✓"),
    "reproduced at reduced scale": ("good", "✓"),
    "reproduced with altered arithmetic": ("warn", "≈"),
    "not reproduced": ("bad", "✗"),
    "needs a GPU": ("none", "–"),
    "not yet": ("none", "–"),
    "skipped": ("none", "–"),
}
"""Words that a table shows as a badge: its tone and its sign, so that color is never the only
carrier.
"""

STYLES = {"good": "green", "warn": "yellow", "bad": "red", "none": "dim"}
"""Tones on a terminal."""

BADGE_COLUMNS = {"verdict", "outcome"}

_WHOLE = 22  # characters of a cell that stay on one line
_ROOM = 24  # characters that a long text needs to read well
_GAP = 2.5  # characters between columns
# characters that stand beside each other on a phone of 390 points, a tablet and a desk
_PHONE, _TABLET, _DESK = 42, 84, 132
_MANY = 8  # rows from which on sorting and filtering help


def sign_of(word: str) -> str:
    """Return the sign of a word of `BADGES`."""
    return BADGES[word][1]


def style_of(word: str) -> str:
    """Return the color of a word of `BADGES` on a terminal."""
    return STYLES[BADGES[word][0]]


def table_block(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str = "",
    command: str = "",
) -> dict[str, Any]:
    """Return a page's block of a table; a cell is as `laid_out` takes it."""
    table = {"kind": "table", "title": title, "columns": columns, "rows": rows}
    return table | {"caption": caption, "command": command}


@dataclass(frozen=True)
class Cell:
    """A cell as the page shows it."""

    text: str
    to: str = ""  # the section or details it leads to
    note: str = ""  # smaller, below the text
    tone: str = ""  # of a badge
    sign: str = ""


@dataclass(frozen=True)
class Column:
    """A column's name and kind: "number" flush right, "short" on one line, "wide" with room."""

    name: str
    kind: str


@dataclass(frozen=True)
class Layout:
    """A table as the page shows it."""

    columns: list[Column]
    rows: list[list[Cell]]
    stacks: str  # where rows become cards: nowhere, on a "phone", a "tablet" too, or "always"
    tools: bool  # whether sorting and filtering help


def laid_out(table: Mapping[str, Any]) -> Layout:
    """Return the layout of a table {"columns", "rows"}; a cell is a value, or a mapping with
    "text" and perhaps "to", a name it leads to, and "note".
    """
    names = [str(column) for column in table["columns"]]
    rows = [[_cell(value, names[i]) for i, value in enumerate(row)] for row in table["rows"]]
    cells = [[row[i] for row in rows] for i in range(len(names))]
    columns = [
        Column(name, _kind(one, table["rows"], i))
        for i, (name, one) in enumerate(zip(names, cells, strict=True))
    ]
    need = sum(_need(column, one) + _GAP for column, one in zip(columns, cells, strict=True))
    widths = ((_PHONE, ""), (_TABLET, "phone"), (_DESK, "tablet"))
    stacks = next((where for width, where in widths if need <= width), "always")
    return Layout(columns, rows, stacks, len(rows) >= _MANY)


def _cell(value: object, column: str) -> Cell:
    given = value if isinstance(value, Mapping) else {"text": value}
    text = cell_text(given["text"])
    tone, sign = BADGES.get(text, ("", "")) if column in BADGE_COLUMNS else ("", "")
    return Cell(text, str(given.get("to") or ""), str(given.get("note") or ""), tone, sign)


def _kind(cells: Sequence[Cell], rows: Sequence[Sequence[object]], i: int) -> str:
    texts = [cell.text for cell, row in zip(cells, rows, strict=True) if row[i] is not None]
    if _is_numeric(texts) and not any(cell.note for cell in cells):
        return "number"
    longest = max((max(len(cell.text), len(cell.note)) for cell in cells), default=0)
    return "short" if longest <= _WHOLE else "wide" if longest > 38 else ""


def _is_numeric(texts: Sequence[str]) -> bool:
    number = r"[+−-]?[\d∞][\d.,e+−-]*"
    form = rf"({number}( … {number}| ?[×%s])?( \(≥ {number}\))?|–)"
    return any(text != "–" for text in texts) and all(re.fullmatch(form, text) for text in texts)


def _need(column: Column, cells: Sequence[Cell]) -> float:
    """Characters that a column needs at least."""
    head = max(map(len, column.name.split()), default=0)
    longest = max((len(cell.text) + 4 * bool(cell.tone) for cell in cells), default=0)
    if column.kind in ("number", "short"):
        return max(head, longest)
    return max(head, min(longest, _ROOM))
