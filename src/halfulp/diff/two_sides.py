"""The comparison of two settings: both passes over every batch, operation by operation, then whose
fault the gap is.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfulp.diff.after_steps import MakeOptimizer, Training, after_steps
from halfulp.diff.again import Rerun, ambient
from halfulp.diff.alignment import Aligned, align
from halfulp.diff.difference import Compared, Difference, summed_up
from halfulp.diff.floors import exactly, floors_of
from halfulp.diff.local_gap import LocalGap, added, step_of
from halfulp.diff.noise import Chance, Moved, chance, noise_step
from halfulp.diff.setting import Outcome, Piece, Setting, part_of, run, tensors_in
from halfulp.diff.shares import Carried, Stand, Swapped, grouped
from halfulp.diff.tape import Entry, Tape, constants, each, entry_of, result_of
from halfulp.interpose import Operation
from halfulp.runs.results import Progress, no_progress


class TwoSides:
    """Runs both sides and holds what they part in."""

    def __init__(
        self, a: Setting, b: Setting, gradients: bool, folder: Path, *, swaps: bool = True
    ) -> None:
        self._swaps = swaps
        self.a, self.b, self.gradients = a, b, gradients
        self._folder = folder
        self._tape = Tape(folder / "a")
        self._kept = Tape(folder / "gradients")
        self._names = constants(a.model), constants(b.model)
        self._rerun = Rerun(a)
        self._opaque = any(s.context is not None or s.forward is not None for s in (a, b))
        self.entries: dict[str, Entry] = {}  # A's by place
        self.aligned: Aligned | None = None
        self.gaps: dict[str, LocalGap] = {}
        self._floors: dict[str, float] = {}
        self.stands: list[Stand] = []
        self.unseen: dict[str, str] = {}
        self.parameters: dict[str, tuple[float, float, float]] = {}  # gap², size², gap·a
        self._held: dict[str, Tensor] = {}  # A's gradients, until B's come
        self._seen: list[str] = []  # parameters whose gradients were compared in this batch
        self.of_tokens = False

    def add(self, batch: Any) -> None:
        """Both passes over one batch."""
        number = len(self.stands)
        a = self._record(batch, number)
        alike = self.a.model is self.b.model and self.b.whole and not self._opaque
        if self.aligned is None and alike:  # one model: its operations most likely are, too
            self.aligned = Aligned({place: place for place in self.entries})
        elif self.aligned is None:
            self._align(batch)
        b = self._compare(batch, number)
        if alike and number == 0 and self._unlike():
            self.gaps.clear()
            self.parameters.clear()
            self._align(batch)
            if self.gradients:  # which went as they were compared
                self._record(batch, number)
            b = self._compare(batch, number)
        if a.outputs.shape != b.outputs.shape:
            raise ValueError(
                f"A gives outputs of shape {list(a.outputs.shape)} and B of"
                f" {list(b.outputs.shape)}: accepted are the same batches and tokens on both sides"
            )
        self._tape.clear()
        self.of_tokens = a.of_tokens
        self.unseen |= {f"A: {path}": why for path, why in a.interposed.unseen.items()}
        self.unseen |= {f"B: {path}": why for path, why in b.interposed.unseen.items()}
        kept = partial(self._both, number) if self.gradients else None
        self.stands.append(Stand(batch, (a.outputs, b.outputs), (a.loss, b.loss), kept))

    def _record(self, batch: Any, number: int) -> Outcome:
        """A's pass, written down."""
        self._held.clear()

        def look(operation: Operation, result: Tensor, count: int) -> None:
            place = operation.place
            self.entries[place] = entry_of(operation, result, self._names[0], count)
            self._tape.write(place, result)
            if result.requires_grad:
                _on_gradient(result, lambda grad: self._tape.write(f"{place} gradient", grad))

        found = run(self.a, batch, gradients=self.gradients, observe=each(look), seed=number)
        if self.gradients:
            for name, parameter in self.a.model.named_parameters():
                if parameter.grad is not None:
                    self._held[name], parameter.grad = parameter.grad, None
        return found

    def _align(self, batch: Any) -> None:
        """What answers to what, from one pass of B without its numbers."""
        entries: dict[int, dict[str, Entry]] = {}
        piece = Piece()

        def look(operation: Operation, result: Tensor, _: int) -> None:
            found = entries.setdefault(piece.number, {})
            found[operation.place] = entry_of(operation, result, self._names[1], len(found))

        run(self.b, batch, observe=each(look), piece=piece, seed=len(self.stands))
        if not entries:  # all of B is hidden
            self.aligned = Aligned(only_a=list(self.entries.values()))
            return
        last = entries[max(entries)]
        self.aligned = align(list(self.entries.values()), list(last.values()), self.b.whole)
        for found in entries.values():  # what only the first pieces do
            for place in found.keys() - last.keys() & self.entries.keys():
                self.aligned.pairs.setdefault(place, place)

    def _unlike(self) -> bool:
        """Whether an operation of one side has none on the other under its own name."""
        assert self.aligned is not None
        lone = any(gap.answer is None for gap in self.gaps.values())
        return lone or self.gaps.keys() != self.aligned.pairs.keys()

    def _compare(self, batch: Any, number: int) -> Outcome:
        """B's pass, held against what was written down."""
        piece = Piece()
        saved: list[tuple[Any, ...]] = []

        def before(operation: Operation) -> None:
            # once it has run its operand is gone, on which A's operation is to be made
            if operation.in_place:
                args = tuple(x.clone() if isinstance(x, Tensor) else x for x in operation.args)
                saved[:] = [args]

        def look(operation: Operation, result: Tensor, count: int) -> None:
            if operation.in_place and saved:
                operation = replace(operation, args=saved.pop())
            with torch.no_grad():
                self._pair(operation, result, piece, count)

        self._seen = []
        with ExitStack() as stack:
            for name, parameter in self.b.model.named_parameters() if self.gradients else ():
                if parameter.requires_grad:
                    held = self._on_parameter(name, number)
                    hook = parameter.register_post_accumulate_grad_hook(held)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            return run(
                self.b, batch, gradients=self.gradients, observe=each(look), before=before,
                piece=piece, seed=number,
            )  # fmt: skip

    def _pair(self, operation: Operation, result: Tensor, piece: Piece, count: int) -> None:
        assert self.aligned is not None
        entry = entry_of(operation, result, self._names[1], count)
        place = operation.place
        answer = self.entries.get(self.aligned.pairs.get(place, ""))
        theirs = None if answer is None else self._tape.read(answer.place)
        if theirs is not None and theirs.shape != result.shape:
            theirs = part_of(theirs, tuple(result.shape), piece)
        replaced = answer is not None and theirs is None  # tiles of another size, say
        replaced |= any(x.path == operation.path for x in self.aligned.only_a)
        if theirs is None:
            answer = None
        gap = self.gaps.get(place)
        if gap is None:
            gap = self.gaps[place] = LocalGap(entry, answer)
        if answer is None or theirs is None:
            gap.replaced, gap.instead = replaced, self.aligned.instead(entry)
            self._lone(gap, entry, operation, result)
            return
        if gap.answer is None:
            gap.answer = answer
        again = None
        if self._opaque or not self._rerun.same(answer, entry, operation, self.b):
            again = self._again(gap, answer, operation)
            again = None if again is None or again.shape != result.shape else again
        if again is None:
            floor = math.hypot(step_of(answer.dtype), step_of(entry.dtype))
        else:
            floor = self._floor(place, answer, entry, operation)
        gap.add(result, theirs, again, floor)
        if result.requires_grad and self.gradients and piece.total == 0:
            name = f"{answer.place} gradient"

            def hook(grad: Tensor) -> None:
                other = self._tape.read(name)
                if other is not None:
                    gap.add_gradient(grad.detach().cpu(), other)

            _on_gradient(result, hook)

    def _again(self, gap: LocalGap, answer: Entry, operation: Operation) -> Tensor | None:
        """A's operation on B's operands. Of a part of the batch it would be B's own, to the bit,
        so that it is made exactly there.
        """
        if self.b.whole or self.a.swap_of(operation) is not self.b.swap_of(operation):
            return result_of(self._rerun.on(answer, operation, own_form=self.b.whole))
        gap.exact = True
        return exactly(operation)

    def _lone(self, gap: LocalGap, entry: Entry, operation: Operation, result: Tensor) -> None:
        """An operation that A has not: held against itself in fp64."""
        with ambient(entry.ambience, result.device.type):
            exact = exactly(operation)
        if exact is not None and exact.shape == result.shape:
            gap.add(result, exact, exact, math.inf if entry.kind == "other" else 0.0)

    def _floor(self, place: str, answer: Entry, entry: Entry, operation: Operation) -> float:
        if place not in self._floors:
            self._floors[place] = math.hypot(*floors_of([answer, entry], operation))
        return self._floors[place]

    def _on_parameter(self, name: str, number: int) -> Callable[[Tensor], None]:
        """Holds a gradient of B's against A's when it comes, and lets both go: each side's may be
        as large as its model.
        """

        def look(parameter: Tensor) -> None:
            mine, theirs = parameter.grad, self._held.pop(name, None)
            parameter.grad = None
            if name in self._seen:
                self.unseen[f"B: {name}"] = "its gradient comes in parts; the first was compared"
            if mine is None or theirs is None or mine.shape != theirs.shape:
                return
            added(self.parameters, name, mine.cpu(), theirs.cpu())
            self._seen.append(name)
            if self._swaps:
                self._kept.write(f"{number} a {name}", theirs)
                self._kept.write(f"{number} b {name}", mine)

        return look

    def _both(self, number: int, name: str) -> tuple[Tensor, Tensor] | None:
        """A's and B's gradient of a parameter in a batch, from disk."""
        a, b = (self._kept.read(f"{number} {side} {name}") for side in "ab")
        return None if a is None or b is None else (a, b)

    def compared(self) -> Compared:
        """What is known after all batches."""
        assert self.aligned is not None
        names = self.a.name, self.b.name
        weights = zip(self.a.model.parameters(), self.b.model.parameters(), strict=False)
        differ = self.a.model is not self.b.model and not all(
            x.shape == y.shape and torch.equal(x, y.to(x.dtype)) for x, y in weights
        )
        return Compared(
            names, self.gaps, self.aligned, self.stands, self.parameters, self.unseen,
            self.of_tokens, differ,
        )  # fmt: skip

    @property
    def coarser(self) -> bool:
        """Whether B rounds an operation to fewer bits than A, or the other way round."""
        return any(gap.coarser for gap in self._moved)

    @property
    def _moved(self) -> list[LocalGap]:
        return [gap for gap in self.gaps.values() if not gap.same and gap.own and gap.answer]

    def chances(self, repetitions: int) -> dict[str, Chance]:
        """Whether rounding explains the outputs' gap: in A's formats, and in B's if coarser."""
        found = {"A": self._chance(self.roundings(False), repetitions)}
        if self.coarser:
            found["both"] = self._chance(self.roundings(True), repetitions)
        return found

    def roundings(self, formats: bool) -> dict[str, float]:
        """How far rounding moves what differs, by A's place: in A's formats, or in the coarser."""
        steps = {}
        for gap in self._moved:
            assert gap.answer is not None
            mine, theirs = noise_step(gap.answer.coarsest), noise_step(gap.entry.coarsest)
            steps[gap.answer.place] = max(mine, theirs) if formats else mine
        # what only B does has no place in A: rounding is put where A does otherwise
        lone = {x.entry.path for x in self.gaps.values() if x.own and x.answer is None}
        for entry in self.entries.values():
            if entry.path in lone or not self.gaps:  # or all of B is hidden
                steps.setdefault(entry.place, noise_step(entry.coarsest))
        return steps

    def roundings_of_all(self) -> dict[str, float]:
        """The same for every operation of A: where sides differ in the backward pass alone, such as
        in the order of a sum over the batch.
        """
        return {place: noise_step(entry.coarsest) for place, entry in self.entries.items()}

    def _chance(self, steps: Mapping[str, float], repetitions: int) -> Chance:
        gaps = [stand.outputs[1] - stand.outputs[0] for stand in self.stands]
        if not steps:
            return chance(gaps, [])
        noise: list[list[Tensor]] = []
        for number, stand in enumerate(self.stands):
            noise.append([])
            for repetition in range(repetitions):
                swap = Moved(self.a, steps, number * 101 + repetition).swap()
                found = run(self.a, stand.batch, swaps=[swap], seed=number)
                noise[-1].append(found.outputs - stand.outputs[0])
        return chance(gaps, noise)

    def shares(self, most: int, progress: Progress = no_progress) -> tuple[list[Carried], int]:
        """What each group carries of the gap, the largest first, layers of the first one last; and
        how many groups were not tried.
        """
        swapped = Swapped(self.a, self.b, self.gaps, self.stands, self._folder / "values")
        groups = grouped(list(self.gaps.values()))
        found = []
        for i, group in enumerate(groups[:most]):
            progress(0.6 + 0.4 * i / min(most, len(groups)), f"swapping {group.name}")
            found.append(swapped.carried(group))
        found.sort(key=_rank, reverse=True)
        if found:
            layers = grouped(found[0].group.members, by_layer=True)
            if 1 < len(layers) <= 4 * most:
                inside = [swapped.carried(layer) for layer in layers]
                found += sorted(inside, key=_rank, reverse=True)
        return found, max(0, len(groups) - most)


