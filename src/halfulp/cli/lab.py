"""The commands of the training lab; `COMMANDS` in `halfulp.cli.entry` names them."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halfulp import __version__
from halfulp.cli.shell import (
    PROGRAM,
    check_files,
    going_on,
    progress_bar,
    say,
    tell,
    typed_command,
)
from halfulp.complaints import meant

if TYPE_CHECKING:
    from halfulp.isolate.rule import Rule
    from halfulp.training.config import RunConfig
    from halfulp.training.loop import Sink, TrainedRun


def train(
    preset: str = "",
    /,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    attention: tuple[str, ...] = (),
    steps: int | None = None,
    seed: int | None = None,
    data: str | None = None,
    device: str | None = None,
    set: tuple[str, ...] = (),
    batches: Path | None = None,
    parallel: Literal["none", "ddp", "fsdp"] = "none",
    tensorboard: bool = False,
    wandb: str | None = None,
    trust: bool = False,
    workload: str | None = None,
    json: Path | None = None,
) -> int:
    """Train a model into a run folder: halfulp train minutes --out DIR, or halfulp train my.py:make
    --out DIR; go on with one: halfulp train --resume DIR

    Ctrl-C lets the step end and saves it. The same command writes the same losses and weights, bit
    for bit, and so does a run that was interrupted or killed and resumed. Exit code 1: the loss is
    no finite number any more.

    Args:
        preset: seconds, minutes, capture, pictures or gpt2 (`halfulp ls presets` says what each is
            and takes); or file.py:function, which makes a model of your own
            (docs/your_model.md).
        out: New folder for the run.
        resume: Folder of a run to go on with, from its last checkpoint; its own configuration
            holds.
        attention: Who computes attention: torch:flash, torch:math, torch:fp32, halfulp, a recipe,
            file.py:function, or another name of `halfulp ls targets`. Given again with a place,
            such as "layer 1 head 2,5: torch:math", it holds there alone.
        steps: Steps to train.
        seed: Of weights, data and their order.
        data: synthetic, english, or a token file that `halfulp tokens` wrote.
        device: Where to train, such as cpu or cuda.
        set: Any other field as field=value, such as optimizer.learning_rate=3e-4 or
            workload.layers=2. May be given again; batch counts sequences, measure_every and
            checkpoint_every count steps.
        batches: Folder of another run whose recorded order of samples is replayed.
        parallel: Share the work of several processes that torchrun started: ddp copies the model,
            fsdp shards it.
        tensorboard: Write what is measured for TensorBoard too, to DIR/tensorboard.
        wandb: Send it to this project of Weights & Biases too.
        trust: Run the code that the resumed folder names as its model or attention.
        workload: The file.py:function that makes the model of the resumed run, named by you.
        json: File to write what became of the run to; - prints it as JSON instead of text.
    """
    check_files(json)
    asked: dict[str, Any] = {"preset": preset, "out": out, "attention": attention, "steps": steps}
    asked |= {"seed": seed, "data": data, "device": device, "set": set, "batches": batches}
    if resume is None:
        config, folder = _configured(asked, workload)
    else:
        config, folder = _recorded(resume, asked, trust, workload)
    leads = os.environ.get("RANK", "0") == "0"  # torchrun's; one process speaks for all
    sinks = _sinks(config, folder, tensorboard, wandb) if leads else []
    options: dict[str, Any] = {"resume": resume is not None, "parallel": parallel, "sinks": sinks}
    try:
        run = _train(config, folder, batches, options)
    except (OSError, MemoryError, RuntimeError) as error:
        if (folder / "run.json").exists():
            error.add_note(f"; what was saved lies there: {_go_on(config, folder)}")
        raise
    if leads:
        _tell(run, folder, json)
    return {"failed": 1, "interrupted": 130}.get(run.status, 0)


def tokens(
    folder: Path,
    file: Path,
    /,
    *,
    tokenizer: Literal["bytes", "gpt2"] = "bytes",
    json: Path | None = None,
) -> int:
    """Make a token file of all text below a folder, to train on: halfulp tokens DIR corpus.npy
    --tokenizer gpt2

    Args:
        folder: Text files, UTF-8, in any subfolders; or one such file.
        file: Token file to write, a name that ends in .npy; FILE.json beside it says what it holds.
        tokenizer: bytes (256 tokens), or gpt2 (50,257 tokens; needs the extra `tokens`, no
            network).
        json: File to write what the file holds to; - prints it as JSON instead of text.
    """
    from halfulp.training.tokens import read_tokens, write_tokens

    check_files(json, file=file)
    _, about = read_tokens(write_tokens(folder, file, tokenizer))
    left_out = about["left_out"]
    said = f"{about['tokens']:,} tokens of {about['documents']:,} documents lie in {file}"
    if left_out:
        said += f"; {left_out} files that are no text were left out"
    tell(about, json, lambda: say(said))
    return 0


def compare(
    runs: tuple[Path, ...],
    /,
    *,
    baseline: Path | None = None,
    html: Path | None = None,
    trust: bool = False,
    json: Path | None = None,
) -> int:
    """Compare the weights of twin runs over all checkpoints in common: halfulp compare RUN RUN

    The largest difference and the Wasserstein distance of the weights, and their growth a step.
    Runs that differ from the baseline in their seeds alone are baselines for the runs that share
    those seeds: three of each give intervals.

    Args:
        runs: Folders of `halfulp train`, kept with checkpoints (--set checkpoint_every=N --set
            keep=none); the first is the baseline, unless another is named.
        baseline: Folder that the runs are compared with.
        html: File to write a page to, with pictures that text-to-image runs draw.
        trust: Draw them with the code that a folder names as its attention, instead of in fp32.
        json: File to write every figure to; - prints them instead of the tables.
    """
    from halfulp.experiments.compare import compare_runs
    from halfulp.experiments.drawing import sheets_of
    from halfulp.report.compare_page import compare_page
    from halfulp.report.terminal import print_tables

    check_files(json, html=html)
    with progress_bar("compare") as progress:
        plain = compare_runs(runs, baseline, command=typed_command(), progress=progress).as_dict()

    def page() -> str:
        pictures = sheets_of([*runs] if baseline is None else [baseline, *runs], trust=trust)
        return compare_page(plain, pictures)

    tell(plain, json, lambda: print_tables(plain["tables"]), html, page)
    return 0


def isolate(
    run: Path,
    /,
    *,
    out: Path | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    from_step: int = 0,
    budget_seconds: float | None = None,
    budget_steps: int | None = None,
    workers: int = 2,
    backend: str | None = None,
    loss_factor: float | None = None,
    patience: int | None = None,
    html: Path | None = None,
    trust: bool = False,
    workload: str | None = None,
    json: Path | None = None,
) -> int:
    """Find what makes a run fail, by training it again with one thing changed at a time: halfulp
    isolate RUN

    Layers, heads, operations and mantissa bits, on several seeds; the verdict says how sure it is
    and what saves the run. An isolation that was interrupted goes on with the same command. Exit
    code 0: a cause was found; 1: none was, or the run does not fail.

    Args:
        run: Folder of `halfulp train`, a preset (`halfulp ls presets`), file.py:function, which
            makes a model of your own, or with --workload a snapshot of `halfulp.watch` or a folder
            of it, whose last snapshot is taken.
        out: Folder for the runs it makes, isolation.json and report.html; by default the run's name
            with -isolated.
        seeds: How many seeds, the run's own first; 3, or 1 from a checkpoint.
        steps: Last step of every run, by default the run's own; of a snapshot, steps from there.
        from_step: Start every run from this checkpoint of the run instead of from the beginning.
        budget_seconds: Stop after so many seconds and say what was not tested.
        budget_steps: Train at most so many steps in all.
        workers: Processes, one thread each.
        backend: Of joblib: loky, threading, dask:ADDRESS or ray:ADDRESS; other machines need the
            same folders.
        loss_factor: A run has failed above so many times its best loss; 3 for the one-layer task,
            else 1.2.
        patience: Steps over which losses are medians; by default a tenth of the run.
        html: File to write the page to instead.
        trust: Run the code that the folder names as its model or attention.
        workload: The file.py:function that makes the model of the run, named by you.
        json: File to write what was found to; - prints it instead of the tables.
    """
    from halfulp.isolate.isolation import isolate as isolated

    check_files(json, html=html)
    folder = Path(f"{run.name.partition(':')[0]}-isolated") if out is None else out
    run, steps, from_step = _begun(run, folder, workload, steps, from_step)
    chosen, first, rule = _isolated_run(run, loss_factor, patience)
    chosen_seeds = None if seeds is None else tuple(range(first, first + seeds))
    options: dict[str, Any] = {"seeds": chosen_seeds, "steps": steps, "from_step": from_step}
    options |= {"budget_seconds": budget_seconds, "budget_steps": budget_steps}
    options |= {"workers": workers, "backend": backend, "command": typed_command()}
    options |= {"trust": trust, "workload": workload}
    with progress_bar("isolate") as progress, going_on():
        found = isolated(chosen, out=folder, rule=rule, progress=progress, **options)
    return tell_trial(found, json, folder / "report.html" if html is None else html)


def tell_trial(found: Any, json: Path | None, page: Path) -> int:
    """Tell of an isolation or a prescription, write its page, and return the exit code."""
    from halfulp.report.terminal import console
    from halfulp.report.trial_page import print_trial, trial_page

    plain = found.as_dict()

    def show() -> None:
        print_trial(plain, console())
        say(f"The page lies in {page}")

    tell(plain, json, show, page, lambda: trial_page(plain, meta=f"halfulp {__version__}"))
    return int(found.exit_code)


def _begun(
    run: Path, folder: Path, workload: str | None, steps: int | None, from_step: int
) -> tuple[Path, int | None, int]:
    """A snapshot, or the last of a watched training, as a run folder beside the isolation's, and
    its step; anything else as it is.
    """
    from halfulp.prescribe.prescribing import snapshot_of

    snapshot = snapshot_of(run)
    if snapshot is None:
        return run, steps, from_step
    from halfulp.training.from_snapshot import begun

    start, done = begun(snapshot, folder, workload, steps)
    return start, None, done


def named_run(run: Path) -> Path | RunConfig:
    """Return a folder as it is, and a preset or a function of the user's as the run that it names.

    Raises:
        ValueError: there is none of that name.
    """
    from halfulp.training.presets import PRESETS
    from halfulp.training.user_model import user_run

    if run.exists():
        return run
    if ":" in str(run):
        return user_run(str(run))
    if str(run) in PRESETS:
        return PRESETS[str(run)]()
    raise ValueError(
        f"run={str(run)!r}: there is no such folder; accepted are one of halfulp train, a snapshot"
        f" of halfulp.watch, file.py:function, or a preset, {', '.join(PRESETS)}"
    )


def _isolated_run(
    run: Path, loss_factor: float | None, patience: int | None
) -> tuple[Path | RunConfig, int, Rule]:
    """The recorded run or preset, its seed, and the rule with what was asked for instead."""
    from halfulp.isolate.rule import rule_for
    from halfulp.training.run_json import read_config

    chosen = named_run(run)
    config = read_config(chosen) if isinstance(chosen, Path) else chosen
    given = {"loss_factor": loss_factor, "patience": patience}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return chosen, config.seed, replace(rule_for(config.workload), **changes)


def _configured(asked: dict[str, Any], workload: str | None) -> tuple[RunConfig, Path]:
    """The preset or the user's model with what was asked for instead, and where the run goes."""
    from halfulp.runs.folder import check_folder
    from halfulp.training.attention import AttentionPlan
    from halfulp.training.presets import PRESETS
    from halfulp.training.settings import settable, with_settings

    preset, attention, data = asked["preset"], asked["attention"], asked["data"]
    if workload is not None:
        raise ValueError(
            f"workload={workload!r}: accepted with --resume; a new run is halfulp train {workload}"
        )
    own = ":" in preset
    if preset not in PRESETS and not own:
        named = f"preset={preset!r}" if preset else "preset is missing"
        raise ValueError(
            f"{named}: accepted are {', '.join(PRESETS)}, file.py:function for a model of your own,"
            f" or --resume DIR alone{meant(preset, PRESETS)}"
        )
    if asked["out"] is None:
        raise ValueError(
            "out is missing; accepted is a new folder for the run (--out), or --resume DIR"
        )
    check_folder("out", asked["out"])
    config = _own_model(asked) if own else PRESETS[preset]()
    if attention:
        somewhere = attention[0].lstrip().startswith(("layer", "head"))
        plan = config.attention.with_(*attention) if somewhere else AttentionPlan.of(*attention)
        config = replace(config, attention=plan)
    if data is not None and "workload.data" not in settable(config):
        raise ValueError(f"data={data!r}: accepted with another preset; {preset} makes its own")
    given = {
        "steps": asked["steps"],
        "seed": asked["seed"],
        "workload.data": data,
        "device": asked["device"],
    }
    texts = [f"{name}={value}" for name, value in given.items() if value is not None]
    return with_settings(config, [*texts, *asked["set"]]), asked["out"]


