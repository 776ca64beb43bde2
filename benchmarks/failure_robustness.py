"""How much of a failure the failing task is: what its loss means, and what of its recipe it needs.

Every run is the preset `seconds` with PyTorch's bf16 flash attention, one thing of the recipe
changed, beside fp32 attention on the same data and weights. "Failed" is `halfulp.isolate.rule`'s
word; "explained" is the share of the target's variance that the last loss (the median over the last
tenth) leaves explained: a run can have lost a factor of ten against its best and still explain
nearly all of it.

    python -m benchmarks.failure_robustness --seeds 3
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from halfulp.isolate.rule import judge
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Progress, no_progress
from halfulp.runs.threads import one_thread
from halfulp.training.config import RunConfig
from halfulp.training.loop import train
from halfulp.training.presets import seconds
from halfulp.training.workload import build_workload

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cosine to 0": {"schedule": "cosine"},
    "rate 3e-4": {"learning_rate": 3e-4},
    "weight decay 0.1": {"weight_decay": 0.1},
    "β₂ 0.999": {"betas": (0.9, 0.999)},
    "no constant coordinates": {"constant": 0},
}


def varied(attention: str, seed: int, steps: int, change: dict[str, Any]) -> RunConfig:
    """The preset with one thing changed, in its optimizer or in its task."""
    config = replace(seconds(attention, seed=seed, steps=steps), measure_every=0)
    if "constant" in change:
        return replace(config, workload=replace(config.workload, **change))
    return replace(config, optimizer=replace(config.optimizer, **change))


def outcome(
    job: tuple[str, str, int, int], report: Progress = no_progress
) -> tuple[str, float, float]:
    """(outcome, last loss, share of the target's variance explained) of one run."""
    attention, variant, seed, steps = job
    config = varied(attention, seed, steps, VARIANTS[variant])
    with one_thread():
        run = train(config, progress=report)
    loss, score = run.curve("loss"), run.curve("mean_score")
    last = statistics.median(loss[-max(1, len(loss) // 10) :])
    said, _ = judge(loss, score, run.steps[-1] if run.status == "failed" else None)
    return said, last, 1 - last / variance(config)


def variance(config: RunConfig) -> float:
    """Of the teacher's output on the batch that the task is trained on."""
    workload = build_workload(config)
    _, target = workload.batch(np.zeros(1, dtype=np.int64), 0)
    return float(target.double().var(unbiased=False))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        (attention, variant, seed, chosen.steps)
        for variant in VARIANTS
        for attention in ("torch:flash", "torch:fp32")
        for seed in range(chosen.seeds)
    ]
    found = dict(zip(jobs, run_jobs(outcome, jobs, workers=chosen.workers), strict=True))
    print(f"{chosen.steps} steps, {chosen.seeds} seeds; loss and share explained: least to most")
    for variant in VARIANTS:
        for attention in ("torch:flash", "torch:fp32"):
            ends = [found[attention, variant, s, chosen.steps] for s in range(chosen.seeds)]
            failed = sum(end[0] == "failed" for end in ends)
            losses, shares = ([end[i] for end in ends] for i in (1, 2))
            print(
                f"{variant:24} {attention:12} {failed} of {chosen.seeds} failed, loss"
                f" {min(losses):.1e} to {max(losses):.1e}, explained {min(shares):.4%} to"
                f" {max(shares):.4%}"
            )


if __name__ == "__main__":
    main()
