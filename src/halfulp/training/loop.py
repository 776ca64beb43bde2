"""The training loop: one readable function that trains any workload, and the few things around it.

The same configuration gives the same bits on the same machine: the order of samples is drawn before
the first step and recorded, weights come from a seed of their own, what attention draws from one of
each step's (`halfulp.training.determinism`), and a checkpoint holds everything else that the rest
of the run depends on. So a run that was killed at any moment and taken up again ends in the weights
it would have ended in.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np

from halfulp.runs.lock import Lock, sweep_lock
from halfulp.runs.results import Progress, no_progress
from halfulp.training.attention import AttentionFunction
from halfulp.training.checkpoint import Checkpoint, checkpoints
from halfulp.training.config import RunConfig
from halfulp.training.determinism import deterministic, own_generators
from halfulp.training.distributed import Parallel, World, world
from halfulp.training.interrupt import asked_to_stop
from halfulp.training.journal import (
    Journal,
    Row,
    read_rows,
    recorded_order,
    warn_of_lines,
)
from halfulp.training.run_json import read_record
from halfulp.training.session import Session
from halfulp.training.workload import Workload, build_workload

Status: TypeAlias = Literal["done", "failed", "stopped", "interrupted"]
_OVER: tuple[Status, ...] = ("done", "failed", "stopped")
Stop: TypeAlias = Callable[[Row], str | None]
"""Shown every line of metrics; a reason ends the run, None lets it go on."""


class Sink(Protocol):
    """Where lines of metrics go besides the run folder."""

    def row(self, row: Row) -> None:
        """Take one line of metrics or one measurement."""
        ...

    def close(self) -> None:
        """End; called once, whatever became of the run."""
        ...


@dataclass(frozen=True)
class TrainedRun:
    """What a run recorded, and the model it ended with."""

    config: RunConfig
    # step, loss, grad_norm, learning_rate, seconds, tokens_per_second, the workload's figures
    metrics: list[Row]
    measures: list[Row]  # step, measure: {name: numbers or [layer][head]}
    status: Status
    reason: str  # why it failed or was stopped
    folder: Path | None
    workload: Workload

    def curve(self, name: str) -> tuple[float, ...]:
        """Return one figure of every line of metrics; None in a file was a number that is not
        finite.
        """
        return tuple(math.nan if row[name] is None else row[name] for row in self.metrics)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the lines of metrics."""
        return tuple(row["step"] for row in self.metrics)


def train(
    config: RunConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    batches: np.ndarray | None = None,
    start: Checkpoint | None = None,
    own: Mapping[str, AttentionFunction] | None = None,
    parallel: Parallel = "none",
    stop: Stop | None = None,
    sinks: Sequence[Sink] = (),
    progress: Progress | None = None,
    deadline: float | None = None,
    command: str | None = None,
) -> TrainedRun:
    """Train, and say what became of it.

    Args:
        config: the run.
        folder: where to write it; None trains in memory.
        resume: go on from the last whole checkpoint in `folder`; a run that is over is returned as
            it stands, one that never began is begun.
        batches: another run's order of samples, int64 `[steps, batch]`, instead of drawing one.
        start: another run's checkpoint to start from, weights and optimizer; the steps before it
            are not made.
        own: attention functions of the caller's that the plan may name.
        parallel: "ddp" or "fsdp" under torchrun.
        stop: shown every line of metrics; a text ends the run with that reason.
        sinks: shown every line of metrics.
        progress: called at every line of metrics.
        deadline: seconds since the epoch; the first step that ends after it is the last, and the
            run can be resumed.
        command: what repeats the run, for its record.

    Raises:
        ValueError: the configuration does not fit the workload, this machine or what lies in the
            folder.
    """
    if resume and folder is None:
        raise ValueError("resume=True: accepted with the folder of a run")
    if parallel == "fsdp" and config.measure_every:
        raise ValueError(
            f"measure_every={config.measure_every}: accepted with parallel='fsdp' is 0"
        )
    made = _Made(config, batches, start, own)
    taken = folder if resume and folder is not None and (folder / "run.json").exists() else None
    with ExitStack() as stack:
        group = stack.enter_context(world(parallel, config.device))
        stack.enter_context(deterministic(group.device))
        stack.enter_context(own_generators(group.device))
        # a run that is over is only read, which needs no lock
        if taken is not None and read_record(taken)["status"] in _OVER:
            return _as_recorded(*made.session(group, taken), taken)
        lock = Lock(taken) if taken is not None and group.leads else None
        if lock is not None:
            stack.callback(lock.release)
        session, rows = made.session(group, taken)
        # lines beyond the checkpoint are of a state that is lost: those steps are made again
        session.rows = [row for row in rows if row["step"] <= session.done]
        group.wait()  # every process has read before the one that leads writes
        journal = None
        if folder is not None and group.leads:
            journal = (
                Journal.begin(
                    folder, config, session.order, session.workload.source, command, session.done
                )
                if lock is None
                else Journal.take_up(folder, lock, session.done, session.rows)
            )
        until = math.inf if deadline is None else deadline
        return _run(session, journal, stop, sinks, progress or no_progress, until)


