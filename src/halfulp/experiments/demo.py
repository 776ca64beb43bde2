"""The main job, end to end on a CPU: a training that a stock kernel ruins, its cause, an audit of
every kernel here.

Every act leaves its figures in the run folder as soon as it is over, so that a demo that is stopped
can still be read. What an act says is computed from what it measured (`demo_findings`); where a
machine lacks a kernel, it says that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfulp.audit import Shape
from halfulp.experiments.audits import Job, audit_all, choose_targets
from halfulp.experiments.capture import save_captured, train_and_capture
from halfulp.experiments.demo_findings import (
    audit_finding,
    failure_finding,
    short,
    worst_outcome,
)
from halfulp.experiments.explain import EXAMPLE, explain
from halfulp.experiments.failure import (
    AttentionChoice,
    FailureRun,
    curves,
    final_loss,
    run_failures,
)
from halfulp.formats import BF16
from halfulp.isolate.isolation import isolate
from halfulp.isolate.rule import RULE
from halfulp.isolate.substitutions import EXACT, halfulp_like
from halfulp.recipes import recipe_named
from halfulp.recipes.spelling import recipe_text
from halfulp.runs.folder import write_json
from halfulp.runs.record import closed, new_record
from halfulp.runs.results import Progress, Table, part_of
from halfulp.runs.threads import one_thread
from halfulp.targets.emulation import emulations
from halfulp.training.config import RunConfig
from halfulp.training.presets import capture, seconds

Act: TypeAlias = dict[str, Any]
Watch: TypeAlias = Callable[[int, str], AbstractContextManager[Progress]]

HALFULP = "halfulp"
FLASH, MATH, FP32 = "PyTorch flash", "PyTorch math", "PyTorch fp32"
STAND_IN = "stock, emulated"
RUNS = "runs"  # the folder of act 1's trainings, which act 2 does not make again

_CURVES = "Each line is the median over the seeds, the band around it their range."


@dataclass(frozen=True)
class DemoConfig:
    """How much the demo does; the defaults take three to five minutes on two idle cores with
    AVX-512, and twelve minutes of processor time with AVX2.
    """

    seeds: int = 3  # of the failing run
    isolation_seeds: int = 3  # of every run of the isolation
    isolation_steps: int = 3000  # of each of them: twice what the kernel needs to fail
    isolation_seconds: float = 180.0  # after which it says what was not tested
    steps: int = 4000  # of each training
    workers: int = 2  # processes of one thread each
    gpt: RunConfig = field(default_factory=capture)  # whose activations are captured
    shapes: tuple[Shape, ...] = ()  # of the audit; its own quick size if empty
    targets: tuple[str, ...] | None = None  # to audit; every one that this machine has if None
    seed: int = 0  # of the audit's probe inputs

    def __post_init__(self) -> None:
        for name in ("seeds", "isolation_seeds", "steps", "isolation_steps", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: accepted is an integer of at least 1"
                )

    @property
    def command(self) -> str:
        """What repeats the demo."""
        return f"halfulp demo --seeds {self.seeds} --isolation-seeds {self.isolation_seeds}"


def run_demo(
    config: DemoConfig,
    folder: Path,
    watch: Watch,
    told: Callable[[Act], None],
    *,
    final: Path | None = None,
) -> tuple[dict[str, Any], list[Act]]:
    """Run three acts and return the run's record and the acts, as plain data.

    Args:
        config: how much to do.
        folder: an empty folder; gets run.json, failure.json, cause.json, audit.json, runs/,
            isolation/ and tensors/.
        watch: called with an act's number and title; gives a context that gives the function that
            shows progress.
        told: called with every act when it is over.
        final: what `folder` will be called later, where it is known already: files are named by it.

    Raises:
        KeyboardInterrupt: as it came, after the record was closed with status "interrupted".
    """
    record = new_record("demo", asdict(config), config.command, seed=config.seed, acts=[])
    acts: list[Act] = []
    stage = _Stage(config, folder, final or folder)
    write_json(folder / "run.json", record)
    try:
        for number, (name, title, measure) in enumerate(_ACTS, 1):
            began = time.perf_counter()
            with watch(number, title) as progress:
                act = measure(stage, progress)
            act = {
                "name": name,
                "number": number,
                "title": title,
                "seconds": time.perf_counter() - began,
            } | act
            write_json(folder / f"{name}.json", act)
            acts.append(act)
            record["acts"].append(
                {key: act[key] for key in ("name", "title", "finding", "seconds")}
            )
            write_json(folder / "run.json", record)
            told(act)
    except BaseException as stopped:
        status = "interrupted" if isinstance(stopped, KeyboardInterrupt) else "failed"
        with suppress(OSError):  # what went wrong is told all the same
            write_json(folder / "run.json", closed(record, status))
        raise
    record = closed(record, "done")
    write_json(folder / "run.json", record)
    return record, acts


@dataclass
class _Stage:
    """What acts share."""

    config: DemoConfig
    folder: Path
    final: Path


def flash_missing() -> str | None:
    """Return why PyTorch's bf16 flash kernel cannot train here; None where it can."""
    x = torch.zeros(1, 1, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            torch.autograd.grad(out.sum(), x)
    except RuntimeError as error:
        return " ".join(str(error).split("\n")[0].split())
    return None


def _suspect(missing: str | None) -> str:
    """The attention that ruins the training: PyTorch's flash kernel, or the recipe it follows."""
    return "torch:flash" if missing is None else "BF16_FLASH2"


def _failure(stage: _Stage, progress: Progress) -> Act:
    """Act 1: the same training with four attention functions."""
    config, missing = stage.config, flash_missing()
    kernel = _suspect(missing)
    choices: dict[str, AttentionChoice] = {FLASH if missing is None else STAND_IN: kernel}
    # with the tiles of the recipe that act 2 replaces operations in, so that it needs no run again
    fixed = recipe_text(halfulp_like(recipe_named(emulations(kernel)[-1])))
    choices |= {MATH: "torch:math", FP32: EXACT, HALFULP: fixed}
    seeds = range(config.seeds)
    found = run_failures(
        choices.values(),
        seeds,
        config.steps,
        workers=config.workers,
        folder=stage.folder / RUNS,
        progress=progress,
    )
    names = [name for name in choices for _ in seeds]
    runs = [replace(run, attention=name) for name, run in zip(names, found, strict=True)]
    by_name = {name: [run for run in runs if run.attention == name] for name in choices}
    suspect = next(iter(choices))
    text = [
        (
            "One causal attention layer (width 32, 32 tokens, batch 16) learns a random teacher on"
            f" one fixed batch with Adam, {config.steps} steps, in true bf16. All runs of a seed"
            " start from the same weights and see the same data; they differ in the attention"
            " function alone, and nothing is accelerated or made coarser."
        ),
        f"A run is called by this rule. {RULE[0].upper()}{RULE[1:]}.",
    ]
    if missing is not None:
        text.append(
            f"PyTorch's bf16 flash kernel does not run here ({missing}); the stock recipe stands in"
            " for it."
        )
    return {
        "finding": failure_finding(by_name, suspect),
        "text": text,
        "figures": [
            figure.as_dict() | {"caption": _CURVES} for figure in curves(runs, config.command)
        ],
        "tables": [_failure_table(by_name, config).as_dict()],
        "runs": [run.as_dict() for run in runs],
    }


def _failure_table(by_name: dict[str, list[FailureRun]], config: DemoConfig) -> Table:
    shown: tuple[tuple[str, Callable[[FailureRun], float], Callable[[float], str]], ...] = (
        ("lowest loss", lambda run: min(run.loss, default=0.0), short),
        ("loss at the end", final_loss, short),
        ("mean score at the end", lambda run: run.mean_score[-1], "{:+.1f}".format),
        ("σ(W_Q) at the end", lambda run: run.sigma_query[-1], "{:.1f}".format),
    )
    rows = []
    for name, runs in by_name.items():
        cells = (_range([figure(run) for run in runs], form) for _, figure, form in shown)
        rows.append((name, worst_outcome(runs), *cells))
    columns = ("attention", "outcome", *(title for title, _, _ in shown))
    seeds = f"{config.seeds} seeds, lowest … highest of them" if config.seeds > 1 else "one seed"
    said = f"{config.steps} steps, {seeds}."
    return Table("What became of each run", columns, tuple(rows), said, config.command)


def _range(values: Sequence[float], form: Callable[[float], str]) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} … {high}"


