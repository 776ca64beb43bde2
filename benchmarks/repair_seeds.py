"""Whether `halfulp.patch()` alone saves the seconds task: as many seeds as asked for, with it and
without.

Every run is `train(seconds("torch:flash", seed=...))`, PyTorch's flash kernel in true bf16, with
nothing changed. A run fails if its loss ends above twice its smallest mean of ten recorded steps,
or if the mean score leaves ±4.

    python benchmarks/repair_seeds.py --seeds 5 --backend torch
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch

import halfulp
from halfulp.training.loop import train
from halfulp.training.presets import seconds


def outcome(seed: int, steps: int, patched: bool, backend: str | None) -> tuple[bool, float, float]:
    """(survives, last loss, last mean score) of one run."""
    with halfulp.patch(backend=backend) if patched else nullcontext():
        rows = train(seconds("torch:flash", seed=seed, steps=steps)).metrics
    losses = torch.tensor([row["loss"] for row in rows]).double()
    means = losses.unfold(0, min(10, len(losses)), 1).mean(-1)
    score = float(rows[-1]["mean_score"])
    return bool(means[-1] <= 2 * means.min()) and abs(score) < 4, float(losses[-1]), score


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument(
        "--backend", default=None, help="cpu, triton or torch; the first that fits if left out"
    )
    parser.add_argument("--stock", action="store_true", help="run the seeds without the patch, too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for patched in (True, False) if chosen.stock else (True,):
        lived = 0
        for seed in range(chosen.seeds):
            survives, loss, score = outcome(seed, chosen.steps, patched, chosen.backend)
            lived += survives
            name = "patched" if patched else "stock"
            print(
                f"{name}, seed {seed}: {'lives' if survives else 'fails'}, loss {loss:.2e}, mean"
                f" score {score:+.1f}"
            )
        print(f"{'patched' if patched else 'stock'}: {lived} of {chosen.seeds} live")


if __name__ == "__main__":
    main()
