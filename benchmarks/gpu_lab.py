"""What only a GPU can tell: do its kernels ruin the seconds task and a byte GPT in true bf16, and
how fast is GPT-2?

usage: python -m benchmarks.gpu_lab [--out gpu-lab] [--seconds 570] [--device cuda] [--small]
[--only NAME …]

Every run is a run folder below --out. A call ends after --seconds and the next one goes on where it
ended, so that the whole fits machines that are lent for minutes:

- seconds: the one-layer task, 4000 steps, 3 seeds, with PyTorch's flash, cuDNN, efficient and math
  kernels, fp32 and halfulp's recipe. Do they fail too?
- bytes: a byte GPT of one layer in true bf16, 10^6 steps, flash against fp32: on a CPU its failure
  only shows with coarser numbers than bf16's.
- gpt2: the first steps of paper A's GPT-2, 524,288 tokens each, in tokens per second.

--small does all of it in a minute on a CPU, at sizes that say nothing about a GPU; it is how the
script is tested.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from halfulp.experiments.overview import overview, read_runs
from halfulp.report.run_page import record_section, run_page, training_section
from halfulp.runs.folder import write_json, write_text
from halfulp.runs.machine import describe_machine, describe_versions
from halfulp.runs.threads import one_thread
from halfulp.training.config import Language, RunConfig
from halfulp.training.loop import TrainedRun, train
from halfulp.training.presets import gpt2, minutes, seconds

KERNELS = (
    "torch:flash",
    "torch:cudnn",
    "torch:efficient",
    "torch:math",
    "torch:fp32",
    "BF16_HALFULP",
)


@dataclass(frozen=True)
class Task:
    """One run: its part of the script, its folder's name, its configuration."""

    part: str
    name: str
    config: RunConfig


def tasks(device: str, small: bool) -> Iterator[Task]:
    """Yield what is to be run, the quick and telling first."""
    for seed in range(1 if small else 3):
        for kernel in KERNELS:
            config = seconds(kernel, seed=seed, steps=60 if small else 4000)
            every = {"metrics_every": 10} if small else {}
            name = f"seconds-{kernel.replace(':', '-')}-{seed}"
            yield Task("seconds", name, replace(config, device=device, **every))
    yield Task("gpt2", "gpt2", gpt2_start(device, small))
    for kernel in ("torch:flash", "torch:fp32"):
        config = minutes(kernel, steps=40 if small else 1_000_000)
        lines = {"metrics_every": 20, "measure_every": 50, "checkpoint_every": 50} if small else {
            "metrics_every": 1000, "measure_every": 10_000, "checkpoint_every": 20_000}  # fmt: skip
        yield Task(
            "bytes", f"bytes-{kernel.replace(':', '-')}", replace(config, device=device, **lines)
        )


def gpt2_start(device: str, small: bool) -> RunConfig:
    """Return the first steps of paper A's run."""
    config = replace(gpt2(device=device, steps=12), metrics_every=1, checkpoint_every=0)
    if not small:
        return config
    tiny = Language(layers=2, heads=2, width=32, context=32)
    return replace(config, workload=tiny, batch=8, accumulation=2, steps=3)


def run(task: Task, out: Path, deadline: float) -> TrainedRun | str:
    """Go on with one run until the deadline; or say why it cannot run here."""
    try:
        return train(task.config, out / task.name, resume=True, deadline=deadline)
    except (ValueError, RuntimeError) as error:  # a kernel that this device lacks, or memory
        return " ".join(str(error).split())[:200]


def speed(trained: TrainedRun) -> str:
    """Tokens per second: the median over lines but the first, which pays for start-up, with the
    range.
    """
    rates = sorted(row["tokens_per_second"] for row in trained.metrics[1:]) or [math.nan]
    return f"{rates[len(rates) // 2]:,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f}, n = {len(rates)})"


def describe(found: dict[str, TrainedRun | str], names: dict[str, Task]) -> Table:
    """Return the table of runs: how far, what became of them, how fast."""
    table = Table(
        "run", "steps", "outcome", "figures that decided", "tokens per second: median, range"
    )
    folders = [
        one.folder
        for one in found.values()
        if not isinstance(one, str) and one.folder and one.metrics
    ]
    judged = {seen.folder: seen.judgement for seen in read_runs(folders)}
    for name, one in found.items():
        if isinstance(one, str):
            table.add_row(name, "", "not run", one, "")
            continue
        seen = judged.get(one.folder)
        last = one.metrics[-1]["step"] if one.metrics else 0
        outcome, why = ("", "") if seen is None else (seen.outcome, seen.reason)
        table.add_row(name, f"{last} of {names[name].config.steps}", outcome, why, speed(one))
    return table


def write(out: Path, found: dict[str, TrainedRun | str]) -> None:
    """Write results.json and report.html beside the run folders."""
    runs = read_runs(
        [
            one.folder
            for one in found.values()
            if not isinstance(one, str) and one.folder and one.metrics
        ]
    )
    refused = {name: one for name, one in found.items() if isinstance(one, str)}
    plain = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "refused": refused,
        "runs": [
            {
                "name": r.name,
                "status": r.record["status"],
                "steps": r.metrics[-1]["step"],
                "last": r.metrics[-1],
                "outcome": r.judgement.outcome if r.judgement else None,
            }
            for r in runs
        ],
    }
    write_json(out / "results.json", plain)
    sections = []
    for part in ("seconds", "bytes", "gpt2"):
        same = [r for r in runs if r.name.startswith(part)]
        if same:
            section = training_section(overview(same, "python -m benchmarks.gpu_lab"), "")
            sections.append(section | {"heading": part})
    sections += [record_section(r.name, r.record) for r in runs[:1]]
    names = [r.name for r in runs] or ["nothing ran"]
    write_text(out / "report.html", run_page(sections, names, "python -m benchmarks.gpu_lab", ""))


def main(argv: list[str] | None = None) -> None:
    """Run what time allows, print the table, write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-lab"), help="folder of run folders, made if missing"
    )
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="of this call; the next one goes on"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--small", action="store_true", help="a minute on a CPU, to test the script"
    )
    parser.add_argument(
        "--only", nargs="*", default=["seconds", "gpt2", "bytes"], help="parts to run"
    )
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; --device cpu --small tests the script")
    deadline = time.time() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {t.name: t for t in tasks(options.device, options.small) if t.part in options.only}
    found: dict[str, TrainedRun | str] = {}
    console = Console(width=180)
    with one_thread():
        for name, task in track(
            chosen.items(), "runs", console=Console(stderr=True), disable=not console.is_terminal
        ):
            if time.time() >= deadline:
                break
            found[name] = run(task, options.out, deadline)
    console.print(describe(found, chosen))
    left = [
        name
        for name in chosen
        if name not in found or getattr(found[name], "status", "") == "interrupted"
    ]
    console.print(
        f"not finished: {', '.join(left)}; the same command goes on"
        if left
        else "all runs are over"
    )
    write(options.out, found)
    console.print(f"{options.out / 'report.html'} and results.json")


if __name__ == "__main__":
    main()
