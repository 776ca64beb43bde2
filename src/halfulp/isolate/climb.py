"""The ladder while it is climbed: runs in parallel, none twice, and no more than the budget allows.

Every rung is a plan of attention over some seeds. Its runs lie in OUT/rungs/NAME/seed-S, and what
is there already is read, so that a search that was interrupted asks the same questions again and
gets its old answers at once. Rungs of the same plan share their runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfulp.isolate.rule import Rule, judge_rows, read_curves
from halfulp.isolate.rung import Job, RungRun, run_rung, rung_config, summarize
from halfulp.isolate.sites import Layout
from halfulp.isolate.substitutions import Cells, cells_of, plan_of
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Progress, no_progress
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import RunConfig
from halfulp.training.journal import read_rows
from halfulp.training.operations import OperationPlan
from halfulp.training.run_json import config_from_dict, read_record
from halfulp.training.settings import with_settings

ORIGINAL, TWIN = "original", "fp32"
# what a run writes down, which changes nothing in it
_NOTED = ("metrics_every", "measure_every", "checkpoint_every", "keep", "preset")


class BudgetSpentError(Exception):
    """The budget ended before every run that was asked for."""


@dataclass(frozen=True)
class Settings:
    """What an isolation goes by; the same settings continue the same folder."""

    config: RunConfig
    seeds: tuple[int, ...]
    horizon: int  # the last step of every run
    rule: Rule
    out: Path
    source: Path | None = None  # the recorded run
    start: int = 0  # the step of its checkpoint that every run starts from
    workers: int = 2
    backend: str | None = None
    budget_seconds: float | None = None  # of this call
    budget_steps: int | None = None  # of training, over all runs in the folder
    recorded: tuple[Path, ...] = ()  # runs that are there already, of other seeds or attention
    layout: Layout | None = None  # of a user's model
    changed: bool = False  # since it was recorded, so that no recorded run is one of it


@dataclass(frozen=True)
class Substitution:
    """One thing changed: which attention, or in a user's model which arithmetic, runs where."""

    name: str  # of a folder
    question: str
    change: str
    cells: Cells
    operations: OperationPlan | None = None  # None: the run's own
    settings: tuple[str, ...] = ()  # "field=value", as `halfulp.training.settings` takes them


@dataclass
class Rung:
    """A substitution and what became of it, by seed."""

    name: str
    question: str
    change: str
    attention: str
    runs: dict[int, RungRun] = field(default_factory=dict)

    def held(self, seeds: Sequence[int]) -> tuple[int, int]:
        """On how many of these seeds it survived, and on how many it was tried."""
        tried = [seed for seed in seeds if seed in self.runs]
        return sum(self.runs[seed].survived for seed in tried), len(tried)


