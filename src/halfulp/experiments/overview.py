"""What training runs recorded, as figures and tables: one run head by head, several runs on the
same axes.

It reads run folders and nothing else, so a run that still trains, or that was killed, can be looked
at too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from halfulp.isolate.rule import Judgement, judge_rows, rule_for
from halfulp.runs.results import Figure, Series, Table
from halfulp.training.config import RunConfig
from halfulp.training.journal import Row, read_rows
from halfulp.training.run_json import config_from_dict, difference, read_record
from halfulp.watch.alarms import RULE, alarms

_POINTS = 400  # of a curve in a picture
_CURVES = 8  # in one picture
DECIDED = "figures that decided"
_LAYERS = 7  # in one picture: as many as have a color of their own

METRICS: tuple[tuple[str, str, str, bool], ...] = (
    ("loss", "Training loss", "loss", True),
    ("grad_norm", "Gradient norm before clipping", "‖g‖", True),
    ("mean_score", "Mean score", "mean of S, natural units", False),
    ("max_score", "Largest score", "max S, natural units", False),
    ("sigma_query", "Largest singular value of W_Q", "σ(W_Q)", False),
    ("sigma_key", "Largest singular value of W_K", "σ(W_K)", False),
    ("sigma_query_key", "Largest singular value of W_QK", "σ(α W_Qᵀ W_K)", False),
    ("tokens_per_second", "Speed", "tokens per second", False),
)
"""Lines of metrics that are drawn where a run has them: name, title, axis, whether it is
logarithmic.
"""

MEASURES: tuple[tuple[str, str, str], ...] = (
    ("sigma_query", "Largest singular value of W_Q", "σ(W_Q)"),
    ("sigma_query_key", "Largest singular value of W_QK", "σ(α W_Qᵀ W_K)"),
    ("max_score", "Largest score", "max S, natural units"),
    ("mean_score", "Mean score", "mean of S, natural units"),
    ("entropy", "Entropy of attention", "nats"),
    ("sink_first", "Weight on the first key", "share"),
    ("tied_rows", "Ties: rows whose largest score is repeated, in fp32", "share of rows"),
    ("tied_rows_bf16", "Ties with scores rounded to bf16", "share of rows"),
    ("repeated_unit_rows", "Rows with more than one P̄ = 1 in bf16", "share of rows"),
    ("query_rms", "Size of the queries", "root mean square"),
    ("key_rms", "Size of the keys", "root mean square"),
    ("value_rms", "Size of the values", "root mean square"),
    ("out_rms", "Size of attention's output", "root mean square"),
    ("input_max", "Largest activation before attention", "max |X|"),
    ("sign_agreement", "dO and the error of O of one sign", "share of elements"),
    (
        "guilty_sign_agreement",
        "dO and the error of O of one sign, in the feature that adds most to δ's error",
        "share of elements",
    ),
    ("terms_cosine", "Rank-1 terms of dW_Q's error, between tokens", "mean cosine"),
    ("terms_step_cosine", "Rank-1 terms of dW_Q's error, between steps", "mean cosine"),
    ("direction_cosine", "Direction of dW_Q's error against earlier steps", "cosine"),
    (
        "direction_cosine_shuffled",
        "Direction of dW_Q's error with shuffled features, which is chance",
        "rms cosine",
    ),
    ("delta_error_cumulative", "Cumulative Σ(δ_lp − δ_hp) of the measured steps", "sum over rows"),
    (
        "delta_error_first_order_steps_t",
        "First-order part of δ's error",
        "t over the measured steps",
    ),
    (
        "delta_error_in_gradient_steps_t",
        "Error of δ that the gradient has",
        "t over the measured steps",
    ),
    ("delta_error_curvature_steps_t", "Curvature part of δ's error", "t over the measured steps"),
)
"""Measurements that are drawn where a run has them, by layer and head."""


@dataclass(frozen=True)
class RecordedRun:
    """A run folder of a training, read."""

    name: str
    folder: Path
    record: dict[str, Any]
    config: RunConfig
    metrics: list[Row]
    measures: list[Row]

    @property
    def judgement(self) -> Judgement | None:
        """What became of it, by the rule for its workload and without a twin; None before the first
        line.
        """
        rows = sorted((*self.metrics, *self.measures), key=lambda row: row["step"])
        return (
            judge_rows(rows, rule_for(self.config.workload), self.config.steps)
            if self.metrics
            else None
        )


def read_run(folder: Path, name: str | None = None) -> RecordedRun:
    """Read a run folder.

    Raises:
        ValueError: there is no training in it.
    """
    record = read_record(folder)
    rows = read_rows(folder)
    return RecordedRun(
        name or folder.resolve().name,
        folder,
        record,
        config_from_dict(record["config"]),
        [row for row in rows if "loss" in row],
        [row for row in rows if "measure" in row],
    )


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Read several run folders; those that share a name are called by their parents' too."""
    names = [folder.resolve().name for folder in folders]
    full = [f"{folder.resolve().parent.name}/{folder.resolve().name}" for folder in folders]
    return [
        read_run(folder, name if names.count(name) == 1 else longer)
        for folder, name, longer in zip(folders, names, full, strict=True)
    ]