@contextmanager
def in_memory(config: RunConfig) -> Iterator[Session]:
    """Give a run's session, for the caller to step, with nothing around it: neither generators nor
    kernels are other than the caller has them.
    """
    with world("none", config.device) as group:
        yield _Made(config, None, None, None).session(group, None)[0]


def times_of_steps(
    configs: Sequence[RunConfig],
    rounds: int,
    *,
    seconds: float = math.inf,
    batches: np.ndarray | None = None,
    start: Checkpoint | None = None,
) -> list[list[float]]:
    """Return how long steps of several runs take, in seconds, by run: `rounds` of each, or those
    that so many seconds hold, but 6 at least.

    They take turns, step by step, in memory, so that whatever else the machine does meets them all
    alike; a first step of each, which compiles and allocates, is left out. The rest as `train`.
    """
    found: list[list[float]] = [[] for _ in configs]
    with ExitStack() as stack:
        group = stack.enter_context(world("none", configs[0].device))
        stack.enter_context(deterministic(group.device))
        stack.enter_context(own_generators(group.device))
        made = [_Made(one, batches, start, None).session(group, None)[0] for one in configs]
        for turn in range(rounds + 1):
            for times, session in zip(found, made, strict=True):
                began = time.perf_counter()
                session.step()  # which waits for its loss
                if turn:
                    times.append(time.perf_counter() - began)
            if turn >= 6 and sum(map(sum, found)) > seconds:
                break
    return found


@dataclass(frozen=True)
class _Made:
    """What a session is made of."""

    config: RunConfig
    batches: np.ndarray | None
    start: Checkpoint | None
    own: Mapping[str, AttentionFunction] | None

    def session(self, group: World, taken: Path | None) -> tuple[Session, list[Row]]:
        """A new session, or one that goes on from the last checkpoint in a folder that fits, and
        the lines that are recorded there.
        """
        config = self.config
        if config.batch % (config.accumulation * group.size):
            accepted = (
                "accepted is a multiple of accumulation × processes ="
                f" {config.accumulation * group.size}"
            )
            raise ValueError(f"batch={config.batch}: {accepted}")
        workload = build_workload(config, group.device, self.own)
        if taken is None:
            order = _order(workload, config, self.batches)
            return Session(config, workload, group, order, self.start), []
        order = recorded_order(taken, config, workload.source)
        session, written, seal = None, "", read_record(taken)["seal"]
        for checkpoint in checkpoints(taken / "checkpoints"):
            try:
                # another run's weights may fit the model all the same
                if checkpoint.run != seal:
                    raise ValueError("it is another run's; accepted is this run's")
                session = Session(config, workload, group, order, checkpoint)
                written = checkpoint.lines
                break
            except ValueError as error:
                warnings.warn(
                    f"skipped: {taken / 'checkpoints'}, step {checkpoint.step}: {error}",
                    stacklevel=2,
                )
                # half of the refused checkpoint may be in the model: the next one gets a fresh one
                workload = build_workload(config, group.device, self.own)
        session = session or Session(config, workload, group, order, self.start)
        rows = read_rows(taken)
        warn_of_lines(taken, config, rows, session.done, written)
        return session, rows


