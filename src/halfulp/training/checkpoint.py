"""Checkpoints: weights and optimizer as safetensors, the rest as JSON, in a folder that is whole or
not there.

A folder is written under a temporary name, synced and renamed, with the SHA-256 of every file in
it. One that is torn or altered all the same (a copy that was cut off, a bad disk) is skipped with a
warning, and the one before it is taken.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfulp.runs.folder import remove
from halfulp.runs.sealed import TORN, load_sealed, load_tensors, save_sealed

# no leading zeros, so that a step has one name
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_MODEL, _STATE, _PLAIN = "model.safetensors", "state.safetensors", "state.json"
_ENTRIES = {"step", "exp_avg", "exp_avg_sq"}  # of AdamW


@dataclass(frozen=True)
class Checkpoint:
    """The state after a step: everything that the rest of the run depends on."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # "parameter/exp_avg" and so on
    monitor: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)  # of the fp16 loss
    # of a user's optimizer: "groups", its options, and "state", numbers by "parameter/entry"
    numbers: dict[str, Any] = field(default_factory=dict)
    run: str = ""  # the seal of the run.json that it belongs to
    lines: str = ""  # SHA-256 of the lines of metrics up to its step


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, whole where they are sharded; tied ones
    once.
    """
    # named_* give a tied tensor once, state_dict under each of its names; buffers that are
    # not persistent are in the former alone
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
        if isinstance(x, Tensor)
    }


def optimizer_numbers(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer holds besides tensors, as JSON has it: the options of its groups,
    and the numbers in its state by "parameter/entry".

    Raises:
        ValueError: there is something else, which could not be put back.
    """
    state = {
        f"{name}/{entry}": x
        for name, parameter in model.named_parameters()
        for entry, x in optimizer.state.get(parameter, {}).items()
        if not isinstance(x, Tensor)
    }
    for name, x in state.items():
        if not isinstance(x, int | float | str | None):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: {name} is a {type(x).__name__}; accepted"
                " are tensors and numbers, which a checkpoint can hold"
            )
    groups = [
        {
            name: float(x) if isinstance(x, Tensor) else x
            for name, x in group.items()
            if isinstance(x, int | float | str | tuple | None)
            or (isinstance(x, Tensor) and x.ndim == 0)
        }
        for group in optimizer.param_groups
    ]
    return {"groups": groups, "state": state}


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Put a checkpoint's weights and, where given, the optimizer's state into place.

    Raises:
        ValueError: the model has other parameters, shapes or dtypes than the checkpoint; nothing
            has been changed then.
    """
    named = dict(model.named_parameters())
    targets = named | dict(model.named_buffers())
    whole = model_tensors(model)
    for name in {**whole, **checkpoint.model}:
        if name not in targets:
            raise ValueError(
                f"checkpoint: {name} is not of this model; accepted are {', '.join(targets)}"
            )
        _check_alike(name, checkpoint.model.get(name), whole.get(name, targets[name]))
    if optimizer is not None:
        _check_optimizer(checkpoint, named, whole, optimizer)
    with torch.no_grad():
        for name, x in checkpoint.model.items():
            targets[name].copy_(_like(x, targets[name]))
    if optimizer is not None:
        _restore_optimizer(checkpoint, named, optimizer)


def _check_alike(name: str, found: Tensor | None, x: Tensor) -> None:
    if found is None or found.shape != x.shape or found.dtype != x.dtype:
        there = "nothing" if found is None else f"shape {tuple(found.shape)} of {found.dtype}"
        raise ValueError(
            f"checkpoint: {name} has {there}; accepted is the model's {tuple(x.shape)} of {x.dtype}"
        )


def _check_optimizer(
    checkpoint: Checkpoint,
    named: dict[str, nn.Parameter],
    whole: dict[str, Tensor],
    optimizer: Optimizer,
) -> None:
    numbers = checkpoint.numbers
    theirs = bool(numbers)  # whose entries only it knows
    if theirs and len(numbers["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"checkpoint: its optimizer has {len(numbers['groups'])} groups; accepted are the"
            f" {len(optimizer.param_groups)} of this one"
        )
    entries: dict[str, set[str]] = {}
    for key, x in (checkpoint.optimizer | numbers.get("state", {})).items():
        name, _, entry = key.rpartition("/")
        if name not in named:
            raise ValueError(
                f"checkpoint: the optimizer's {key} is not of this model; accepted are parameters"
            )
        entries.setdefault(name, set()).add(entry)
        # a user's optimizer may have entries of other shapes, such as factored moments
        if entry != "step" and not theirs:
            _check_alike(key, x, whole[name])
    for name, found in () if theirs else entries.items():
        if found != _ENTRIES:
            raise ValueError(
                f"checkpoint: the optimizer has {sorted(found)} of {name}; accepted is"
                f" {sorted(_ENTRIES)}"
            )


def _restore_optimizer(
    checkpoint: Checkpoint, parameters: dict[str, nn.Parameter], optimizer: Optimizer
) -> None:
    # else a parameter of which the checkpoint has no state would keep its later one
    optimizer.state.clear()
    for key, x in checkpoint.optimizer.items():
        name, _, entry = key.rpartition("/")
        # the step count is a number on the CPU, whatever the parameter's device
        value = x.clone() if x.ndim == 0 else _placed(x, parameters[name]).clone()
        optimizer.state[parameters[name]][entry] = value
    for key, number in checkpoint.numbers.get("state", {}).items():
        name, _, entry = key.rpartition("/")
        optimizer.state[parameters[name]][entry] = number
    for group, options in zip(
        optimizer.param_groups, checkpoint.numbers.get("groups", ()), strict=False
    ):
        for name, option in options.items():
            # in place, since a scheduler or a captured graph may hold the same tensor
            if isinstance(group.get(name), Tensor):
                group[name].fill_(option)
            else:
                # JSON has no tuples, and betas is one
                group[name] = tuple(option) if isinstance(option, list) else option


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-N`, whole or not at all; one of that step that is there already is
    replaced.

    Raises:
        ValueError: the folder is a link, perhaps to another run's.
        OSError: it cannot be written; what was there is still there.
    """
    if folder.is_symlink():
        raise ValueError(f"checkpoints={str(folder)!r} is a link; accepted is a folder of the run")
    folder.mkdir(exist_ok=True)
    state = {
        f"{group}|{name}": x
        for group in ("optimizer", "monitor")
        for name, x in getattr(checkpoint, group).items()
    }
    plain = {
        "step": checkpoint.step,
        "scaler": checkpoint.scaler,
        "numbers": checkpoint.numbers,
        "run": checkpoint.run,
        "lines": checkpoint.lines,
    }
    files = {_MODEL: checkpoint.model, _STATE: state}
    return save_sealed(folder / f"step-{checkpoint.step}", _PLAIN, plain, files)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a `step-N` folder.

    Raises:
        ValueError: a file is missing, torn or altered, or is of another step; one line says which.
    """
    from safetensors import SafetensorError

    groups: dict[str, dict[str, Tensor]] = {"optimizer": {}, "monitor": {}}
    try:
        plain = _plain(folder)
        for key, x in load_tensors(folder, plain, _STATE).items():
            group, _, name = key.partition("|")
            groups[group][name] = x
        model = load_tensors(folder, plain, _MODEL)
    except (SafetensorError, *TORN) as error:
        raise _unreadable(folder, error) from None
    return Checkpoint(
        plain["step"],
        model,
        **groups,
        scaler=plain["scaler"],
        numbers=plain.get("numbers", {}),
        run=plain["run"],
        lines=plain["lines"],
    )


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read the model's tensors of a `step-N` folder, and nothing else of it; errors as
    `load_checkpoint`.
    """
    from safetensors import SafetensorError

    try:
        return load_tensors(folder, _plain(folder), _MODEL)
    except (SafetensorError, *TORN) as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: Exception) -> ValueError:
    said = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"checkpoint={str(folder)!r}: {said}; accepted is a whole one")


