"""Who carries the gap: one group of operations at a time is put from B into A, and out of B."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfulp.diff.again import InPlaceOf, Rerun, narrowed, noted
from halfulp.diff.local_gap import LocalGap, blocks
from halfulp.diff.setting import Piece, Setting, part_of, run
from halfulp.diff.tape import Tape
from halfulp.interpose import KINDS, Operation, Swap
from halfulp.interpose.operation import mapped

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_OWN = ("attention", "rotary")


@dataclass
class Group:
    """Operations that are swapped together."""

    name: str
    members: list[LocalGap] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Of its operations."""
        return sorted({gap.entry.kind for gap in self.members})


def grouped(gaps: Sequence[LocalGap], by_layer: bool = False) -> list[Group]:
    """Operations that differ, by module path with its numbers left out (or not), attention and
    rotary apart; the likeliest first.
    """
    found: dict[str, Group] = {}
    for gap in gaps:
        if (gap.same or not gap.own) and gap.answer is not None:
            continue
        if gap.exact and not gap.beyond:
            continue  # the same operation on a part of the batch: there is nothing to swap
        path = gap.entry.path or "(outside)"
        pattern = path if by_layer else _NUMBER.sub("*", path)
        name = f"{pattern} {gap.entry.kind}" if gap.entry.kind in _OWN else pattern
        found.setdefault(name, Group(name)).members.append(gap)
    told = [group for group in found.values() if any(gap.own for gap in group.members)]
    return sorted(told, key=lambda group: -max(map(_weight, group.members)))


def _weight(gap: LocalGap) -> float:
    # what equal arithmetic does not explain stands before roundings that are merely large
    return gap.relative_own * (100 if gap.parts else 1)


@dataclass(frozen=True)
class Share:
    """How much of a gap a group carries: 1 is all of it."""

    of: str  # "outputs", "loss" or "gradients"
    share: float
    error: float  # standard error over sequences (outputs) or batches; NaN: one alone


@dataclass
class Carried:
    """What swapping one group did."""

    group: Group
    into: list[Share]  # of the gap, made by B's operations alone in A
    out: list[Share]  # of the gap, gone with A's operations in B
    failed: str = ""  # why it could not be swapped

    def share(self, of: str = "outputs") -> float:
        """The mean of both ways, or the one that there is; NaN: none."""
        known = [x.share for x in (*self.into, *self.out) if x.of == of and math.isfinite(x.share)]
        return sum(known) / len(known) if known else math.nan


Measured: TypeAlias = Callable[[Sequence[Swap], int], list[Share]]
"""Of swaps on a side, 0 for A: what they make of the gap, or what of it is gone."""


@dataclass
class Stand:
    """What both sides gave on one batch."""

    batch: Any
    outputs: tuple[Tensor, Tensor]  # A's and B's
    losses: tuple[float | None, float | None]
    # A's and B's by parameter, where both have one
    gradients: Callable[[str], tuple[Tensor, Tensor] | None] | None = None


