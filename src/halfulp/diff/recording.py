"""One side of a comparison, written down: `halfulp record` in one environment, `halfulp diff` of
two recordings anywhere.

A recording is a folder of safetensors and JSON that is whole or not there. It holds every
operation's result and its error against the same operation in fp64 on the same operands, so that
what is an operation's own needs neither side to be run again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from halfulp.diff.alignment import align
from halfulp.diff.difference import Compared, Difference, summed_up
from halfulp.diff.floors import exactly, floors_of
from halfulp.diff.local_gap import LocalGap, added, squares
from halfulp.diff.noise import Moved, chance, noise_step
from halfulp.diff.setting import Outcome, Setting, run, tensors_in
from halfulp.diff.shares import Stand
from halfulp.diff.tape import (
    Ambience,
    Entry,
    Slot,
    asked_otherwise,
    constants,
    each,
    entry_of,
)
from halfulp.interpose import Operation
from halfulp.runs.folder import new_folder, read_json, remove, sync_folder, write_json
from halfulp.runs.machine import describe_machine, describe_versions

CHUNK = 16 * 2**20  # bytes that are held before they are written
AMPLIFIED = 4.0
"""How many times the gap of its operands an operation's gap has to be, to be its own."""
FILE, OUTPUTS, KIND = "record.json", "outputs.safetensors", "halfulp recording"


class _Text:
    """An argument of an operation that is known by its text alone."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _plain(tree: Any) -> Any:
    if isinstance(tree, Slot):
        return {"slot": [tree.index, str(tree.dtype), list(tree.shape), tree.constant]}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree)}
    if isinstance(tree, Mapping):
        return {"items": [[str(name), _plain(item)] for name, item in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"list": [_plain(item) for item in tree]}
    known = tree is None or isinstance(tree, (bool, int, float, str))
    return {"text": repr(tree) if known else str(type(tree))}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this torch")
    return found


def _tree(plain: Any) -> Any:
    ((kind, held),) = plain.items()
    if kind == "slot":
        return Slot(held[0], _dtype(held[1]), tuple(held[2]), held[3])
    if kind == "dtype":
        return _dtype(held)
    if kind == "items":
        return {name: _tree(item) for name, item in held}
    return tuple(map(_tree, held)) if kind == "list" else _Text(held)


def _nothing(*_: Any) -> None:
    raise AssertionError("a recorded operation is never made again")


def _entry(row: Mapping[str, Any]) -> Entry:
    return Entry(
        row["place"], row["kind"], row["name"], row["path"], row["order"], row["number"],
        _nothing, _tree(row["arguments"]),
        Ambience(_dtype(row["autocast"]) if row["autocast"] else None, (), ""),
        tuple(row["shape"]), _dtype(row["dtype"]),
    )  # fmt: skip


class _Files:
    """Safetensors files of a recording, of a few megabytes each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._size = 0
        self.where: dict[str, Path] = {}  # the file of each tensor that is written

    def write(self, name: str, x: Tensor) -> None:
        """Keep a copy of a tensor."""
        copied = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._held[name] = copied
        self._size += copied.numel() * copied.element_size()
        if self._size >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if not self._held:
            return
        file = self._folder / f"{len({*self.where.values()}):06d}.safetensors"
        save_file(self._held, file)
        self.where |= dict.fromkeys(self._held, file)
        self._held, self._size = {}, 0


