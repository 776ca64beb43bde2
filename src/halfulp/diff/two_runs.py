"""Where two recorded trainings part: what they were asked for, their curves, their weights, and,
where their models may be made, one pass of both over the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from halfulp.diff.after_steps import STRETCHES
from halfulp.diff.difference import Difference, Report
from halfulp.diff.local_gap import BEYOND, step_of
from halfulp.diff.noise import LEVEL
from halfulp.diff.run_sides import RunSide
from halfulp.diff.setting import Setting
from halfulp.diff.two_sides import compared
from halfulp.diff.weights_apart import Distance, ModuleDrift, Weights, apart, distance, drifts
from halfulp.runs.results import Progress, Table, no_progress, number_of
from halfulp.training.checkpoint import load_weights
from halfulp.training.run_json import difference
from halfulp.training.trust import named_code, trusted

_ARITHMETIC = ("attention", "operations", "autocast")
"""Settings that decide how the same numbers are computed, and nothing else."""
_SUMS = ("accumulation", "device")
"""Settings that change the order of sums, which a pass over a whole batch does not show."""
_BESIDE = ("metrics_every", "measure_every", "checkpoint_every", "keep", "preset", "steps")
"""Settings that do not change a step."""
_CLOCK = ("step", "seconds", "tokens_per_second")

FORWARD = (
    "That is one forward pass: an error that leans in the gradient is within rounding there and may"
    " still ruin a run. --gradients looks at the gradients, `halfulp isolate` at the training."
)

Verdict = Literal["identical", "within rounding", "beyond rounding", "unknown"]


@dataclass(frozen=True)
class CurveGap:
    """One figure of the lines of metrics that both runs have."""

    name: str
    lines: int
    first: int | None  # step of the first line whose numbers are not the same to the bit
    beyond: int | None  # of the first that differs by more than rounding in one pass
    last: tuple[int, float, float]  # step, A's and B's number


@dataclass(frozen=True)
class Drift:
    """The weights at a step of which both runs have a checkpoint."""

    step: int
    gap: Distance
    travelled: float | None  # ‖A − where A began‖
    modules: tuple[ModuleDrift, ...]


@dataclass(frozen=True, repr=False)
class RunDifference(Report):
    """The report of two run folders: print it, or `to_json`.

    `verdict` is "identical" (every common line and checkpoint, to the bit), "beyond rounding" (they
    were asked for other things than arithmetic, or their arithmetic differs by more than rounding
    in one pass), "within rounding" (their arithmetic alone differs, by no more), or "unknown".
    """

    names: tuple[str, str]
    verdict: Verdict
    why: str
    p: float | None
    settings: tuple[str, ...]
    environments: tuple[str, ...]
    tolerance: float  # relative, of a curve
    formats: str  # the coarsest that a run computes in
    curves: tuple[CurveGap, ...]
    drifts: tuple[Drift, ...]
    beside: Mapping[str, Distance]  # other distances at the last common step, or at the start
    same_weights: Difference | None  # A's weights, each run's arithmetic
    own_weights: Difference | None  # each run's own
    notes: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        """0: identical, or within rounding; 1: more; 2: not known."""
        late = None if self.same_weights is None else self.same_weights.after
        if late is not None and late.p is not None and late.p < LEVEL:
            return 1
        return {"beyond rounding": 1, "unknown": 2}.get(self.verdict, 0)

    def text(self, width: int) -> str:
        """The verdict, settings, curves, weights and passes."""
        from halfulp.diff.run_wording import text

        return text(self, width)

    def sections(self) -> dict[str, list[Table]]:
        """Settings, curves, weights and passes, whole."""
        from halfulp.diff.run_wording import sections

        return sections(self)


def diff_runs(
    a: Path,
    b: Path,
    *,
    at: int | None = None,
    beside: Sequence[Path] = (),
    batches: int = 2,
    gradients: bool = False,
    attribute: bool = True,
    repetitions: int = 2,
    most: int = 12,
    steps: int = 0,
    trust: bool = False,
    workload: str | None = None,
    progress: Progress | None = None,
) -> RunDifference:
    """Say where two recorded trainings part, and whether it is more than rounding.

    Args:
        a: run folder that counts as right.
        b: the other.
        at: step of the checkpoints whose models are run; by default the last that both have.
        beside: run folders that differ from a in their seed, for scale.
        batches: of a's that both models are run on.
        gradients, attribute, repetitions, most: of those passes, as of `halfulp.diff`.
        steps: train copies of both so many steps from a's checkpoint, its weights and its
            optimizer's state, each as its run was trained, on a's next batches.
        trust: run the code that the folders name as their model or attention.
        workload: the caller's own word for the function that makes the model of both.
        progress: called with the fraction done and what is being worked on.

    Raises:
        ValueError: a folder is no training run, or they are of other models.
    """
    told = progress or no_progress
    one, other = (_side(folder, trust, workload) for folder in (a, b))
    _check_comparable(one, other)
    changes = difference(one.config, other.config)
    notes: list[str] = []
    told(0.05, "weights")
    start = one.initial()
    common = sorted(set(one.steps) & set(other.steps))
    if at is not None and at not in common:
        raise ValueError(f"at={at}: accepted are checkpoints that both runs have, {common}")
    found = _drifts(one, other, common, start)
    near = _beside(one, common[-1], beside, start) if common else {}
    if not common:
        notes.append("No checkpoint is common to both runs; their weights are not compared.")
    passes: tuple[Difference | None, Difference | None] = None, None
    if common and one.runs and other.runs:
        options: dict[str, Any] = {"gradients": gradients, "attribute": attribute}
        options |= {"repetitions": repetitions, "most": most, "steps": steps}
        passes = _passes(one, other, at or common[-1], batches, options, changes, told)
    elif common:
        code = named_code(other.config if one.runs else one.config)
        notes.append(
            f"No pass was made: that needs {', '.join(code)}, named by a run.json; accepted with"
            " --trust (trust=True), or --workload for a model of your own."
        )
    dtype = max(one.coarsest(), other.coarsest(), key=lambda x: torch.finfo(x).eps)
    tolerance = step_of(dtype) * BEYOND[16 if torch.finfo(dtype).bits <= 16 else 32]
    curves = _curves(one, other, tolerance)
    verdict, why = _verdict(changes, curves, found, passes[0])
    if verdict == "within rounding" and not gradients:
        notes.append(FORWARD)
    return RunDifference(
        (str(a), str(b)), verdict, why, passes[0].p if passes[0] else None, tuple(changes),
        tuple(_environments(one, other)), tolerance, str(dtype).removeprefix("torch."),
        tuple(curves), tuple(found), near, *passes, tuple(notes),
    )  # fmt: skip


def _side(folder: Path, trust: bool, workload: str | None) -> RunSide:
    side = RunSide.of(folder)
    if not (trust or workload):
        return side
    return RunSide.of(folder, trusted(side.config, folder, trust, workload))


def _check_comparable(one: RunSide, other: RunSide) -> None:
    """Raise ValueError for runs of other models."""
    kinds = [type(side.config.workload).__name__ for side in (one, other)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"a={str(one.folder)!r} and b={str(other.folder)!r}: a run of {kinds[0]} and one of"
            f" {kinds[1]}; accepted are runs of one model"
        )
    for side, letter in ((one, "a"), (other, "b")):
        if not side.rows and not side.steps:
            raise ValueError(
                f"{letter}={str(side.folder)!r} has no line of metrics and no checkpoint yet;"
                " accepted is a run that has made steps"
            )
    if one.steps and other.steps:
        shapes = [
            {name: tuple(x.shape) for name, x in side.weights(side.steps[-1]).items()}
            for side in (one, other)
        ]
        lone = sorted(k for k in shapes[0] | shapes[1] if shapes[0].get(k) != shapes[1].get(k))
        if lone:
            has = [shapes[i].get(lone[0], "no such tensor") for i in (0, 1)]
            raise ValueError(
                f"a={str(one.folder)!r} and b={str(other.folder)!r} are of other models:"
                f" {lone[0]} is {has[0]} and {has[1]}; accepted are runs of one"
            )


def _environments(one: RunSide, other: RunSide) -> list[str]:
    """What is not a setting and may change bits: versions and machines."""
    found = []
    for of in ("versions", "machine"):
        mine, theirs = one.record[of], other.record[of]
        both = mine | theirs if of == "versions" else [n for n in mine if n in theirs]
        names = [name for name in both if mine.get(name) != theirs.get(name)]
        found += [f"{name}: {mine.get(name)} → {theirs.get(name)}" for name in names]
    return found


def _curves(one: RunSide, other: RunSide, tolerance: float) -> list[CurveGap]:
    rows = [{row["step"]: row for row in side.rows} for side in (one, other)]
    steps = sorted(rows[0].keys() & rows[1].keys())
    names = [k for k in (rows[0][steps[0]] if steps else {}) if k not in _CLOCK]
    found = []
    for name in names:
        first = beyond = None
        last = (0, math.nan, math.nan)
        for step in steps:
            a, b = (number_of(row[step].get(name)) for row in rows)
            last = (step, a, b)
            if a != b and not (math.isnan(a) and math.isnan(b)):
                first = step if first is None else first
                if beyond is None and not abs(b - a) <= tolerance * abs(a):
                    beyond = step
        found.append(CurveGap(name, len(steps), first, beyond, last))
    return found


def _drifts(
    one: RunSide, other: RunSide, common: Sequence[int], start: Weights | None
) -> list[Drift]:
    found = []
    for step in common:
        a, b = one.weights(step), other.weights(step)
        way = None if start is None else apart(start, a)
        found.append(Drift(step, distance(a, b), way, tuple(drifts(a, b, start))))
    return found


def _beside(
    one: RunSide, step: int, beside: Sequence[Path], start: Weights | None
) -> dict[str, Distance]:
    """Distances that those of the two runs are held against."""
    mine, found = one.weights(step), {}
    for folder in beside:
        side = RunSide.of(folder)
        _check_comparable(one, side)
        if step not in side.steps:
            raise ValueError(
                f"beside={str(folder)!r} has no checkpoint of step {step}; it has {side.steps}"
            )
        changes = "; ".join(difference(one.config, side.config)) or "the same run repeated"
        weights = load_weights(folder / "checkpoints" / f"step-{step}")
        found[f"{folder} ({changes}), step {step}"] = distance(mine, weights)
    if not beside and start is not None:
        seed = one.config.seed + 1
        another = one.initial(seed)
        assert another is not None
        label = f"two initializations, seeds {one.config.seed} and {seed}, step 0"
        found[label] = distance(start, another)
    return found


def _passes(
    one: RunSide,
    other: RunSide,
    step: int,
    count: int,
    options: Mapping[str, Any],
    changes: Sequence[str],
    told: Progress,
) -> tuple[Difference | None, Difference | None]:
    """One pass of each run's arithmetic with A's weights, and with each run's own."""
    trained = options["steps"]
    batches = one.batches(step, max(count, STRETCHES * (trained + 1) if trained else 0))
    mine, theirs = one.weights(step), other.weights(step)

    def compare(a: Setting, b: Setting, part: float, what: str, **more: Any) -> Difference:
        return compared(
            a, b, batches, folder=None, **(dict(options) | more),
            progress=lambda done, said: told(part + 0.45 * done, f"{what}: {said}"),
        )  # fmt: skip

    same = own = None
    a = one.setting(mine, f"{one.folder.name} (step {step})")
    if trained or any(_field(change) in _ARITHMETIC for change in changes):
        b = other.setting(mine, f"{other.folder.name}'s arithmetic")
        start = one.checkpoint(step)
        makers = (one.steps_from(start), other.steps_from(start)) if trained else None
        same = compare(a, b, 0.1, "arithmetic", optimizers=makers)
    if any(not torch.equal(x, theirs[name]) for name, x in mine.items()):
        b = other.setting(theirs, f"{other.folder.name} (step {step})")
        own = compare(a, b, 0.55, "weights", steps=0)
    return same, own