def _own_model(asked: dict[str, Any]) -> RunConfig:
    from halfulp.training.user_model import user_run

    seed = 0 if asked["seed"] is None else asked["seed"]
    return user_run(asked["preset"], seed=seed, device=asked["device"] or "cpu")


def _recorded(
    folder: Path, asked: dict[str, Any], trust: bool, workload: str | None
) -> tuple[RunConfig, Path]:
    """The configuration of a run that goes on, which nothing may change."""
    from halfulp.training.run_json import read_config
    from halfulp.training.trust import trusted

    _refuse_watched("resume", folder)
    for name, value in asked.items():
        if value not in (None, "", ()):
            shown = " ".join(value) if isinstance(value, tuple) else str(value)
            raise ValueError(f"{name}={shown!r}: accepted without --resume, whose run has its own")
    config = read_config(folder)
    return trusted(config, folder, trust, workload), folder


def _refuse_watched(argument: str, folder: Path) -> None:
    from halfulp.runs.folder import read_json

    record = read_json(folder / "run.json")
    if isinstance(record, dict) and record.get("kind") == "watch":
        raise ValueError(
            f"{argument}={str(folder)!r} is a folder of halfulp.watch, which records another"
            " program's training and cannot repeat it; accepted is a folder of halfulp train"
        )


