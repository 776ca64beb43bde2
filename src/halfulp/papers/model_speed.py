"""How much faster flash attention makes a model's forward and backward pass: the paper reports 14
%.

Two attentions alternate in one run, step by step, on the same batch and the same weights, so that
whatever else the machine does meets both alike. The median over pairs of steps of the ratio of
their times is what counts, not two medians of different minutes. On a CPU it is the processor's
time, which other processes do not lengthen.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfulp.runs.results import Progress, no_progress
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, Pictures, RunConfig
from halfulp.training.workload import build_workload

WARM_UP = 2  # pairs that do not count


@dataclass(frozen=True)
class Speed:
    """Seconds of forward and backward passes with two attentions, in pairs."""

    workload: str
    tokens: int  # that attend to one another
    baseline: tuple[float, ...]  # seconds
    flash: tuple[float, ...]  # seconds, of the step beside it

    @property
    def speed_up(self) -> float:
        """Median over pairs of baseline time over flash time; 1.14 is 14 % faster."""
        return statistics.median(self._ratios())

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of that ratio."""
        low, _, high = statistics.quantiles(self._ratios(), n=4, method="inclusive")
        return low, high

    @property
    def interval(self) -> tuple[float, float]:
        """The median ratio's 95 % interval or a little more: order statistics, by a binomial count;
        from 6 pairs.
        """
        from scipy.stats import binom

        ordered = sorted(self._ratios())
        rank = int(binom.ppf(0.025, len(ordered), 0.5))
        return ordered[max(rank - 1, 0)], ordered[min(len(ordered) - rank, len(ordered) - 1)]

    def _ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.baseline, self.flash, strict=True)]

    def __str__(self) -> str:
        (low, high), (first, third) = self.interval, self.quartiles
        ms = [1000 * statistics.median(times) for times in (self.baseline, self.flash)]
        return (
            f"{self.workload}: {ms[0]:.0f} → {ms[1]:.0f} ms, × {self.speed_up:.2f} [{low:.2f},"
            f" {high:.2f}], quartiles {first:.2f} to {third:.2f}, {len(self.flash)} pairs"
        )


def speed_sizes() -> dict[str, RunConfig]:
    """Return the text-to-image model at growing numbers of patches, and a GPT."""
    found: dict[str, RunConfig] = {
        f"pictures, {(side // 2) ** 2} patches": RunConfig(
            Pictures(layers=1, heads=2, width=128, size=side, patch=2, data="shapes"),
            batch=max(1, 4096 // side**2),
        )
        for side in (32, 64, 128)
    }
    return found | {
        "GPT, 1024 tokens": RunConfig(Language(layers=1, heads=2, width=128, context=1024))
    }


EAGER = "halfulp.papers.model_speed:eager"
"""Attention as models write it without a kernel, which is what a paper's baseline usually is."""


def eager(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """Return out `[B, H, N, D_v]` by plain products and a softmax of the whole `[N, N_k]`
    matrix.
    """
    scores = query @ key.mT * scale
    if is_causal:
        hidden = torch.triu(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device), 1
        )
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value


def measure_speed(
    name: str,
    config: RunConfig,
    pairs: int = 15,
    *,
    baseline: str = EAGER,
    flash: str = "torch:flash",
    progress: Progress | None = None,
) -> Speed:
    """Time forward and backward passes under bf16 autocast, one thread, the two attentions in turn.

    Args:
        name: of the workload, for the reader.
        config: workload and batch; attention and precision are replaced.
        pairs: of steps that count.
        baseline: the attention to be compared with.
        flash: the attention in question.
        progress: called after every pair.

    Raises:
        ValueError: `pairs` is below 2, or an attention is not known.
    """
    if pairs < 2:
        raise ValueError(f"pairs={pairs}: accepted is an integer of at least 2")
    with one_thread():
        steps = [
            _stepper(replace(config, attention=AttentionPlan.of(choice)))
            for choice in (baseline, flash)
        ]
        times: tuple[list[float], list[float]] = ([], [])
        for pair in range(pairs + WARM_UP):
            # neither comes always second, to what the other left in the caches
            for which in (0, 1) if pair % 2 else (1, 0):
                began = _now(config.device)
                steps[which]()
                times[which].append(_now(config.device) - began)
            (progress or no_progress)(
                (pair + 1) / (pairs + WARM_UP), f"{name}: timing, pair {pair + 1}"
            )
    tokens = build_workload(config, "cpu").tokens_per_sample
    return Speed(name, tokens, tuple(times[0][WARM_UP:]), tuple(times[1][WARM_UP:]))


def _now(device: str) -> float:
    """Seconds: of the processor on a CPU, of the clock once a GPU has done its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _stepper(config: RunConfig) -> Callable[[], None]:
    """A function that makes one forward and backward pass."""
    workload = build_workload(config)
    batch = workload.batch(workload.order(1, config.batch)[0], 1)

    def step() -> None:
        workload.model.zero_grad()
        with torch.autocast(config.device, torch.bfloat16):
            loss = workload.loss(workload.model, batch)
        torch.autograd.backward(loss)

    return step
