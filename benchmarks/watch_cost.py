"""Times training steps of a watched model beside those of the same model unwatched, and a measured
step beside both.

Rounds of a few steps of each, interleaved in one process on the same batches; what is reported is
the median over rounds of the ratios, with the quartiles, and what a run takes longer at the default
interval. The first rounds are warm-up. From the repository root:

    python benchmarks/watch_cost.py [--case NAME ...] [--rounds N] [--threads N] [--json FILE]

The target: a step that is not measured takes at most 1 % longer, and the run at most 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import halfulp

DEFAULT_EVERY = 200
WARM_UP = 2
STEPS_A_ROUND = 4
CASES = {
    "tiny": (1, 2, 32, 32, 8),
    "small": (4, 4, 128, 256, 8),
    "context 1024": (2, 4, 256, 1024, 4),
}
"""Layers, heads, width, context and batch."""


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """X `[B, N, width]` to the same."""
        parts = (
            self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        out = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def stepper(layers: int, heads: int, width: int) -> tuple[nn.Module, Callable[[Tensor], None]]:
    """A model, and a training step of it in bf16 autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(x: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x.roll(1, 1)).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()

    return model, step


def timed(step: Callable[[Tensor], None], batches: list[Tensor]) -> float:
    """Seconds of one step, the mean over batches."""
    start = time.perf_counter()
    for x in batches:
        step(x)
    return (time.perf_counter() - start) / len(batches)


def measure(
    layers: int, heads: int, width: int, context: int, batch: int, rounds: int
) -> dict[str, float]:
    """The ratios with their quartiles, and seconds of a step."""
    _, plain = stepper(layers, heads, width)
    model, step = stepper(layers, heads, width)
    watcher = halfulp.watch(model, every=STEPS_A_ROUND + 1)
    step(torch.randn(batch, context, width))  # the first step is measured
    ratios, measured, seconds = [], [], []
    for number in range(WARM_UP + rounds):
        batches = [torch.randn(batch, context, width) for _ in range(STEPS_A_ROUND)]
        if number:
            timed(plain, batches[:1])
        pair = (plain, step) if number % 2 else (step, plain)
        if number == 0:
            timed(step, batches[1:])  # so that every round has its measured step at the end
            times = {plain: timed(plain, batches), step: 1.0}
        else:
            times = {one: timed(one, batches) for one in pair}
        before = watcher.measurements
        last = timed(step, batches[:1])
        assert watcher.measurements == before + 1
        if number >= WARM_UP:
            ratios.append(times[step] / times[plain])
            measured.append(last / times[plain])
            seconds.append(times[plain])
    watcher.close()
    low, middle, high = statistics.quantiles(ratios, n=4)
    at = statistics.median(measured)
    return {
        "step_ms": 1e3 * statistics.median(seconds),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "measured_step_ratio": at,
        "run_longer": (middle * (DEFAULT_EVERY - 1) + at) / DEFAULT_EVERY - 1,
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {}
    for name in arguments.case:
        found[name] = row = measure(*CASES[name], rounds=arguments.rounds)
        print(
            f"{name}: step {row['step_ms']:.1f} ms; watched {row['ratio']:.3f} of it"
            f" ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}), a measured step"
            f" {row['measured_step_ratio']:.1f}; at every={DEFAULT_EVERY} the run takes"
            f" {row['run_longer']:+.1%}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