def _on_gradient(x: Tensor, look: Callable[[Tensor], None]) -> None:
    x.register_hook(look)  # type: ignore[no-untyped-call]


def _rank(carried: Carried) -> float:
    share = carried.share()
    return -math.inf if math.isnan(share) else share


def compared(
    a: Setting,
    b: Setting,
    batches: Sequence[Any],
    *,
    gradients: bool,
    attribute: bool,
    repetitions: int,
    most: int,
    folder: str | Path | None,
    progress: Progress = no_progress,
    steps: int = 0,
    optimizers: tuple[MakeOptimizer, MakeOptimizer] | None = None,
) -> Difference:
    """`halfulp.diff` after its arguments were read."""
    if not a.whole:
        raise ValueError(
            "a runs in pieces: accepted is a whole batch for a; give the pieces to b instead"
        )
    if gradients and b.decode:
        raise ValueError("gradients=True with decode: accepted is gradients=False")
    for batch in batches:
        tensors_in(batch)
    with tempfile.TemporaryDirectory(dir=folder, prefix="halfulp-diff-") as scratch:
        sides = TwoSides(a, b, gradients, Path(scratch), swaps=attribute)
        for i, batch in enumerate(batches):
            progress(0.4 * i / len(batches), f"batch {i + 1} of {len(batches)}")
            sides.add(batch)
        found = sides.compared()
        chances: dict[str, Chance] = {}
        carried: list[Carried] = []
        left_out = 0
        if not found.identical:
            progress(0.4, "what rounding makes")
            chances = sides.chances(repetitions)
            if attribute:
                carried, left_out = sides.shares(most, progress)
        whole = summed_up(found, chances, carried, left_out)
        if not steps or optimizers is None:
            return whole
        progress(0.9, f"{steps} steps")
        moved = sides.roundings(sides.coarser) if b.whole else {}
        training = Training(
            a, b, batches, steps, optimizers, moved or sides.roundings_of_all(), Path(scratch)
        )
        swapped = Swapped(a, b, sides.gaps, (), Path(scratch) / "values", trained=True)
        after = after_steps(
            training, repetitions, sides.coarser, swapped if attribute else None, most
        )
        return replace(whole, after=after)
