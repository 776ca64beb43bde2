"""What the reports of a comparison are set with: paragraphs, columns, probabilities, shares."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TypeVar

from halfulp.diff.difference import GroupShare
from halfulp.runs.results import Table

Item = TypeVar("Item")
ROWS = 12
SHARES = "±: 1 standard error, over sequences (outputs) or batches."


def group_tables(groups: Sequence[GroupShare], columns: Sequence[str], width: int) -> str:
    """What each group carries, both ways, and each layer of the first one."""
    whole, layers = ([x for x in groups if x.layer is layer] for layer in (False, True))
    said = [_with_reasons(whole, columns, width)]
    if layers:
        said += ["", f"Layers of {whole[0].name}:", _with_reasons(layers, columns, width)]
    return "\n".join(said)


def _with_reasons(groups: Sequence[GroupShare], columns: Sequence[str], width: int) -> str:
    shown = drawn(group_table(groups[:ROWS], columns), width)
    why = [wrapped(f"{x.name}: {x.why}.", width) for x in groups if (x.share or 0) >= 0.2]
    return "\n".join([shown, *([""] if why else []), *why[:4]])


def group_table(groups: Sequence[GroupShare], columns: Sequence[str], why: bool = False) -> Table:
    """What each group carries of the gap in each column, and, where it is asked, what differs."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        reason = (group.why,) * why
        for way, shares in (("into A", group.into), ("out of B", group.out)):
            if not shares and (way == "into A" or group.into):
                continue
            cells = [_share(shares.get(x)) for x in columns]
            first = way == "into A" or not group.into
            rows.append((group.name if first else "", way, *cells, *reason))
        if group.failed:
            rows.append((group.name, "failed", *("-" for _ in columns), *reason))
    named = ("carries of the gap in", "", *columns, *("what differs",) * why)
    return Table("One group of operations swapped at a time", named, tuple(rows), SHARES, "")


def _share(found: tuple[float, float | None] | None) -> str:
    if found is None:
        return "-"
    share, error = found
    return f"{share:.0%}" + ("" if error is None else f" ± {error:.0%}")


def drawn(made: Table, width: int) -> str:
    """Columns; a first one that is too wide loses its beginning, which rows have in common."""
    lines = [list(map(str, line)) for line in (made.columns, *made.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = min(widths[0], max(24, width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    said = []
    for first, *rest in lines:
        short = first if len(first) <= widths[0] else f"…{first[1 - widths[0] :]}"
        cells = [cell.rjust(wide) for cell, wide in zip(rest, widths[1:], strict=True)]
        said.append("  ".join([short.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(said)


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """The first and the last, and some evenly between."""
    last = len(items) - 1
    return [items[i] for i in sorted({round(i * last / (most - 1)) for i in range(most)})]


def chance_text(p: float) -> str:
    """A probability in few letters."""
    if p < 1e-12:
        return "1e-12 or less"
    return f"{p:.1g}" if p < 0.01 else f"{p:.2f}"


def wrapped(said: str, width: int) -> str:
    """A paragraph in lines of at most so many letters."""
    return "\n".join(textwrap.wrap(said, width, break_long_words=False, break_on_hyphens=False))
