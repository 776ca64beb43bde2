"""What trainings again with one thing changed told, an isolation or a prescription, on a page and
on the terminal, from its plain data: the verdict first, then the runs that it rests on.
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

Plain = Mapping[str, Any]

# title, what was done to the run, heading of its tables and what their rows are
_ISOLATION = (
    "What makes this run fail",
    "trained again with one thing changed at a time until it survives",
    "The ladder",
    "Every row is a run or one run a seed.",
)
_PRESCRIPTION = (
    "What to do about this run",
    "gone on with after one small change at a time",
    "Remedies",
    "Every row is one change, tried on every seed beside the run as it is.",
)


def trial_page(plain: Plain, *, meta: str = "") -> str:
    """Return the page of an isolation or a prescription."""
    title, done, *_ = _ISOLATION if _isolates(plain) else _PRESCRIPTION
    lead, footer = f"The run {plain['run']}, {done}.", f"Repeat it: {plain['command']}"
    return page(title, lead, trial_sections(plain), meta=meta, footer=footer)


def trial_sections(plain: Plain) -> list[dict[str, Any]]:
    """Return its sections: what was found, and what was tried."""
    *_, heading, said = _ISOLATION if _isolates(plain) else _PRESCRIPTION
    known: list[Block] = []
    if plain.get("fix"):
        known.append({"kind": "text", "text": f"The fix. {plain['fix']}"})
    if plain.get("symptoms"):
        known.append({"kind": "heading", "text": "What is known of the run"})
        known.append({"kind": "list", "items": plain["symptoms"]})
    if plain["notes"]:
        known.append({"kind": "list", "items": plain["notes"]})
    if plain["figures"]:
        known.append({"kind": "figures", "figures": plain["figures"]})
    facts = _isolation_facts(plain) if _isolates(plain) else _prescription_facts(plain)
    known.append({"kind": "facts", "pairs": facts + _spent(plain)})
    found = [{"heading": "Verdict", "finding": _verdict(plain), "blocks": known}]
    tables = [{"kind": "table", **table} for table in plain["tables"]]
    return found + [{"heading": heading, "finding": said, "blocks": tables}] * bool(tables)


def print_trial(plain: Plain, to: Console) -> None:
    """Print what is known of the run, the tables, what was noted, the verdict and the fix."""
    from rich.text import Text

    troubles = plain.get("troubles", {}).items()
    known = [*plain.get("symptoms", ())]
    known += [f"as it is, seed {seed}: {why or 'no trouble'}" for seed, why in troubles]
    for line in known:
        to.print(Text(line, style="dim"))
    if known:
        to.print()
    for table in plain["tables"]:
        print_table(table | {"rows": [_signed(row, table) for row in table["rows"]]}, to)
        to.print()
    for note in plain["notes"]:
        to.print(Text(note, style="dim"))
    color = STYLES["good" if plain["exit_code"] == 0 else "none"]
    to.print(Text("verdict  ", style=f"bold {color}").append(_verdict(plain), "default not bold"))
    if plain.get("fix"):
        to.print(Text("fix  ", style="bold").append(plain["fix"], style="not bold"))
    to.print(Text(", ".join(value for _, value in _spent(plain)), style="dim"))


def _isolates(plain: Plain) -> bool:
    """Whether it is an isolation, which climbs rungs, and no prescription."""
    return "rungs" in plain


def _verdict(plain: Plain) -> str:
    """The verdict, behind whether it is the last word."""
    if plain["status"] == "done":
        return str(plain["verdict"])
    kind = "isolation" if _isolates(plain) else "prescription"
    return f"This {kind} is {plain['status']}; the same command goes on. {plain['verdict']}"


def _signed(row: list[Any], table: Plain) -> list[Any]:
    """The row with a sign before its outcome, as a badge has on a page."""
    if "outcome" not in table["columns"]:
        return row
    at = table["columns"].index("outcome")
    sign = BADGES[row[at]][1] if row[at] in BADGES else "●"
    return [*row[:at], f"{sign} {row[at]}", *row[at + 1 :]]


def _isolation_facts(plain: Plain) -> list[tuple[str, str]]:
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
    return pairs


def _prescription_facts(plain: Plain) -> list[tuple[str, str]]:
    troubles = [f"seed {seed}: {why or 'none'}" for seed, why in plain["troubles"].items()]
    return [
        ("run", plain["run"]),
        ("trouble of the run as it is", "; ".join(troubles) or "not known"),
        ("a seed changes", plain["what_a_seed_changes"]),
        ("rule", plain["rule"]),
    ]


def _spent(plain: Plain) -> list[tuple[str, str]]:
    runs = sum(len(one["runs"]) for one in plain["rungs" if _isolates(plain) else "trials"])
    said = (f"{runs} runs", "") if _isolates(plain) else (f"{runs} runs of remedies", " in all")
    return [
        ("runs", f"{said[0]}, {plain['steps']} steps of training{said[1]}"),
        ("time", duration_text(plain["seconds"])),
    ]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