class Swapped:
    """Swaps groups between two settings.

    Args:
        a, b: the settings.
        gaps: every operation of B, by place.
        stands: by batch, what both sides gave.
        folder: for values of A that are put into B.
        trained: whether weights are those of the copy that runs, and not the settings' own.
    """

    def __init__(
        self,
        a: Setting,
        b: Setting,
        gaps: Mapping[str, LocalGap],
        stands: Sequence[Stand],
        folder: Path,
        trained: bool = False,
    ) -> None:
        self._a, self._b, self.gaps, self._stands = a, b, gaps, stands
        self._rerun = Rerun(a, not trained), Rerun(b, not trained)
        self._tape = Tape(folder)

    def carried(self, group: Group, measured: Measured | None = None) -> Carried:
        """Both ways: what swaps on a side make of the gap in one pass over all batches, or by
        another measure, which has no values of A's pass to put in.
        """
        into: list[Share] = []
        shares = measured or self._measured
        try:
            if not any(gap.replaced for gap in group.members):
                out = shares(self._out_of(group), 1)
                if self._b.whole and any(gap.answer is not None for gap in group.members):
                    into = shares(self._into(group), 0)
            elif measured is None:
                out = self._with_values(group)
            else:
                raise ValueError("A has nothing of that form in its place")
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return Carried(group, [], [], str(error).partition("\n")[0])
        return Carried(group, into, out)

    def _out_of(self, group: Group) -> list[Swap]:
        """A's operations in the place of a group of B's."""
        aligned = {gap.entry.place: gap.answer for gap in group.members if gap.answer is not None}
        lone = frozenset(gap.entry.place for gap in group.members if gap.answer is None)
        # what B alone does has nothing of A's to stand for it: it is made in more precision
        swaps = [Swap("fp64" if self._b.dtype == "fp64" else "fp32", places=lone)] if lone else []
        other = InPlaceOf(self._b, self._rerun[0], aligned, self._b.whole)
        return [*swaps, Swap(other, kinds=KINDS)]

    def _into(self, group: Group) -> list[Swap]:
        """A group of B's operations in the place of A's."""
        entries = {gap.answer.place: gap.entry for gap in group.members if gap.answer is not None}
        return [Swap(InPlaceOf(self._a, self._rerun[1], entries), kinds=KINDS)]

    def _with_values(self, group: Group) -> list[Share]:
        """Where B does something else than A on the way to an operation that both have, that one
        gets A's operands.
        """
        takers = _takers(group, list(self.gaps.values()))
        piece = Piece()
        entry_dtype = {place: gap.entry.dtype for place, gap in takers.items()}
        places = {gap.answer.place for gap in takers.values() if gap.answer is not None}

        def keep(operation: Operation, _: Any) -> None:
            if operation.place in places:
                for i, x in enumerate(operation.tensors()):
                    self._tape.write(f"{operation.place} {i}", x)

        def put(operation: Operation) -> Any:
            gap = takers.get(operation.place)
            answer = None if gap is None else gap.answer
            plain = narrowed(operation)
            if answer is None:
                return self._b.compute(plain)
            count = iter(range(len(operation.tensors())))

            def value(x: Any) -> Any:
                if not isinstance(x, Tensor) or not x.is_floating_point():
                    return x
                theirs = self._tape.read(f"{answer.place} {next(count)}")
                if theirs is not None and theirs.shape != x.shape:
                    theirs = part_of(theirs, tuple(x.shape), piece)
                return x if theirs is None else theirs.to(x.device, x.dtype if pieces else None)

            pieces = not self._b.whole
            given = plain.changed(value)
            if pieces:
                return self._b.compute(given)
            expected = entry_dtype[operation.place]
            return mapped(self._rerun[0].on(answer, given), lambda x: noted(x, expected))

        def prepare(number: int, stand: Stand) -> Piece:
            self._tape.clear()
            run(self._a, stand.batch, observe=keep, seed=number)
            # begun anew, but the same object, which the swap below reads
            vars(piece).update(vars(Piece()))
            return piece

        put.takes_wide = True  # type: ignore[attr-defined]
        return self._measured([Swap(put, kinds=KINDS)], 1, prepare)

    def _measured(
        self,
        swaps: Sequence[Swap],
        side: int,
        prepare: Callable[[int, Stand], Piece] | None = None,
    ) -> list[Share]:
        setting = (self._a, self._b)[side]
        pairs: dict[str, list[tuple[float, float]]] = {"outputs": [], "loss": [], "gradients": []}
        for number, stand in enumerate(self._stands):
            asked = stand.gradients is not None and prepare is None
            piece = prepare(number, stand) if prepare else None
            found = run(
                setting, stand.batch, gradients=asked, swaps=swaps, piece=piece, seed=number
            )
            mine, theirs = stand.outputs
            rows = zip(mine, theirs, found.outputs, strict=True)
            pairs["outputs"] += [part_of_gap(a, b, made, side) for a, b, made in rows]
            if found.loss is not None and None not in stand.losses:
                a, b, made = (torch.tensor(x) for x in (*stand.losses, found.loss))
                pairs["loss"].append(part_of_gap(a, b, made, side))
            if asked:
                pairs["gradients"].append(self._of_gradients(setting, stand, side))
        return [share_of(name, found) for name, found in pairs.items() if found]

    @staticmethod
    def _of_gradients(setting: Setting, stand: Stand, side: int) -> tuple[float, float]:
        assert stand.gradients is not None
        along = size = 0.0
        for name, parameter in setting.model.named_parameters():
            both = None if parameter.grad is None else stand.gradients(name)
            if parameter.grad is not None and both is not None:
                part = part_of_gap(*both, parameter.grad.cpu(), side)
                along, size = along + part[0], size + part[1]
        return along, size


def part_of_gap(a: Tensor, b: Tensor, found: Tensor, side: int) -> tuple[float, float]:
    """What a swap did, and the gap, as squares.

    Into A: its effect along the gap. Out of B: what of the gap's square is gone; its effect along
    the gap would count the roundings after it, which fall differently and were part of the gap.
    """
    along = whole = 0.0
    for parts in blocks(a, b, found):
        x, y, made = (part.double() for part in parts)
        gap = y - x
        square = float(gap.square().sum())
        whole += square
        if side == 0:
            along += float(((made - x) * gap).sum())
        else:
            along += square - float((made - x).square().sum())
    return along, whole


def _takers(group: Group, gaps: Sequence[LocalGap]) -> dict[str, LocalGap]:
    """The operations of both sides that take what only B's of a group give: the next attention in
    their module, or the next operation there.
    """
    found = {}
    paired = [gap for gap in gaps if gap.answer is not None]
    for member in group.members:
        if member.answer is not None:
            continue
        after = [
            gap
            for gap in paired
            if gap.entry.path == member.entry.path and gap.entry.number > member.entry.number
        ]
        chosen = [gap for gap in after if gap.entry.kind in ("attention", "softmax")] or after
        if chosen:
            first = min(chosen, key=lambda gap: gap.entry.number)
            found[first.entry.place] = first
    return found


def share_of(name: str, pairs: Sequence[tuple[float, float]]) -> Share:
    """The ratio of sums, and its standard error by the jackknife."""
    along, size = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    whole = float(size.sum())
    if not whole:
        return Share(name, math.nan, math.nan)
    share = float(along.sum()) / whole
    n = len(along)
    rest = size.sum() - size
    if n < 2 or not bool((rest > 0).all()):
        return Share(name, share, math.nan)
    # a sample with a large gap weighs in both sums, which leaving out one at a time sees and a
    # spread of single ratios would not
    without = (along.sum() - along) / rest
    spread = (without - without.mean()).square().sum() * (n - 1) / n
    return Share(name, share, float(spread.sqrt()))
