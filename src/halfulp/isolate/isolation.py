"""`isolate`: which attention, where, which operation and how many bits make a run fail, and what
saves it.

The questions come in the order in which their answers narrow the next: is it attention at all, is
it what the kernel's emulation does too, is it the tiling; then which layers, which operation, which
heads, how many bits. Every answer is a run that was made, judged by a stated rule; the last step
turns them into a sentence, and into a number for how sure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from halfulp.isolate.climb import BudgetSpentError, Ladder, Settings
from halfulp.isolate.conclusion import conclude
from halfulp.isolate.questions import Investigation
from halfulp.isolate.result import Isolation
from halfulp.isolate.rule import Rule, rule_for
from halfulp.isolate.sites import layout_of
from halfulp.isolate.substitutions import suspects
from halfulp.isolate.user_conclusion import conclude_user
from halfulp.isolate.user_questions import HEADS, KINDS, MODULES, STEP, UserInvestigation
from halfulp.runs.folder import check_folder, write_json
from halfulp.runs.lock import LOCK, Lock
from halfulp.runs.record import NAMED, closed, new_record, read_record
from halfulp.runs.results import Progress
from halfulp.training.checkpoint import checkpoint_steps
from halfulp.training.config import RunConfig, UserModel
from halfulp.training.run_json import config_as_dict, read_config
from halfulp.training.trust import trusted
from halfulp.training.user_model import load_named, source_digest

__all__ = ["isolate"]

Phases: TypeAlias = tuple[tuple[str, Callable[[Any], None], float], ...]
PHASES: Phases = (
    ("(a) attention", Investigation.attention, 0.15),
    ("emulation", Investigation.emulation, 0.2),
    ("(b) tiling", Investigation.tiling, 0.25),
    ("(c) layers", Investigation.layers, 0.35),
    ("(d) operations", Investigation.operations, 0.8),
    ("(e) heads", Investigation.heads, 0.9),
    ("(f) bits", Investigation.bits, 1.0),
)
"""The questions in order, and how much is usually done after each."""
USER_PHASES: Phases = (
    ("(a) arithmetic", UserInvestigation.everything, 0.2),
    (STEP, UserInvestigation.step, 0.3),
    (MODULES, UserInvestigation.modules, 0.6),
    (KINDS, UserInvestigation.kinds, 0.8),
    (HEADS, UserInvestigation.user_heads, 1.0),
)
"""Those of a user's model."""


def isolate(
    run: Path | RunConfig,
    *,
    out: Path,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
    from_step: int = 0,
    budget_seconds: float | None = None,
    budget_steps: int | None = None,
    workers: int = 2,
    backend: str | None = None,
    rule: Rule | None = None,
    recorded: Sequence[Path] = (),
    progress: Progress | None = None,
    command: str = "halfulp isolate",
    trust: bool = False,
    workload: str | None = None,
) -> Isolation:
    """Find what makes a run fail by training it again with one thing changed at a time.

    Args:
        run: the folder of a recorded run, whose order of samples is replayed, or a configuration.
        out: the folder for all runs, isolation.json and run.json. One that holds an unfinished
            isolation with the same settings is continued.
        seeds: of weights and data; by default the run's own and the two after it.
        steps: the last step of every run; by default that of the run.
        from_step: start every run from the recorded run's checkpoint of that step instead of from
            the beginning; the seed is then the run's own.
        budget_seconds: of this call; what is not tested then is said.
        budget_steps: of training, over all runs.
        workers: processes, one thread each.
        backend: of joblib, see `halfulp.runs.parallel.run_jobs`.
        rule: what counts as failure; by default `rule_for` the workload.
        recorded: folders of runs that are there already and differ from `run`, a configuration, in
            seed and attention alone; where one is a run that is asked for, it is not made again.
        progress: called with the fraction done and the run at work.
        command: what repeats this, for the record.
        trust: run the code that the folder of a recorded run names ("file.py:function").
        workload: the caller's own word for the function that makes the model of a recorded run.

    Raises:
        ValueError: an argument is not accepted, or the folder holds something else.
        WorkerKilledError: a worker process was killed; the same call goes on.
    """
    config, source = _begin(run, from_step, trust, workload)
    settings = Settings(
        config,
        _seeds(config, seeds, from_step),
        horizon=config.steps if steps is None else steps,
        rule=rule or rule_for(config.workload),
        out=out,
        source=source,
        start=from_step,
        workers=workers,
        backend=backend,
        budget_seconds=budget_seconds,
        budget_steps=budget_steps,
        recorded=tuple(recorded),
    )
    _check(settings)
    settings = looked_at(settings)
    _check_suspects(settings)
    with working(settings, "isolate", command, seeds=list(settings.seeds)) as record:
        return _investigated(Ladder(settings, progress), record, command)


def _investigated(ladder: Ladder, record: dict[str, Any], command: str) -> Isolation:
    """Ask every question, and write down what is known after each."""
    found, phases, ended = _questions(ladder)
    # what stands in the folder if anything ends this before the last question, Ctrl-C too
    status = "interrupted"
    try:
        for what, phase, share in phases:
            found.begin(what, share)
            # the first question finds a seed that fails where attention is to blame; without one
            # there is nothing that the others could ask
            if found.main is not None or phase is phases[0][1]:
                _ask(found, what, phase)
            _write(ladder.settings, record, ended(found, "running", command))
        status = "done"
    finally:
        result = ended(found, status, command)
        _write(ladder.settings, record, result)
    return result


