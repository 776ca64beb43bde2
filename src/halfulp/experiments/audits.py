"""Audits of several targets: every attention kernel of this machine and our own recipes, in
processes of one thread.

One thread a process keeps a kernel's bits the same wherever it runs, and uses every core without
two of them waiting for each other. What the targets are held against is computed once a process.
"""

from __future__ import annotations

import multiprocessing
import queue
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfulp.audit import AuditReport, Shape, audit
from halfulp.audit.planning import plan
from halfulp.audit.references import references
from halfulp.runs.folder import write_text
from halfulp.runs.parallel import WorkerKilledError
from halfulp.runs.results import Progress
from halfulp.runs.threads import one_thread
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
            script = str(write_text(repro / f"{name}.py", report.script))
        yield report, script


@contextmanager
def auditors(workers: int, shapes: tuple[Shape, ...] = (), seed: int = 0) -> Iterator[Auditors]:
    """Start processes that audit; while the caller prepares the jobs they compute what targets are
    held against.

    One worker means this process.
    """
    if workers <= 1:
        yield Auditors(None, None)
        return
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start, initargs=(messages,)
    )
    try:
        for _ in range(workers):
            pool.submit(_warm_up, shapes, seed)
        yield Auditors(pool, messages)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@dataclass(frozen=True)
class Auditors:
    """Processes that were started to audit, or none."""

    pool: ProcessPoolExecutor | None
    messages: Any

    def audit(self, jobs: Sequence[Job], report: Progress) -> list[dict[str, Any]]:
        """Return the audits' plain data in the order of the jobs; raises WorkerKilledError where a
        process dies.
        """
        if self.pool is None:
            with one_thread():
                return [
                    _audit(job, _share(report, number, len(jobs), job))
                    for number, job in enumerate(jobs)
                ]
        try:
            futures = [self.pool.submit(_in_worker, number, job) for number, job in enumerate(jobs)]
            _relay(futures, self.messages, report)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise WorkerKilledError(
                "a worker process was killed, perhaps for want of memory, while auditing"
            ) from error


def _audit(job: Job, progress: Progress) -> dict[str, Any]:
    found = audit(
        job.target, shapes=job.shapes, captured=job.captured, seed=job.seed, progress=progress
    )
    return found.as_dict()


def _share(report: Progress, number: int, count: int, job: Job) -> Progress:
    return lambda fraction, message: report((number + fraction) / count, f"{job.target}: {message}")


_messages: list[Any] = []  # in a worker: the queue to its parent


def _start(messages: Any) -> None:
    # Ctrl-C reaches every process: end at once, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    _messages[:] = [messages]


def _warm_up(shapes: tuple[Shape, ...], seed: int) -> None:
    """Fill this process's cache of references, which every audit of the same plan then reads."""
    todo = plan("quick", "bfloat16", seed, shapes)
    for case in (*todo.all_cases, *todo.relations):
        references(case)


def _in_worker(number: int, job: Job) -> dict[str, Any]:
    return _audit(
        job,
        lambda fraction, message: _messages[0].put((number, fraction, f"{job.target}: {message}")),
    )


def _relay(futures: Sequence[Future[dict[str, Any]]], messages: Any, report: Progress) -> None:
    """Hand on what the workers say until they are done; raises what a worker raised."""
    done = [0.0] * len(futures)
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
        message = ""
        while True:
            try:
                number, done[number], message = messages.get_nowait()
            except queue.Empty:
                break
        if message:
            report(sum(done) / len(done), message)