def _order(workload: Workload, config: RunConfig, batches: np.ndarray | None) -> np.ndarray:
    """The order of samples: a recorded one, or one that the data seed draws."""
    if batches is None:
        return workload.order(config.steps, config.batch)
    if batches.ndim != 2 or batches.shape[0] < config.steps or batches.shape[1] != config.batch:
        raise ValueError(
            f"batches of shape {batches.shape}: accepted is [at least {config.steps},"
            f" {config.batch}]"
        )
    return batches[: config.steps]


def _run(
    session: Session,
    journal: Journal | None,
    stop: Stop | None,
    sinks: Sequence[Sink],
    progress: Progress,
    deadline: float,
) -> TrainedRun:
    """The loop itself."""
    config, group = session.config, session.group
    status, reason = _OVER[0], ""
    for row in session.rows:  # what stop has seen before
        if stop is not None and "loss" in row:
            stop(row)
    try:
        with asked_to_stop() as asked:
            while session.done < config.steps and status == _OVER[0]:
                rows = session.step()
                for row in rows:
                    for sink in (journal, *sinks):
                        if sink is not None:
                            sink.row(row)
                    if "loss" in row:
                        progress(
                            session.done / config.steps,
                            f"step {session.done}: loss {row['loss']:.4g}",
                        )
                        reason = (stop(row) or "") if stop is not None else ""
                        # all processes leave at one step, or the rest would wait for who left
                        status = "stopped" if group.agree(bool(reason)) else status
                if not math.isfinite(session.loss):
                    status, reason = "failed", f"the loss of step {session.done} is {session.loss}"
                elif status == _OVER[0] and group.agree(bool(asked) or time.time() >= deadline):
                    said = "asked to stop" if asked else "out of time"
                    status, reason = "interrupted", f"{said} after step {session.done}"
                last = status != _OVER[0] or session.done == config.steps
                due = config.checkpoint_every and session.done % config.checkpoint_every == 0
                # weights that gave a loss which is not finite are nothing to go on from
                if (due or last) and status != "failed":
                    _checkpoint(session, journal)
        if journal is not None:
            journal.close(status, reason)
    except BaseException as error:
        if journal is not None:
            # of a full disk the record may stay "running"; what went wrong is told all the same
            with suppress(OSError):
                # a name that only a pass could tell is none of the model's
                if isinstance(error, ValueError) and not session.done and not journal.taken_up:
                    journal.forget()
                else:
                    journal.close(
                        "interrupted" if isinstance(error, KeyboardInterrupt) else "broken",
                        _said(error),
                    )
        raise
    finally:
        for sink in sinks:
            sink.close()
    return _result(session, status, reason, None if journal is None else journal.folder)


def _checkpoint(session: Session, journal: Journal | None) -> None:
    """Every process gathers, the one that leads writes."""
    if journal is None and session.group.size == 1:
        return
    state = session.state()
    if journal is not None:
        journal.checkpoint(state, session.config.keep)


def _result(session: Session, status: Status, reason: str, folder: Path | None) -> TrainedRun:
    metrics = [row for row in session.rows if "loss" in row]
    measures = [row for row in session.rows if "measure" in row]
    return TrainedRun(session.config, metrics, measures, status, reason, folder, session.workload)


def _said(error: BaseException) -> str:
    """An exception in words, also one whose own words raise."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def _as_recorded(session: Session, rows: list[Row], folder: Path) -> TrainedRun:
    record = read_record(folder)
    session.rows = rows
    if session.group.leads:
        sweep_lock(folder)  # of a process that was killed when all was written
    if record["status"] == _OVER[0] and session.done < session.config.steps:
        warnings.warn(
            f"{folder / 'checkpoints'}: the run is over, and its last whole checkpoint is of"
            f" step {session.done}",
            stacklevel=2,
        )
        warn_of_lines(folder, session.config, session.rows, session.config.steps)
    return _result(session, record["status"], record["reason"], folder)