def _questions(ladder: Ladder) -> tuple[Any, Phases, Callable[[Any, str, str], Isolation]]:
    """Who asks, what in which order, and who says what was found."""
    if ladder.settings.layout is None:
        return Investigation(ladder), PHASES, conclude
    return UserInvestigation(ladder), USER_PHASES, conclude_user


def _ask(found: Investigation, what: str, phase: Callable[[Any], None]) -> None:
    try:
        phase(found)
    except BudgetSpentError:
        found.not_tested.append((what, found.budget_text()))


def _begin(
    run: Path | RunConfig, from_step: int, trust: bool, workload: str | None
) -> tuple[RunConfig, Path | None]:
    """The configuration of a run and, of a recorded one, the folder, which has that checkpoint."""
    there = checkpoint_steps(run / "checkpoints") if isinstance(run, Path) else []
    if from_step and from_step not in there:
        raise ValueError(f"from_step={from_step}: accepted are 0 and the run's checkpoints {there}")
    if isinstance(run, RunConfig):
        return run, None
    return trusted(read_config(run), run, trust, workload), run


def _seeds(config: RunConfig, seeds: Sequence[int] | None, from_step: int) -> tuple[int, ...]:
    """Those asked for, or the run's own and, from the beginning, the two after it."""
    if seeds is None:
        seeds = (config.seed,) if from_step else tuple(range(config.seed, config.seed + 3))
    if not seeds or len(set(seeds)) < len(seeds) or (from_step and tuple(seeds) != (config.seed,)):
        accepted = (
            f"the run's own {config.seed} with from_step"
            if from_step
            else "different ones, at least one"
        )
        raise ValueError(f"seeds={list(seeds)}: accepted are {accepted}")
    return tuple(seeds)


def _check(settings: Settings) -> None:
    """Raise ValueError for an end or a budget that cannot be."""
    start, horizon, last = settings.start, settings.horizon, settings.config.steps
    if not start < horizon <= last:
        raise ValueError(f"steps={horizon}: accepted are {start + 1} to the run's {last}")
    for name in ("budget_seconds", "budget_steps"):
        budget = getattr(settings, name)
        if budget is not None and not budget > 0:
            raise ValueError(f"{name}={budget}: accepted is a number above 0")
    if settings.workers < 1:
        raise ValueError(f"workers={settings.workers}: accepted is an integer of at least 1")


def _check_suspects(settings: Settings) -> None:
    """Raise ValueError where there is nothing that could be put into fp32."""
    if settings.layout is None and not suspects(Ladder(settings).cells):
        raise ValueError(
            f"attention={str(settings.config.attention)!r}: it is in fp32 everywhere; accepted"
            " is a run with another"
        )
    if settings.layout is not None and not settings.layout.sites:
        raise ValueError(
            "workload: every operation that is seen in it has operands of fp32 or more, outside of"
            " autocast; accepted is a run in which something is rounded more"
        )


def looked_at(settings: Settings) -> Settings:
    """The settings with what a user's model computes; one whose source was changed since the run
    was recorded is another, and none of its recorded runs is taken.
    """
    made = settings.config.workload
    if not isinstance(made, UserModel):
        return settings
    layout = layout_of(settings.config)
    now = source_digest(load_named(made.make)[1])
    if now == made.sha256:
        return replace(settings, layout=layout)
    config = replace(settings.config, workload=replace(made, sha256=now))
    return replace(settings, layout=layout, config=config, changed=True)


@contextmanager
def working(settings: Settings, kind: str, command: str, **more: Any) -> Iterator[dict[str, Any]]:
    """The folder claimed meanwhile, with the beginning of its run.json, which is the record."""
    lock = _claim(settings, kind)
    try:
        record = new_record(kind, identity(settings), command, **more)
        write_json(settings.out / "run.json", record)
        yield record
    finally:
        lock.release()


def _claim(settings: Settings, kind: str) -> Lock:
    """Make the folder, or see that what it holds of this kind goes by the same settings; nobody
    else writes it then.
    """
    out = settings.out
    check_folder("out", out)
    if out.exists() and {path.name for path in out.iterdir()} - {LOCK}:
        if not (out / "run.json").exists():
            raise ValueError(
                f"out={str(out)!r} holds other files; accepted is a new or empty folder"
            )
        record, wanted = read_record(out, kind), identity(settings)
        changes = [name for name in wanted if record["config"].get(name) != wanted[name]]
        if changes:
            raise ValueError(
                f"out={str(out)!r} holds {NAMED[kind]} with another {changes[0]}; accepted is"
                " a new folder"
            )
    out.mkdir(exist_ok=True)
    return Lock(out)


def identity(settings: Settings) -> dict[str, Any]:
    """What must be the same for a folder to be gone on with, as JSON reads it."""
    # neither seeds nor budget nor workers: a later call may ask for more of them and go on
    plain = {
        "config": config_as_dict(settings.config),
        "rule": {name: getattr(settings.rule, name) for name in Rule.__dataclass_fields__},
        "horizon": settings.horizon,
        "start": settings.start,
        "source": None if settings.source is None else str(settings.source.resolve()),
    }
    loaded: dict[str, Any] = json.loads(json.dumps(plain))
    return loaded


def _write(settings: Settings, record: dict[str, Any], result: Isolation) -> None:
    write_json(settings.out / "isolation.json", result.as_dict())
    now = record if result.status == "running" else closed(record, result.status)
    write_json(settings.out / "run.json", now)