def overview(runs: Sequence[RecordedRun], command: str) -> dict[str, Any]:
    """Return figures and tables of runs as plain data: {"figures": …, "tables": …}."""
    rows = {run.name: run.metrics for run in runs}
    figures = metric_figures(rows, _left_out(runs), command)
    if len(runs) == 1:
        drawn = {name for row in runs[0].metrics for name in row}
        figures += measured_by_head(runs[0].measures, command, without=drawn)
    else:
        figures += _measured_by_run(runs, command)
    tables = [_outcomes(runs, command)]
    if any(run.measures for run in runs):
        tables.append(_alarms(runs, command))
    if len(runs) > 1:
        tables.append(_differences(runs, command))
    return {
        "figures": [figure.as_dict() for figure in figures],
        "tables": [table.as_dict() for table in tables],
    }


def finding(runs: Sequence[RecordedRun]) -> str:
    """Return what became of the runs, in a sentence each."""
    said = []
    for run in runs:
        judged = run.judgement
        if judged is None:
            said.append(f"{run.name} has not recorded a step yet.")
        else:
            last = run.metrics[-1]["step"]
            said.append(
                f"{run.name} {judged.outcome} ({judged.reason}), {last} of {run.config.steps}"
                " steps."
            )
    return " ".join(said)


def metric_figures(rows: Mapping[str, Sequence[Row]], caption: str, command: str) -> list[Figure]:
    """What runs recorded besides measurements, a figure a metric and a curve a run.

    Args:
        rows: of metrics, by the run's name.
        caption: below each figure.
        command: that the figures came from.
    """
    figures = []
    for name, title, axis, log in METRICS:
        having = [run for run in rows if any(name in row for row in rows[run])][:_CURVES]
        series = tuple(
            _curve(run, [row for row in rows[run] if name in row], itemgetter(name))
            for run in having
        )
        if series:
            log = log and all(y > 0 for one in series for y in one.y if math.isfinite(y))
            figures.append(Figure(title, "step", axis, series, caption, command, y_log=log))
    return figures


def measured_by_head(
    measures: Sequence[Row],
    command: str,
    *,
    names: Sequence[str] = (),
    without: Collection[str] = (),
) -> list[Figure]:
    """One run: a curve a head where there are few, else a layer's median with the range over its
    heads.

    Args:
        measures: rows {"step", "measure"}.
        command: that the figures came from.
        names: of the layers; their numbers if empty.
        without: figures that are drawn already.
    """
    figures = []
    for name, title, axis in MEASURES:
        rows = [row for row in measures if isinstance(row["measure"].get(name), list)]
        if not rows or name in without:
            continue
        shape = [
            (layer, len(heads)) for layer, heads in enumerate(rows[-1]["measure"][name]) if heads
        ]
        if sum(count for _, count in shape) <= _CURVES:
            series = [
                _curve(f"{_layer_name(names, layer)}, head {head}", rows, _at(name, layer, head))
                for layer, count in shape
                for head in range(count)
            ]
            caption = "One curve a head."
        else:
            series = [
                _layer_curve(rows, name, layer, _layer_name(names, layer))
                for layer in _worst([layer for layer, _ in shape], rows[-1]["measure"][name])
            ]
            caption = (
                "Each line is the median over a layer's heads, the band around it their range."
            )
            if len(shape) > _LAYERS:
                caption += (
                    f" Of {len(shape)} layers the {_LAYERS} with the head that is farthest from 0"
                    " in the last measurement."
                )
        figures.append(Figure(title, "step", axis, tuple(series), caption, command))
    return figures


def _worst(layers: Sequence[int], measured: Sequence[Sequence[float | None]]) -> list[int]:
    """As many layers as a picture holds, in order: those that are farthest from 0."""

    def size(layer: int) -> float:
        return max((abs(x) for x in measured[layer] if x is not None), default=0.0)

    return sorted(sorted(layers, key=size, reverse=True)[:_LAYERS])


