"""The substitution ladder: change one thing in the failing recipe after the other and see which change saves the run.

Every rung is a recipe made from the stock kernel's by `with_`, trained on the same data from the same weights, so the
first rung that survives names the cause. The claim behind the order: the stock recipe computes δ from the rounded O,
sums l from the unrounded weights and recomputes the weights in another precision than it used; δ alone is the largest
part, and only all of them together leave nothing that pushes the scores.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfulp.experiments.failure import FailureRun, run_failures
from halfulp.isolate.rule import RULE, Outcome
from halfulp.isolate.substitutions import OPERATIONS, replaced
from halfulp.recipes import (
    BF16_AUTHORS,
    BF16_FLASH2,
    BF16_HALFULP,
    BF16_PAPER_STABILIZED,
    Recipe,
)
from halfulp.runs.results import Progress, Table

# Two tiles of keys for the task's 32 tokens, so that the online softmax rescales; all queries at once, for speed.
TILES: dict[str, int | None] = {"block_query": None, "block_key": 16}


@dataclass(frozen=True)
class Rung:
    """One substitution: a recipe and what it changes, in words."""

    recipe: Recipe
    change: str


_STOCK = BF16_FLASH2.with_(name="stock", **TILES)
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


def _replaced(name: str, *operations: str) -> Recipe:
    """The stock recipe with operations of `halfulp.isolate` replaced."""
    recipe = replaced(_STOCK, [_BY_NAME[operation] for operation in operations])
    assert recipe is not None
    return recipe.with_(name=name)


LADDER: tuple[Rung, ...] = (
    Rung(_STOCK, "nothing: δ from the rounded O, l from the weights before rounding"),
    Rung(_replaced("dP∘P", "delta-dP.P"), "δ = rowsum(dP ∘ P) (claim A4)"),
    Rung(_replaced("fp32 O for δ", "delta-exact-O"), "δ from O before it is rounded (claim A5)"),
    Rung(_replaced("fp32 O", "O-fp32"), "O stored in fp32, for δ and for the output (claim A5)"),
    Rung(_replaced("residual", "residual"), "δ from O and its bf16 residual"),
    Rung(_replaced("residual+row_sum", "residual", "row-sum"), "… and l summed from the rounded weights"),
    Rung(
        _replaced("residual+row_sum+weights", "residual", "row-sum", "weights"),
        "… and the backward pass on exactly the forward's rounded weights",
    ),
    Rung(BF16_HALFULP.with_(name="halfulp", **TILES), "… and an integer row maximum, residual in 8 bits: BF16_HALFULP"),
    Rung(BF16_AUTHORS.with_(name="authors", **TILES), "the paper's own recipe: scores, Ō and O in bf16"),
    Rung(BF16_PAPER_STABILIZED.with_(name="authors+softmax", **TILES), "… with its published softmax fix, β = 7"),
    Rung(_replaced("stock+softmax", "softmax"), "the stock recipe with the published softmax fix, β = 7"),
)


@dataclass(frozen=True)
class RungResult:
    """One rung over all its seeds."""

    rung: str
    change: str
    outcome: Outcome  # the worst of the seeds
    outcomes: tuple[Outcome, ...]
    final_loss: tuple[float, ...]  # one per seed: median of the last tenth of the curve
    mean_score: tuple[float, ...]  # one per seed, at the end
    max_score: tuple[float, ...]
    broke_at: tuple[int | None, ...]


@dataclass(frozen=True)
class LadderResult:
    """The whole ladder: what became of every rung, and the runs themselves."""

    seeds: tuple[int, ...]
    steps: int
    rungs: tuple[RungResult, ...]
    runs: tuple[FailureRun, ...]
    rule: str = RULE

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: the table and every curve."""
        return {
            "seeds": list(self.seeds),
            "steps": self.steps,
            "rule": self.rule,
            "table": self.table().as_dict(),
            "runs": [run.as_dict() for run in self.runs],
        }

    def table(self, command: str = "halfulp demo") -> Table:
        """Return who survives, one row a rung, the range over seeds in each cell."""
        columns = ("rung", "what is changed", "outcome", "final loss", "mean score", "max score")
        rows = tuple(
            (r.rung, r.change, _outcome(r), _losses(r), _range(r.mean_score, "{:+.1f}"),
             _range(r.max_score, "{:.0f}"))
            for r in self.rungs
        )  # fmt: skip
        caption = f"{self.steps} steps, seeds {', '.join(map(str, self.seeds))}; lowest to highest seed. {self.rule}."
        return Table("Substitution ladder", columns, rows, caption, command)


def climb(
    seeds: Sequence[int] = (0, 1),
    steps: int = 4000,
    *,
    rungs: Sequence[Rung] = LADDER,
    workers: int = 2,
    progress: Progress | None = None,
) -> LadderResult:
    """Train every rung on every seed; `workers` processes (see `failure.run_failures`).

    Raises:
        ValueError: no seeds or no rungs.
    """
    if not seeds or not rungs:
        raise ValueError(f"seeds={list(seeds)}, rungs={len(rungs)}: accepted are at least one of each")
    recipes = [rung.recipe for rung in rungs]
    runs = run_failures(recipes, seeds, steps, workers=workers, progress=progress)
    return summarize(runs, rungs, seeds, steps)


def summarize(runs: Sequence[FailureRun], rungs: Sequence[Rung], seeds: Sequence[int], steps: int) -> LadderResult:
    """Return the ladder from runs in the order rung by rung, all seeds of a rung together."""
    results = []
    for i, rung in enumerate(rungs):
        same = runs[i * len(seeds) : (i + 1) * len(seeds)]
        outcomes = tuple(run.outcome for run in same)
        results.append(
            RungResult(
                rung=rung.recipe.name,
                change=rung.change,
                outcome=max(outcomes, key=("survived", "drifting", "failed").index),
                outcomes=outcomes,
                final_loss=tuple(final_loss(run) for run in same),
                mean_score=tuple(run.mean_score[-1] for run in same),
                max_score=tuple(run.max_score[-1] for run in same),
                broke_at=tuple(run.broke_at for run in same),
            )
        )
    return LadderResult(tuple(seeds), steps, tuple(results), tuple(runs))


def final_loss(run: FailureRun) -> float:
    """Median loss over the last tenth of the recorded points; NaN where the run broke off."""
    if run.broke_at is not None:
        return math.nan
    return statistics.median(run.loss[-max(1, len(run.loss) // 10) :])


def _outcome(result: RungResult) -> str:
    if len(set(result.outcomes)) == 1:
        return result.outcome
    counts = [f"{result.outcomes.count(name)} {name}" for name in dict.fromkeys(result.outcomes)]
    return ", ".join(counts)


def _losses(result: RungResult) -> str:
    """The range of final losses, and at which steps runs broke off."""
    whole = [loss for loss in result.final_loss if not math.isnan(loss)]
    broke = [step for step in result.broke_at if step is not None]
    parts = [_range(whole, "{:.1e}")] if whole else []
    parts += [f"NaN at step {_range(broke, '{}')}"] if broke else []
    return ", ".join(parts)


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} … {high}"
