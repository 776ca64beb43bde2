"""Times a measurement of attention beside the training steps that it stands between, in units of
one step.

Rounds of a few training steps and one measurement, interleaved in one process on one batch a step;
what is reported is the median over rounds of the ratio of a measurement to a step of the same
round, with the quartiles, and what share of the run's time that is at the default interval. The
first rounds are warm-up: the first measurement also asks every attention what it reads. From the
repository root:

    python benchmarks/monitor_cost.py [--case NAME ...] [--rounds N] [--threads N] [--json FILE]

The target: a share of at most 5 % at `halfulp.watch.monitor.DEFAULT_EVERY` in every case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, LayerTask, Pictures, RunConfig, WorkloadConfig
from halfulp.training.workload import build_workload
from halfulp.watch.monitor import DEFAULT_EVERY, Monitor

TARGET_SHARE = 0.05
WARM_UP = 2
STEPS_A_ROUND = 4


@dataclass(frozen=True)
class Case:
    """A workload as one of the presets trains it."""

    workload: WorkloadConfig
    batch: int
    attention: str = "torch:flash"
    autocast: bool = False


CASES = {
    "one layer": Case(LayerTask(), 1),
    "byte GPT, recipe": Case(Language(layers=1, heads=2, width=64, context=64), 16, "BF16_FLASH2"),
    "byte GPT": Case(Language(layers=2, heads=4, width=128, context=256), 8),
    "byte GPT, autocast": Case(
        Language(layers=2, heads=4, width=128, context=256), 8, autocast=True
    ),
    "GPT, context 1024": Case(Language(layers=2, heads=4, width=256, context=1024), 4),
    "pictures": Case(
        Pictures(layers=3, heads=4, width=96, size=24, patch=4, count=36, data="shapes"), 32
    ),
}


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of a step and of a measurement, and the ratio with its quartiles."""
    config = RunConfig(case.workload, AttentionPlan.of(case.attention), batch=case.batch)
    workload = build_workload(config)
    order = workload.order((WARM_UP + rounds) * STEPS_A_ROUND, case.batch)
    adam = torch.optim.AdamW(
        workload.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    monitor = Monitor(workload.model)
    steps, measurements, ratios = [], [], []
    number = 0
    for turn in range(WARM_UP + rounds):
        start = time.perf_counter()
        for _ in range(STEPS_A_ROUND):
            batch = workload.batch(order[number], number)
            number += 1
            adam.zero_grad()
            torch.autograd.backward(loss(workload, batch, case.autocast))
            torch.nn.utils.clip_grad_norm_(workload.model.parameters(), 1.0)
            adam.step()
        middle = time.perf_counter()
        monitor.measure(number, lambda batch=batch: loss(workload, batch, case.autocast))  # type: ignore[misc]
        end = time.perf_counter()
        if turn >= WARM_UP:
            steps.append((middle - start) / STEPS_A_ROUND)
            measurements.append(end - middle)
            ratios.append(measurements[-1] / steps[-1])
    low, ratio, high = statistics.quantiles(ratios, n=4)
    result = {
        "step_ms": 1e3 * statistics.median(steps),
        "measurement_ms": 1e3 * statistics.median(measurements),
    }
    result |= {"ratio": ratio, "ratio_quartile_1": low, "ratio_quartile_3": high}
    return result | {"share": ratio / (DEFAULT_EVERY + ratio)}


def loss(workload: Any, batch: tuple[Tensor, ...], autocast: bool) -> Tensor:
    """The workload's loss, as the loop computes it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value: Tensor = workload.loss(workload.model, batch)
    return value


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--case", nargs="+", choices=list(CASES), default=list(CASES), help="which (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = parser.parse_args()
    for name, least in (("rounds", 2), ("threads", 1)):
        if getattr(chosen, name) < least:
            parser.error(
                f"--{name} {getattr(chosen, name)}: accepted is an integer of at least {least}"
            )
    torch.set_num_threads(chosen.threads)
    print(
        f"{chosen.threads} thread(s), {chosen.rounds} rounds of {STEPS_A_ROUND} steps and one"
        " measurement"
    )
    print(
        f"{'':20}{'step':>9}{'measurement':>14}   in steps (quartiles)     share of the run, every"
        f" {DEFAULT_EVERY}"
    )
    figures = {}
    for name in chosen.case:
        row = figures[name] = measure(CASES[name], chosen.rounds)
        spread = (
            f"{row['ratio']:5.2f} ({row['ratio_quartile_1']:.2f} to {row['ratio_quartile_3']:.2f})"
        )
        print(
            f"{name:20}{row['step_ms']:6.1f} ms{row['measurement_ms']:11.1f} ms  "
            f" {spread:25}{row['share']:.1%}"
        )
    met = all(row["share"] <= TARGET_SHARE for row in figures.values())
    print(f"target: a share of at most {TARGET_SHARE:.0%}: {'met' if met else 'missed'}")
    if chosen.json:
        settings: dict[str, Any] = {
            "threads": chosen.threads,
            "rounds": chosen.rounds,
            "every": DEFAULT_EVERY,
        }
        settings |= {"torch": torch.__version__}
        chosen.json.write_text(json.dumps(settings | {"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
