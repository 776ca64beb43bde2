"""Times training steps of a watched model beside those of the same model unwatched, and a measured
step beside both.

Rounds of a few steps of each, interleaved in one process on the same batches; what is reported is
the median over rounds of the ratios, with the quartiles, and what a run takes longer at the default
interval. The first rounds are warm-up. From the repository root:

    python benchmarks/watch_cost.py [--case NAME ...] [--rounds N] [--threads N] [--json FILE]

Printed are also what the first hundred steps take longer, of which ten are measured, and how many
bytes of tensors are alive after a step that was not measured beyond those of an unwatched training.

The target: on a model of ten million parameters and more the run takes at most 2 % longer at the
default interval, and nothing is held between two measurements.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import halfulp

DEFAULT_EVERY, EARLY = 200, 10
WARM_UP = 2
STEPS_A_ROUND = 4
CASES = {
    "tiny": (1, 2, 32, 32, 8),
    "small": (4, 4, 128, 256, 8),
    "context 1024": (2, 4, 256, 1024, 4),
    "10 million": (6, 6, 384, 256, 4),
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
    """Processor seconds of one step, the mean over batches: what else runs on the machine counts
    little.
    """
    start = time.process_time()
    for x in batches:
        step(x)
    return (time.process_time() - start) / len(batches)


def alive() -> int:
    """Bytes of all tensors that something holds."""
    gc.collect()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if isinstance(one, Tensor):
            for x in (one, one.grad if one.is_leaf else None):
                if x is not None:
                    storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def held(layers: int, heads: int, width: int, context: int, batch: int) -> int:
    """Bytes of tensors that are alive in a watched training between two measurements, beyond those
    of one that is not.
    """
    counts = []
    for watched in (False, True):
        model, step = stepper(layers, heads, width)
        before = alive()
        watcher = halfulp.watch(model, every=3) if watched else None
        for _ in range(4):  # of which the first and the third are measured
            step(torch.randn(batch, context, width))
        counts.append(alive() - before)
        if watcher is not None:
            watcher.close()
        del model, step, watcher
    return counts[1] - counts[0]


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
        "first_100_longer": (middle * 90 + at * EARLY) / 100 - 1,
        "held_bytes": held(layers, heads, width, context, batch),
        "parameters": sum(x.numel() for x in model.parameters()),
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
    warnings.simplefilter("ignore", FutureWarning)  # of names that looking at all objects touches
    found = {}
    for name in arguments.case:
        found[name] = row = measure(*CASES[name], rounds=arguments.rounds)
        print(
            f"{name}: step {row['step_ms']:.1f} ms; watched {row['ratio']:.3f} of it"
            f" ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}), a measured step"
            f" {row['measured_step_ratio']:.1f}; at every={DEFAULT_EVERY} the run takes"
            f" {row['run_longer']:+.1%}, its first 100 steps {row['first_100_longer']:+.1%};"
            f" {row['held_bytes']} bytes held of {row['parameters']:,} parameters"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
