"""When a run has failed: a rule with numbers in it, so that nobody has to look at a curve and
decide.

Three things count. A number that is not finite. A loss that has lost a stated factor against its
own best, for a stated number of steps, so that one spike is no failure. Scores or weights that run
away from those of the twin, the same run with attention in fp32, long before the loss shows it. A
run whose scores walk off more slowly is said to drift: it has not failed, and it has not survived
either.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from halfulp.runs.results import number_of
from halfulp.training.config import LayerTask, UserModel, WorkloadConfig

Outcome: TypeAlias = Literal["survived", "drifting", "failed"]
Row: TypeAlias = Mapping[str, Any]

RUN_AWAY = ("max_score", "sigma_query", "sigma_key")
"""Figures that are held against the twin's, where a run records them."""
DRIFT = "mean_score"
_LEAST = 5e-324  # that a loss may be 0 and another so many times it
BEHIND = 1.05
"""Sound bf16 was at most 1.4 % behind fp32 in 24 runs of six small models over 40 steps, and up to
2 % where a loss falls steeply."""
LOST, LEAST_LOST = 0.25, 0.01
"""Of the way down that fp32 made, sound bf16 had lost at most 1.1 % in 22 such runs, and was 0.25 %
behind; weights in bf16 that swallow updates lose half of it while the loss is 2 % behind."""


