"""A snapshot of a watched training as the beginning of a run of the user's model, which can then be
gone on with, or taken apart from there.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from halfulp.runs.snapshot import Snapshot, read_snapshot
from halfulp.training.checkpoint import Checkpoint, checkpoint_steps, restore
from halfulp.training.determinism import own_generators
from halfulp.training.journal import Journal
from halfulp.training.run_json import read_config
from halfulp.training.user_model import user_run
from halfulp.training.workload import build_workload

STEPS = 100
"""From a snapshot on, unless asked for otherwise."""
_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}


def run_of_snapshot(folder: Path, workload: str, steps: int, out: Path) -> int:
    """Write a run folder whose only checkpoint is a snapshot's state, and return its step.

    The batches from there on are those of the user's function: `batch(n)` is the batch of step
    n + 1, as the watch counted them.

    Args:
        folder: of the snapshot.
        workload: the function that makes the model; imported and called.
        steps: to train from the snapshot on.
        out: a new folder.

    Raises:
        ValueError: the snapshot is torn, or of another model than the function makes.
    """
    found = read_snapshot(folder)
    if sharded := found.about.get("sharded"):
        raise ValueError(
            f"snapshot={str(folder)!r}: {len(sharded)} of its tensors are one process's parts;"
            " accepted is one of whole tensors"
        )
    # a checkpoint is the state after its step, a snapshot mostly that before its update
    done = found.step - 1 if found.about.get("before_update", True) else found.step
    device = "cpu" if "cuda" not in found.about.get("autocast", {}) else "cuda"
    precision = _AUTOCAST.get(found.about.get("autocast", {}).get(device, ""), "none")
    config = user_run(workload, device=device, steps=done + steps, autocast=precision)
    scaler = found.about.get("scaler", {}) if precision == "fp16" else {}
    state = Checkpoint(done, found.model, found.optimizer, {}, scaler, _numbers(found))
    if not found.optimizer:
        warnings.warn(
            f"{folder}: it holds no state of the optimizer, whose moments begin anew", stacklevel=2
        )
    with own_generators(torch.device(device)):
        made = build_workload(config, "cpu")
        assert made.parts is not None
        restore(state, made.model, made.parts.optimizer)
        order = made.order(config.steps, config.batch)
        journal = Journal.begin(out, config, order, made.source, None, done)
    journal.checkpoint(state, None)
    # a run that is not over, so that it can be gone on with
    journal.close("interrupted", f"a snapshot of step {found.step}: {found.reason}")
    return done


def begun(snapshot: Path, out: Path, workload: str | None, steps: int | None) -> tuple[Path, int]:
    """A snapshot as a run folder beside `out`, made once, and the step of its one checkpoint;
    arguments and errors as `run_of_snapshot`.
    """
    if workload is None:
        raise ValueError(
            f"run={str(snapshot)!r} is a snapshot; accepted with --workload file.py:function, which"
            " makes its model and the batches that follow"
        )
    start = out.with_name(f"{out.name}-start")
    if not start.exists():
        run_of_snapshot(snapshot, workload, STEPS if steps is None else steps, start)
    (done,) = checkpoint_steps(start / "checkpoints")
    begun_with = read_config(start).steps - done
    if steps not in (None, begun_with):
        raise ValueError(
            f"steps={steps}: {str(start)!r} was begun with {begun_with}; accepted is that, or"
            " another out"
        )
    return start, done


def _numbers(found: Snapshot) -> dict[str, Any]:
    """Options of the optimizer's groups, as a checkpoint has them."""
    plain = (int, float, str, list, type(None))
    groups = [
        {name: x for name, x in group.items() if name != "params" and isinstance(x, plain)}
        for group in found.about.get("param_groups", ())
    ]
    return {"groups": groups, "state": {}} if groups else {}