class Ladder:
    """Runs substitutions and remembers them."""

    def __init__(self, settings: Settings, progress: Progress | None = None) -> None:
        self.settings = settings
        config, layout = settings.config, settings.layout
        self.cells = cells_of(config) if layout is None else layout.cells(config)
        self.rungs: dict[str, Rung] = {}
        self.progress = progress or no_progress
        self.share = (0.0, 1.0)  # of the progress that the present phase has
        self._began = time.time()
        self._runs: dict[tuple[str, int], RungRun] = {}  # by plan and seed
        self._recorded = self._known()
        # by its text: plans, settings, and the rung that has the runs
        self._plans: dict[str, tuple[AttentionPlan, OperationPlan, tuple[str, ...], str]] = {}

    @property
    def steps(self) -> int:
        """Steps of training in all runs so far, those of earlier calls included."""
        return sum(run.made for run in self._runs.values())

    @property
    def seconds(self) -> float:
        """Since this call began."""
        return time.time() - self._began

    def add(self, substitution: Substitution) -> Rung:
        """The rung of a substitution, without running it; a name stands for one substitution."""
        config, operations = self.settings.config, substitution.operations
        plan = plan_of(substitution.cells) if substitution.cells else config.attention
        operations = config.operations if operations is None else operations
        name, settings = substitution.name, substitution.settings
        text = _text(plan, operations, settings)
        if name not in self.rungs:
            self.rungs[name] = Rung(name, substitution.question, substitution.change, text)
            self._plans.setdefault(text, (plan, operations, settings, name))
        assert self.rungs[name].attention == text, name
        return self.rungs[name]

    def climb(self, substitutions: Sequence[Substitution], seeds: Sequence[int]) -> list[Rung]:
        """Run substitutions on seeds and return their rungs.

        Raises:
            BudgetSpentError: some of them could not be run; those that could are remembered.
        """
        rungs = [self.add(substitution) for substitution in substitutions]
        # by what is run and not by name: two rungs that ask for the same are one run
        wanted = dict.fromkeys((rung.attention, seed) for rung in rungs for seed in seeds)
        jobs = [key for key in wanted if key not in self._runs and not self._as_recorded(*key)]
        try:
            while jobs:
                room = self._room()
                if not room:
                    raise BudgetSpentError
                self._run(jobs[:room])
                jobs = jobs[room:]
        finally:
            for rung in rungs:
                found = {seed: self._runs.get((rung.attention, seed)) for seed in seeds}
                rung.runs |= {seed: run for seed, run in found.items() if run is not None}
        return rungs

    def folder(self, rung: str, seed: int) -> Path:
        """Where the run of a rung lies."""
        run = self._runs[self.rungs[rung].attention, seed]
        return self.settings.out / run.folder

    def _room(self) -> int:
        """How many runs may be started now."""
        s = self.settings
        if s.budget_seconds is not None and self.seconds >= s.budget_seconds:
            return 0
        if s.budget_steps is None:
            return len(self.rungs) * len(s.seeds) + 1
        # each is counted as if it went to the end; what those that fail early leave is the next
        # round's
        return max(0, (s.budget_steps - self.steps) // (s.horizon - s.start))

    def _run(self, keys: Sequence[tuple[str, int]]) -> None:
        s, (low, high) = self.settings, self.share
        jobs = [self._job(plan, seed) for plan, seed in keys]

        def report(done: float, message: str) -> None:
            self.progress(
                low + (high - low) * done,
                f"{jobs[0].rung}{' …' if len(jobs) > 1 else ''}: {message}",
            )

        report(0.0, f"0 of {len(jobs)} runs")
        results = run_jobs(run_rung, jobs, workers=s.workers, backend=s.backend, progress=report)
        for key, result in zip(keys, results, strict=True):
            if result is not None:
                self._runs[key] = replace(
                    result,
                    seed=key[1],
                    folder=str(Path(result.folder).relative_to(s.out.absolute())),
                )
        if None in results:
            raise BudgetSpentError

    def config(self, rung: str, seed: int | None = None) -> RunConfig:
        """What the run of a rung is on a seed, by default the run's own."""
        s = self.settings
        attention, operations, settings, _ = self._plans[self.rungs[rung].attention]
        seed = s.config.seed if seed is None else seed
        own = redrawn(s.config, seed, s.start) if s.start else seeded(s.config, seed)
        own = replace(rung_config(own, s.horizon), attention=attention, operations=operations)
        return with_settings(own, settings)

    def _job(self, plan: str, seed: int) -> Job:
        s = self.settings
        name = self._plans[plan][-1]
        return Job(
            rung=name,
            config=self.config(name, seed),
            # a worker on a shared path stands in another folder
            folder=s.out.absolute() / "rungs" / name / f"seed-{seed}",
            rule=s.rule,
            horizon=s.horizon,
            twin=_absolute(self._twin(seed)) if name != TWIN else None,
            source=_absolute(s.source) if s.start or seed == s.config.seed else None,
            start=s.start,
            deadline=None if s.budget_seconds is None else self._began + s.budget_seconds,
        )

    def _twin(self, seed: int) -> Path | None:
        twin = self.rungs.get(TWIN)
        return self.folder(TWIN, seed) if twin is not None and seed in twin.runs else None

    def _as_recorded(self, plan: str, seed: int) -> bool:
        """Take a recorded run for a rung's, if it got far enough to be judged; the original may be
        the recorded run itself.
        """
        s = self.settings
        itself = self.rungs[ORIGINAL].attention if ORIGINAL in self.rungs else ""
        source = s.source is not None and seed == s.config.seed and plan == itself
        source = source and not s.changed
        folder = s.source if source else self._recorded.get((plan, seed))
        if folder is None:
            return False
        rows = [row for row in read_rows(folder) if row["step"] <= s.horizon]
        if not any("loss" in row for row in rows):
            return False
        twin = self._twin(seed)
        judged = judge_rows(
            rows, s.rule, s.horizon, None if twin is None else read_curves(read_rows(twin))
        )
        if judged.failed_at is None and rows[-1]["step"] < s.horizon:
            return False
        name, place = self._plans[plan][-1], folder.resolve()
        if not source:  # beside this folder, with which it may be moved
            place = Path(os.path.relpath(place, s.out.resolve()))
        run = summarize(name, seed, place, 0, rows, judged)
        self._runs[plan, seed] = replace(run, made=0)
        return True

    def _known(self) -> dict[tuple[str, int], Path]:
        """Recorded runs that differ from this one's in seed and attention alone, by both."""
        s, found = self.settings, dict[tuple[str, int], Path]()
        for folder in () if s.start or s.source else s.recorded:
            config = config_from_dict(read_record(folder)["config"])
            noted = {name: getattr(s.config, name) for name in ("attention", *_NOTED)}
            if replace(config, **noted) == seeded(s.config, config.seed):
                found[str(config.attention), config.seed] = folder
        return found


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _text(plan: AttentionPlan, operations: OperationPlan, settings: tuple[str, ...]) -> str:
    """What a rung runs, as one text."""
    texts = (str(plan), str(operations), *settings)
    return " | ".join(text for text in texts if text)


def redrawn(config: RunConfig, seed: int, start: int) -> RunConfig:
    """Return the run with what follows a checkpoint in another order, of the seed: the batches of
    its steps and what they draw at random. The run's own seed leaves all as it is.
    """
    return replace(
        config, adjusted=replace(config.adjusted, since=start, draw=abs(seed - config.seed))
    )


def seeded(config: RunConfig, seed: int) -> RunConfig:
    """Return the run with other weights and another order of data, both of the seed."""
    shift = seed - config.seed
    return replace(
        config, seed=seed, data_seed=None if config.data_seed is None else config.data_seed + shift
    )
