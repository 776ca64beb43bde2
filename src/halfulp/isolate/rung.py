"""One run of the ladder: trained until the rule calls it failed or the horizon is reached, in a run
folder of its own.

A job is plain data, so that a process on another machine can do it. A run that is over is read and
not trained again; one that was cut off goes on from its last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from halfulp.isolate.rule import Judgement, Outcome, Rule, Watcher, judge_rows, read_curves
from halfulp.runs.threads import one_thread
from halfulp.training.checkpoint import checkpoint_steps, load_checkpoint
from halfulp.training.config import LayerTask, RunConfig, UserModel
from halfulp.training.journal import Row, read_order, read_rows
from halfulp.training.loop import train
from halfulp.training.run_json import difference, read_config, read_record

HORIZON = "end of the horizon"
_POINTS = 20  # lines of metrics a run, at least, and measurements, unless it has its own
_CHECKPOINTS = 5  # a run, but none within …
_LEAST = 100  # steps


class OutOfTimeError(Exception):
    """The budget of seconds ended in the middle of a run."""


@dataclass(frozen=True)
class Job:
    """What one run of a rung is."""

    rung: str
    config: RunConfig  # its seed included
    folder: Path
    rule: Rule
    horizon: int  # the last step to make
    twin: Path | None = None  # the run of the fp32 twin with the same seed
    source: Path | None = None  # the recorded run whose order of samples is replayed
    start: int = 0  # the step of the source's checkpoint to start from
    deadline: float | None = None  # seconds since the epoch


@dataclass(frozen=True)
class RungRun:
    """What became of one run."""

    rung: str
    seed: int
    outcome: Outcome
    reason: str
    failed_at: int | None  # time to failure, in steps from the beginning
    last_step: int
    made: int  # steps made for it
    loss: float  # at the end: median over the rule's number of steps, where there are so many
    # of the mean score over the second half, beyond the twin's; the layer and head that moved most
    score_moved: float
    # at the end: mean_score, max_score and σ, the largest of any layer and head
    figures: dict[str, float]
    seconds: float  # of training
    folder: str  # inside the isolation's

    @property
    def survived(self) -> bool:
        """Whether it neither failed nor drifts."""
        return self.outcome == "survived"

    def __lt__(self, other: RungRun) -> bool:
        """Whether it got less far: by outcome, then time to failure, drift, loss."""
        return self._rank() < other._rank()

    def _rank(self) -> tuple[float, ...]:
        last = float("inf") if self.failed_at is None else self.failed_at
        return (
            ("failed", "drifting", "survived").index(self.outcome),
            last,
            -abs(self.score_moved),
            -self.loss,
        )


def rung_config(config: RunConfig, horizon: int) -> RunConfig:
    """Return the run with enough lines of metrics, measurements and checkpoints for the ladder."""
    metrics = min(config.metrics_every, max(1, horizon // _POINTS))
    measure = config.measure_every or max(1, horizon // _POINTS)
    if isinstance(config.workload, LayerTask):
        measure = 0  # its metrics hold all that the rule looks at
    elif isinstance(config.workload, UserModel):  # where it was asked for
        measure = min(config.measure_every, max(1, horizon // _POINTS))
    checkpoint = max(_LEAST, -(-horizon // _CHECKPOINTS))
    return replace(
        config, metrics_every=metrics, measure_every=measure, checkpoint_every=checkpoint, keep=0
    )


def run_rung(job: Job) -> RungRun | None:
    """Train one run and judge it; None if the budget of seconds ended first.

    Raises:
        ValueError: the folder holds another run, or a recorded checkpoint is missing.
        KeyboardInterrupt: somebody asked to stop; the run can be taken up again.
    """
    # one thread: the same bits in this process and in a worker
    with one_thread() if job.config.device == "cpu" else nullcontext():
        return _run_rung(job)


def _run_rung(job: Job) -> RungRun | None:
    twin = None if job.twin is None else read_curves(read_rows(job.twin))
    begun = read_rows(job.source) if job.source and job.start else []
    earlier = [row for row in begun if row["step"] <= job.start]
    rows = _recorded(job)
    if rows is None:
        rows = _train(job, Watcher(job.rule, job.horizon, twin), earlier)
    if rows is None:
        return None
    rows = sorted(rows, key=lambda row: (row["step"], "loss" in row))
    judged = judge_rows(
        (row for row in (*earlier, *rows) if row["step"] <= job.horizon),
        job.rule,
        job.horizon,
        twin,
    )
    return summarize(job.rung, job.config.seed, job.folder, job.start, rows, judged)


def _recorded(job: Job) -> list[Row] | None:
    """The lines of a run that is over; None where it is not."""
    if not (job.folder / "run.json").exists():
        return None
    changes = difference(read_config(job.folder), job.config)
    if changes:
        raise ValueError(
            f"out={str(job.folder)!r} holds another run ({changes[0]}); accepted is a new folder"
        )
    over = read_record(job.folder)["status"] in ("done", "failed", "stopped")
    return read_rows(job.folder) if over else None


def _train(job: Job, watcher: Watcher, earlier: Sequence[Row]) -> list[Row] | None:
    """Train and return all lines; None if time ended first."""
    if time.time() >= (job.deadline or float("inf")):
        return None
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    sentinel = _Sentinel(watcher, job, earlier)
    begin = order = None
    if job.source is not None:
        order = read_order(job.source)
        if job.start:
            begin = load_checkpoint(job.source / "checkpoints" / f"step-{job.start}")
    try:
        run = train(
            job.config,
            job.folder,
            resume=True,
            batches=order,
            start=begin,
            stop=sentinel.stop,
            sinks=(sentinel,),
        )
    except OutOfTimeError:
        return None
    if run.status == "interrupted":
        raise KeyboardInterrupt
    return [*run.metrics, *run.measures]


def summarize(
    rung: str, seed: int, folder: Path, start: int, rows: Sequence[Row], judged: Judgement
) -> RungRun:
    """Return a judged run in a few numbers; `rows` are all its lines in order."""
    last = max((row["step"] for row in rows), default=start)
    curves = read_curves(rows)
    figures: dict[str, float] = {}
    for name, curve in curves.items():
        kind = name.partition(" of ")[0]
        if kind != "loss" and abs(curve.values[-1]) >= abs(figures.get(kind, 0.0)):
            figures[kind] = curve.values[-1]
    return RungRun(
        rung=rung,
        seed=seed,
        **vars(judged),
        last_step=last,
        made=last - start,
        figures=figures,
        seconds=round(sum(row.get("seconds") or 0.0 for row in rows), 3),
        folder=str(folder),
    )


class _Sentinel:
    """Shows a run's lines to the watcher as they come; ends it once they have told enough."""

    def __init__(self, watcher: Watcher, job: Job, earlier: Sequence[Row]) -> None:
        self.watcher, self.job = watcher, job
        for row in earlier:
            watcher(row)
        taken = max(checkpoint_steps(job.folder / "checkpoints"), default=0)
        for row in read_rows(job.folder):
            if "loss" not in row and row["step"] <= taken:  # the loop shows the others again
                watcher(row)

    def row(self, row: Row) -> None:
        """Take a measurement; lines of metrics come by `stop`."""
        if "loss" not in row:
            self.watcher(row)

    def close(self) -> None:
        """Nothing is held open."""

    def stop(self, row: Row) -> str | None:
        """Return why the run may end here."""
        reason, horizon = self.watcher(row), self.job.horizon
        if reason is None and row["step"] >= horizon and horizon < self.job.config.steps:
            reason = HORIZON
        if reason is None and time.time() >= (self.job.deadline or float("inf")):
            raise OutOfTimeError
        return reason