def _cause(stage: _Stage, progress: Progress) -> Act:
    """Act 2: the failing run again with one thing changed at a time, and one rounding bit by
    bit.
    """
    config = stage.config
    run = seconds(_suspect(flash_missing()), steps=config.steps)
    steps = min(config.isolation_steps, config.steps)
    found = isolate(
        run,
        out=stage.folder / "isolation",
        seeds=tuple(range(config.isolation_seeds)),
        steps=steps,
        budget_seconds=config.isolation_seconds,
        workers=config.workers,
        recorded=sorted((stage.folder / RUNS).iterdir()),
        progress=progress,
        command=f"halfulp isolate seconds --seeds {config.isolation_seeds} --steps {steps}",
    )
    plain = found.as_dict()
    example = explain(EXAMPLE, BF16)
    values = " ".join(map(repr, EXAMPLE))
    return {
        "finding": found.verdict,
        "text": [
            (
                "The failing run is made again with one thing changed at a time, from the whole"
                " attention down to one operation and its bits, and what saves it names what was"
                " wrong. The search goes on one seed; what it finds is tried on the others, which"
                " alone say how sure it is. Runs of act 1 are taken where they are the ones asked"
                " for."
            ),
            *([f"The fix. {found.fix}"] if found.fix else []),
            *found.notes,
        ],
        "figures": plain["figures"],
        "tables": plain["tables"],
        "code": [
            {
                "caption": (
                    "One rounding, bit by bit: a sum of two weighted values of one sign carries"
                    " into the next binade, and the bit it loses pushes the result away from zero"
                    " (the worked example of Qiu & Yao, arXiv 2510.04212, section 3.3.2)."
                ),
                "text": example.text(),
                "command": f"halfulp explain -- {values} --format bf16",
            }
        ],
        "example": example.as_dict(),
    }


