"""A prescription on a page and on the terminal, from its plain data: the verdict first, then what
was tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfulp.report.html import Block, page
from halfulp.report.terminal import print_table
from halfulp.report.text import duration_text

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "What to do about this run"


def prescription_page(plain: Mapping[str, Any], *, meta: str = "") -> str:
    """Return the page of a prescription."""
    lead = f"The run {plain['run']}, gone on with after one small change at a time."
    footer = f"Repeat it: {plain['command']}"
    return page(TITLE, lead, prescription_sections(plain), meta=meta, footer=footer)


def prescription_sections(plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sections of a prescription: what helps, and what was tried."""
    first: list[Block] = []
    if plain["symptoms"]:
        first += [{"kind": "heading", "text": "What is known of the run"}]
        first += [{"kind": "list", "items": plain["symptoms"]}]
    if plain["notes"]:
        first.append({"kind": "list", "items": plain["notes"]})
    if plain["figures"]:
        first.append({"kind": "figures", "figures": plain["figures"]})
    first.append({"kind": "facts", "pairs": _facts(plain)})
    tables = [{"kind": "table", **table} for table in plain["tables"]]
    said = "Every row is one change, tried on every seed beside the run as it is."
    found = [{"heading": "Verdict", "finding": _state(plain) + plain["verdict"], "blocks": first}]
    return found + [{"heading": "Remedies", "finding": said, "blocks": tables}] * bool(tables)


def print_prescription(plain: Mapping[str, Any], to: Console) -> None:
    """Print a prescription: what is known, its tables, and the verdict."""
    from rich.text import Text

    for symptom in plain["symptoms"]:
        to.print(Text(symptom, style="dim"))
    for seed, why in plain["troubles"].items():
        to.print(Text(f"as it is, seed {seed}: {why or 'no trouble'}", style="dim"))
    to.print()
    for table in plain["tables"]:
        print_table(table, to)
        to.print()
    for note in plain["notes"]:
        to.print(Text(note, style="dim"))
    color = "green" if plain["helping"] else "none"
    head = Text("verdict  ", style=f"bold {color}")
    to.print(head.append(_state(plain) + plain["verdict"], style="default not bold"))
    to.print(Text(", ".join(value for _, value in _spent(plain)), style="dim"))


def _state(plain: Mapping[str, Any]) -> str:
    if plain["status"] == "done":
        return ""
    return f"This prescription is {plain['status']}; the same command goes on. "


def _facts(plain: Mapping[str, Any]) -> list[tuple[str, str]]:
    troubles = [f"seed {seed}: {why or 'none'}" for seed, why in plain["troubles"].items()]
    return [
        ("run", plain["run"]),
        ("trouble of the run as it is", "; ".join(troubles) or "not known"),
        ("a seed changes", plain["what_a_seed_changes"]),
        ("rule", plain["rule"]),
        *_spent(plain),
    ]


def _spent(plain: Mapping[str, Any]) -> list[tuple[str, str]]:
    runs = sum(len(one["runs"]) for one in plain["trials"])
    return [
        ("runs", f"{runs} runs of remedies, {plain['steps']} steps of training in all"),
        ("time", duration_text(plain["seconds"])),
    ]