def _measured_by_run(runs: Sequence[RecordedRun], command: str) -> list[Figure]:
    """Several runs: the head with the largest value of each."""
    figures = []
    for name, title, axis in MEASURES:
        having = [
            run
            for run in runs
            if any(isinstance(r["measure"].get(name), list) for r in run.measures)
        ]
        # drawn already
        having = [run for run in having if not any(name in row for row in run.metrics)]
        series = tuple(_curve(run.name, run.measures, _extreme(name)) for run in having[:_CURVES])
        if series:
            where = "The layer and head whose magnitude is largest at that step."
            caption = f"{where} {_left_out(having)}".strip()
            figures.append(Figure(title, "step", axis, series, caption, command))
    return figures


def _at(name: str, layer: int, head: int) -> Callable[[Row], Any]:
    def value(row: Row) -> float | None:
        heads = row["measure"][name][layer]  # none where the layer was not measured that time
        return heads[head] if head < len(heads) else None

    return value


def _extreme(name: str) -> Callable[[Row], Any]:
    def largest(row: Row) -> float | None:
        numbers = [x for heads in row["measure"].get(name, ()) for x in heads if x is not None]
        return max(numbers, key=abs) if numbers else None

    return largest


def _layer_name(names: Sequence[str], layer: int) -> str:
    return names[layer] if names else f"layer {layer}"


def _layer_curve(rows: Sequence[Row], name: str, layer: int, label: str) -> Series:
    rows = _thinned(rows)
    columns = [
        [x for x in row["measure"][name][layer] if x is not None] or [math.nan] for row in rows
    ]
    return Series.over(label, [row["step"] for row in rows], columns)


def _curve(label: str, rows: Sequence[Row], value: Callable[[Row], Any]) -> Series:
    points = [(row["step"], value(row)) for row in _thinned(rows)]
    return Series(
        label,
        tuple(step for step, _ in points),
        tuple(math.nan if y is None else y for _, y in points),
    )


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """At most `_POINTS` rows, evenly spread, the last among them."""
    # counted from the end, so that the last row, where a run may have failed, is always drawn
    every = max(1, math.ceil(len(rows) / _POINTS))
    return list(rows[(len(rows) - 1) % every :: every])


def _left_out(runs: Sequence[RecordedRun]) -> str:
    return f"The first {_CURVES} of {len(runs)} runs." if len(runs) > _CURVES else ""


def _outcomes(runs: Sequence[RecordedRun], command: str) -> Table:
    columns = ("run", "attention", "seed", "steps", "status", "outcome", "final loss", DECIDED)
    rows = []
    for run in runs:
        judged = run.judgement
        steps = f"{run.metrics[-1]['step'] if run.metrics else 0} of {run.config.steps}"
        end = ("", None, "") if judged is None else (judged.outcome, judged.loss, judged.reason)
        made = (run.name, str(run.config.attention), run.config.seed)
        rows.append((*made, steps, str(run.record["status"]), *end))
    rules = dict.fromkeys(rule_for(run.config.workload).text(run.config.steps) for run in runs)
    return Table(
        "Runs",
        columns,
        tuple(rows),
        " ".join(f"{rule[0].upper()}{rule[1:]}." for rule in rules)
        + " No twin is trained for a report, so nothing here is judged by one; halfulp isolate"
        " trains it.",
        command,
    )


def _alarms(runs: Sequence[RecordedRun], command: str) -> Table:
    rows = tuple(
        (run.name, a.kind, a.step, a.layer, a.head, round(a.t, 1), round(a.score_moved, 1))
        for run in runs
        for a in alarms(run.measures)
    )
    columns = ("run", "alarm", "step", "layer", "head", "t", "mean score moved")
    none = "" if rows else f"No head alarms after the last measurement of {len(runs)} runs. "
    return Table("Alarms", columns, rows, f"{none}{RULE[0].upper()}{RULE[1:]}.", command)


def _differences(runs: Sequence[RecordedRun], command: str) -> Table:
    first = runs[0]
    rows = []
    for run in runs[1:]:
        changes = difference(first.config, run.config)
        rows.append(
            (run.name, "; ".join(changes) if changes else "nothing: the same configuration")
        )
    caption = "Twin runs differ in one field: what else differs may be what is seen."
    return Table("What differs", ("run", f"against {first.name}"), tuple(rows), caption, command)