def _field(change: str) -> str:
    return change.partition(":")[0].partition(".")[0]


def _verdict(
    changes: Sequence[str],
    curves: Sequence[CurveGap],
    found: Sequence[Drift],
    same: Difference | None,
) -> tuple[Verdict, str]:
    apart = [x.step for x in found if x.gap.largest != 0]
    if not apart and not any(curve.first for curve in curves) and (curves or found):
        return "identical", "every line and checkpoint that both have"
    fields = [x for x in changes if _field(x) not in (*_BESIDE, *_ARITHMETIC, *_SUMS)]
    if fields:
        return "beyond rounding", f"they were asked for other things: {'; '.join(fields)}"
    named = [x for x in changes if _field(x) in _ARITHMETIC]
    sums = [x for x in changes if _field(x) in _SUMS]
    if same is not None and same.verdict == "beyond rounding":
        coarser = same.p_formats is not None and same.p_formats >= LEVEL
        but = "; rounding to the coarser of both formats explains it" if coarser else ""
        return "beyond rounding", f"in one pass with the same weights: {'; '.join(named)}{but}"
    if same is not None and same.verdict != "unknown" and not sums:
        return "within rounding", f"in one pass with the same weights: {'; '.join(named)}"
    after = None if same is None else same.after
    if sums and after is not None and after.p is not None:
        why = f"after {len(after.steps) - 1} steps from the same weights: {'; '.join(named + sums)}"
        return ("beyond rounding" if after.p < LEVEL else "within rounding"), why
    if sums:
        return "unknown", f"a pass over a whole batch does not show {'; '.join(sums)}"
    if named:
        return "unknown", f"no pass says what {'; '.join(named)} does"
    return "unknown", (
        "no setting differs: another machine, version, number of threads or source; `halfulp"
        " record` on both tells which operation"
    )