def _audit(stage: _Stage, progress: Progress) -> Act:
    """Act 3: every kernel here on the probe inputs and on the activations of a model trained on the
    spot.
    """
    config = stage.config
    share = 0.45  # of the act: the training
    names, skipped = choose_targets(config.targets)
    with one_thread():
        trained = train_and_capture(config.gpt, progress=part_of(progress, 0.0, share))
    file = save_captured(stage.folder / "tensors" / "gpt.safetensors", trained.captured)
    jobs = [Job(name, config.shapes, (str(file),), config.seed) for name in names]
    found = audit_all(jobs, config.workers, part_of(progress, share, 1.0))
    here = str(stage.folder)
    # files by the names that they will have when the folder is in its place
    audits: list[dict[str, Any]] = json.loads(json.dumps(found).replace(here, str(stage.final)))
    sizes = ", ".join(map(str, config.shapes or (Shape(),)))
    shape = tuple(trained.captured.query.shape)
    return {
        "finding": audit_finding(audits, skipped),
        "text": [
            (
                f"Each kernel is called on {_probe_count(audits)} probe inputs of size (B, H, N, D)"
                f" = {sizes} and on real activations: {trained.captured.source},"
                f" {trained.bits_per_byte:.2f} bits a byte, query {shape}. Its errors are set"
                " beside those of the stock recipe on the same inputs and beside the floor, the"
                " least that any kernel with bf16 operands and results must round."
            ),
        ],
        "audits": audits,
        "skipped": skipped,
        "bits_per_byte": trained.bits_per_byte,
        "command": f"halfulp audit TARGET --captured {stage.final / 'tensors' / 'gpt.safetensors'}",
    }


def _probe_count(audits: Sequence[dict[str, Any]]) -> int:
    return len(
        {
            case["probe"]
            for audit in audits
            for case in audit["cases"]
            if case["probe"] != "captured"
        }
    )


_ACTS: tuple[tuple[str, str, Callable[[_Stage, Progress], Act]], ...] = (
    ("failure", "The failure", _failure),
    ("cause", "The cause", _cause),
    ("audit", "The audit", _audit),
)
