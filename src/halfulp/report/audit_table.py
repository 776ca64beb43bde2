"""An audit on the terminal: the verdict first, then why, then every probe and relation, in 100
columns.

Every verdict carries a sign and a word besides its color, so that it reads in a log file as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfulp.report.audit_summary import (
    HOLDS,
    Report,
    facts,
    false_alarms,
    headline,
    meaning,
    not_run,
    of_attention,
    probe_rows,
    relation_rows,
    why,
    worst_ratios,
)
from halfulp.report.tables import sign_of, style_of
from halfulp.report.text import duration_text, relative_text, times_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


_WIDE, _NARROW = 90, 76
"""Columns of text below which a table of probes leaves figures out, and sizes too."""


def print_audit(report: Report, console: Console, *, script: str | None = None) -> None:
    """Print one audit; `script` is where the failing input was written, if it was."""
    from rich.padding import Padding
    from rich.text import Text

    verdict = report["verdict"]
    line = Text(f"{sign_of(verdict)} {verdict.upper()}  ", style=f"bold {style_of(verdict)}")
    line.append(report["target"], style="bold default")
    line.append(f"  ({headline(report)})", style="dim")
    console.print(line)
    reason = report["reason"] if verdict == "error" else f"{meaning(report)}: {report['reason']}"
    console.print(Padding(_plain(reason), (0, 0, 0, 2)))
    if verdict == "error":
        return
    _print_pairs(facts(report), console)
    if script is not None:  # on a line of its own, never folded, so that it can be copied
        console.print(_plain(f"  to see it: run {script}"), soft_wrap=True)
    console.print()
    console.print(_probes(report, console.width))
    if report["relations"]:
        console.print()
        console.print(_relations(report))
    skipped = not_run(report)
    if skipped:
        console.print()
        console.print(_plain("not run", "bold"))
        _print_pairs([(probes, reason) for reason, probes in skipped], console)
    console.print()
    console.print(_plain(false_alarms(report), "dim"))


def print_summary(reports: Sequence[Report], console: Console) -> None:
    """Print one line a target: verdict, largest error beside the stock recipe's and the floor, and
    why.
    """
    table = _table(f"{len(reports)} targets: the largest error of any probe, and why")
    for name in ("target", "verdict"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=30)
    for name in ("× stock", "× floor", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    beside = console.width >= _WIDE
    if beside:
        table.add_column("why", overflow="fold", ratio=1)
    for report in reports:
        verdict = report["verdict"]
        stock, floor = worst_ratios(report)
        table.add_row(
            _plain(report["target"]),
            _plain(f"{sign_of(verdict)} {verdict}", style_of(verdict)),
            times_text(stock),
            times_text(floor),
            duration_text(report["seconds"]),
            *([_plain(why(report))] if beside else []),
        )
    console.print(table)
    if not beside:
        _print_pairs([(report["target"], why(report)) for report in reports], console)


def _probes(report: Report, width: int) -> Table:
    table = _table(
        "probe inputs: the worst figure of each, as a multiple of the stock recipe's and of the"
        " floor's",
        between=1,  # so that a figure's words fit
    )
    table.add_column("")
    table.add_column("probe", no_wrap=True)
    rows = probe_rows(report)
    long = any(len(row.shape) > 20 for row in rows)  # of many symbols: beside it no word would fit
    names = ("relative", "× stock", "at least", "× floor", "at least")
    shown = [name for name in names if width >= _WIDE or "×" in name]
    sized = width >= _NARROW
    if sized:
        table.add_column("B, H, N, D" if of_attention(report) else "size", no_wrap=not long)
    table.add_column("figure", overflow="fold", ratio=None if long else 1, min_width=13)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratios = (row.times_stock, row.stock_at_least, row.times_floor, row.floor_at_least)
        figures = (relative_text(row.relative), *map(times_text, ratios))
        texts = [
            sign_of(row.grade),
            row.probe,
            *([row.shape] if sized else []),
            row.said,
            *(text for name, text in zip(names, figures, strict=True) if name in shown),
        ]
        style = "" if row.grade == "sound" else style_of(row.grade)
        table.add_row(*[_plain(text, style) for text in texts])
    return table


def _relations(report: Report) -> Table:
    table = _table("relations between calls that exact arithmetic guarantees")
    table.add_column("")
    table.add_column("relation", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    table.add_column("", ratio=1, overflow="fold", style="dim")
    for row in relation_rows(report):
        broken = row.outcome == HOLDS[0]
        sign, style = "✗" if broken else "✓", "red" if broken else ""
        table.add_row(
            _plain(sign, style),
            _plain(row.relation),
            _plain(row.outcome, style),
            _plain(row.detail),
        )
    return table


def _table(title: str, between: int = 2) -> Table:
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, between, 0, 0),
        expand=True,
    )


def _plain(text: str, style: str = "") -> Text:
    """Text as it stands: a name in brackets is no markup."""
    from rich.text import Text

    return Text(text, style=style)


def _print_pairs(pairs: Sequence[tuple[str, str]], console: Console) -> None:
    from rich.padding import Padding
    from rich.table import Table

    if not pairs:
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", max_width=32)
    grid.add_column(ratio=1, overflow="fold")
    for name, value in pairs:
        grid.add_row(_plain(name), _plain(value))
    console.print(Padding(grid, (0, 0, 0, 2)))
