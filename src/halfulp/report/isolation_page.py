"""An isolation on a page and on the terminal, from its plain data: the verdict first, then the
ladder it rests on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfulp.report.html import Block, page
from halfulp.report.tables import BADGES, STYLES
from halfulp.report.terminal import print_table
from halfulp.report.text import duration_text

if TYPE_CHECKING:
    from rich.console import Console

Isolation = Mapping[str, Any]

TITLE = "What makes this run fail"


def isolation_page(plain: Isolation, *, meta: str = "") -> str:
    """Return the page of an isolation."""
    lead = (
        f"The run {plain['run']}, trained again with one thing changed at a time until it survives."
    )
    return page(
        TITLE, lead, isolation_sections(plain), meta=meta, footer=f"Repeat it: {plain['command']}"
    )


def isolation_sections(plain: Isolation) -> list[dict[str, Any]]:
    """Return the sections of an isolation: what was found, and the ladder."""
    state = (
        ""
        if plain["status"] == "done"
        else f"This isolation is {plain['status']}; the same command goes on. "
    )
    verdict: list[Block] = (
        [{"kind": "text", "text": f"The fix. {plain['fix']}"}] if plain["fix"] else []
    )
    if plain["notes"]:
        verdict.append({"kind": "list", "items": plain["notes"]})
    if plain["figures"]:
        verdict.append({"kind": "figures", "figures": plain["figures"]})
    verdict.append({"kind": "facts", "pairs": _facts(plain)})
    tables = [{"kind": "table", **table} for table in plain["tables"]]
    return [
        {"heading": "Verdict", "finding": f"{state}{plain['verdict']}", "blocks": verdict},
        {
            "heading": "The ladder",
            "finding": "Every row is a run or one run a seed.",
            "blocks": tables,
        },
    ]


def print_isolation(plain: Isolation, to: Console) -> None:
    """Print an isolation: its tables, what was noted, the verdict and the fix."""
    from rich.padding import Padding
    from rich.text import Text

    for table in plain["tables"]:
        print_table(table | {"rows": [_signed(row, table) for row in table["rows"]]}, to)
        to.print()
    for note in plain["notes"]:
        to.print(Text(note, style="dim"))
    color = STYLES["good" if plain["found"] else "none"]
    to.print(
        Text("verdict  ", style=f"bold {color}").append(plain["verdict"], style="default not bold")
    )
    if plain["fix"]:
        to.print(Text("fix  ", style="bold").append(plain["fix"], style="not bold"))
    if plain["status"] != "done":
        to.print(
            Text(f"This isolation is {plain['status']}; the same command goes on.", style="bold")
        )
    to.print(Padding(Text(", ".join(value for _, value in _spent(plain)), style="dim"), (0, 0)))


def _signed(row: list[Any], table: Mapping[str, Any]) -> list[Any]:
    """The row with a sign before its outcome, as a badge has on a page."""
    if "outcome" not in table["columns"]:
        return row
    at = table["columns"].index("outcome")
    sign = BADGES[row[at]][1] if row[at] in BADGES else "●"
    return [*row[:at], f"{sign} {row[at]}", *row[at + 1 :]]


def _facts(plain: Isolation) -> list[tuple[str, str]]:
    confidence = plain["confidence"]
    pairs = [
        ("run", plain["run"]),
        ("attention", "; ".join(plain["config"]["attention"])),
        ("seeds", f"{_list(plain['seeds'])}; it fails on {_list(plain['failing']) or 'none'}"),
        ("rule", plain["rule"]),
    ]
    if confidence["tried"]:
        said = f"{confidence['held']} of {confidence['tried']} seeds"
        searched = confidence.get("searched", 0)
        if searched:
            said += ", of which one was searched on"
        if confidence["bound"] is not None:
            said += (
                f"; {'from the others, ' * bool(searched)}of all seeds at least"
                f" {100 * confidence['bound']:.0f} % at {100 * confidence['confidence']:.0f} %"
                " confidence (Clopper–Pearson, one-sided)"
            )
        pairs.append(("confidence", said))
    return pairs + _spent(plain)


def _spent(plain: Isolation) -> list[tuple[str, str]]:
    runs = sum(len(rung["runs"]) for rung in plain["rungs"])
    return [
        ("runs", f"{runs} runs, {plain['steps']} steps of training"),
        ("time", duration_text(plain["seconds"])),
    ]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
