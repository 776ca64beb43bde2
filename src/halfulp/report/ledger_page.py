"""The claims ledger on the terminal and on a page, from the plain data of its verdicts.

A verdict is {"id", "statement", "paper", "measured", "estimates", "rule", "history", "source",
"verdict", "command", "seconds", "kept", "pictures"}; the last two may be missing, and pictures are
figures and heat maps as `report.heatmap.draw_picture` takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfulp.report.html import page
from halfulp.report.pages import figure_blocks
from halfulp.report.tables import sign_of, style_of, table_block

if TYPE_CHECKING:
    from rich.console import Console

Verdict = Mapping[str, Any]


def counts(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims got which verdict, the papers' and halfulp's own apart."""
    said = []
    for source, whose in (("papers", "the papers'"), ("halfulp", "halfulp's own")):
        own = [str(v["verdict"]) for v in verdicts if v["source"] == source]
        if own:
            kinds = ", ".join(f"{own.count(kind)} {kind}" for kind in dict.fromkeys(own))
            said.append(f"of {whose} {len(own)} claim{'s' * (len(own) > 1)} {kinds}")
    return "; ".join(said)


def print_ledger(verdicts: Sequence[Verdict], to: Console) -> None:
    """Print every measured claim with the paper's figure, the one measured here and the rule; the
    others in a line.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for verdict in (v for v in verdicts if v["measured"]):
        style = style_of(verdict["verdict"])
        line = Text(f"{sign_of(verdict['verdict'])} {verdict['id']}  ", style=f"bold {style}")
        line.append(verdict["verdict"], style=style)
        line.append(f"  ({verdict['seconds']:.1f} s)", style="dim")
        to.print(line)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column(ratio=1)
        for name, told in [("claim", verdict["statement"]), *_facts(verdict)]:
            grid.add_row(name, Text(told))
        to.print(Padding(grid, (0, 0, 1, 4)))
    for verdict in (v for v in verdicts if not v["measured"]):
        said = f"{verdict['id']:<4} {verdict['verdict']}: {verdict['statement']}"
        to.print(Text(f"{sign_of(verdict['verdict'])} {said}", style="dim"))
    to.print(Text(counts(verdicts), style="bold"))


def ledger_page(verdicts: Sequence[Verdict], command: str) -> str:
    """Return the page of a ledger: all verdicts in one table, then claim by claim what was
    measured, with pictures.
    """
    rows = [
        [verdict[key] for key in ("id", "verdict", "statement", "paper")] for verdict in verdicts
    ]
    columns = ("id", "verdict", "claim", "paper")
    table = table_block("", columns, rows, command=command)
    lead = (
        "Every claim with the paper's figure, the figure measured here, and a verdict computed by a"
        " stated rule."
    )
    said = counts(verdicts)
    measured = [block for verdict in verdicts for block in _claim(verdict)]
    sections: list[dict[str, Any]] = [
        {"heading": "Verdicts", "finding": f"{said[:1].upper()}{said[1:]}.", "blocks": [table]},
        {"heading": "What was measured", "blocks": measured},
    ]
    return page("The claims ledger", lead, sections)


_FACTS = {
    "paper": "paper",
    "measured": "measured",
    "95 %": "estimates",
    "rule": "rule",
    "rule changed": "history",
    "earlier call": "kept",
}
"""What is said of a claim, by the names that it is said under."""


def _facts(verdict: Verdict) -> list[tuple[str, str]]:
    return [(name, str(verdict[key])) for name, key in _FACTS.items() if verdict.get(key)]


def _claim(verdict: Verdict) -> list[dict[str, Any]]:
    """One claim: its figures and rule in words, then its pictures."""
    repeat = [("repeat", verdict["command"])] if verdict["command"] else []
    pairs = [("verdict", verdict["verdict"]), *_facts(verdict), *repeat]
    blocks: list[dict[str, Any]] = [
        {"kind": "heading", "text": f"{verdict['id']}: {verdict['statement']}"},
        {"kind": "facts", "pairs": pairs},
    ]
    pictures = verdict.get("pictures") or ()
    sheets = [picture for picture in pictures if picture.get("kind") == "picture"]
    return blocks + figure_blocks(p for p in pictures if p not in sheets) + sheets
