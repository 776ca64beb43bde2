"""An audit as sections of a page: a table of all targets, then one section a target with its
figures and relations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfulp.report.audit_summary import (
    MEANING,
    Report,
    facts,
    false_alarms,
    headline,
    not_run,
    probe_rows,
    relation_rows,
    why,
    worst_ratios,
)
from halfulp.report.html import Block, page
from halfulp.report.text import duration_text, power_text, times_text


def audit_page(reports: Sequence[Report], command: str, *, meta: str = "") -> str:
    """Return the page of one or more audits; `command` repeats them."""
    names = ", ".join(str(report["target"]) for report in reports)
    lead = (
        "Every figure is set beside the stock kernel's own arithmetic on the same inputs and the"
        " floor of the format."
    )
    sections = [audit_section(report, folded=len(reports) > 1) for report in reports]
    if len(reports) > 1:
        sections = [
            {
                "heading": "All targets",
                "finding": verdicts(reports),
                "blocks": [audit_summary(reports)],
            },
            *sections,
        ]
    sections[0]["blocks"].append({"kind": "command", "command": command})
    return page(f"Audit of {names}", lead, sections, meta=meta)


def verdicts(reports: Sequence[Report]) -> str:
    """Return how many targets got which verdict, in one sentence."""
    counts = {word: sum(report["verdict"] == word for report in reports) for word in MEANING}
    parts = [f"{count} {word}" for word, count in counts.items() if count]
    noun = "target" if len(reports) == 1 else "targets"
    return f"Of {len(reports)} {noun}: {', '.join(parts)}."


def audit_summary(reports: Sequence[Report], skipped: Mapping[str, str] | None = None) -> Block:
    """Return the table of all targets; `skipped` are those that this machine lacks, with the
    reason.
    """
    rows: list[tuple[object, ...]] = []
    for report in reports:
        stock, floor = worst_ratios(report)
        seconds = duration_text(report["seconds"])
        ratios = (times_text(stock), times_text(floor))
        rows.append((report["target"], report["verdict"], *ratios, why(report), seconds))
    rows += [
        (name, "skipped", None, None, reason, None) for name, reason in (skipped or {}).items()
    ]
    caption = (
        "The largest error over all probe inputs, as a multiple of the stock recipe's and of the"
        " format's floor."
    )
    columns = ("target", "verdict", "× stock", "× floor", "why", "time")
    return {
        "kind": "table",
        "title": "Verdicts",
        "columns": columns,
        "rows": rows,
        "caption": caption,
    }


def audit_section(report: Report, *, folded: bool = False) -> dict[str, Any]:
    """Return the section of one target; `folded` shows the tables only when asked for, as on a page
    of many targets.
    """
    verdict = report["verdict"]
    finding = f"{verdict.capitalize()}, {MEANING[verdict]}: {report['reason']}."
    heading = str(report["target"])
    if verdict == "error":
        return {
            "heading": heading,
            "finding": finding,
            "blocks": [{"kind": "text", "text": headline(report)}],
        }
    blocks: list[Block] = [
        {"kind": "facts", "pairs": [("audited", headline(report)), *facts(report)]}
    ]
    if report["script"]:
        caption = (
            "The smallest input that shows it, as a program that exits with 1 while the defect is"
            " there:"
        )
        blocks.append({"kind": "code", "text": report["script"], "caption": caption})
    tables = [_probes(report), _relations(report)]
    blocks += (
        [{"kind": "details", "summary": "Every probe input and relation", "blocks": tables}]
        if folded
        else tables
    )
    if skipped := not_run(report):
        blocks += [
            {"kind": "heading", "text": "Not run"},
            {"kind": "facts", "pairs": [(p, r) for r, p in skipped]},
        ]
    blocks.append({"kind": "text", "text": f"{false_alarms(report)}."})
    return {"heading": heading, "finding": finding, "blocks": blocks}


def _probes(report: Report) -> Block:
    rows = []
    for row in probe_rows(report):
        ratios = (row.times_stock, row.stock_at_least, row.times_floor, row.floor_at_least)
        figure = f"{row.figure}; {row.note}" if row.note else row.figure
        numbers = (power_text(row.relative), *map(times_text, ratios))
        rows.append((row.probe, row.grade, row.shape, figure, *numbers, row.exposes))
    columns = (
        "probe",
        "verdict",
        "size",
        "figure",
        "relative",
        "× stock",
        "at least",
        "× floor",
        "at least",
        "exposes",
    )
    caption = (
        "The worst figure of each: relative error, and its multiple of the stock recipe's and of"
        " the floor's."
    )
    return {
        "kind": "table",
        "title": "Probe inputs",
        "columns": columns,
        "rows": rows,
        "caption": caption,
    }


def _relations(report: Report) -> Block:
    rows = [(row.relation, row.outcome, row.detail) for row in relation_rows(report)]
    caption = (
        "What exact arithmetic guarantees between two calls; a difference as large as rounding is"
        " allowed."
    )
    columns = ("relation", "outcome", "detail")
    return {
        "kind": "table",
        "title": "Relations between calls",
        "columns": columns,
        "rows": rows,
        "caption": caption,
    }
