"""The page of a comparison of two computations (`halfulp diff`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.html import page

LEAD = (
    "Both sides run on the same batches. Each operation of B is held against A's operation on the"
    " same operands: own is what is left, inherited what came in with them, and the floor is what"
    " rounding operands and result once on each side makes. Sizes are relative to A's result."
)


def diff_page(
    names: Sequence[str],
    said: str,
    sections: Mapping[str, Sequence[Mapping[str, Any]]],
    command: str,
) -> str:
    """Return the page of a `halfulp.diff.difference.Report`.

    Args:
        names: of its sides.
        said: its text, whose first paragraph is the verdict.
        sections: its tables in their plain form, by heading; those without rows are left out.
        command: that repeats it.
    """
    finding = " ".join(said.split("\n\n")[0].split())
    shown: list[dict[str, Any]] = [{"heading": "Verdict", "finding": finding, "blocks": []}]
    for heading, tables in sections.items():
        blocks = [{"kind": "table", **table} for table in tables if table["rows"]]
        shown += [{"heading": heading, "blocks": blocks}] * bool(blocks)
    footer = f"Repeat everything on this page: {command}"
    return page(f"{names[0]} and {names[1]}", LEAD, shown, footer=footer)
