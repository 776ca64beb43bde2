"""What a watched training is found to do, in words: alarms with cause and fix, and a table of layers and heads."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfulp.watch.alarms import LEVEL, Alarm, threshold
from halfulp.watch.calls import IN_GRADIENT
from halfulp.watch.running import SIZE, TOTAL, WINDOW

OPERATIONS = {
    "delta": "δ = rowsum(dO ∘ O) leans: the rounding error of O goes along with dO",
    "backward": "Rows of dS do not sum to 0, and O is not to blame: it is the kernel's backward pass",
    "unknown": "Rows of dS do not sum to 0; whether O is to blame cannot be told under dropout",
}
"""What leans, by the name that an alarm gives it."""
FIXES = {
    "delta": 'train inside `with halfulp.patch():`, or with attn_implementation="halfulp"',
    "backward": "audit the kernel (`halfulp audit`), or train inside `with halfulp.patch():`",
    "unknown": "train inside `with halfulp.patch():`",
}
MOST_ALARMS = 10
MOST_LINES = 40


@dataclass(frozen=True)
class HeadAlarm:
    """One head of one layer that leans: where, how sure, which operation, and what to do."""

    kind: str  # "biased" or "run-away", by `halfulp.watch.alarms.RULE`
    step: int
    layer: str  # path of the module that called attention
    head: int
    t: float  # of the error of δ in the gradient: its mean in standard errors
    score_moved: float  # natural units
    measurements: int  # that t rests on
    operation: str  # of OPERATIONS

    @property
    def where(self) -> str:
        """Step, layer, head, and how sure."""
        sure = f"t = {self.t:.1f} over {self.measurements} measurements, mean score moved by {self.score_moved:+.1f}"
        return f"step {self.step}, {self.layer}, head {self.head}: {self.kind} ({sure})"

    def __str__(self) -> str:
        return f"{self.where}. {OPERATIONS[self.operation]}. Fix: {FIXES[self.operation]}."


def explained(alarm: Alarm, rows: Sequence[Mapping[str, Any]], layers: Sequence[str]) -> HeadAlarm:
    """Name an alarm's layer, and the operation: does the error of O account for half of that in the gradient?"""
    of_out, in_gradient = (_mean(rows, name, alarm.layer, alarm.head) for name in (TOTAL, IN_GRADIENT))
    operation = "delta" if of_out / in_gradient >= 0.5 else "backward"
    return HeadAlarm(
        alarm.kind, alarm.step, layers[alarm.layer], alarm.head, alarm.t, alarm.score_moved, min(len(rows), WINDOW),
        "unknown" if math.isnan(of_out) else operation,
    )  # fmt: skip


def _mean(rows: Sequence[Mapping[str, Any]], name: str, layer: int, head: int) -> float:
    """The mean over measurements of a part of δ's error, in units of its size."""
    measures = [row["measure"] for row in rows]
    pairs = [(m[name][layer][head], m[SIZE][layer][head]) for m in measures if layer < len(m[SIZE]) and m[SIZE][layer]]
    return float(sum(part / size for part, size in pairs if size)) / len(pairs)


COLUMNS = (
    ("max score", "max_score", "{:.1f}"),
    ("tied", "tied_rows", "{:.0%}"),
    ("O error", "out_error", "{:.1e}"),
    ("dQ", "grad_query_error", "{:.1e}"),
    ("dK", "grad_key_error", "{:.1e}"),
    ("dV", "grad_value_error", "{:.1e}"),
    ("δ leans", "leaning", "{:+.0%}"),
    ("t", "delta_error_in_gradient_steps_t", "{:+.1f}"),
)
LEGEND = (
    "max score: largest α q·k, natural units; tied: rows that repeat their maximum; O error, dQ, dK, dV: relative "
    "error of O and of the gradients, against their exact values; δ leans: mean error of δ in the gradient over the "
    "last {window} measurements, as a share of Σ|δ − golden|, and t, in standard errors: beyond {least:.1f} it alarms."
)


