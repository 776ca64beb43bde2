"""Whether the failing task needs its optimizer (D13): SGD with momentum, Lion and Muon in Adam's
place.

Adam divides every gradient by its size, so a small push of constant sign moves the weights as fast
as a large one. Without that the push has to be felt beside the gradient as it is.
"""

from __future__ import annotations

from typing import get_args

from halfulp.experiments.compare_summary import Interval, interval_of
from halfulp.isolate.rule import judge
from halfulp.papers.claim import Claim, Lab, Measured, Rule, share_of
from halfulp.papers.claims.a_cause import traced
from halfulp.papers.run_changes import OptimizerName
from halfulp.papers.runs_a import Plan, Traced

OTHERS: tuple[OptimizerName, ...] = tuple(x for x in get_args(OptimizerName) if x != "adamw")
_STEPS = 2000
_KERNELS = ("torch:flash", "torch:fp32")


def _others(lab: Lab) -> Measured:
    """D13: PyTorch's bf16 flash kernel and fp32 attention under three other optimizers."""
    plans = {
        f"{name}, {kernel}": [Plan((kernel,), s, _STEPS, optimizer=name) for s in lab.seeds]
        for name in OTHERS
        for kernel in _KERNELS
    }
    found = traced(lab, plans)
    figures: dict[str, float] = {"seeds": float(len(lab.seeds))}
    intervals: dict[str, Interval] = {}
    said = []
    for name in OTHERS:
        low, twin = (found[f"{name}, {kernel}"] for kernel in _KERNELS)
        fell, sound = (
            [sum(outcome(run) == kind for run in low) for kind in ("failed", "drifting")],
            sum(outcome(run) == "survived" for run in twin),
        )
        figures |= {
            f"{name}, lost": sum(fell) / len(low),
            f"{name}, sound in fp32": sound / len(twin),
        }
        moved = [final_score(a) - final_score(b) for a, b in zip(low, twin, strict=True)]
        losses = [[run.loss()[1][-1] for run in runs] for runs in (low, twin)]
        intervals |= {
            f"{name} lost": share_of(sum(fell), len(low)),
            f"{name}, mean score less the fp32 twin's": interval_of(moved),
        }
        said.append(
            f"{name}: {fell[0]} failed and {fell[1]} drift of {len(low)}, {sound} of {len(twin)}"
            f" survive in fp32, mean score {min(moved):+.1f} to {max(moved):+.1f} beyond the"
            f" twin's, loss {min(losses[0]):.1e} to {max(losses[0]):.1e} against"
            f" {min(losses[1]):.1e} to {max(losses[1]):.1e}"
        )
    text = f"one-layer task, torch:flash, {_STEPS} steps, {len(lab.seeds)} seeds; {'; '.join(said)}"
    return Measured(figures, text, (), intervals)


def outcome(run: Traced) -> str:
    """What became of a run of the one-layer task, by that task's rule."""
    losses = run.loss()[1]
    scores = [row["mean_score"] for row in run.metrics]
    return judge(losses, scores)[0]


def final_score(run: Traced) -> float:
    """The mean score at the last recorded step."""
    score: float = run.metrics[-1]["mean_score"]
    return score


CLAIMS = (
    Claim(
        "D13",
        "the failing task's runaway does not need Adam: SGD with momentum, Lion and Muon have it"
        " too",
        "",
        _others,
        Rule(
            "at least 3 seeds: under each of the three every run with the bf16 flash kernel fails"
            " or drifts, and every one in fp32 survives",
            lambda f: (
                f["seeds"] >= 3
                and all(f[f"{name}, lost"] == 1 for name in OTHERS)
                and all(f[f"{name}, sound in fp32"] == 1 for name in OTHERS)
            ),
        ),
        history="2026-11-22: new, its rule set before running, rates by the fp32 runs alone",
        seconds=45.0,
    ),
)
