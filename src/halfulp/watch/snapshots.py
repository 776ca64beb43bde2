"""Snapshots of a watched training: what a step needs to be made again, copied at once and written
in the background.

Nothing is held of a step that has ended. Whoever wants the batch of the step that went wrong has to
hold it until then: with snapshots on, references to the arguments of the model's passes and the
generators' states lie here from a step's first pass to its end.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfulp.interpose.standing import ITSELF, module_names
from halfulp.runs.folder import TEMPORARY, remove
from halfulp.runs.generators import generator_states
from halfulp.runs.machine import describe_versions
from halfulp.runs.record import now
from halfulp.runs.snapshot import Snapshot, write_snapshot
from halfulp.watch.foreign import Foreign

LOG = logging.getLogger("halfulp.watch")
FOLDER = "snapshots"
MOST_BYTES = 8 * 2**30
"""Of one snapshot; what does not fit is left out and named, never the weights."""
MOST_PASSES = 64
"""Passes of a step whose batches are held."""
MOST_HEADS = 8
"""Heads whose query, key, value, O and dO go along, of the first batch entry that is measured."""


class Snapshots:
    """Makes and writes snapshots.

    Args:
        model: the watched one.
        folder: of the run; None: only snapshots that are asked for with a path of their own.
        most: how many are written without being asked for.
        most_bytes: of one.
    """

    def __init__(
        self, model: nn.Module, folder: Path | None, most: int, most_bytes: int = MOST_BYTES
    ) -> None:
        self._model, self._folder = model, folder
        self._left, self._most_bytes = most, most_bytes
        self.careful = most > 0  # whether each step is looked at before its update
        # of the next one: why, and where to; and its heads
        self.wanted: tuple[str, Path | None] | None = None
        self.heads: dict[str, list[int]] = {}
        self._batches: list[tuple[Sequence[Any], Mapping[str, Any]]] = []
        self._states: dict[str, Tensor] = {}
        self.autocast: dict[str, str] = {}  # its dtype when the step began, by device
        self.calls: dict[str, dict[str, Tensor]] = {}  # of the guilty heads
        self._writer: threading.Thread | None = None
        self.written: list[Path] = []

    @property
    def holding(self) -> bool:
        """Whether a step's batches are held until it ends."""
        return self.careful or self.wanted is not None

    def begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A pass of the model begins."""
        if not self._batches:
            self._states = generator_states() if self.holding else {}
            self.autocast = {
                device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                for device in ("cpu", "cuda")
                if torch.is_autocast_enabled(device)
            }
        if len(self._batches) < MOST_PASSES:
            self._batches.append((args, kwargs))

    @property
    def last_batch(self) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """The arguments of the step's last pass, if they are held."""
        return self._batches[-1] if self._batches else None

    def ends(self) -> None:
        """The step has ended."""
        self._batches, self._states, self.autocast, self.calls = [], {}, {}, {}

    def ask(self, reason: str, path: Path | None = None) -> None:
        """Have a snapshot made of the next step that begins; one that is wanted already stays."""
        if self.wanted is None and (path is not None or self._left > 0):
            self.wanted = (reason, path)

    def ask_for(self, path: Path | None) -> None:
        """Have one made because somebody asked; raises ValueError where it could not be."""
        if path is None and self._left <= 0:
            raise ValueError(
                "path=None: accepted is a folder to make, or a watcher with folder= and"
                " snapshots=N of which some are left"
            )
        if path is not None and path.exists():
            raise ValueError(f"path={str(path)!r} is there already; accepted is a new folder")
        self.ask("asked for", path)

    def keep(self, call: Foreign) -> None:
        """Keep what the guilty heads of a call were fed, gave and got back."""
        heads = self.heads[call.layer]
        group = call.tensors["query"].shape[1] // call.tensors["key"].shape[1]
        of_key = [head // group for head in heads]
        self.calls[call.layer] = {
            name: call.tensors[name][:1, of_key if name in ("key", "value") else heads]
            .cpu()
            .clone()
            for name in ("query", "key", "value", "out", "grad_out")
            if name in call.tensors
        }

    def take(self, step: int, optimizer: Optimizer | None, about: Mapping[str, Any]) -> Path | None:
        """Copy the snapshot that is wanted, and begin to write it; None where none is, or where the
        step's batches were not held.
        """
        if self.wanted is None or not self._batches:
            return None
        (reason, path), self.wanted = self.wanted, None
        if path is None:
            if self._folder is None or self._left <= 0:
                return None
            self._left -= 1
            self.careful = self._left > 0
            path = self._folder / FOLDER / f"step-{step}-{_word(reason)}"
        try:
            parts = self._parts(step, reason, optimizer, about)
        except (MemoryError, torch.OutOfMemoryError) as error:
            # a watch must not end the training that it looks at
            LOG.warning("no snapshot of step %d: %s", step, error)
            return None
        # one is written at a time, so that copies of the model do not pile up in memory
        self.wait()
        self._writer = threading.Thread(
            target=self._write, args=(path, parts), name="halfulp-snapshot"
        )
        self._writer.start()
        return path

    def wait(self) -> None:
        """Wait until what was begun is written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def closes(self) -> None:
        """Wait so, and say what is wanted still: a snapshot is of a whole step."""
        self.wait()
        if self.wanted is not None and (self.wanted[1] is not None or self._left > 0):
            LOG.warning("no snapshot was written (%s): no step came after it", self.wanted[0])

    def _write(self, path: Path, parts: Snapshot) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_snapshot(path, parts, self._most_bytes)
        except (OSError, ValueError, RuntimeError) as error:
            LOG.warning("no snapshot of step %d: %s", parts.step, error)
            for torn in path.parent.glob(f"{TEMPORARY}*"):
                remove(torn)
            return
        self.written.append(path)
        LOG.warning("snapshot of step %d: %s", parts.step, path)

    def _parts(
        self, step: int, reason: str, optimizer: Optimizer | None, about: Mapping[str, Any]
    ) -> Snapshot:
        sharded: list[str] = []
        names = _names(self._model)
        model = {
            name: _copied(x, name, sharded) for x, name in _tensors_of(self._model, names).items()
        }
        moments: dict[str, Tensor] = {}
        groups: list[dict[str, Any]] = []
        for group in [] if optimizer is None else optimizer.param_groups:
            known = [names[p] for p in group["params"] if p in names]
            groups.append(
                {"params": known}
                | {
                    name: list(x) if isinstance(x, tuple) else x
                    for name, x in group.items()
                    if isinstance(x, (int, float, str, bool, tuple, type(None)))
                }
            )
            for parameter in group["params"]:
                for entry, x in optimizer.state.get(parameter, {}).items() if optimizer else ():
                    if parameter in names and isinstance(x, (Tensor, int, float)):
                        key = f"{names[parameter]}/{entry}"
                        moments[key] = _copied(torch.as_tensor(x), key, sharded)
        from halfulp import __version__

        said = {
            "halfulp": __version__,
            "versions": describe_versions(),
            "time": now(),
            "model_class": type(self._model).__name__,
            "optimizer_class": None if optimizer is None else type(optimizer).__name__,
            "param_groups": groups,
            "autocast": self.autocast,
            "training": self._model.training,
            "heads": {path: self.heads.get(path, []) for path in self.calls},
            "before_update": optimizer is not None,
            "sharded": sharded,
            "left_out": {},
            **about,
        }
        batches = [(_held(args), _held(kwargs)) for args, kwargs in self._batches]
        calls = {path: dict(xs) for path, xs in self.calls.items()}
        return Snapshot(step, reason, model, moments, batches, dict(self._states), calls, said)


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Every parameter and persistent buffer by itself: its name without what wrappers add."""
    found: dict[Tensor, str] = {}
    for path, module in module_names(model):
        at = "" if path == ITSELF else f"{path}."
        for name, x in module.named_parameters(recurse=False):
            found.setdefault(x, f"{at}{name}")
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.setdefault(buffer, f"{at}{name}")
    return found


def _tensors_of(model: nn.Module, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
    return {x: names[x] for x in (*model.parameters(), *model.buffers()) if x in names}


def _copied(x: Tensor, name: str, sharded: list[str]) -> Tensor:
    """A copy on the CPU that nobody else writes to; of a sharded one this process's part."""
    local = getattr(x, "to_local", None)
    if local is not None:
        sharded.append(name)
        x = local()
    return x.detach().to("cpu", copy=True).contiguous()


def _held(value: Any) -> Any:
    """A batch whose tensors are copies on the CPU."""
    if isinstance(value, Tensor):
        plain = value.detach()
        return plain.to("cpu", copy=True) if plain.layout == torch.strided else None
    if isinstance(value, Mapping):
        return {name: _held(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(_held, value)) if isinstance(value, tuple) else list(map(_held, value))
    return value


def _word(reason: str) -> str:
    """A reason as a part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:40] or "asked-for"
