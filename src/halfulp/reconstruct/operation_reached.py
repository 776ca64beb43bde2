"""Which of what is read each result hangs on, asked of a kernel that nothing known explains: one
index of an operand after the other is changed, and results show where it arrives. Beside it how
results grow with an operand as a whole.

What a definition makes of the same changes says what is due, so nothing here knows an operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.operations import OperationCalls, defined, emulated, sizes_of
from halfulp.reconstruct.operation_blocks import BY_NAME
from halfulp.reconstruct.operation_mistakes import fitting, moved
from halfulp.reconstruct.operation_trials import Run, Trial

CHANGES = (-1.0, -0.5)  # times what it was: the second is seen in squares, and by scales of blocks
LONGEST = 160  # indices that are changed one by one
WORK = 2**23  # numbers that are read for them at most
OTHERS = 0.003  # of the largest change, from which on what should not arrive does
FEWEST = 8  # of which some that do not arrive are told by what they have in common
NOTHING = 0.02  # of the change that is due, below which one does not arrive
SHOWS = 0.02  # of a result, by which a change puts it off that no rounding hides
ARRIVES = 0.1  # of the largest change that is due anywhere, from which on one does
TRACE = 1e-6  # of that, above which something does
TIMES = 4.0  # an operand as a whole
EXACT = 1e-9  # of what is due, by which it is no multiple
STRAIGHT = 0.02  # of a result, by which it may differ from a multiple of itself


class Reached(NamedTuple):
    """What is said of a kernel."""

    cause: str  # its key in `CAUSES`
    text: str
    each: bool = False  # whether each index has another's data, no two the same


def reached(run: Run, one: Trial, signs: bool = False) -> Reached | None:
    """What results hang on that they should not, or do not hang on though they should; None where
    they hang on what they should, or are not finite, or differ from call to call. By `signs` alone
    where scales must not move.
    """
    calls, shapes = one.calls, one.calls.operation.shapes_of_results
    if not all(one.kernel[n].isfinite().all() for n in one.failing):
        return None
    # gradients inherit what is wrong with results
    failing = [n for n in one.failing if not n.startswith("grad_")] or list(one.failing)
    told: list[Reached] = []
    # of a block that is quantized every number goes by the largest
    by_blocks = signs or calls.options.get("format") in BY_NAME
    for by, (name, symbol) in product(CHANGES[:1] if by_blocks else CHANGES, _changes(calls)):
        for result, own, due, other in _made(run, calls, name, symbol, by, failing):
            # what is a small part of itself hangs on what it should by as little
            part = float(one.kernel[result].norm() / one.exact[result].norm().clamp_min(1e-300))
            for dim, along in enumerate(shapes[result].split()):
                size = _by(one.exact[result].abs(), dim)
                changes = _by(own, dim), _by(due, dim), _by(other, dim)
                told += _Map(result, name, symbol, along, *changes, size, part).read()
        if len(told) >= len(failing):
            break
    first = min(told, key=lambda x: _ORDER.index(x.cause), default=None)
    # where another's data stands results also grow otherwise; one index that all hang on is such as
    # holds their largest
    return first if first is not None and first.each else _powers(run, one, failing) or first


_ORDER = ("neighbor", "end", "term-missing")  # what says more before what says less


def _changes(calls: OperationCalls) -> Iterator[tuple[str, str]]:
    """Operands and gradients that arrive, with each symbol of theirs that is short enough."""
    sizes, given = sizes_of(calls), calls.operands | calls.grads
    numbers = sum(x.numel() for x in given.values())
    for name, shape in calls.operation.shapes_of_operands.items():
        for symbol in shape.split() if name in given and given[name].is_floating_point() else ():
            if 1 < sizes.get(symbol, 0) <= LONGEST and numbers * sizes[symbol] <= WORK:
                yield name, symbol


def _made(
    run: Run, calls: OperationCalls, name: str, symbol: str, by: float, failing: list[str]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Results, and by how much each index changes them: a kernel's, the definition's and the
    recipe's. None of what differs from call to call, or with the calls before, or has no number.
    """
    given, length = calls.operands | calls.grads, sizes_of(calls)[symbol]
    dim = calls.operation.shapes_of_operands[name].split().index(symbol)

    def changed(by: float, order: Tensor) -> OperationCalls:
        every = {n: x[:1].expand(length + 2, *x.shape[1:]).clone() for n, x in given.items()}
        for index in range(length):  # the last two are as they were
            every[name][index].select(dim, index).mul_(by)
        return replace(
            calls,
            operands={n: x[order] for n, x in every.items() if n in calls.operands},
            grads={n: x[order] for n, x in every.items() if n in calls.grads},
        )

    order = torch.arange(length + 2)
    asked = changed(by, order)
    result, again = run(asked), run(changed(by, order.flip(0)))
    if result is None or again is None:
        return
    made = result.tensors, defined(asked), emulated(asked, calls.operation.stock)
    # squares do not show that one has lost its sign, and results hang on them all the same
    more = [defined(changed(other, order)) for other in CHANGES if other != by]
    for of in failing:
        if of in again.tensors and torch.equal(again.tensors[of].flip(0), result.tensors[of]):
            off = [(x[of][:-1].double() - x[of][-1].double()).abs() for x in (*made, *more)]
            if all(bool(x.isfinite().all()) and not bool(x[-1].any()) for x in off):
                own, due, *others = (x[:-1] for x in off)
                yield of, own, due, torch.stack(others).amax(0)


