"""`halfulp prescribe`: what to do about a run that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfulp.cli.lab import named_run, tell_trial
from halfulp.cli.shell import check_files, going_on, progress_bar, typed_command


def prescribe(
    run: Path,
    /,
    *,
    workload: str | None = None,
    steps: int | None = None,
    seeds: int = 3,
    from_step: int | None = None,
    remedy: tuple[str, ...] = (),
    out: Path | None = None,
    set: tuple[str, ...] = (),
    budget_seconds: float | None = None,
    budget_steps: int | None = None,
    workers: int = 2,
    backend: str | None = None,
    html: Path | None = None,
    trust: bool = False,
    json: Path | None = None,
) -> int:
    """Try small changes to a run that fails, from where it stood, and rank them: halfulp prescribe
    RUN

    Another attention, one kind of operation or one module in fp32, the optimizer's numbers: each
    beside the run as it is, on the same batches, with the line that applies it. One that was
    interrupted goes on with the same command. Exit code 0: something helps; 1: nothing tried does,
    or there is nothing to cure.

    Args:
        run: Folder of `halfulp train`, a snapshot of `halfulp.watch` or the folder of a watched
            training with one, both with --workload, a preset, or file.py:function, which makes a
            model of your own.
        workload: The file.py:function that makes the model of the run, named by you.
        steps: Of every run, from where it begins; by default 100 from a snapshot, twice the way to
            the failure from a checkpoint, the whole run from the beginning.
        seeds: How many, at least 2. From a checkpoint or snapshot a seed is another order of the
            batches and random numbers that follow; from the beginning also other weights.
        from_step: Checkpoint of the run to begin at, 0 for the beginning; by default the last at
            which it was still well.
        remedy: Name of a remedy to try, and no other; may be given again.
        out: Folder for the runs it makes, prescription.json and report.html; by default the run's
            name with -prescribed.
        set: Field of the run's configuration as field=value that holds in every run, such as
            optimizer.clip=1.0 for a watched training that clips. May be given again.
        budget_seconds: Stop after so many seconds and say what was not tried.
        budget_steps: Train at most so many steps in all.
        workers: Processes, one thread each.
        backend: Of joblib: loky, threading, dask:ADDRESS or ray:ADDRESS; other machines need the
            same folders.
        html: File to write the page to instead.
        trust: Run the code that the folder names as its model or attention.
        json: File to write what was found to; - prints it instead of the tables.
    """
    from halfulp.prescribe.prescribing import prescribe as prescribed

    check_files(json, html=html)
    folder = Path(f"{run.name.partition(':')[0]}-prescribed") if out is None else out
    asked: dict[str, Any] = {"workload": workload, "trust": trust, "steps": steps, "seeds": seeds}
    asked |= {"from_step": from_step, "only": remedy, "settings": set, "workers": workers}
    asked |= {"budget_seconds": budget_seconds, "budget_steps": budget_steps, "backend": backend}
    asked |= {"out": folder, "command": typed_command()}
    with progress_bar("prescribe") as progress, going_on():
        found = prescribed(named_run(run), progress=progress, **asked)
    return tell_trial(found, json, folder / "report.html" if html is None else html)
