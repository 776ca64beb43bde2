"""What Golden et al. leave for future work: weights at a loss spike (B11), and Winograd convolution
(B12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfulp.experiments.compare_summary import Interval, geometric_interval
from halfulp.papers.claim import MANY_SEEDS, Claim, Lab, Measured, Rule
from halfulp.papers.claims.a_growth import loss_rises
from halfulp.papers.figures_b import spike_figures
from halfulp.papers.spike_run import Approach, approach
from halfulp.runs.parallel import run_jobs

_BEFORE = 100  # steps


def _spike(lab: Lab) -> Measured:
    """B11: the weights' distance from the twin's where the loss rises, over a control's."""
    bits, steps = (2, 2000) if lab.full else (1, 600)
    jobs = [(seed, steps, bits) for seed in MANY_SEEDS]
    runs = run_jobs(approach, jobs, workers=lab.workers, progress=lab.report)
    rises = [loss_rises(run.steps, run.loss, run.twin_loss) for run in runs]
    controls = [loss_rises(run.steps, run.control_loss, run.twin_loss) for run in runs]
    there = ratio_at(runs, rises)
    before = ratio_at(runs, [step - _BEFORE for step in rises])
    figures = {
        "seeds": float(len(runs)),
        "latest rise": max(rises),
        "control rises": float(sum(map(math.isfinite, controls))),
        "there": there.low,
        "before": before.low,
    }
    shown = ", ".join("never" if math.isinf(step) else f"{step:g}" for step in rises)
    text = (
        f"byte GPT of one layer (accelerated: O with {bits} mantissa bit{'s' * (bits > 1)}),"
        f" {len(runs)} seeds, {steps} steps: the loss rises 0.2 nats above its lowest excess over"
        f" the twin's at step {shown}, that of the control (δ = rowsum(dP ∘ P)) on"
        f" {figures['control rises']:.0f} seeds; Wasserstein distance of the weights from the"
        f" twin's, over the control's: × {there} at that step, × {before} {_BEFORE} steps before"
    )
    intervals = {"distance at the rise": there, f"{_BEFORE} steps before": before}
    drawn = tuple(spike_figures(runs[0], rises[0], lab.command("B11")))
    return Measured(figures, text, drawn, intervals)


def ratio_at(runs: Sequence[Approach], steps: Sequence[float]) -> Interval:
    """The distance of the runs over that of their controls at a step each: geometric mean over
    seeds, 95 % interval; NaN where a step is not recorded.
    """
    if any(step not in run.steps for run, step in zip(runs, steps, strict=True)):
        return Interval(math.nan, math.nan, math.nan, len(runs))
    at = [run.steps.index(int(step)) for run, step in zip(runs, steps, strict=True)]
    return geometric_interval(
        [run.distance[i] / run.control_distance[i] for run, i in zip(runs, at, strict=True)]
    )


CLAIMS = (
    Claim(
        "B11",
        "where the loss spikes, the weights have left the baseline's farther than without a spike",
        "future work: the weights' deviation at the point of a loss spike",
        _spike,
        Rule(
            "at least 5 seeds: every loss rises and no control's does; the weights' Wasserstein"
            " distance from the twin's, over the control's, has a 95 % interval above 1 at the rise"
            f" and {_BEFORE} steps before",
            lambda f: (
                f["seeds"] >= 5
                and math.isfinite(f["latest rise"])
                and f["control rises"] == 0
                and f["there"] > 1
                and f["before"] > 1
            ),
        ),
        setup="altered",
        history="2026-11-22: new, its rule set before running",
        seconds=30.0,
    ),
    Claim(
        "B12",
        "the deviation of Winograd convolution, by the same method",
        "future work",
    ),
)
