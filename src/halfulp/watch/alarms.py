"""What measurements give reason to fear, while there is time: a gradient that leans, and scores
that follow it.

The rule asks what reaches the weights and not what rounds: an attention whose O errs, but whose
gradient does not, is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halfulp.chances import student_beyond
from halfulp.watch.running import WINDOW

LEVEL = 1e-3
SCORE_MOVE = 2.0


def rule(level: float) -> str:
    """What alarms, in words."""
    return (
        f"biased: over the last {WINDOW} measurements (half as many at least) the error of δ that"
        " the gradient has, read from dK (or dQ, where heads share a key) in units of Σ|δ_lp −"
        f" δ_hp|, is not zero in the mean, by Student's t, at a level of {level:g} over all heads"
        " of one measurement; run-away: biased, and the head's mean score has moved by more than"
        f" {SCORE_MOVE:g} since the middle of these measurements"
    )


RULE = rule(LEVEL)


@dataclass(frozen=True)
class Alarm:
    """One head of one layer that the last measurement gives reason to look at."""

    kind: Literal["biased", "run-away"]
    step: int
    layer: int
    head: int
    t: float  # the mean error in standard errors
    score_moved: float  # natural units

    def __str__(self) -> str:
        moved = f"mean score moved by {self.score_moved:+.1f}"
        return (
            f"step {self.step}, layer {self.layer}, head {self.head}: {self.kind} (t ="
            f" {self.t:.1f}, {moved})"
        )


def alarms(rows: Sequence[Mapping[str, Any]], level: float = LEVEL) -> list[Alarm]:
    """Return what the last of some measurements alarms about, by `rule`; rows {"step", "measure"}
    as runs record them.

    Looking after every measurement of a long run is a test each time: the level is that of one
    look.
    """
    measured = [row for row in rows if "measure" in row][-WINDOW:]
    if len(measured) < WINDOW // 2:
        return []
    last, middle = (measured[i]["measure"] for i in (-1, len(measured) // 2))
    ts = last["delta_error_in_gradient_steps_t"]
    least = threshold(sum(map(len, ts)), len(measured), level)
    found = []
    for layer, heads in enumerate(ts):
        for head, t in enumerate(heads):
            if t is None or not abs(t) > least:
                continue
            now, before = (
                _figure(measure["mean_score"], layer, head) for measure in (last, middle)
            )
            kind: Literal["biased", "run-away"] = (
                "run-away" if abs(now - before) > SCORE_MOVE else "biased"
            )
            found.append(Alarm(kind, measured[-1]["step"], layer, head, t, now - before))
    return found


def threshold(heads: int, measurements: int, level: float = LEVEL) -> float:
    """The |t| that is beyond the level, over all heads of one measurement."""
    # Bonferroni over heads, two-sided
    return student_beyond(level / (2 * max(heads, 1)), measurements - 1)


def _figure(rows: Sequence[Sequence[float | None]], layer: int, head: int) -> float:
    """NaN where it was not finite, or the layer not measured."""
    value = rows[layer][head] if layer < len(rows) and head < len(rows[layer]) else None
    return math.nan if value is None else value