@dataclass(frozen=True)
class Rule:
    """What counts as failure; the defaults are for the one-layer task, `rule_for` has others."""

    loss_factor: float = 3.0  # k: failed above k times the best loss
    # n, steps: losses are medians over n steps; None: a tenth of the run
    patience: int | None = None
    least_loss: float = 1e-5  # below it a loss that rises is fp32's own noise
    score_drift: float = 2.0  # natural units, over the second half of the run and beyond the twin's
    # failed above this many times the twin's largest score or σ, for n steps
    run_away: float = 10.0
    # failed above this many times the twin's loss, medians over n steps; None: not looked at
    behind: float | None = None
    # failed where over this share of the twin's way down from its beginning is lost, and 1 % of the
    # twin's loss; None: not looked at
    lost_way: float | None = None

    def __post_init__(self) -> None:
        factor, number = "a finite factor above 1", "a finite number of at least 0"
        share, count = "a share, 0 to 1", "an integer of at least 1"
        for name, fits, accepted in (
            ("loss_factor", 1 < self.loss_factor < math.inf, factor),
            ("run_away", 1 < self.run_away < math.inf, factor),
            ("least_loss", 0 <= self.least_loss < math.inf, number),
            ("score_drift", 0 <= self.score_drift < math.inf, number),
            ("behind", self.behind is None or 1 < self.behind < math.inf, f"{factor}, or None"),
            ("lost_way", self.lost_way is None or 0 < self.lost_way < 1, f"{share}, or None"),
            ("patience", self.patience is None or self.patience >= 1, f"{count}, or None"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)}: accepted is {accepted}")

    def steps_of(self, planned: int) -> int:
        """Return n for a run of so many steps."""
        return max(1, planned // 10) if self.patience is None else self.patience

    def text(self, planned: int) -> str:
        """Return the rule in words, for a run of so many steps."""
        n = self.steps_of(planned)
        lowest = (
            f"failed: a number is not finite, or the loss (median of {n} steps) is over"
            f" {self.loss_factor:g} times its lowest (smallest median of {n} steps before)"
        )
        if self.behind is not None:
            lost = (
                f", or has lost over {self.lost_way:g} of the twin's way down and"
                f" {LEAST_LOST:.0%} of its loss"
                if self.lost_way
                else ""
            )
            return (
                f"{lowest}, or over {self.behind:g} times that of the twin, the same run with"
                f" everything in fp32{lost}, or, where the run measures them, for {n} steps the"
                f" largest score or a σ of W_Q or W_K is over {self.run_away:g} times the twin's;"
                " survived: otherwise"
            )
        least = f" and at least {self.least_loss:g}" if self.least_loss else ""
        return (
            f"{lowest}{least}, or for {n} steps the largest score or a σ"
            f" of W_Q or W_K is over {self.run_away:g} times the fp32 twin's; drifting: not failed,"
            f" but over the second half the mean score has moved by more than {self.score_drift:g}"
            " beyond the twin's; survived: otherwise"
        )


def rule_for(workload: WorkloadConfig) -> Rule:
    """Return the rule by which runs of a workload are judged unless another is given.

    A language model's loss starts at the log of its vocabulary and ends at a good part of it: a
    factor of 3 is more than it can lose. Its mean scores wander by some units in sound runs too. A
    user's model, of which nothing but the loss is known, is held against its twin's.
    """
    if isinstance(workload, LayerTask):
        return Rule()
    rule = Rule(loss_factor=1.2, least_loss=0.0, score_drift=10.0)
    held = isinstance(workload, UserModel)
    return replace(rule, behind=BEHIND, lost_way=LOST) if held else rule


_LAYER = Rule()
RULE = (
    "failed: a number is not finite, or the loss (median of the last tenth of the run) is over"
    f" {_LAYER.loss_factor:g} times its lowest (smallest median of any earlier tenth) and at least"
    f" 1e-5; drifting: not failed, but the mean score has moved by more than {_LAYER.score_drift:g}"
    " over the second half; survived: otherwise"
)
"""What `judge` goes by."""


def judge(
    loss: Sequence[float],
    mean_score: Sequence[float],
    broke_at: int | None = None,
    rule: Rule = _LAYER,
) -> tuple[Outcome, str]:
    """Return what became of a whole run, by its last tenth and without a twin, and the figures that
    decided it.

    Args:
        loss: at every recorded step.
        mean_score: at the same steps.
        broke_at: the step whose loss was not finite, if there was one.
        rule: its factor, its least loss and its drift.
    """
    if broke_at is not None or not all(map(math.isfinite, (*loss, *mean_score))):
        return "failed", f"not finite at step {broke_at}" if broke_at is not None else "not finite"
    tenths = [statistics.median(part) for part in _tenths(loss)]
    last, lowest = tenths[-1], min(tenths)
    moved = _moved(mean_score)
    figures = (
        f"loss {last:.1e} at the end, {lowest:.1e} at best; mean score {mean_score[-1]:+.1f}, moved"
        f" {moved:+.1f}"
    )
    if last > rule.loss_factor * lowest and last >= rule.least_loss:
        return "failed", figures
    return ("drifting" if abs(moved) > rule.score_drift else "survived"), figures


def _tenths(values: Sequence[float]) -> list[Sequence[float]]:
    """Up to ten consecutive parts of about equal length."""
    parts = min(10, len(values))
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _moved(values: Sequence[float]) -> float:
    """How far a curve went over its second half."""
    return values[-1] - values[len(values) // 2]


@dataclass
class Curve:
    """One figure over the steps at which it was recorded, ascending."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Add a point."""
        self.steps.append(step)
        self.values.append(value)

    def at(self, step: int) -> float:
        """The value at a step or the last recorded one before it; the first if none."""
        return self.values[max(0, bisect.bisect_right(self.steps, step) - 1)]

    def largest(self, step: int) -> float:
        """The largest magnitude up to a step."""
        return max(map(abs, self.values[: max(1, bisect.bisect_right(self.steps, step))]))


def read_curves(rows: Iterable[Row]) -> dict[str, Curve]:
    """Return loss, mean score and the figures of `RUN_AWAY` by name, from metrics and measurements
    in order of steps.

    What is measured by layer and head has a curve for each: "max_score of layer 1, head 2". A
    number that was not finite, null in a file, is NaN.
    """
    curves: dict[str, Curve] = {}
    for row in rows:
        for name, value in _figures(row):
            curves.setdefault(name, Curve()).add(row["step"], value)
    return curves


def _figures(row: Row) -> Iterator[tuple[str, float]]:
    if "loss" in row:
        yield "loss", number_of(row["loss"])
    for name in (DRIFT, *RUN_AWAY):
        if name in row:
            yield name, number_of(row[name])
        measured = row.get("measure", {}).get(name)
        for layer, heads in enumerate(measured if isinstance(measured, list) else ()):
            yield from (
                (f"{name} of layer {layer}, head {head}", number_of(x))
                for head, x in enumerate(heads)
            )


@dataclass(frozen=True)
class Judgement:
    """What became of a run, by a rule."""

    outcome: Outcome
    reason: str  # the figures that decided it
    failed_at: int | None = None  # the step at which the rule called it failed
    loss: float = math.nan  # the last; a median over n steps where there are so many
    # the mean score's way over the second half, beyond the twin's; of the head that moved most
    score_moved: float = 0.0

    @property
    def survived(self) -> bool:
        """Whether it neither failed nor drifts."""
        return self.outcome == "survived"


class Watcher:
    """Looks at a run line by line, and says at which of them it has failed.

    Args:
        rule: what counts.
        planned: steps of the whole run.
        twin: curves of the same run with attention in fp32; without them nothing is held against a
            twin.
    """

    def __init__(self, rule: Rule, planned: int, twin: Mapping[str, Curve] | None = None) -> None:
        self.rule, self.patience, self.twin = rule, rule.steps_of(planned), twin or {}
        self.curves: dict[str, Curve] = {}
        self.failed: Judgement | None = None
        self._medians = Curve()
        self._best: list[float] = []  # smallest median up to each of them
        self._since: dict[str, int] = {}  # when a figure went over the twin's

    def __call__(self, row: Row) -> str | None:
        """Take a line of metrics or a measurement; return why the run has failed, once it has."""
        for name, value in _figures(row):
            self.curves.setdefault(name, Curve()).add(row["step"], value)
            if self.failed is None:
                reason = (
                    self._loss(row["step"], value)
                    if name == "loss"
                    else self._figure(name, row["step"], value)
                )
                if reason:
                    self.failed = Judgement(
                        "failed", f"{reason} at step {row['step']}", row["step"]
                    )
        return self.failed.reason if self.failed else None

    def judgement(self) -> Judgement:
        """Return what became of the run up to the last line taken.

        Raises:
            ValueError: no loss was recorded.
        """
        if "loss" not in self.curves:
            raise ValueError(
                "metrics without a loss: accepted are those of a run with at least one recorded"
                " step"
            )
        loss = self._medians.values[-1] if self._best else self.curves["loss"].values[-1]
        moved = {name: self._drift(name) for name in self.curves if name.startswith(DRIFT)}
        worst = max(moved, key=lambda name: abs(moved[name]), default="")
        way = moved.get(worst, 0.0)
        if self.failed is not None:
            return replace(self.failed, loss=loss, score_moved=way)
        figures = f"loss {loss:.2g}"
        if self._best:
            figures = f"median {figures}, {self._best[-1]:.2g} at best"
        figures += f"; {worst.replace('_', ' ')} moved {way:+.1f}" if worst else ""
        return Judgement(
            "drifting" if abs(way) > self.rule.score_drift else "survived", figures, None, loss, way
        )

    def _loss(self, step: int, value: float) -> str | None:
        if not math.isfinite(value):
            return "loss not finite"
        curve = self.curves["loss"]
        # a recorded loss stands for the steps since the last one: n steps have to be there before
        # their median is taken
        gap = curve.steps[1] - curve.steps[0] if len(curve.steps) > 1 else step
        if step - self.patience < curve.steps[0] - gap:
            return None
        median = statistics.median(
            curve.values[bisect.bisect_right(curve.steps, step - self.patience) :]
        )
        self._medians.add(step, median)
        self._best.append(min(median, self._best[-1]) if self._best else median)
        if (reason := self._behind(step, median)) is not None:
            return reason
        # the best of windows that share no step with this one, or a rise would lift its own bound
        earlier = bisect.bisect_right(self._medians.steps, step - self.patience)
        if (
            not earlier
            or median < self.rule.least_loss
            or median <= self.rule.loss_factor * self._best[earlier - 1]
        ):
            return None
        best = max(self._best[earlier - 1], _LEAST)
        return f"loss {median:.2g}, {median / best:.1f} times its best"

    def _behind(self, step: int, median: float) -> str | None:
        """Whether the loss is above the twin's at the same steps."""
        twin = self.twin.get("loss")
        if self.rule.behind is None or twin is None or step > twin.steps[-1]:
            return None
        first, last = (bisect.bisect_right(twin.steps, s) for s in (step - self.patience, step))
        best = statistics.median(twin.values[first:last]) if last > first else math.nan
        if median < self.rule.least_loss:
            return None
        if median > self.rule.behind * best:
            return f"loss {median:.3g}, {median / max(best, _LEAST):.2f} times the twin's"
        gap = twin.steps[1] - twin.steps[0] if len(twin.steps) > 1 else step
        begun = bisect.bisect_right(twin.steps, twin.steps[0] - gap + self.patience)
        start = statistics.median(twin.values[: max(1, begun)])
        lost, way = median - best, start - best
        least = LEAST_LOST * best
        # of a twin that hardly learns, a quarter of its way is noise
        if self.rule.lost_way is None or way < 2 * least or lost < least:
            return None
        if lost <= self.rule.lost_way * way:
            return None
        return f"loss {median:.3g}, {lost / way:.0%} of the twin's way from {start:.3g} lost"

    def _figure(self, name: str, step: int, value: float) -> str | None:
        said = name.replace("_", " ")
        if not math.isfinite(value):
            return f"{said} not finite"
        twin = self.twin.get(name)
        if twin is None or name.startswith(DRIFT):
            return None
        # not below 1 natural unit: ten times the scores of a fresh model are no run-away yet
        bound = max(1.0, twin.largest(step))
        if abs(value) <= self.rule.run_away * bound:
            # back below: n steps in a row are meant
            self._since.pop(name, None)
            return None
        if step - self._since.setdefault(name, step) < self.patience:
            return None
        return f"{said} {value:.3g}, {abs(value) / bound:.0f} times the twin's"

    def _drift(self, name: str) -> float:
        curve, twin = self.curves[name], self.twin.get(name)
        half, end = curve.steps[len(curve.steps) // 2], curve.steps[-1]
        return _moved(curve.values) - (0.0 if twin is None else twin.at(end) - twin.at(half))


def judge_rows(
    rows: Iterable[Row], rule: Rule, planned: int, twin: Mapping[str, Curve] | None = None
) -> Judgement:
    """Return what became of a recorded run: see `Watcher`."""
    watcher = Watcher(rule, planned, twin)
    for row in rows:
        watcher(row)
    return watcher.judgement()
