"""Audits as Markdown for a pull request: a line with the verdict, the cause, at most ten rows, and
the smallest input folded away.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from halfulp.report.audit_summary import (
    HOLDS,
    ProbeRow,
    Report,
    facts,
    false_alarms,
    headline,
    meaning,
    not_run,
    probe_rows,
    relation_rows,
)
from halfulp.report.comparison_table import Comparison, beside_figures, change_rows, summary_line
from halfulp.report.tables import sign_of
from halfulp.report.text import relative_text, times_text, visible

MOST_ROWS = 10
_SHOWN = ("resembles", "also", "in training", "missing", "notes")


def audit_markdown(reports: Sequence[Report], comparisons: Sequence[Comparison] = ()) -> str:
    """Return GitHub's Markdown of audits, each with the comparison of its number if there is
    one.
    """
    parts = [
        _section(report, comparisons[i] if i < len(comparisons) else None)
        for i, report in enumerate(reports)
    ]
    return "\n\n".join(parts) + "\n"


def comparison_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return GitHub's Markdown of comparisons alone."""
    return "\n\n".join(_comparison(c) for c in comparisons) + "\n"


def _section(report: Report, comparison: Comparison | None) -> str:
    verdict = report["verdict"]
    lines = [
        f"### {sign_of(verdict)} {verdict.upper()}: {_code(report['target'])}",
        "",
        f"{escaped(meaning(report))}: {escaped(report['reason'])}  ",
        f"<sub>{escaped(headline(report))}</sub>",
    ]
    cause = report["cause"]
    if cause is not None:
        code = f"{cause['code']}: " if cause.get("code") else ""
        lines += ["", f"**Cause** {code}{escaped(cause['name'])}"]
    told = [f"- {name}: {escaped(text)}" for name, text in facts(report) if name in _SHOWN]
    lines += ["", *told] if told else []
    if comparison is not None:
        lines += ["", _comparison(comparison)]
    lines += _figures(report, MOST_ROWS if comparison is None else MOST_ROWS // 2)
    lines += _not_run(report)
    if report["script"] is not None:
        small = report["smallest"]
        lines += _folded(
            f"smallest input: {small['probe']} {small['shape']}, seed {small['seed']}",
            report["script"],
        )
    if verdict != "error":
        lines += ["", f"<sub>{escaped(false_alarms(report))}</sub>"]
    return "\n".join(lines)


def _not_run(report: Report) -> list[str]:
    reasons = [f"{escaped(reason)} ({escaped(probes)})" for reason, probes in not_run(report)]
    return ["", f"<sub>not run: {'; '.join(reasons)}</sub>"] if reasons else []


def _figures(report: Report, most: int) -> list[str]:
    broken = [row for row in relation_rows(report) if row.outcome == HOLDS[0]]
    rows = probe_rows(report)
    room = max(1, most - len(broken))
    if not rows and not broken:
        return []
    table = [["", "probe", "figure", "relative", "× stock", "at least", "× floor"]]
    table += [_row(row) for row in rows[:room]]
    table += [
        [sign_of("defect"), row.relation, row.detail, "", "", "", ""] for row in broken[:most]
    ]
    left = len(rows) - room
    more = [f"<sub>{left} more probes, none of them worse</sub>"] if left > 0 else []
    return ["", *_table(table), *([""] if more else []), *more]


def _row(row: ProbeRow) -> list[str]:
    ratios = (row.times_stock, row.stock_at_least, row.times_floor)
    probe = f"{row.probe} {row.shape}"
    return [
        sign_of(row.grade),
        probe,
        row.said,
        relative_text(row.relative),
        *map(times_text, ratios),
    ]


def _comparison(comparison: Comparison) -> str:
    rows = change_rows(comparison, MOST_ROWS // 2)
    lines = [f"**{escaped(summary_line(comparison))}**"]
    lines += [f"- {escaped(text)}" for text in beside_figures(comparison)]
    if rows:
        head = ["", "figure", "on", "now / before", "at least", "at most"]
        lines += ["", *_table([head, *rows])]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(escaped(cell) for cell in row)} |" for row in rows]
    return [lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]]


def _folded(title: str, program: str) -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", program)), default=0))
    folded = [
        "<details>",
        f"<summary>{html.escape(visible(title))}</summary>",
        "",
        f"{fence}python",
    ]
    return ["", *folded, program.rstrip("\n"), fence, "", "</details>"]


def escaped(text: Any) -> str:
    """Return text in one line in which nothing is markup."""
    line = " ".join(visible(str(text)).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~@])", r"\\\1", line)


def _code(text: str) -> str:
    line = " ".join(visible(text).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"
