"""What a watched training is found to do, in words: alarms with cause and fix, and a table of
layers and heads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfulp.watch.alarms import Alarm, alarms, threshold
from halfulp.watch.calls import IN_GRADIENT, NOT_FINITE
from halfulp.watch.running import SIZE, TOTAL, WINDOW
from halfulp.watch.troubles import CAUSES

OPERATIONS = {
    "delta": "δ = rowsum(dO ∘ O) leans: the rounding error of O goes along with dO",
    "backward": (
        "Rows of dS do not sum to 0, and O is not to blame: it is the kernel's backward pass"
    ),
    "unknown": "Rows of dS do not sum to 0; whether O is to blame cannot be told under dropout",
}
"""What leans, by the name that an alarm gives it."""
FIXES = {
    "delta": 'train inside `with halfulp.patch():`, or with attn_implementation="halfulp"',
    "backward": "audit the kernel (`halfulp audit`), or train inside `with halfulp.patch():`",
    "unknown": "train inside `with halfulp.patch():`",
}
LEVEL = 1e-5
"""Of one look over all heads: a run is looked at after each of its measurements, a thousand times
maybe.
"""
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
        sure = (
            f"t = {self.t:.1f} over {self.measurements} measurements, mean score moved by"
            f" {self.score_moved:+.1f}"
        )
        return f"step {self.step}, {self.layer}, head {self.head}: {self.kind} ({sure})"

    def __str__(self) -> str:
        return f"{self.where}. {OPERATIONS[self.operation]}. Fix: {FIXES[self.operation]}."


def explained(alarm: Alarm, rows: Sequence[Mapping[str, Any]], layers: Sequence[str]) -> HeadAlarm:
    """An alarm with its layer and operation: is half of the gradient's error that of O?"""
    of_out, in_gradient = (
        _mean(rows, name, alarm.layer, alarm.head) for name in (TOTAL, IN_GRADIENT)
    )
    operation = "delta" if of_out / in_gradient >= 0.5 else "backward"
    return HeadAlarm(
        alarm.kind,
        alarm.step,
        layers[alarm.layer],
        alarm.head,
        alarm.t,
        alarm.score_moved,
        min(len(rows), WINDOW),
        "unknown" if math.isnan(of_out) else operation,
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str, layer: int, head: int) -> float:
    """The mean over measurements of a part of δ's error, in units of its size; NaN where there is
    none.
    """
    measures = [row["measure"] for row in rows]
    pairs = [
        (m[name][layer][head], m[SIZE][layer][head])
        for m in measures
        if layer < len(m[SIZE]) and m[SIZE][layer]
    ]
    if not pairs or any(part is None or size is None for part, size in pairs):
        return math.nan
    return float(sum(part / size for part, size in pairs if size)) / len(pairs)