def _train(
    config: RunConfig, folder: Path, batches: Path | None, options: dict[str, Any]
) -> TrainedRun:
    """On one thread of a CPU: the same bits on every machine, and small models are faster so."""
    from halfulp.runs.threads import one_thread
    from halfulp.training.journal import read_order
    from halfulp.training.loop import train as trained

    order = None if batches is None else read_order(batches)
    # a sum that is split over threads has other bits, and a run shall be repeated bit for bit
    with one_thread() if config.device == "cpu" else nullcontext():
        return trained(config, folder, batches=order, command=typed_command(), **options)


def _go_on(config: RunConfig, folder: Path) -> str:
    """The command that goes on with a run."""
    from halfulp.training.trust import named_code

    trust = ["--trust"] if named_code(config) else []
    return shlex.join([PROGRAM, "train", "--resume", str(folder), *trust])


def _sinks(config: RunConfig, folder: Path, tensorboard: bool, project: str | None) -> list[Sink]:
    from halfulp.report.terminal import console
    from halfulp.runs.writers import TensorBoardSink, WandbSink
    from halfulp.training.run_json import config_as_dict
    from halfulp.training.sinks import ConsoleSink

    sinks: list[Sink] = [ConsoleSink(config.steps, config.preset or "train", console(stderr=True))]
    if tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", config_as_dict(config)))
    if project is not None:
        sinks.append(WandbSink(project, config_as_dict(config), folder))
    return sinks


def _tell(run: TrainedRun, folder: Path, json: Path | None) -> None:
    """How it ended, where it lies, what alarms, and how to go on."""
    from halfulp.watch.alarms import alarms

    last = run.metrics[-1] if run.metrics else {"step": 0, "loss": None}
    whole = {
        "folder": str(folder),
        "status": run.status,
        "reason": run.reason,
        "steps": run.config.steps,
    }

    def show() -> None:
        loss = "none yet" if last["loss"] is None else f"{last['loss']:.6g}"
        why = f" ({run.reason})" if run.reason else ""
        say(
            f"{run.config.preset or 'train'}, {run.config.attention}, seed {run.config.seed}:"
            f" {run.status}{why}"
        )
        say(f"loss {loss} at step {last['step']} of {run.config.steps}; the run lies in {folder}")
        for alarm in alarms(run.measures):
            say(f"alarm: {alarm}")
        if run.status == "interrupted":
            say(f"go on with: {_go_on(run.config, folder)}")

    tell(whole | last, json, show)
