"""An audit as sections of a page: a table of all targets, then one section a target with its
figures and relations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from halfulp.report.audit_summary import (
    MEANING,
    ProbeRow,
    Report,
    facts,
    false_alarms,
    headline,
    meaning,
    not_run,
    probe_rows,
    relation_rows,
    why,
    worst_ratios,
)
from halfulp.report.html import Block, page
from halfulp.report.tables import table_block
from halfulp.report.text import at_least_text, duration_text, relative_text, times_text

EVERY = "Every probe input and relation"


def audit_page(reports: Sequence[Report], command: str, *, meta: str = "") -> str:
    """Return the page of one or more audits; `command` repeats them."""
    names = ", ".join(str(report["target"]) for report in reports)
    lead = (
        "Every figure is set beside the stock kernel's own arithmetic on the same inputs and the"
        " floor of the format."
    )
    sections = [audit_section(report, folded=len(reports) > 1) for report in reports]
    if len(reports) > 1:
        found, table = verdicts(reports), audit_summary(reports)
        sections.insert(0, {"heading": "All targets", "finding": found, "blocks": [table]})
    sections[0]["blocks"].append({"kind": "command", "command": command})
    return page(f"Audit of {names}", lead, sections, meta=meta)


def verdicts(reports: Sequence[Report]) -> str:
    """Return how many targets got which verdict, in one sentence."""
    counts = {word: sum(report["verdict"] == word for report in reports) for word in MEANING}
    parts = [f"{count} {word}" for word, count in counts.items() if count]
    noun = "target" if len(reports) == 1 else "targets"
    return f"Of {len(reports)} {noun}: {', '.join(parts)}."


def audit_summary(reports: Sequence[Report]) -> Block:
    """Return the table of all targets."""
    rows: list[tuple[object, ...]] = []
    for report in reports:
        stock, floor = worst_ratios(report)
        seconds = duration_text(report["seconds"])
        ratios = (times_text(stock), times_text(floor))
        target = {"text": report["target"], "to": report["target"]}
        rows.append((target, report["verdict"], *ratios, why(report), seconds))
    caption = (
        "The largest error over all probe inputs, as a multiple of the stock recipe's and of the"
        " format's floor."
    )
    columns = ("target", "verdict", "× stock", "× floor", "why", "time")
    return table_block("Verdicts", columns, rows, caption)


def audit_section(report: Report, *, folded: bool = False) -> dict[str, Any]:
    """Return the section of one target; `folded` shows the tables only when asked for, as on a page
    of many targets.
    """
    verdict = report["verdict"]
    finding = f"{verdict.capitalize()}, {meaning(report)}: {report['reason']}."
    heading = str(report["target"])
    if verdict == "error":
        said = [{"kind": "text", "text": headline(report)}]
        return {"heading": heading, "finding": finding, "blocks": said}
    blocks: list[Block] = [
        {"kind": "facts", "pairs": [("audited", headline(report)), *facts(report)]}
    ]
    if report["script"]:
        caption = (
            "The smallest input that shows it, as a program that exits with 1 while the defect is"
            " there:"
        )
        blocks.append({"kind": "code", "text": report["script"], "caption": caption})
    rows = probe_rows(report)
    chart = [{"kind": "figures", "figures": [_chart(report, rows)]}] if rows else []
    tables = [*chart, _probes(rows), _relations(report)]
    blocks += (
        [{"kind": "details", "summary": f"{EVERY} of {heading}", "blocks": tables}]
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


def _chart(report: Report, rows: Sequence[ProbeRow]) -> dict[str, Any]:
    caption = (
        "The worst error on every probe input, over the stock recipe's and over the floor's on the"
        " same input; it counts against a kernel where even the least it can be (the left end of a"
        " line) is beyond the limit."
    )
    probes = [row.probe for row in rows]
    names = [  # a probe of several sizes with its N
        f"{row.probe}, N {row.shape.split(', ')[2]}" if probes.count(row.probe) > 1 else row.probe
        for row in rows
    ]
    return {
        "kind": "audit",
        "title": "Errors by probe",
        "rows": [asdict(row) | {"probe": name} for row, name in zip(rows, names, strict=True)],
        "bounds": report.get("bounds"),
        "caption": caption,
        "command": "",
    }


def _probes(rows: Sequence[ProbeRow]) -> Block:
    cells = []
    for row in rows:
        stock = at_least_text(row.times_stock, row.stock_at_least)
        floor = at_least_text(row.times_floor, row.floor_at_least)
        probe = {"text": row.probe, "note": row.exposes}
        cells.append(
            (probe, row.grade, row.shape, row.said, relative_text(row.relative), stock, floor)
        )
    columns = ("probe", "verdict", "size", "figure", "relative", "× stock", "× floor")
    caption = (
        "The worst figure of each: relative error, and its multiple of the stock recipe's and of"
        " the floor's, in brackets what that is at least."
    )
    return table_block("Probe inputs", columns, cells, caption)


def _relations(report: Report) -> Block:
    rows = [(row.relation, row.outcome, row.detail) for row in relation_rows(report)]
    caption = (
        "What exact arithmetic guarantees between two calls; a difference as large as rounding is"
        " allowed."
    )
    columns = ("relation", "outcome", "detail")
    return table_block("Relations between calls", columns, rows, caption)