COLUMNS = (
    ("max S", "max_score", "{:.1f}"),
    ("tied", "tied_rows", "{:.0%}"),
    ("O", "out_error", "{:.1e}"),
    ("dQ", "grad_query_error", "{:.1e}"),
    ("dK", "grad_key_error", "{:.1e}"),
    ("dV", "grad_value_error", "{:.1e}"),
    ("δ leans", "leaning", "{:+.0%}"),
    ("t", "delta_error_in_gradient_steps_t", "{:+.1f}"),
)
LEGEND = (
    "max S: largest score α q·k, natural units; tied: rows that repeat their maximum; O, dQ, dK,"
    " dV: relative errors against their exact values; δ leans: mean error of δ in the gradient over"
    " the last {window}, as a share of Σ|δ − golden|; t: the same in standard errors{alarms}."
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
    warnings: tuple[str, ...] = ()  # what is wrong beside attention's leaning, a sentence each
    loss: str = ""  # in words
    measured_from: int | None = None  # the first of the measurements that alarms rest on
    # other causes that were ever found, as `Finding.as_dict` gives them
    findings: tuple[dict[str, Any], ...] = ()
    looked: int = 0  # steps that they rest on

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **vars(self),
            "alarms": [{**vars(alarm), "text": str(alarm)} for alarm in self.alarms],
        }

    def text(self, width: int = 100, lines: int = MOST_LINES) -> str:
        """The report; with more heads than `lines`, each layer's worst and those that alarm."""
        said = [self._head(), *(f"WARNING {sentence}" for sentence in self.warnings)]
        said += _first([f"ALARM {found['text']}" for found in self.findings])
        if self.rows:
            shown = self.rows if len(self.rows) <= lines else self._worst()
            table = _table(shown, {(a.layer, a.head) for a in self.alarms}, width)
            said += ["", "\n".join(table)]
            if len(shown) < len(self.rows):
                every = len(self.rows)
                said.append(f"The worst head of each layer; text(lines={every}) has all {every}.")
            window = min(self.measurements, WINDOW)
            least = threshold(len(self.rows), window, LEVEL) if window >= WINDOW // 2 else None
            alarm = "" if least is None else f", beyond {least:.1f} it alarms"
            said += ["", LEGEND.format(window=_count(window, "measurement"), alarms=alarm)]
        said += [f"Not measured: {sentence}." for sentence in self.unseen]
        if self.alarms:
            said += ["", *_first([f"ALARM {alarm.where}" for alarm in self.alarms])]
            operations = dict.fromkeys(alarm.operation for alarm in self.alarms)
            said += [f"{OPERATIONS[of]}. Fix: {FIXES[of]}." for of in operations]
        elif self.rows:
            said += ["", self._no_alarm()]
        if not self.findings and self.looked:
            said.append(self._no_cause())
        return "\n".join(_wrapped(line, width) for line in said)

    def _head(self) -> str:
        last = "" if self.measured_step is None else f", the last at step {self.measured_step}"
        steps, measurements = _count(self.steps, "step"), _count(self.measurements, "measurement")
        wrong = ""
        if self.warnings or self.unseen or self.findings:
            kinds = dict.fromkeys(_name(found) for found in self.findings)
            found = _count(len(self.warnings), "warning") if self.warnings else ""
            missed = "not all attention measured" if self.unseen else ""
            wrong = f"; {', '.join(filter(None, (*kinds, found, missed)))}"
        loss = f", {self.loss}" if self.loss else ""
        return (
            f"halfulp.watch: {steps}, {measurements}{last},"
            f" {_count(len(self.layers), 'attention layer')}{loss}{wrong}"
        )

    def _no_alarm(self) -> str:
        if self.measurements < WINDOW // 2:
            return f"No alarm yet: it takes {WINDOW // 2} measurements."
        looks = _count(min(self.measurements, WINDOW), "measurement")
        since = "" if self.measured_from is None else f" since step {self.measured_from}"
        said = (
            f"No head alarms: over the last {looks}{since} none of the"
            f" {_count(len(self.rows), 'measured head')} leans, at a level of {LEVEL:g} over all of"
            " one measurement. That speaks of rounding in these heads' attention, in one pass of"
            " each measured step, and of nothing else"
        )
        unknown = [
            *(["the loss, which was not seen"] if not self.loss else []),
            *(["what the warnings name"] if self.warnings else []),
            *(["attention that was not measured"] if self.unseen else []),
        ]
        return f"{said}; not covered: {', '.join(unknown)}." if unknown else f"{said}."

    def _no_cause(self) -> str:
        names = ", ".join(cause.name for kind, cause in CAUSES.items() if kind != "unexplained")
        return (
            f"No other cause was found in the last {_count(self.looked, 'step')}, of those that are"
            f" looked for: {names}."
        )

    def _worst(self) -> tuple[dict[str, Any], ...]:
        alarmed = {(alarm.layer, alarm.head) for alarm in self.alarms}
        best: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row["layer"] not in best or _badness(row) > _badness(best[row["layer"]]):
                best[row["layer"]] = row
        return tuple(
            row
            for row in self.rows
            if best[row["layer"]] is row or (row["layer"], row["head"]) in alarmed
        )

    def __str__(self) -> str:
        return self.text(min(shutil.get_terminal_size((100, 24)).columns, 140))

    __repr__ = __str__


def report_of(
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[str],
    alarmed: Sequence[HeadAlarm],
    *,
    steps: int,
    measurements: int,
    unseen: Mapping[str, str],
    warnings: Sequence[str] = (),
    loss: str = "",
    findings: Sequence[dict[str, Any]] = (),
    looked: int = 0,
) -> WatchReport:
    """The report after the last of some measurements.

    Args:
        rows: the last `WINDOW`, {"step", "measure"}.
        layers: their names, in the order of the measures.
        alarmed: what the last one alarms about.
        steps: that have ended.
        measurements: that were made.
        unseen: why a layer was not measured.
        warnings: what is wrong elsewhere, a sentence each.
        loss: the loss in words.
        findings: other causes that were ever found, as `Finding.as_dict` gives them.
        looked: steps that these rest on.
    """
    heads: list[dict[str, Any]] = []
    measure = rows[-1]["measure"] if rows else {}
    for number, layer in enumerate(layers if rows else ()):
        for head in range(len(measure["max_score"][number])):
            row: dict[str, Any] = {"layer": layer, "head": head}
            row["leaning"] = _mean(rows, IN_GRADIENT, number, head)
            known = (name for _, name, _ in COLUMNS if name in measure)
            heads.append(row | {name: measure[name][number][head] for name in known})
    last = rows[-1]["step"] if rows else None
    found = (*warnings, *out_of_range(rows, layers))
    return WatchReport(
        steps,
        measurements,
        tuple(layers),
        tuple(heads),
        tuple(alarmed),
        tuple(by_reason(unseen)),
        last,
        found,
        loss,
        rows[0]["step"] if rows else None,
        tuple(findings),
        looked,
    )


