"""One pair of operations: how far apart, how much of that is its own and how much came in, and what
rounding alone would make.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.diff.tape import Entry

ROUNDING = 0.2123
"""Root mean square of the relative error of one rounding to nearest, in units of eps, for numbers
whose logarithm is uniform: √((1 − ¼) / ln 4 / 12)."""
BEYOND = {16: 3.0, 32: 24.0}
"""How many times its floor an operation's own gap may be, by the bits of its format. Sums of
float32 differ by their order, which the floor (each operand and the result rounded once) leaves
out."""
_CACHED = 2**17
"""Numbers that are worked on at once, so that they stay in a core's cache, and that a sum in fp32
may have; sums of them are in fp64."""
_SUMMED = 1e-30, 1e30
"""Between which a sum of squares in fp32 is one."""
LEANS, LEAST_LEAN = 8.0, 0.25
"""From which t on a gap leans, and the least share of it that has to."""


def step_of(dtype: torch.dtype) -> float:
    """The relative error (rms) of one rounding to a dtype."""
    return ROUNDING * torch.finfo(dtype).eps


@dataclass
class LocalGap:
    """Sums over the batches of one operation; B − A."""

    entry: Entry  # B's
    answer: Entry | None  # A's; None: A has no such operation
    same: bool = True  # both sides make one and the same operation
    exact: bool = False  # `own` is B's error, since A's operation is B's own on a part of the batch
    replaced: bool = False  # without an answer, and A does something else in its place
    instead: torch.dtype = torch.float32  # the coarsest format of what A alone does in its module
    numbers: int = 0
    gap: float = 0.0  # Σ (B − A)²
    own: float = 0.0  # Σ (B − A's operation on B's operands)²
    inherited: float = 0.0
    size: float = 0.0  # Σ A²
    floor: float = 0.0  # Σ of squares, of both sides' roundings
    rows: int = 0
    lean: float = 0.0  # Σ over rows of the gap along A's row, as a share of it
    lean_squared: float = 0.0
    gradient: float = 0.0  # Σ (gradient of B's result − of A's)²
    gradient_size: float = 0.0

    def add(self, found: Tensor, theirs: Tensor, again: Tensor | None, floor: float) -> None:
        """One batch.

        Args:
            found: B's result.
            theirs: A's result.
            again: A's operation on B's operands; None: the same as `found`.
            floor: rms of what rounding makes, relative to A's result.
        """
        self.numbers += found.numel()
        self.same &= again is None
        size = 0.0
        sides = [_rows(x) for x in (found, theirs, found if again is None else again)]
        alike = again is None and torch.equal(found, theirs)
        for b, a, mine in _split(_block(sides[0]), *sides):
            if alike:
                size += _square(_wide(a).nan_to_num(0, 0, 0))
            else:
                size += self._add_rows(b, a, None if again is None else mine)
        self.size += size
        self.floor += floor**2 * size

    def _add_rows(self, b: Tensor, a: Tensor, mine: Tensor | None) -> float:
        gap, wide = _difference(b, a), _wide(a)
        square, size = _square(gap), _square(wide)
        # hidden scores of −inf, say: what is not finite on a side tells no distance
        if not math.isfinite(square + size):
            finite = b.isfinite() & a.isfinite()
            b, a = (x.masked_fill(~finite, 0) for x in (b, a))
            mine = None if mine is None else mine.masked_fill(~finite, 0)
            gap, wide = _difference(b, a), _wide(a)
            square, size = _square(gap), _square(wide)
        self.gap += square
        if mine is None:
            self.inherited += square
            return size
        own = _difference(b, mine)
        self.own += _square(own)
        wide = wide.to(own.dtype)
        # rounding has no direction: what goes along A's own row is a wrong scale, or another eps
        lengths, along = torch.linalg.vecdot(wide, wide), torch.linalg.vecdot(own, wide)
        self.inherited += _square(gap - own)
        along = (along / lengths)[(lengths > 0) & lengths.isfinite()].double()
        self.rows += along.numel()
        self.lean += float(along.sum())
        self.lean_squared += float(along.square().sum())
        return size

    def add_gradient(self, found: Tensor, theirs: Tensor) -> None:
        """The gradients of the results, of one batch."""
        if found.shape == theirs.shape:
            gap, size, _ = squares(found, theirs)
            self.gradient += gap
            self.gradient_size += size

    @property
    def relative_gap(self) -> float:
        """‖B − A‖ / ‖A‖."""
        return _ratio(self.gap, self.size)

    @property
    def relative_own(self) -> float:
        """The operation's own part, relative to A's result."""
        return _ratio(self.own, self.size)

    @property
    def relative_inherited(self) -> float:
        """What came in with the operands, relative to A's result."""
        return _ratio(self.inherited, self.size)

    @property
    def relative_floor(self) -> float:
        """What rounding operands and result once on each side makes, relative to A's result."""
        return _ratio(self.floor, self.size)

    @property
    def over_floor(self) -> float:
        """The own gap in floors; NaN where there is no floor."""
        return _ratio(self.own, self.floor) if self.floor else math.nan

    @property
    def beyond(self) -> bool:
        """Whether the own gap is more than rounding in both sides' formats explains."""
        if self.same or not self.own:
            return False
        if self.answer is None:
            # with nothing of A's to make again, the coarsest format that A uses there has to do
            wide = torch.finfo(self.instead).bits > 16
            return self.relative_own > BEYOND[32 if wide else 16] * step_of(self.instead)
        bits = min(torch.finfo(x.coarsest).bits for x in (self.answer, self.entry))
        return self.over_floor > BEYOND[16 if bits <= 16 else 32]

    @property
    def coarser(self) -> bool:
        """Whether one side rounds here to fewer bits than the other."""
        if self.same or not self.own:
            return False
        return self.answer is None or step_of(self.entry.coarsest) != step_of(self.answer.coarsest)

    @property
    def leans(self) -> bool:
        """Whether the own gap goes along A's rows, or against them, as no rounding does."""
        mean, t = self.leaning
        compared = not self.same and not self.exact and self.answer is not None
        return compared and abs(t) > LEANS and abs(mean) > LEAST_LEAN * self.relative_own

    @property
    def parts(self) -> bool:
        """Whether the two sides part here by more than equal arithmetic does."""
        return self.beyond or self.leans or (self.coarser and self.answer is not None)

    @property
    def leaning(self) -> tuple[float, float]:
        """Mean of the gap along A's rows, as a share of them, and its t over rows."""
        if self.rows < 2:
            return (self.lean, math.nan)
        mean = self.lean / self.rows
        # a difference of nearly equal sums, which rounding may bring below 0
        spread = max(0.0, self.lean_squared / self.rows - mean**2) / (self.rows - 1)
        if not spread:
            return mean, math.inf if mean else 0.0
        return mean, mean / math.sqrt(spread)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)