def _by(changes: Tensor, dim: int) -> Tensor:
    """`[changed, index]`: the root of the sum of squares over all other indices."""
    other = [d for d in range(1, changes.ndim) if d != dim + 1]
    squares = changes.square()
    return (squares.sum(other) if other else squares).sqrt()


@dataclass(frozen=True)
class _Map:
    """How much of each index of an operand arrives at each of a result."""

    result: str
    name: str
    symbol: str  # of what is changed
    along: str  # of the result
    own: Tensor
    due: Tensor
    other: Tensor  # the recipe's, whose scales and roundings are of more than the definition's
    size: Tensor  # of the result, by its index
    part: float  # of its size that the kernel gives

    def read(self) -> Iterator[Reached]:
        """What is said of it."""
        # by what is changed: an operand may hold numbers of all sizes
        least = ARRIVES * self.due.amax(1, keepdim=True)
        # scales that rows share move all of them a little, and a wrong scale makes that large
        free = torch.maximum(self.due, self.other) < TRACE * least
        if self.symbol == self.along:
            free &= ~torch.eye(len(free), dtype=torch.bool)
        largest = torch.maximum(self.due, self.own).amax(1, keepdim=True)
        found = free & (self.own > OTHERS * largest)
        if not bool(found.any()):
            yield from self._lost()
        elif self.symbol == self.along and not bool((self.due > least).fill_diagonal_(False).any()):
            yield self._of_others(found)

    def _of_others(self, found: Tensor) -> Reached:
        """Whose data some indices have, where each is due its own alone."""
        columns = found.any(0)
        indices, index, length = columns.nonzero()[:, 0], int(columns.nonzero()[0, 0]), len(columns)
        own = self.own.diagonal() > NOTHING * self.due.diagonal()
        beside = " beside its own" if bool(own[columns].any()) else ""
        sources = found[:, index].nonzero()[:, 0]
        rules = [
            (text, len(torch.unique(at)) == length)
            for text, at in moved(torch.arange(length), length, self.symbol, index, sources)
            if text and bool(found[at[indices], indices].all())
        ]
        example = f"at {index} along {self.along} of that at {int(sources[0])}"
        regions = fitting(self.along, columns, ~columns) if not bool(columns.all()) else []
        known = rules and (regions or 2 * len(indices) > length)
        rule, each = rules[0] if known else ("", False)
        which = f"of what lies {rule}" if known else example
        where = f", {regions[0].text}" if regions else ""
        text = f"{self.result} is made of other {self.name}{beside}: {which}{where}"
        return Reached("neighbor", text, each)

    def _lost(self) -> Iterator[Reached]:
        """What does not arrive: of some indices nowhere, or at some none; of all of them where
        nothing is told by results without a number that is not 0.
        """
        for dim, symbol in ((1, self.symbol), (0, self.along)):
            own, due = self.own.norm(dim=dim), self.due.norm(dim=dim)
            shown = due > SHOWS * float(self.size.norm()) / len(due) ** 0.5
            gone = shown & (own < NOTHING * min(self.part, 1.0) * due)
            text = f"{self.result} does not hang on {self.name}"
            if bool(gone.all()) and bool(self.own.any()):
                yield Reached("term-missing", text)
            elif len(gone) < FEWEST or not bool((shown & ~gone).any()):
                continue
            elif bool(gone.any()) and (regions := fitting(symbol, gone, shown & ~gone)):
                cause = "end" if regions[0].kind in ("tail", "last") else "term-missing"
                yield Reached(cause, f"{text}, {regions[0].text}")


def _powers(run: Run, one: Trial, failing: list[str]) -> Reached | None:
    """An operand with which results grow otherwise than they should."""
    calls = one.calls
    given = calls.operands | calls.grads
    for name, x in given.items():
        if not x.is_floating_point():
            continue
        every = {n: t[:1].expand(3, *t.shape[1:]).clone() for n, t in given.items()}
        every[name][1] *= TIMES
        every[name][2] /= TIMES
        asked = replace(
            calls,
            operands={n: every[n] for n in calls.operands},
            grads={n: every[n] for n in calls.grads},
        )
        result = run(asked)
        if result is None:
            return None
        for of in failing:
            own = _power(result.tensors[of].double(), STRAIGHT)
            due = _power(defined(asked)[of].double(), EXACT)
            # what is held within limits does not grow: that is no other power
            if own and due is not None and own != due:
                text = f"{of} grows with {name} to the power of {own}, where {due} is due"
                return Reached("factor", text)
    return None


def _power(every: Tensor, straight: float) -> int | None:
    """By which a result grows with what is TIMES as large and as small, None where there is none:
    what saturates has one in one direction.
    """
    start, large, small = every.flatten(1)
    powers = set()
    for a, b in ((start, large), (small, start)):
        by = float(a.dot(b) / a.dot(a).clamp_min(1e-300))
        if not by > 0 or not float((b - by * a).norm()) <= straight * float(b.norm()):
            return None
        power = math.log(by, TIMES)
        powers.add(round(power) if abs(power - round(power)) < STRAIGHT else None)
    return powers.pop() if len(powers) == 1 else None