LARGEST_SCORE, LARGEST_ERROR = 1e3, 1.0
"""Beyond which a figure is named: scores that make a softmax an argmax, errors as large as what
they are errors of.
"""


def out_of_range(rows: Sequence[Mapping[str, Any]], layers: Sequence[str]) -> list[str]:
    """What no sound attention shows, in any of some measurements, a sentence each."""
    limits = {NOT_FINITE: 0.0, "max_score": LARGEST_SCORE, "out_error": LARGEST_ERROR}
    limits |= {f"grad_{name}_error": LARGEST_ERROR for name in ("query", "key", "value")}
    worst: dict[str, tuple[float, str, int, int]] = {}
    for row in rows:
        for name, limit in limits.items():
            for layer, heads in enumerate(row["measure"].get(name, ())):
                for head, value in enumerate(heads):
                    # None and NaN: not known, or not finite, which has a figure of its own
                    size = 0.0 if value is None else abs(value)
                    if size > max(limit, worst.get(name, (0.0,))[0]):
                        worst[name] = (size, layers[layer], head, row["step"])
    titles = {name: title for title, name, _ in COLUMNS}
    said = []
    for name, (size, path, head, step) in worst.items():
        where = f"in {path}, head {head}, step {step}"
        if name == NOT_FINITE:
            said.append(f"{size:.0f} numbers that attention was fed or gave are not finite {where}")
        else:
            said.append(f"{titles[name]} is {size:.3g} {where}: beyond {limits[name]:g}")
    return said


def by_reason(unseen: Mapping[str, str]) -> list[str]:
    """What was not measured and why, a reason each."""
    return [
        f"{', '.join(layer for layer in unseen if unseen[layer] == why)} ({why})"
        for why in dict.fromkeys(unseen.values())
    ]


def alarmed_heads(
    rows: Sequence[Mapping[str, Any]], layers: Sequence[str]
) -> tuple[HeadAlarm, ...]:
    """What the last of some measurements alarms about."""
    return tuple(explained(alarm, rows, layers) for alarm in alarms(rows, LEVEL))


def _name(found: Mapping[str, Any]) -> str:
    """Of a cause; another halfulp may know others."""
    return CAUSES[found["kind"]].name if found["kind"] in CAUSES else str(found["kind"])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _badness(row: Mapping[str, Any]) -> float:
    t = row["delta_error_in_gradient_steps_t"]
    return -1.0 if t is None or math.isnan(t) else abs(t)


def _table(
    rows: Sequence[Mapping[str, Any]], alarmed: Collection[tuple[str, int]], width: int
) -> list[str]:
    lines = [["layer", "head", *(title for title, _, _ in COLUMNS), ""]]
    for row in rows:
        figures = [_figure(row.get(name), form) for _, name, form in COLUMNS]
        alarm = "ALARM" if (row["layer"], row["head"]) in alarmed else ""
        lines.append([row["layer"], str(row["head"]), *figures, alarm])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = width - sum(widths[1:]) - 2 * (len(widths) - 1)
    texts, names = [], dict.fromkeys(line[0] for line in lines[1:])
    alone = False  # the path stands on a line of its own
    if widths[0] > room:
        pattern, short = _shortened(names)
        alone = max(map(len, short.values())) > room
        texts = [] if alone else [f"layer: the * in {pattern}"]
        lines[1:] = [[line[0] if alone else short[line[0]], *line[1:]] for line in lines[1:]]
        widths[0] = 0 if alone else max(len(line[0]) for line in lines)
    above = "layer"
    for layer, *cells in lines:
        if alone and layer != above:
            texts.append(layer)
        above = layer
        rest = [cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True)]
        texts.append("  ".join(["" if alone else layer.ljust(widths[0]), *rest]).rstrip())
    return texts


def _shortened(paths: Collection[str]) -> tuple[str, dict[str, str]]:
    """What paths have in common, with * for what they have not; and what they have not."""
    parts = [path.split(".") for path in paths]
    first = next(
        (i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1), 0
    )
    ends = [part[first + 1 :][::-1] for part in parts]
    last = next(
        (i for i, column in enumerate(zip(*ends, strict=False)) if len(set(column)) > 1),
        min(map(len, ends)),
    )
    middle = {
        path: ".".join(part[first : len(part) - last])
        for path, part in zip(paths, parts, strict=True)
    }
    return ".".join([*parts[0][:first], "*", *parts[0][len(parts[0]) - last :]]), middle


def _figure(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return form.format(value).replace("e-0", "e-")


def _first(said: Sequence[str]) -> list[str]:
    """As many as are shown, and how many more there are."""
    more = len(said) - MOST_ALARMS
    return [*said[:MOST_ALARMS], *([f"and {more} more"] if more > 0 else [])]


def _wrapped(text: str, width: int) -> str:
    """A sentence in lines; a table has its own."""
    import textwrap

    if len(text) <= width or "\n" in text:
        return text
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
