"""What measurements give reason to fear, while there is time: a gradient that leans, and scores
that follow it.

The rule asks what reaches the weights and not what rounds: an attention whose O errs, but whose
gradient does not, is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from halfulp.chances import student_beyond
from halfulp.watch.health import Step
from halfulp.watch.nonfinite import Place
from halfulp.watch.running import WINDOW
from halfulp.watch.troubles import CAUSES, Finding, Seen, find

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


class Alarms:
    """What else has been found in a run, each cause once a place, a bad batch once a step."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.found: list[Finding] = []

    def look(
        self,
        steps: Sequence[Step],
        new: int,
        rows: Sequence[Mapping[str, Any]],
        layers: Sequence[str],
        *,
        leaning: Sequence[str],
        unseen: Mapping[str, str],
        place: Place | None,
        skipped_at: Place | None,
        first_loss: float,
        measurements: int,
    ) -> list[Finding]:
        """Return what is found for the first time.

        Args:
            steps: in order, of which the last `new` have not been looked at.
            new: how many.
            rows: the last measurements, {"step", "measure", "weights"}.
            layers: their names.
            leaning: those of which a head alarms now.
            unseen: why others are not measured.
            place: where a number first was not finite in an update.
            skipped_at: where it was in a step that a GradScaler left out.
            first_loss: that the run began at.
            measurements: of attention, that were made.
        """
        seen = Seen(
            list(steps),
            new,
            rows,
            layers,
            self._model,
            leaning,
            [one.since for one in self.found if one.kind in _EXPLAINING],
            unseen,
            {one.kind for one in self.found},
            "" if place is None else str(place),
            "" if place is None else place.dtype,
            "" if skipped_at is None else str(skipped_at),
            first_loss,
        )
        known = {_key(one) for one in self.found}
        said = _of_attention(leaning, unseen, measurements)
        fresh = [replace(one, attention=said) for one in find(seen) if _key(one) not in known]
        self.found += fresh
        return fresh


_EXPLAINING = {name for name, cause in CAUSES.items() if cause.explains_loss}


def _key(one: Finding) -> tuple[str, str, int]:
    return one.kind, one.layer, one.since if one.kind == "bad_batch" else 0


def _of_attention(leaning: Sequence[str], unseen: Mapping[str, str], measurements: int) -> str:
    """What is known of rounding in attention where another cause is found."""
    if leaning:
        return f"Attention leans too, in {len(set(leaning))} layers."
    if measurements < WINDOW // 2:
        return (
            f"Whether attention's rounding plays a part is not known: {measurements} measurements,"
            f" and it takes {WINDOW // 2}."
        )
    but = f", but {len(unseen)} layers are not measured" if unseen else ""
    return f"Rounding in attention is not seen: no head that is measured leans so far{but}."


def threshold(heads: int, measurements: int, level: float = LEVEL) -> float:
    """The |t| that is beyond the level, over all heads of one measurement."""
    return student_beyond(level / (2 * max(heads, 1)), measurements - 1)


def _figure(rows: Sequence[Sequence[float | None]], layer: int, head: int) -> float:
    """NaN where it was not finite, or the layer not measured."""
    value = rows[layer][head] if layer < len(rows) and head < len(rows[layer]) else None
    return math.nan if value is None else value
