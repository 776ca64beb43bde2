"""`prescribe`: small changes to a run that fails, each tried from where it stood, beside the run as
it is, and ranked by what they do and what they cost.

The run as it is and the same with everything in fp32 come first: they say whether there is
something to cure, and whether rounding has a part in it. Runs, folders, seeds, budget and resume
are the ladder's (`halfulp.isolate.climb`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from halfulp.complaints import meant
from halfulp.isolate.climb import ORIGINAL, TWIN, BudgetSpentError, Ladder, Settings, Substitution
from halfulp.isolate.isolation import looked_at, working
from halfulp.isolate.rule import BEHIND, judge_rows, read_curves, rule_for
from halfulp.isolate.search import guilty_sets
from halfulp.prescribe.candidates import (
    AGAIN,
    Case,
    Facts,
    Remedy,
    Untried,
    alone,
    candidates,
    in_modules,
    twin,
)
from halfulp.prescribe.prescription import Prescription
from halfulp.prescribe.symptoms import Symptoms, last_good, last_snapshot, of_run, of_snapshot
from halfulp.prescribe.trials import Control, Seen, Trial, ranked, seen
from halfulp.runs.folder import read_json, write_json
from halfulp.runs.record import closed
from halfulp.runs.results import Figure, Progress, Series
from halfulp.runs.snapshot import is_snapshot
from halfulp.runs.threads import one_thread
from halfulp.training.checkpoint import checkpoint_steps, load_checkpoint
from halfulp.training.config import RunConfig, UserModel
from halfulp.training.determinism import own_generators
from halfulp.training.from_snapshot import begun
from halfulp.training.journal import read_order, read_rows
from halfulp.training.loop import times_of_steps
from halfulp.training.run_json import config_as_dict, read_config
from halfulp.training.settings import with_settings
from halfulp.training.trust import trusted
from halfulp.training.workload import build_workload

__all__ = ["prescribe"]

SEEDS = 3
_POINTS = 100  # lines of metrics a run
_LEAST = 5  # steps that losses are medians over, where there are enough
_TIMED = 8  # remedies whose steps are timed
_ROUNDS, _SECONDS = 100, 2.0  # steps of each, if they take no longer


def prescribe(
    run: Path | RunConfig,
    *,
    out: Path,
    workload: str | None = None,
    trust: bool = False,
    steps: int | None = None,
    from_step: int | None = None,
    seeds: int = SEEDS,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
    budget_seconds: float | None = None,
    budget_steps: int | None = None,
    workers: int = 2,
    backend: str | None = None,
    progress: Progress | None = None,
    command: str = "halfulp prescribe",
) -> Prescription:
    """Try small changes to a run that fails, and rank them.

    Args:
        run: the folder of a training, from whose last good checkpoint they are tried, or from the
            beginning where there is none; a snapshot of `halfulp.watch` or the folder of a watched
            training, whose last snapshot is taken; or a configuration.
        out: the folder for all runs, prescription.json and run.json. One that holds an unfinished
            prescription with the same settings is continued.
        workload: the caller's own word for the function that makes the model.
        trust: run the code that the folder of a recorded run names.
        steps: of every run, from where it begins; by default 100 from a snapshot, twice the way to
            the failure from a checkpoint, and the whole run from the beginning.
        from_step: the checkpoint to begin at, 0 for the beginning.
        seeds: how many, at least 2.
        only: names of remedies; by default all that apply.
        settings: "field=value" of the run's configuration that hold in every run, such as
            optimizer.clip=1.0 for a watched training that clips.
        budget_seconds: of this call; what is not tried then is said.
        budget_steps: of training, over all runs.
        workers: processes, one thread each.
        backend: of joblib, see `halfulp.runs.parallel.run_jobs`.
        progress: called with the fraction done and the run at work.
        command: what repeats this, for the record.

    Raises:
        ValueError: an argument is not accepted, or the folder holds something else.
        WorkerKilledError: a worker process was killed; the same call goes on.
    """
    begin = _begin(run, out, workload, trust, steps, from_step, settings)
    ladder_settings = replace(
        _settings(begin, out, seeds),
        workers=workers,
        backend=backend,
        budget_seconds=budget_seconds,
        budget_steps=budget_steps,
    )
    with working(ladder_settings, "prescribe", command) as record:
        tried = _Practice(Ladder(ladder_settings, progress), begin, command)
        status = "interrupted"
        try:
            tried.go(only)
            status = "done"
        finally:
            result = tried.result(status)
            write_json(out / "prescription.json", result.as_dict())
            write_json(out / "run.json", closed(record, status))
    return result


def _settings(begin: _Begin, out: Path, seeds: int) -> Settings:
    """What the ladder goes by."""
    if seeds < 2:
        raise ValueError(f"seeds={seeds}: accepted are 2 or more")
    config, made = begin.config, begin.horizon - begin.start
    patience = max(1, min(_LEAST, made // 4), made // 10)
    settings = Settings(
        replace(config, metrics_every=max(1, min(config.metrics_every, made // _POINTS))),
        tuple(range(config.seed, config.seed + seeds)),
        begin.horizon,
        # `_seen` holds runs against the fp32 twin, and only where the twin itself is in no trouble
        replace(rule_for(config.workload), behind=None, patience=patience),
        out,
        begin.source,
        begin.start,
    )
    # the run as it is is made here, so that all is made alike
    return replace(looked_at(settings), changed=True)


@dataclass(frozen=True)
class _Begin:
    """Where runs begin and end, and what is known of them."""

    named: str
    config: RunConfig
    source: Path | None
    start: int
    horizon: int
    symptoms: Symptoms


def _begin(
    run: Path | RunConfig,
    out: Path,
    workload: str | None,
    trust: bool,
    steps: int | None,
    from_step: int | None,
    settings: Sequence[str],
) -> _Begin:
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}: accepted is an integer of at least 1")
    if isinstance(run, RunConfig):
        if from_step:
            raise ValueError(f"from_step={from_step}: accepted with the folder of a run")
        config = with_settings(run, settings)
        horizon = min(config.steps, steps or config.steps)
        return _Begin(run.preset or "configuration", config, None, 0, horizon, Symptoms())
    snapshot = snapshot_of(run)
    if snapshot is not None:
        if from_step is not None:
            raise ValueError(f"from_step={from_step}: accepted with the folder of a training")
        source, start = begun(snapshot, out, workload, steps)
        config = trusted(read_config(source), source, trust, workload)
        symptoms = of_snapshot(snapshot)
        config = with_settings(config, settings)
        return _Begin(str(run), config, source, start, config.steps, symptoms)
    recorded = read_config(run)
    config = with_settings(trusted(recorded, run, trust, workload), settings)
    symptoms = of_run(run, config, rule_for(config.workload), config.steps)
    there = [0, *checkpoint_steps(run / "checkpoints")]
    start = last_good(run, symptoms) if from_step is None else from_step
    if start not in there or start >= config.steps:
        raise ValueError(
            f"from_step={start}: accepted are 0 and the run's checkpoints before its end,"
            f" {[s for s in there if s < config.steps]}"
        )
    horizon = config.steps if steps is None else min(config.steps, start + steps)
    if steps is None and start and symptoms.failed_at is not None:
        horizon = min(config.steps, start + 2 * (symptoms.failed_at - start))
    return _Begin(str(run), config, run, start, horizon, symptoms)


def snapshot_of(run: Path) -> Path | None:
    """The snapshot that a path names: itself, or the last of a watched training."""
    if is_snapshot(run):
        return run
    record = read_json(run / "run.json")
    if not isinstance(record, dict) or record.get("kind") != "watch":
        return None
    found = last_snapshot(run)
    if found is None:
        raise ValueError(
            f"run={str(run)!r} is a folder of halfulp.watch without a snapshot; accepted is one"
            " that was watched with snapshots=1 or more"
        )
    return found


@dataclass
class _Practice:
    """What was tried so far."""

    ladder: Ladder
    begin: _Begin
    command: str
    control: Control = field(default_factory=lambda: Control({}, {}, {}))
    trials: list[Trial] = field(default_factory=list)
    untried: list[Untried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def go(self, only: Sequence[str]) -> None:
        """The run as it is and its fp32 twin, then, where something is wrong, the remedies."""
        case = self._case()
        first = twin(case)
        self._check(only, [first, *candidates(case)])
        if not self._judged(first):
            return
        if not (any(self.control.troubles.values()) or self.begin.symptoms.kinds or only):
            self.trials = []
            return
        case = replace(case, facts=replace(case.facts, usual_norm=self._usual_norm()))
        asked = candidates(case)
        wanted = [one for one in asked if isinstance(one, Remedy)]
        self.untried += [one for one in asked if isinstance(one, Untried) and not only]
        if only:
            wanted = [one for one in wanted if one.name in only]
        # how far chance reaches depends on how many are tried, which is known only now
        self.control = replace(self.control, remedies=len(self.trials) + len(wanted))
        self.trials = [replace(one, control=self.control) for one in self.trials]
        self._try(wanted)
        if not only and not self.untried_for_budget:
            self._search(case)
        self._time()

    @property
    def untried_for_budget(self) -> bool:
        """Whether the budget is spent."""
        return any("budget" in one.why for one in self.untried)

    def result(self, status: str) -> Prescription:
        """What is known now."""
        s, b = self.ladder.settings, self.begin
        # a fixed batch gives every seed the same losses: one trial then, however many seeds
        losses = {
            tuple(x for x in one.losses.values() if math.isfinite(x))
            for one in self.control.once.values()
        }
        layout = s.layout
        notes = [f"Not seen, so never changed: {path}, {why}."
                 for path, why in (layout.unseen.items() if layout else ())]  # fmt: skip
        order = ranked(self.trials)
        behind_text = (
            f"; in trouble is also a run that is over {BEHIND:g} times its fp32 twin, or that from"
            " the beginning on does not learn"
        )
        return Prescription(
            b.named,
            config_as_dict(s.config),
            s.rule.text(b.horizon - b.start) + behind_text,
            s.seeds,
            b.start,
            b.horizon,
            len(losses) == 1 < len(s.seeds) and losses != {()},
            status,
            b.symptoms.said,
            self.control,
            tuple(order),
            tuple(self.untried),
            tuple(self._figures(order)),
            tuple(self.notes + notes),
            round(self.ladder.seconds, 1),
            self.ladder.steps,
            self.command,
        )

    def _case(self) -> Case:
        b = self.begin
        group = _group(b.config, b.source, b.start)
        betas, eps = group.get("betas"), group.get("eps")
        facts = Facts(
            None if betas is None else float(betas[1]),
            None if eps is None else float(eps),
            None,
            b.config.optimizer.clip,
            b.horizon - b.start,
        )
        return Case(self.ladder.settings, self.ladder.cells, b.symptoms, facts)

    def _check(self, only: Sequence[str], asked: Sequence[Remedy | Untried]) -> None:
        known = [one.name for one in asked if isinstance(one, Remedy)]
        known += ["clip"] * ("clip" not in known)  # whose norm is not known yet
        for name in only:
            if name not in known:
                accepted = f"accepted are {', '.join(known)}{meant(name, known)}"
                raise ValueError(f"remedy={name!r}: {accepted}")

    def _judged(self, first: Remedy | Untried) -> bool:
        """Make the run as it is, twice, and its twin; False where the budget ended before."""
        s, cells = self.ladder.settings, self.ladder.cells
        self.ladder.share = (0.0, 0.2)
        rungs = [Substitution(ORIGINAL, "the run", "nothing", cells)]
        said = "nothing, but its weights moved by an ulp"
        rungs.append(Substitution(AGAIN, "chaos", said, cells, settings=("adjusted.nudged=true",)))
        try:
            if isinstance(first, Remedy):
                self.ladder.climb([first.substitution], s.seeds)
            else:
                self.untried.append(first)
            self.ladder.climb(rungs, s.seeds)
        except BudgetSpentError:
            return False
        # in trouble is what is so both times: of a chaotic run an ulp may decide
        once, again = (self._seen(name, judged=True) for name in (ORIGINAL, AGAIN))
        troubles = {seed: once[seed].trouble if again[seed].trouble else "" for seed in once}
        self.control = Control(once, again, troubles)
        if isinstance(first, Remedy):
            self.trials.append(self._trial(first))
        return True

    def _try(self, remedies: Sequence[Remedy]) -> None:
        """Run remedies on all seeds; those that the budget leaves out are noted."""
        self.ladder.share = (self.ladder.share[1], min(0.95, self.ladder.share[1] + 0.6))
        s = self.ladder.settings
        with suppress(BudgetSpentError):
            self.ladder.climb([one.substitution for one in remedies], s.seeds)
        for one in remedies:
            if len(self.ladder.rungs[one.name].runs) == len(s.seeds):
                self.trials.append(self._trial(one))
            else:
                self.untried.append(Untried(one.change, "the budget was spent"))

    def _search(self, case: Case) -> None:
        """Where everything in fp32 cures and no module is known: which modules, by halves."""
        layout = case.layout
        exact = next((one for one in self.trials if one.remedy.name == TWIN), None)
        known = case.symptoms.sites or case.symptoms.modules
        if layout is None or exact is None or exact.effect != "cures" or known:
            return
        if len(layout.paths) < 2:
            return
        # the search is on one seed; `_try` makes what it finds on all
        main = next(seed for seed, why in self.control.troubles.items() if why)

        def fails(sets: Sequence[frozenset[str]]) -> list[bool]:
            asked = [alone(case, [p for p in layout.paths if p in one]) for one in sets]
            self.ladder.climb(asked, [main])
            mine = [self._seen(one.name, judged=True)[main] for one in asked]
            trials = [Trial(exact.remedy, {main: m}, self.control) for m in mine]
            return [not one.cured(main) for one in trials]

        try:
            found = guilty_sets(layout.paths, fails)
        except BudgetSpentError:
            self.untried.append(Untried("single modules in fp32", "the budget was spent"))
            return
        if len(found.all) < len(layout.paths):
            paths = [path for path in layout.paths if path in found.all]
            said = f"the run fails with low precision in it alone, seed {main}"
            self._try([in_modules(case, paths, said)])

    def _time(self) -> None:
        """How long a step takes with what helps, beside the run as it is."""
        s = self.ladder.settings
        at = None if s.source is None else s.source / "checkpoints" / f"step-{s.start}"
        start = load_checkpoint(at) if at is not None and s.start else None
        order = None if s.source is None else read_order(s.source)
        rounds = min(_ROUNDS, s.config.steps - s.start - 1)
        as_it_is = self.ladder.config(ORIGINAL)
        for i, one in enumerate(ranked(self.trials)[:_TIMED]):
            if one.effect not in ("cures", "lowers the loss") or rounds < 1:
                break
            self.ladder.progress(0.95 + 0.05 * i / _TIMED, f"time of {one.remedy.name}")
            configs = [as_it_is, self.ladder.config(one.remedy.name)]
            with one_thread() if s.config.device == "cpu" else nullcontext():
                # steps that take turns repeat within 10 % at a load of 20, where the runs' own
                # clocks gave 0.27 to 1.09 for equal arithmetic (docs/log.md)
                times = times_of_steps(
                    configs, rounds, seconds=_SECONDS, batches=order, start=start
                )
            cost = statistics.median(mine / its for its, mine in zip(*times, strict=True))
            self.trials[self.trials.index(one)] = replace(one, cost=cost)

    def _trial(self, remedy: Remedy) -> Trial:
        runs = self._seen(remedy.name, judged=remedy.group == "rounding")
        return Trial(remedy, runs, self.control)

    def _seen(self, rung: str, *, judged: bool) -> dict[int, Seen]:
        """Runs of a rung; of a user's model, whose loss alone is known, judged beside their fp32
        twins too, where these are in no trouble.
        """
        s, ladder = self.ladder.settings, self.ladder
        found: dict[int, Seen] = {}
        for seed, run in ladder.rungs[rung].runs.items():
            rows = self._lines(ladder.folder(rung, seed))
            one = seen(run, rows, s.start, s.horizon)
            if judged and s.layout is not None and TWIN in ladder.rungs and not one.trouble:
                exact = self._lines(ladder.folder(TWIN, seed))
                rule = replace(s.rule, behind=BEHIND)
                told = judge_rows(rows, rule, s.horizon, read_curves(exact))
                twin_runs = seen(ladder.rungs[TWIN].runs[seed], exact, s.start, s.horizon)
                if told.outcome == "failed" and not twin_runs.trouble:
                    one = replace(one, trouble=told.reason)
            found[seed] = one
        return found

    def _lines(self, folder: Path) -> list[Any]:
        return [row for row in read_rows(folder) if row["step"] > self.begin.start]

    def _usual_norm(self) -> float | None:
        """The gradient norm at the beginning of the run as it is."""
        norms = []
        for seed in self.control.once:
            rows = self._lines(self.ladder.folder(ORIGINAL, seed))
            # before what goes wrong has made them large
            norms += [r["grad_norm"] for r in rows[: max(3, len(rows) // 10)] if r.get("grad_norm")]
        return statistics.median(norms) if norms else None

    def _figures(self, order: Sequence[Trial]) -> list[Figure]:
        """The loss of the run as it is and of the first remedies, on its first seed in trouble."""
        if not self.control.once or not order:
            return []
        told = [seed for seed, why in self.control.troubles.items() if why]
        main = (told or list(self.control.once))[0]
        shown = {"as it is": self.control.once[main]}
        shown |= {one.remedy.change: one.runs[main] for one in order[:5] if main in one.runs}
        series = tuple(
            Series(label, tuple(one.losses), tuple(one.losses.values()))
            for label, one in shown.items()
        )
        said = f"Seed {main}; a run ends where the rule calls it failed."
        return [Figure("Loss", "step", "loss", series, said, self.command, y_log=True)]


def _group(config: RunConfig, source: Path | None, start: int) -> dict[str, Any]:
    """Options of the optimizer's first group."""
    if not isinstance(config.workload, UserModel):
        return {"betas": config.optimizer.betas, "eps": 1e-8}
    if source is not None and start:
        groups = load_checkpoint(source / "checkpoints" / f"step-{start}").numbers.get("groups", [])
        return dict(groups[0]) if groups else {}
    with own_generators(torch.device(config.device)):
        parts = build_workload(config, "cpu").parts
    assert parts is not None
    return dict(parts.optimizer.param_groups[0])