@dataclass(frozen=True)
class WatchReport:
    """What is known after the last measurement; print it."""

    steps: int
    measurements: int
    layers: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]  # one a head: layer, head, and the figures of COLUMNS
    alarms: tuple[HeadAlarm, ...]  # of the last measurement
    unseen: tuple[str, ...]  # what was not measured, and why, a sentence each
    measured_step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "alarms": [{**vars(alarm), "text": str(alarm)} for alarm in self.alarms]}

    def text(self, width: int = 100, lines: int = MOST_LINES) -> str:
        """The report as text; with more heads than `lines`, the worst of each layer and those that alarm."""
        said = [self._head()]
        if self.rows:
            shown = self.rows if len(self.rows) <= lines else self._worst()
            said += ["", *_table(shown, {(a.layer, a.head): a.kind for a in self.alarms}, width)]
            if len(shown) < len(self.rows):
                rest = f"The worst head of each layer; text(lines={len(self.rows)}) has all {len(self.rows)}."
                said += _wrapped(rest, width)
            least = threshold(len(self.rows), max(2, min(self.measurements, WINDOW)))
            said += ["", *_wrapped(LEGEND.format(window=min(self.measurements, WINDOW), least=least), width)]
        said += [line for sentence in self.unseen for line in _wrapped(f"Not measured: {sentence}.", width)]
        if self.alarms:
            said += ["", *self._alarms(width)]
        if not self.alarms and self.rows:
            said += ["", *_wrapped(self._no_alarm(), width)]
        return "\n".join(said)

    def _head(self) -> str:
        count = f"{self.measurements} measurement{'s' * (self.measurements != 1)}"
        last = "" if self.measured_step is None else f", the last at step {self.measured_step}"
        return f"halfulp.watch: {self.steps} steps, {count}{last}, {len(self.layers)} attention layers"

    def _alarms(self, width: int) -> list[str]:
        said = [line for alarm in self.alarms[:MOST_ALARMS] for line in _wrapped(f"ALARM {alarm.where}", width)]
        if len(self.alarms) > MOST_ALARMS:
            said.append(f"and {len(self.alarms) - MOST_ALARMS} more")
        for operation in dict.fromkeys(alarm.operation for alarm in self.alarms):
            said += _wrapped(f"{OPERATIONS[operation]}. Fix: {FIXES[operation]}.", width)
        return said

    def _no_alarm(self) -> str:
        if self.measurements < WINDOW // 2:
            return f"No alarm yet: it takes {WINDOW // 2} measurements."
        return f"No head alarms, at a level of {LEVEL:g} over all heads."

    def _worst(self) -> tuple[dict[str, Any], ...]:
        alarmed = {(alarm.layer, alarm.head) for alarm in self.alarms}
        best: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row["layer"] not in best or _badness(row) > _badness(best[row["layer"]]):
                best[row["layer"]] = row
        return tuple(row for row in self.rows if best[row["layer"]] is row or (row["layer"], row["head"]) in alarmed)

    def __str__(self) -> str:
        return self.text(min(shutil.get_terminal_size((100, 24)).columns, 140))

    __repr__ = __str__


def _badness(row: Mapping[str, Any]) -> float:
    t = row["delta_error_in_gradient_steps_t"]
    return -1.0 if t is None or math.isnan(t) else abs(t)


def _table(rows: Sequence[Mapping[str, Any]], alarmed: Mapping[tuple[str, int], str], width: int) -> list[str]:
    lines = [["layer", "head", *(title for title, _, _ in COLUMNS), ""]]
    for row in rows:
        figures = [_figure(row.get(name), form) for _, name, form in COLUMNS]
        kind = alarmed.get((row["layer"], row["head"]), "")
        lines.append([row["layer"], str(row["head"]), *figures, kind])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first = min(widths[0], max(8, width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    texts = []
    for layer, *cells in lines:
        rest = [cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True)]
        texts.append("  ".join([_shortened(layer, first).ljust(first), *rest]).rstrip())
    return texts


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else form.format(value)


def _shortened(path: str, width: int) -> str:
    """The end of a path tells layers apart, and its numbers do."""
    return path if len(path) <= width else f"…{path[len(path) - width + 1 :]}"


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
