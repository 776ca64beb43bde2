"""Snapshots: one step of any training, in a folder, so that the step can be made again elsewhere.

What a snapshot holds is the state before the update of its step: weights and the optimizer's
moments as the step found them, the batches of its passes and the generators' states before the
first of them. Running these passes on these weights gives the gradients of that step, and the
optimizer its update.

The folder:
    snapshot.json           what it is: see `Snapshot.about`; the SHA-256 of the other files; a seal
    model.safetensors       parameters and persistent buffers by their names in the plain module
    optimizer.safetensors   "parameter/entry": exp_avg, exp_avg_sq, step, …
    batch.safetensors       tensors of the batches, by the numbers that snapshot.json has for them
    generators.safetensors  "cpu", "cuda:0", "python", "numpy": `halfulp.runs.generators`
    calls.safetensors       "path of the module|operand": query, key, value, out, grad_out
                            `[E, h, N, D]` of the heads that snapshot.json names
Reading executes nothing: objects in a batch that are neither tensors nor plain data are left out
and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp.runs.sealed import TORN, load_sealed, load_tensors, save_sealed

if TYPE_CHECKING:
    from torch import Tensor

JSON = "snapshot.json"
FORMAT = 1
PARTS = ("model", "generators", "batch", "calls", "optimizer")
"""Files of tensors, those first that a snapshot of bounded size can do without least."""
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Snapshot:
    """One step of a training, before its update."""

    step: int
    reason: str  # why it was made: an alarm, what was not finite, or "asked for"
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    batches: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]  # (args, kwargs) of each pass
    generators: dict[str, Tensor]
    calls: dict[str, dict[str, Tensor]]  # by path: operands of the heads in about["heads"][path]
    about: dict[str, Any] = field(repr=False)
    """The rest of snapshot.json: halfulp (version), versions, time, model_class, loss,
    optimizer_class, param_groups (hyperparameters, and "params" by name), scaler (GradScaler's
    state), autocast (dtype by device), heads (numbers by path), causes (what alarmed), found
    (the same as data: kind, layer, head),
    before_update (False where no optimizer of PyTorch's made the step: the weights are those
    after it), sharded (names of tensors of which these are one process's parts), left_out (parts
    and objects that are not there, and why).
    """


def write_snapshot(folder: Path, parts: Snapshot, most_bytes: int | None = None) -> Path:
    """Write a snapshot, whole or not at all.

    Args:
        folder: it becomes this one; one that is there already is replaced.
        parts: what is written: tensors on the CPU that nobody else writes to.
        most_bytes: what does not fit is left out, never the model, and named.

    Raises:
        OSError: it cannot be written.
        ValueError: the model alone is larger than `most_bytes`.
    """
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, str] = dict(parts.about.get("left_out", {}))
    trees = [
        {
            "args": _packed(tuple(args), tensors, left_out, f"batch {i}"),
            "kwargs": _packed(dict(kwargs), tensors, left_out, f"batch {i}"),
        }
        for i, (args, kwargs) in enumerate(parts.batches)
    ]
    files = {
        "model": parts.model,
        "optimizer": parts.optimizer,
        "batch": tensors,
        "generators": parts.generators,
        "calls": {
            f"{path}|{name}": x for path, xs in parts.calls.items() for name, x in xs.items()
        },
    }
    room = most_bytes
    for part in PARTS:
        size = sum(x.nbytes for x in files[part].values())
        if room is None or size <= room:
            room = None if room is None else room - size
        elif part == "model":
            raise ValueError(
                f"most_bytes={most_bytes}: accepted is the model's size at least, {size}"
            )
        else:
            left_out[part] = f"{size} bytes, where a snapshot may have {most_bytes}"
            files[part] = {}
            # they speak of tensors that are left out now
            trees = [] if part == "batch" else trees
    plain = {
        **parts.about,
        "kind": "snapshot",
        "format": FORMAT,
        "step": parts.step,
        "reason": parts.reason,
        "batches": trees,
        "left_out": left_out,
    }
    named = {f"{part}.safetensors": _unshared(files[part]) for part in PARTS}
    return save_sealed(folder, JSON, plain, named)


def is_snapshot(folder: Path) -> bool:
    """Whether a folder looks like a snapshot; whether it is whole is not looked at."""
    return (folder / JSON).is_file()


def read_snapshot(folder: str | Path) -> Snapshot:
    """Read a snapshot that `halfulp.watch` wrote; nothing in it is executed.

    Raises:
        ValueError: a file is missing, torn or altered, or of a later format; one line says which.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    try:
        plain = load_sealed(folder, JSON)
        if plain.get("kind") != "snapshot" or plain.get("format") != FORMAT:
            raise ValueError(
                f"{JSON} is of format {plain.get('format')!r} of a {plain.get('kind')}, and this"
                f" halfulp reads {FORMAT}"
            )
        found = {part: load_tensors(folder, plain, f"{part}.safetensors") for part in PARTS}
        calls: dict[str, dict[str, Tensor]] = {}
        for key, x in found["calls"].items():
            path, _, name = key.rpartition("|")
            calls.setdefault(path, {})[name] = x
        batches = tuple(
            (
                tuple(_unpacked(tree["args"], found["batch"])),
                dict(_unpacked(tree["kwargs"], found["batch"])),
            )
            for tree in plain["batches"]
        )
        given = {"step", "reason", "batches", "kind", "format", "sha256"}
        return Snapshot(
            int(plain["step"]),
            str(plain["reason"]),
            found["model"],
            found["optimizer"],
            batches,
            found["generators"],
            calls,
            {name: value for name, value in plain.items() if name not in given},
        )
    except (SafetensorError, RecursionError, *TORN) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"snapshot={str(folder)!r}: {said}; accepted is a whole one") from None


def _packed(value: Any, tensors: dict[str, Tensor], left_out: dict[str, str], where: str) -> Any:
    """Plain JSON for a value; its tensors go into `tensors` under numbers."""
    import torch

    # every value under its kind, so that a user's dictionary is never taken for one of ours
    if isinstance(value, torch.Tensor):
        tensors[str(len(tensors))] = value
        return {"tensor": len(tensors) - 1}
    if isinstance(value, _PLAIN):
        return {"value": value}
    if isinstance(value, Mapping):
        items = [(k, v) for k, v in value.items() if isinstance(k, str)]
        return {"dict": {k: _packed(v, tensors, left_out, f"{where}, {k}") for k, v in items}}
    if isinstance(value, (list, tuple)):
        packed = [_packed(v, tensors, left_out, f"{where}, {i}") for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": packed}
    left_out[where] = f"a {type(value).__name__}, which is neither a tensor nor plain data"
    return {"value": None}


def _unpacked(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[str(value)]
    if kind == "value":
        return value
    if kind == "dict":
        return {name: _unpacked(item, tensors) for name, item in value.items()}
    items = [_unpacked(item, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory with each other, which is what safetensors writes."""
    seen: set[int] = set()
    kept = {}
    for name, x in tensors.items():
        place = x.untyped_storage().data_ptr()
        # all empty tensors lie at the address 0, and share nothing
        kept[name] = x.clone() if place in seen and x.numel() else x
        seen.add(place)
    return kept
