"""Which causes `halfulp.watch` names: small trainings of eight architectures, each with one planted
cause, and sound ones.

Prints, by plant, how many runs raised the right alarm, how many a wrong one (another cause than the
planted, in any step), how many none, and how many steps after the plant the right one came (median
and range); and for each alarm how many steps before the loss was harmed it came, where it was
harmed: 1.5 times the sound twin's loss and 0.2 above it (rounding: 3 times and 0.001), in the
median of 8 steps. Rounding in attention is the README's failing program, from weights of another
seed each, and its twin is the same inside `halfulp.patch()`. From the repository root:

    python benchmarks/watch_causes.py [--seeds N] [--first N] [--architecture NAME ...]
        [--plant NAME ...] [--json FILE]

It takes about 8 seconds a run on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.watch.breaking import ARCHITECTURES, CAUSES, PLANTED, Outcome, broken, failing_layer

STEPS, LAYER_STEPS = 160, 4000
ROUNDING = ("biased", "run-away")


def measure(architecture: str, plant: str, seed: int, sound: list[float] | None) -> dict[str, Any]:
    """What one run raised: kinds with their steps, and when its loss was harmed."""
    if plant == "rounding":
        found: Outcome = failing_layer(seed, LAYER_STEPS)
        sound = failing_layer(seed, LAYER_STEPS, repaired=True).losses
        right = ROUNDING
    else:
        found = broken(architecture, plant, seed, STEPS)
        right = (CAUSES[plant],) if CAUSES[plant] else ()
    alarms = [(alarm.kind, alarm.step) for alarm in found.alarms]
    begun = {"sound": 0, "rate": 1, "rounding": 1}.get(plant, PLANTED)
    early = [step for kind, step in alarms if kind in right]
    wrong = sorted({kind for kind, step in alarms if kind not in right})
    return {
        "architecture": architecture,
        "plant": plant,
        "seed": seed,
        "right": bool(early),
        "wrong": wrong,
        "delay": early[0] - begun if early else None,
        "lead": _harmed(found.losses, sound, begun) - early[0] if early and sound else None,
        "losses": found.losses,
    }


def _harmed(losses: list[float], sound: list[float] | None, begun: int) -> float:
    """The step at which a loss is worse than its sound twin's; NaN where it never is."""
    tiny = sound is not None and statistics.median(sound[-8:]) < 0.01
    for step in range(max(8, begun), len(losses) + 1):
        last, twin = losses[step - 8 : step], sound[step - 8 : step] if sound else []
        middle = statistics.median(x if math.isfinite(x) else math.inf for x in last)
        usual = statistics.median(twin)
        if middle > (max(3 * usual, 1e-3) if tiny else max(1.5 * usual, usual + 0.2)):
            return step
    return math.nan


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    said = [
        "| planted | runs | right | wrong too | wrong only | silent | steps after the plant |"
        " steps before the loss is harmed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plant in dict.fromkeys(row["plant"] for row in rows):
        of = [row for row in rows if row["plant"] == plant]
        right = [row for row in of if row["right"]]
        lost = [row for row in of if not row["right"]]
        delays = [row["delay"] for row in right]
        leads = [row["lead"] for row in right if row["lead"] is not None]
        leads = [x for x in leads if math.isfinite(x)]
        cells = [
            plant,
            len(of),
            len(right) if plant != "sound" else "–",
            sum(bool(row["wrong"]) for row in right),
            sum(bool(row["wrong"]) for row in lost),
            sum(not row["wrong"] for row in lost),
            _spread(delays),
            f"{_spread(leads)} ({len(leads)} harmed)" if plant != "sound" else "–",
        ]
        said.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(said)


def _spread(numbers: list[float]) -> str:
    if not numbers:
        return "–"
    return f"{statistics.median(numbers):g} ({min(numbers):g} to {max(numbers):g})"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    plants = [*CAUSES, "rounding"]
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument(
        "--architecture", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES)
    )
    parser.add_argument("--plant", nargs="+", choices=plants, default=plants)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for seed in range(asked.first, asked.first + asked.seeds):
        for architecture in asked.architecture:
            sound = None
            for plant in asked.plant:
                if plant == "rounding" and architecture != "hand-written GPT":
                    continue
                row = measure(architecture, plant, seed, sound)
                sound = row["losses"] if plant == "sound" else sound
                rows.append(row)
                print(
                    f"{architecture}, {plant}, seed {seed}: right {row['right']},"
                    f" wrong {row['wrong']}, after {row['delay']}",
                    file=sys.stderr,
                    flush=True,
                )
                if asked.json:
                    plain = [{k: v for k, v in r.items() if k != "losses"} for r in rows]
                    asked.json.write_text(json.dumps(plain, indent=1), encoding="utf-8")
    print(table(rows))
    for row in rows:
        if row["wrong"]:
            print(
                f"wrong: {row['architecture']}, {row['plant']}, seed {row['seed']}: {row['wrong']}"
            )


if __name__ == "__main__":
    main()
