"""What `halfulp.watch` wrote down of a training that is not halfulp's own, as figures and
tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfulp.experiments.overview import measured_by_head, metric_figures
from halfulp.runs.record import read_record
from halfulp.runs.results import Table
from halfulp.training.journal import Row, read_rows
from halfulp.watch.health import sentences_of
from halfulp.watch.running import WINDOW
from halfulp.watch.troubles import CAUSES
from halfulp.watch.watching import COLUMNS, FIXES, OPERATIONS, WatchReport, alarmed_heads, report_of


def watched(folder: Path, command: str) -> tuple[dict[str, Any], str]:
    """Return {"figures": …, "tables": …} of the folder of a watcher, open or closed, and the
    finding in a sentence.
    """
    record = read_record(folder, "watch")
    written = read_rows(folder)
    steps_shown = [row for row in written if "measure" not in row]
    # of a measurement in which no attention was seen only weights are there
    rows = [row for row in written if "max_score" in row.get("measure", ())]
    rows = _whole(rows, len(record["layers"]))
    recent, layers = rows[-WINDOW:], record["layers"]
    steps = max([record["steps"], *(row["step"] for row in written[-1:])])
    broken = sentences_of((rows[-1] if rows else {}) | record.get("health", {}))
    report = report_of(
        recent,
        layers,
        alarmed_heads(recent, layers),
        steps=steps,
        measurements=len(rows),
        unseen=record["not measured"],
        # of a run that was not closed the last measurement knows
        warnings=list(dict.fromkeys((*record.get("warnings", ()), *broken))),
        loss=record.get("loss", ""),
        findings=record.get("causes", ()),
        looked=record.get("looked", 0),
    )
    tables = [
        *([_causes(report, command)] if report.findings else []),
        _alarms(report, record["rule"], command),
        _heads(report, command),
    ]
    name = folder.resolve().name
    figures = metric_figures({name: steps_shown}, "", command)
    figures += measured_by_head(rows, command, names=layers)
    return {
        "figures": [f.as_dict() for f in figures],
        "tables": [t.as_dict() for t in tables],
    }, _finding(report)


def _whole(rows: list[Row], layers: int) -> list[Row]:
    """Rows whose figures have an entry for every layer: one that was met later has none in the rows
    before.
    """
    for row in rows:
        for heads in row["measure"].values():
            heads += [[] for _ in range(layers - len(heads))]
    return rows


def _finding(report: WatchReport) -> str:
    layers = len(report.layers)
    said = (
        f"{report.measurements} measurement{'s' * (report.measurements != 1)} of {layers} attention"
        " layer"
    )
    said += "s" * (layers != 1)
    causes = "".join(f" ALARM: {one['where']}." for one in report.findings)
    if not report.rows:
        return f"{said}.{causes}"
    alarms = len(report.alarms)
    alarming = (
        f"{alarms} heads alarm" if alarms > 1 else "one head alarms" if alarms else "no head alarms"
    )
    wrong = "".join(f" WARNING: {sentence}." for sentence in report.warnings)
    return f"{said}, the last at step {report.measured_step}: {alarming}.{causes}{wrong}"


def _causes(report: WatchReport, command: str) -> Table:
    rows = tuple(
        (
            CAUSES[one["kind"]].name,
            one["step"],
            one["since"],
            one["layer"],
            "; ".join(
                filter(None, (one["detail"], *(f"{k} {v:.3g}" for k, v in one["evidence"].items())))
            ),
            CAUSES[one["kind"]].rule,
            CAUSES[one["kind"]].fix,
        )
        for one in report.findings
        if one["kind"] in CAUSES
    )
    columns = ("cause", "found at step", "since", "where", "evidence", "rule", "fix")
    said = "What else than rounding in attention is found, and by which rule."
    return Table("Other causes", columns, rows, said, command)


def _alarms(report: WatchReport, rule: str, command: str) -> Table:
    rows = tuple(
        (
            a.kind,
            a.layer,
            a.head,
            round(a.t, 1),
            round(a.score_moved, 1),
            OPERATIONS[a.operation],
            FIXES[a.operation],
        )
        for a in report.alarms
    )
    columns = ("alarm", "layer", "head", "t", "mean score moved", "what leans", "fix")
    none = "" if rows else "No head alarms after the last measurement. "
    unseen = "".join(f" Not measured: {sentence}." for sentence in report.unseen)
    return Table("Alarms", columns, rows, f"{none}{rule[0].upper()}{rule[1:]}.{unseen}", command)


def _heads(report: WatchReport, command: str) -> Table:
    rows = tuple(
        (row["layer"], row["head"], *(row.get(name) for _, name, _ in COLUMNS))
        for row in report.rows
    )
    titles = tuple(title for title, _, _ in COLUMNS)
    caption = (
        "Of the last measurement; what leans, over the last ones, as a share of Σ|δ − golden|,"
        " and t."
    )
    return Table("Heads", ("layer", "head", *titles), rows, caption, command)
