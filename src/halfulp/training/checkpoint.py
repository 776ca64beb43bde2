"""Checkpoints: weights and optimizer as safetensors, the rest as JSON, in a folder that is whole or
not there.

A folder is written under a hidden name, synced and renamed. One that is torn all the same (a full
disk, a copy that was cut off) is skipped with a warning, and the one before it is taken.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfulp.runs.folder import json_text, sync_file, sync_folder

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """The state after a step: everything that the rest of the run depends on."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # "parameter/exp_avg" and so on
    random: dict[str, Tensor]  # states of torch's generators, by device
    monitor: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)  # of the fp16 loss


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, whole where they are sharded; tied ones
    once.
    """
    named = dict(model.named_parameters()) | {
        name: x for name, x in model.state_dict().items() if name in dict(model.named_buffers())
    }
    return {name: _whole(x) for name, x in named.items()}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by "parameter/entry", whole where it is sharded."""
    return {
        f"{name}/{entry}": _whole(torch.as_tensor(x))
        for name, parameter in model.named_parameters()
        for entry, x in optimizer.state.get(parameter, {}).items()
    }


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Put a checkpoint's weights and, where given, the optimizer's state into place.

    Raises:
        ValueError: the model has other parameters or shapes than the checkpoint.
    """
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, x in model_tensors(model).items():
        found = checkpoint.model.get(name)
        if found is None or found.shape != x.shape:
            there = "nothing" if found is None else f"shape {tuple(found.shape)}"
            raise ValueError(
                f"checkpoint: {name} has {there}; accepted is the model's {tuple(x.shape)}"
            )
    with torch.no_grad():
        for name, x in checkpoint.model.items():
            if name not in targets:
                raise ValueError(
                    f"checkpoint: {name} is not of this model; accepted are {', '.join(targets)}"
                )
            targets[name].copy_(_like(x, targets[name]))
    if optimizer is not None:
        _restore_optimizer(checkpoint, model, optimizer)


def _restore_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, x in checkpoint.optimizer.items():
        name, _, entry = key.rpartition("/")
        # the step count is a number on the CPU, whatever the parameter's device
        value = x.clone() if x.ndim == 0 else _like(x, parameters[name]).clone()
        optimizer.state[parameters[name]][entry] = value


def random_tensors() -> dict[str, Tensor]:
    """Return the states of torch's generators."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def restore_random(states: dict[str, Tensor]) -> None:
    """Set torch's generators; devices that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    for device, state in states.items():
        if (
            device != "cpu"
            and torch.cuda.is_available()
            and int(device[5:]) < torch.cuda.device_count()
        ):
            torch.cuda.set_rng_state(state, device)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-N`, whole or not at all; one of that step that is there already is
    replaced.
    """
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    final, partial = folder / f"step-{checkpoint.step}", folder / f".step-{checkpoint.step}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    state = {
        f"{group}|{name}": x.contiguous()
        for group in ("optimizer", "random", "monitor")
        for name, x in getattr(checkpoint, group).items()
    }
    save_file(
        {name: x.contiguous() for name, x in checkpoint.model.items()},
        partial / "model.safetensors",
    )
    save_file(state, partial / "state.safetensors")
    (partial / "state.json").write_text(
        json_text({"step": checkpoint.step, "scaler": checkpoint.scaler}) + "\n"
    )
    for file in partial.iterdir():
        sync_file(file)
    sync_folder(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    sync_folder(folder)
    return final


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a `step-N` folder.

    Raises:
        ValueError: a file is missing or torn; one line says which.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        plain = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        model, state = (
            load_file(folder / "model.safetensors"),
            load_file(folder / "state.safetensors"),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"checkpoint={str(folder)!r}: {' '.join(str(error).split())}; accepted is a whole one"
        ) from None
    groups: dict[str, dict[str, Tensor]] = {"optimizer": {}, "random": {}, "monitor": {}}
    for key, x in state.items():
        group, _, name = key.partition("|")
        groups[group][name] = x
    return Checkpoint(plain["step"], model, **groups, scaler=plain["scaler"])


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending; whether they are whole is not
    looked at.
    """
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    )


def checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Yield the whole checkpoints of a folder from the last to the first; warn of the others."""
    for step in reversed(checkpoint_steps(folder)):
        try:
            yield load_checkpoint(folder / f"step-{step}")
        except ValueError as error:
            warnings.warn(f"skipped: {error}", stacklevel=2)


def prune(folder: Path, keep: int | None) -> None:
    """Remove what was left half-written, and all but the last `keep` checkpoints (None: keep
    all).
    """
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)
    if keep is not None:
        for step in checkpoint_steps(folder)[: -keep - 1]:
            shutil.rmtree(folder / f"step-{step}")


def _whole(x: Tensor) -> Tensor:
    """A detached copy of a tensor, gathered from all processes if it is sharded."""
    full = getattr(x.detach(), "full_tensor", None)
    return x.detach().clone() if full is None else full()


def _like(x: Tensor, like: Tensor) -> Tensor:
    """The whole tensor on `like`'s device, sharded as it is."""
    if not hasattr(like, "full_tensor"):
        return x.to(like.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