def _plain(folder: Path) -> dict[str, Any]:
    """What state.json says; raises ValueError or OSError where it is not as a run writes it."""
    plain = load_sealed(folder, _PLAIN)
    if type(plain["step"]) is not int or folder.name != f"step-{plain['step']}":
        raise ValueError(f"{_PLAIN} is of step {plain['step']}")
    owned = isinstance(plain["run"], str) and isinstance(plain["lines"], str)
    if not isinstance(plain["scaler"], dict) or not owned:
        raise ValueError(f"{_PLAIN} has the scaler {plain['scaler']!r}")
    return plain


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
    """Remove all but the last `keep` checkpoints besides the last (None: keep all)."""
    if keep is not None and not folder.is_symlink():
        for step in checkpoint_steps(folder)[: -keep - 1]:
            remove(folder / f"step-{step}")


def _whole(x: Tensor) -> Tensor:
    """A detached copy of a tensor, gathered from all processes if it is sharded."""
    # a copy, since the optimizer changes the tensor in place at the next step
    full = getattr(x.detach(), "full_tensor", None)
    return x.detach().clone() if full is None else full()


def _placed(x: Tensor, like: Tensor) -> Tensor:
    """A tensor of the optimizer's beside its parameter: sharded like it where it has its shape,
    and else, as a factored moment, whole.
    """
    return _like(x, like) if x.shape == like.shape else x.to(like.device)


def _like(x: Tensor, like: Tensor) -> Tensor:
    """The whole tensor on `like`'s device, sharded as it is."""
    if not hasattr(like, "full_tensor"):
        return x.to(like.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