def _block(rows: Tensor) -> int:
    """Rows that are worked on at once."""
    return max(1, _CACHED // max(1, rows.shape[-1]))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _difference(b: Tensor, a: Tensor) -> Tensor:
    """b − a in fp32 where that holds both (it is rounded to 2⁻²⁴ of itself), else in fp64."""
    wide = torch.float64 if torch.float64 in (b.dtype, a.dtype) else torch.float32
    return b.to(wide) - a.to(wide)


def _square(x: Tensor) -> float:
    """Σ x², in fp64 where fp32 does not hold it."""
    flat = x.flatten()
    found = float(torch.dot(flat, flat))
    if x.dtype == torch.float64 or _SUMMED[0] < found < _SUMMED[1]:
        return found
    if not found and not bool(flat.any()):
        return 0.0
    return _square(flat.double())


def _split(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, len(tensors[0]), rows):
        yield tuple(x[start : start + rows] for x in tensors)


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of as many numbers, flat, a block at a time."""
    return _split(_CACHED, *(x.flatten() for x in tensors))


def squares(b: Tensor, a: Tensor) -> tuple[float, float, float]:
    """Σ (b − a)², Σ a² and Σ (b − a) a, a block at a time."""
    found = [0.0, 0.0, 0.0]
    for x, y in blocks(b, a):
        gap, wide = _difference(x, y), _wide(y)
        found[0] += _square(gap)
        found[1] += _square(wide)
        found[2] += float(torch.dot(gap, wide.to(gap.dtype)))
    return found[0], found[1], found[2]


def added(
    sums: dict[str, tuple[float, float, float]], name: str, found: Tensor, theirs: Tensor
) -> None:
    """Add the `squares` of one more batch to those of a parameter."""
    before = sums.get(name, (0.0, 0.0, 0.0))
    gap, size, along = (x + y for x, y in zip(before, squares(found, theirs), strict=True))
    sums[name] = gap, size, along


def _ratio(part: float, whole: float) -> float:
    if not whole:
        return math.inf if part else 0.0
    return math.sqrt(part / whole)