def record(
    setting: Setting,
    batches: Iterable[Any],
    out: str | Path,
    *,
    gradients: bool = False,
    repetitions: int = 2,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write down one side of a comparison.

    Args:
        setting: the model and how it is run; a whole batch at a time.
        batches: as `halfulp.diff`; both sides need the same ones.
        out: new folder, whole or not there; results are written as they come.
        gradients: the parameters' gradients too.
        repetitions: passes with every operation moved at random by one rounding, for the chance.
        about: what else to note, such as the command.

    Raises:
        ValueError: the folder is there already, or the setting runs in pieces.
    """
    place = Path(out)
    if place.exists():
        raise ValueError(f"out={str(place)!r} is there already; accepted is a new folder")
    if not setting.whole:
        raise ValueError(
            "a setting with pieces or decode cannot be recorded; accepted is a whole one"
        )
    folder = new_folder(place.resolve().parent)
    try:
        _write(setting, list(batches), folder, gradients, repetitions, dict(about or {}))
        # the names of its files are durable before the folder has its own
        sync_folder(folder)
        folder.rename(place)
    except BaseException:
        remove(folder)
        raise
    return place


def _write(
    setting: Setting,
    batches: Sequence[Any],
    folder: Path,
    gradients: bool,
    repetitions: int,
    about: dict[str, Any],
) -> None:
    tape, names = _Files(folder), constants(setting.model)
    entries: dict[str, tuple[Entry, float]] = {}
    outputs: dict[str, Tensor] = {}
    losses: list[float | None] = []
    unseen: dict[str, str] = {}
    digests = []
    of_tokens = False
    for number, batch in enumerate(batches):
        digests.append(_digest(tensors_in(batch)))
        found = _recorded(setting, batch, number, tape, names, entries, gradients)
        outputs[f"{number}"] = found.outputs
        losses.append(found.loss)
        unseen |= found.interposed.unseen
        of_tokens = found.of_tokens
        # the other side is not known yet, so that all is moved: a weaker chance than `halfulp.diff`
        # has, which moves only what differs
        steps = {place: noise_step(entry.coarsest) for place, (entry, _) in entries.items()}
        for repetition in range(repetitions):
            swap = Moved(setting, steps, number * 101 + repetition).swap()
            moved = run(setting, batch, swaps=[swap], seed=number)
            outputs[f"{number} moved {repetition}"] = moved.outputs - found.outputs
    tape.flush()
    save_file({k: x.contiguous() for k, x in outputs.items()}, folder / OUTPUTS)
    rows = [
        {
            "place": x.place, "kind": x.kind, "name": x.name, "path": x.path, "order": x.order,
            "number": x.number, "arguments": _plain(x.arguments), "shape": list(x.shape),
            "dtype": str(x.dtype), "floor": floor,
            "autocast": str(x.ambience.autocast) if x.ambience.autocast else None,
        }
        for x, floor in entries.values()
    ]  # fmt: skip
    plain: dict[str, Any] = {
        "kind": KIND,
        "name": setting.name,
        "about": about,
        "machine": describe_machine(),
    }
    plain |= {"versions": describe_versions(), "batches": digests, "losses": losses}
    plain |= {"of_tokens": of_tokens, "repetitions": repetitions, "unseen": unseen}
    plain |= {"weights": _digest(setting.model.parameters()), "operations": rows}
    plain |= {"tensors": {name: file.name for name, file in tape.where.items()}}
    write_json(folder / FILE, plain)


def _recorded(
    setting: Setting,
    batch: Any,
    number: int,
    tape: _Files,
    names: Mapping[int, str],
    entries: dict[str, tuple[Entry, float]],
    gradients: bool,
) -> Outcome:
    def look(operation: Operation, result: Tensor, count: int) -> None:
        entry = entry_of(operation, result, names, count)
        tape.write(f"{number} {entry.place}", result)
        if operation.in_place:
            # its operand is overwritten by now: neither floor nor exact value can be made of it
            entries.setdefault(entry.place, (entry, 0.0))
            return
        with torch.no_grad():
            tape.write(f"{number} {entry.place} taken", _sketches(operation))
            if entry.place not in entries:
                entries[entry.place] = entry, floors_of([entry], operation)[0]
            exact = exactly(operation)
            if exact is not None and exact.shape == result.shape:
                # the difference cancels and is taken in fp64; what is left of it fits fp32
                error = (result.double() - exact).to(torch.float32)
                tape.write(f"{number} {entry.place} error", error)

    found = run(setting, batch, gradients=gradients, observe=each(look), seed=number)
    if gradients:
        for name, parameter in setting.model.named_parameters():
            if parameter.grad is not None:
                tape.write(f"{number} gradient {name}", parameter.grad)
    return found


def _sketches(operation: Operation) -> Tensor:
    """`[operands, 64]`: sums of each operand's numbers with random signs, the same for operands of
    one size. The squared distance of two sketches is that of the operands, give or take a fifth
    (Alon, Matias and Szegedy 1996).
    """
    # a row of zeros first, so that an operation without operands has a sketch too
    found = [torch.zeros(64, dtype=torch.float64)]
    for x in operation.tensors():
        # of the size alone: the other side, in another process, draws the same signs
        generator = torch.Generator().manual_seed(x.numel())
        signs = torch.randint(2, (x.numel(),), generator=generator).mul_(2).sub_(1)
        signed = functional.pad(x.detach().cpu().double().flatten() * signs, (0, -x.numel() % 64))
        found.append(signed.view(-1, 64).sum(0))
    return torch.stack(found)


def _came_in(taken: Tensor | None, other: Tensor | None) -> float:
    """How far operands are apart, relative to them: the farthest that both sides have."""
    if taken is None or other is None:  # recorded before they were looked at
        return 0.0
    common = min(len(taken), len(other))
    gap, size = (taken[:common] - other[:common]).norm(dim=1), other[:common].norm(dim=1)
    return float(torch.where(gap > 0, gap / size, 0.0).nan_to_num(math.inf).max())


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        flat = x.detach().cpu().contiguous().flatten()
        # the same bytes may be another tensor
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Recording:
    """A recording that is read.

    Raises:
        ValueError: the folder holds none, or a torn one.
    """

    def __init__(self, folder: str | Path, argument: str) -> None:
        self.folder = Path(folder)
        plain = read_json(self.folder / FILE)
        if not isinstance(plain, dict) or plain.get("kind") != KIND:
            raise ValueError(
                f"{argument}={str(folder)!r} holds no recording; accepted is a folder that"
                " `halfulp record` wrote"
            )
        try:
            self.entries = {row["place"]: _entry(row) for row in plain["operations"]}
            self.floors = {row["place"]: float(row["floor"]) for row in plain["operations"]}
            self._files = {str(k): str(v) for k, v in plain["tensors"].items()}
            self.name = str(plain["name"] or self.folder.name)
            self.batches, self.losses = list(plain["batches"]), list(plain["losses"])
            self.repetitions, self.of_tokens = int(plain["repetitions"]), bool(plain["of_tokens"])
            self.unseen, self.weights = dict(plain["unseen"]), str(plain["weights"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{argument}={str(folder)!r}: {FILE} is torn: {error}") from error
        # a recording may come from anybody: nothing outside of its folder is opened
        if any(Path(name).name != name for name in self._files.values()):
            raise ValueError(f"{argument}={str(folder)!r}: {FILE} names files outside of it")
        self._open: dict[str, Any] = {}

    def read(self, name: str, file: str | None = None) -> Tensor | None:
        """A tensor by name; None where there is none."""
        file = self._files.get(name) if file is None else file
        if file is None:
            return None
        if file not in self._open:
            self._open = {file: safe_open(self.folder / file, framework="pt")}
        if name not in self._open[file].keys():  # noqa: SIM118
            return None
        found: Tensor = self._open[file].get_tensor(name)
        return found

    def gradients(self, number: int) -> list[str]:
        """The parameters whose gradients lie there."""
        start = f"{number} gradient "
        return [name.removeprefix(start) for name in self._files if name.startswith(start)]


def compare_recordings(a: str | Path, b: str | Path) -> Difference:
    """`halfulp.diff` of two recordings: sizes, floors, the first operation to part, the chance.

    Nothing is run, so no operations are swapped: what carries the gap is not told.

    Raises:
        ValueError: a folder is no recording, or they are of other batches.
    """
    mine, theirs = Recording(a, "a"), Recording(b, "b")
    if mine.batches != theirs.batches:
        raise ValueError(
            f"a={str(a)!r} and b={str(b)!r} were recorded on other batches; accepted are the same"
        )
    aligned = align(list(mine.entries.values()), list(theirs.entries.values()))
    gaps: dict[str, LocalGap] = {}
    stands, noise = [], []
    parameters: dict[str, tuple[float, float, float]] = {}
    for number in range(len(mine.batches)):
        for place, entry in theirs.entries.items():
            answer = mine.entries.get(aligned.pairs.get(place, ""))
            gap = gaps.setdefault(place, LocalGap(entry, answer, instead=aligned.instead(entry)))
            _add(gap, mine, theirs, number)
        outputs = [side.read(f"{number}", OUTPUTS) for side in (mine, theirs)]
        assert outputs[0] is not None
        assert outputs[1] is not None
        stands.append(
            Stand(None, (outputs[0], outputs[1]), (mine.losses[number], theirs.losses[number]))
        )
        moved = [mine.read(f"{number} moved {i}", OUTPUTS) for i in range(mine.repetitions)]
        noise.append([x for x in moved if x is not None])
        for name in theirs.gradients(number):
            one, other = (x.read(f"{number} gradient {name}") for x in (mine, theirs))
            if one is not None and other is not None and one.shape == other.shape:
                added(parameters, name, other, one)
    found = Compared(
        (mine.name, theirs.name), gaps, aligned, stands, parameters,
        {f"A: {k}": v for k, v in mine.unseen.items()}
        | {f"B: {k}": v for k, v in theirs.unseen.items()},
        mine.of_tokens, weights_differ=mine.weights != theirs.weights,
    )  # fmt: skip
    chances = {}
    if not found.identical:
        chances["A"] = chance([x.outputs[1] - x.outputs[0] for x in stands], noise)
    return summed_up(found, chances, [], 0)


def _add(gap: LocalGap, a: Recording, b: Recording, number: int) -> None:
    name = f"{number} {gap.entry.place}"
    found, error = b.read(name), b.read(f"{name} error")
    if found is None:
        return
    if gap.answer is None:
        exact = found.double() if error is None else found.double() - error
        gap.add(found, exact, exact, 0.0)
        return
    name = f"{number} {gap.answer.place}"
    theirs, other = a.read(name), a.read(f"{name} error")
    if theirs is None or theirs.shape != found.shape:
        gap.answer = None
        return
    again: Tensor | None = None
    otherwise = asked_otherwise(gap.entry, gap.answer)
    apart = _came_in(b.read(f"{number} {gap.entry.place} taken"), a.read(f"{name} taken"))
    gap_size, size, _ = squares(found, theirs)
    if otherwise and gap_size > (AMPLIFIED * apart) ** 2 * size:
        again = theirs.double()  # another eps, say: errors against fp64 do not show it
    elif error is not None and other is not None and not torch.equal(error, other):
        # B's exact value and A's error beside its own: as near to A's operation on B's operands as
        # one comes without running it
        again = found.double() - (error.double() - other.double())
    floor = math.hypot(a.floors[gap.answer.place], b.floors[gap.entry.place])
    gap.add(found, theirs, again, floor)
