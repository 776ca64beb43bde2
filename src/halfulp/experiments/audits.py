"""Audits of several targets: every attention kernel of this machine and our own recipes, in
processes of one thread.

One thread a process keeps a kernel's bits the same wherever it runs, and uses every core without
two of them waiting for each other. What the targets are held against is kept on disk, for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfulp.audit import AuditReport, Shape, audit
from halfulp.runs.folder import write_text
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Progress
from halfulp.targets import Target, builtin_targets

RECIPES = (
    "recipe:BF16_HALFULP",
    "recipe:BF16_FLASH2",
    "recipe:BF16_STANDARD",
    "recipe:BF16_FLASH1",
    "recipe:BF16_AUTHORS",
    "recipe:BF16_PAPER_STABILIZED",
    "recipe:FP8_FLASH",
    "recipe:TORCH_CPU_FLASH",
)
"""Recipes in bf16 that stand for a kernel or a paper."""

COMPILED = ("flex:compiled", "transformers:flex_attention")
"""Targets that compile anew for every shape, some seconds each."""


@dataclass(frozen=True)
class Job:
    """One target to audit."""

    target: str
    shapes: tuple[Shape, ...]
    captured: tuple[str, ...]
    seed: int


def choose_targets(wanted: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Return which targets to audit, and for the others why not; `wanted` restricts both."""
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    for target in builtin_targets():
        if target.name.startswith("recipe:") and target.name not in RECIPES:
            continue
        if wanted is not None and target.name not in wanted:
            continue
        if target.missing is not None:
            skipped[target.name] = target.missing
        elif target.name in COMPILED and wanted is None:
            skipped[target.name] = (
                f"compiles for every shape, which takes minutes: halfulp audit {target.name}"
            )
        elif target.name == "sdpa:fp32" and wanted is None:
            skipped[target.name] = "computes in float32, whatever the dtype of its operands"
        elif target.name.startswith("halfulp:") and wanted is None:
            skipped[target.name] = (
                "one of halfulp's own kernels or recipes, whose default is audited as halfulp"
            )
        else:
            chosen.append(target.name)
    return chosen, skipped


def audit_each(
    targets: Sequence[AbstractContextManager[Target]],
    options: Mapping[str, Any],
    repro: Path | None,
    watch: Callable[[str], AbstractContextManager[Progress]],
) -> Iterator[tuple[AuditReport, str | None]]:
    """Audit one target after the other.

    Args:
        targets: what to audit, entered in turn.
        options: keyword arguments of `halfulp.audit`.
        repro: folder for a program that shows each defect; it is made when the first is found. None
            writes none.
        watch: called with what is being audited; gives a context that gives the function that shows
            progress.

    Yields:
        Each report as soon as it is there, and where its program was written.
    """
    for number, opened in enumerate(targets, 1):
        count = f" ({number} of {len(targets)})" if len(targets) > 1 else ""
        with opened as target, watch(f"audit {target.name}{count}") as progress:
            report = audit(target, progress=progress, **options)
        script = None
        if report.script is not None and repro is not None:
            repro.mkdir(exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9]+", "_", report.target.rpartition("/")[2]).strip("_")
            # The folder comes first on the path of what is run in it: torch.py would be torch.
            script = str(write_text(repro / f"{number}_{name}.py", report.script))
        yield report, script


def audit_all(jobs: Sequence[Job], workers: int, progress: Progress) -> list[dict[str, Any]]:
    """Return the audits' plain data in the order of the jobs, in so many processes.

    Raises WorkerKilledError where a process dies.
    """
    return run_jobs(_audit, jobs, workers=workers, progress=progress, what="audits")


def _audit(job: Job) -> dict[str, Any]:
    found = audit(job.target, shapes=job.shapes, captured=job.captured, seed=job.seed)
    return found.as_dict()
