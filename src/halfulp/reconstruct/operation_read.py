"""The numbers that a step has in a kernel, solved for from its results, and what they are of those
that the definition has: a power of them, so many times as large, within limits, on a grid, of so
few bits, or times another step.

Where rows or elements have one number each, results show it: as many as they are, they are found
at once, and say of which function the kernel is before any is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.formats import Format
from halfulp.operations import OperationCalls, Rounding
from halfulp.reconstruct.operation_mistakes import cut, flushed, rounded
from halfulp.reconstruct.operation_numbers import numbered, times, values_of, with_constant
from halfulp.reconstruct.operation_steps import OPERAND, RESULT, said, shapes_of_steps
from halfulp.reconstruct.operation_trials import Trial
from halfulp.reconstruct.operation_ways import Way, put

BY = 0.05  # of its size, by which a step is moved to see what hangs on it
UNKNOWNS = 0.6  # of the numbers that fail, which the values of such a step may be at most
TURNS = 4  # of Newton's way, each from where the last one ended
FARTHEST = 20.0  # times its size, by which a number is moved at once
BEGINS = 0.8  # share of an error from which on it begins at a step
SPREAD = 0.05  # of logarithms, below which numbers are too alike to tell a power
STRAIGHT = 0.99  # of the variance of logarithms, that another step has to explain
OTHER = 0.04  # a power that is nearer to 1 is none
POOLED = 6  # other calls that are read with one
POINTS = 16  # numbers that tell of which function a step is another
CURVE = 256  # points of a curve at most
FORETOLD = 0.1  # share of its squared distance from 1 by which half of one may miss the other
SLIGHTLY = 0.02  # up to which another function is an approximation
GONE = 0.05  # of what it should be, below which a number is lost
LARGE = 0.3  # of the largest change, from which on a number is at a limit


@dataclass(frozen=True)
class Read:
    """A step, its numbers in the definition and in the kernel, and how well results show each."""

    name: str
    own: Tensor
    found: Tensor
    shown: Tensor  # weights
    share: float  # of the error that these numbers explain


def read_ways(trial: Trial, base: Rounding, others: Sequence[Trial] = ()) -> Iterator[Way]:
    """What the numbers that are read off say, of the step that explains most first, and of results
    themselves; of these other calls' as well.
    """
    written = [n for n in trial.failing if not n.startswith("grad_")]
    results = [
        Read(RESULT + n, trial.exact[n][0], x, torch.ones_like(x), 1.0)
        for n in written
        if bool((x := trial.kernel[n][0]).isfinite().all() & trial.exact[n].isfinite().all())
    ]
    for read in (*steps_read(trial, base), *results):
        for relation in _RELATIONS:
            yield from relation(trial, read)
    for name in written:
        yield from _lost(name, (trial, *_also_wrong(trial, others)))


def _also_wrong(trial: Trial, others: Sequence[Trial]) -> list[Trial]:
    """Other calls of which as much fails, with numbers throughout."""
    return [t for t in others if {*t.failing} >= {*trial.failing} and not t.nonfinite][:POOLED]


def _lost(result: str, trials: Sequence[Trial]) -> Iterator[Way]:
    """Elements of a result that are 0 where they, or a step that has as many, are below a size on
    all of these calls.
    """
    gaps: dict[str, list[float]] = {}
    for t in trials:
        due, found = t.exact[result][0], t.kernel[result][0]
        gone = (found.abs() <= GONE * due.abs()) & (due != 0)
        for name, values in ({RESULT + result: due} | values_of(t.calls)).items():
            gap = gaps.setdefault(name, [0.0, math.inf])
            if values.shape == due.shape and bool((due != 0).any()):
                size = values.double().abs()
                gap[0] = max(gap[0], float(size[gone].max()) if bool(gone.any()) else 0.0)
                kept = size[~gone & (due != 0)]
                gap[1] = min(gap[1], float(kept.min()) if kept.numel() else math.inf)
    for name, (most, least) in gaps.items():
        if 0 < most < least < math.inf:
            limit = next(x for x in _round_numbers(most, least) if most < x <= least)
            text = f"{said(name)} is 0 where it is below {limit:.3g}"
            yield Way("limited", text, {name: partial(flushed, limit)})


def _round_numbers(most: float, least: float) -> Iterator[float]:
    """Numbers between two as an author may have written them; the larger one where none is."""
    for base in (10.0, 2.0, math.e):
        yield base ** math.floor(math.log(least, base))
    yield from (float(f"{(most * least) ** 0.5:.{digits}g}") for digits in (1, 2))
    yield least


def function_ways(trial: Trial, base: Rounding, others: Sequence[Trial] = ()) -> Iterator[Way]:
    """A step that is another function of its exact value, or of its mantissa, as approximations
    are: read off a call's numbers, every second of which foretells those between. Other calls'
    are read with it, since one may hold few numbers.
    """
    asked = _also_wrong(trial, others)
    results = [n for n in trial.failing if not n.startswith("grad_")] or list(trial.failing)
    for first in steps_read(trial, base, 1.0):
        more = (_read(t, base, first.name, results) for t in asked)
        reads = [first, *(read for read in more if read is not None and read.share > BEGINS)]
        # of a row that is normalized each call's numbers are known but for a factor
        most = max(reads, key=lambda read: torch.unique(read.own).numel())
        some = ([first], [most] if most is not first else [], reads if len(reads) > 1 else [])
        for every in some:
            if every:
                points = (torch.cat(x) for x in zip(*map(_shown, every), strict=True))
                yield from _curves(first.name, *points)


def _curves(name: str, own: Tensor, found: Tensor, weight: Tensor) -> Iterator[Way]:
    """A step that is such a function."""
    if own.numel() < POINTS:
        return
    for of, key in (_KEYS if bool((own * own[0] > 0).all()) else _SIGNED).items():
        at, ratio, due = _curve(key(own), found / own, weight)
        even = _between(at[::2], ratio[::2], at[1::2])
        left = (due[1::2] * (even - ratio[1::2]).square()).sum()
        if float(left) > FORETOLD * float((due[1::2] * (ratio[1::2] - 1).square()).sum()):
            continue
        least, most = float(ratio.min()), float(ratio.max())
        slight = max(1 - least, most - 1) < SLIGHTLY
        told = (
            f"off by up to {100 * max(1 - least, most - 1):.2g} %"
            if slight
            else f"{least:.3g} to {most:.3g} times what it should be"
        )
        text = f"{said(name)} is another function of its {of}: {told}"
        alter = partial(_as_curve, key, at, ratio)
        yield Way("coarser" if slight else "term-missing", text, {name: alter}, sketched=True)


def _shown(read: Read) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers that are shown, as they should be and as they are, and by how much they are."""
    here = (read.shown > 0) & (read.own != 0) & read.found.isfinite()
    own, found = read.own[here], read.found[here]
    weight = read.shown[here] * own**2
    return own, found, weight / weight.sum().clamp_min(1e-300)


def _of_mantissa(x: Tensor) -> Tensor:
    return x.abs().clamp_min(1e-300).log2() % 1


_KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "value": lambda x: x.abs().clamp_min(1e-300).log2(), "mantissa": _of_mantissa,
}  # fmt: skip
_SIGNED: dict[str, Callable[[Tensor], Tensor]] = {"value": lambda x: x}


def _curve(key: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Points of a curve in order, means of neighbors where there are many between the first and the
    last, and their weights.
    """
    parts = list(key.argsort().tensor_split(min(len(key), CURVE)))
    parts = [(key == key.min()).nonzero()[:, 0], *parts, (key == key.max()).nonzero()[:, 0]]
    due = torch.stack([weight[at].sum() for at in parts])
    means = [
        torch.stack([(weight[at] * x[at]).sum() for at in parts]) / due.clamp_min(1e-300)
        for x in (key, value)
    ]
    return *means, due  # type: ignore[return-value]


def _between(at: Tensor, value: Tensor, key: Tensor) -> Tensor:
    """A curve's values, those of its ends beyond them."""
    at = at.contiguous()
    right = torch.searchsorted(at, key.contiguous()).clamp(1, len(at) - 1)
    low, high = at[right - 1], at[right]
    share = ((key - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
    return value[right - 1] * (1 - share) + value[right] * share


def _as_curve(key: Callable[[Tensor], Tensor], at: Tensor, ratio: Tensor, x: Tensor) -> Tensor:
    return (x * _between(at, ratio, key(x.double()))).to(x.dtype)


def steps_read(trial: Trial, base: Rounding, most: float = UNKNOWNS) -> list[Read]:
    """Steps and operands other numbers of which make the error, those that do so best first; of
    `most` values for each number that fails.
    """
    key = ("read", trial.failing, base.name, most)
    if key not in trial.known:
        trial.known[key] = _all_read(trial, base, most)
    return trial.known[key]  # type: ignore[no-any-return]


def _all_read(trial: Trial, base: Rounding, most: float) -> list[Read]:
    given = {OPERAND + n: x[0].shape for n, x in trial.calls.operands.items()
             if x.is_floating_point()}  # fmt: skip
    shapes = shapes_of_steps(trial.calls) | given
    # a kernel may take its gradient from another number than its result
    results = [n for n in trial.failing if not n.startswith("grad_")]
    found: list[Read] = []
    for name, shape in shapes.items():
        for of in (results, list(trial.failing))[: 1 + (len(results) < len(trial.failing))]:
            numbers = sum(trial.kernel[n].numel() for n in of)
            read = (
                _read(trial, base, name, of)
                if 0 < shape.numel() <= most * numbers and trial.hangs_on(base, name) & {*of}
                else None
            )
            if read is not None and read.share > BEGINS:
                found.append(read)
                break
    return sorted(found, key=lambda read: (round(read.share, 2), -read.own.numel()), reverse=True)


def _read(trial: Trial, base: Rounding, name: str, of: list[str]) -> Read | None:
    """Newton's way to the numbers that make these results."""
    seen: list[Tensor] = []

    def kept(x: Tensor) -> Tensor:
        seen.append(x.detach().double())
        return x

    if trial.emulated(base, (Way("", "", {name: kept}),)) is None or not seen:
        return None
    own = seen[0]
    if not own.isfinite().all() or not own.any():  # zeros carry a gradient alone
        return None
    # up and down by chance where all up will not do: a row that is normalized does not see that
    # all of it has grown
    by_chance = torch.randint(2, own.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = _solved(trial, base, name, of, own, torch.ones(own.shape))
    if found is None or found.share < BEGINS:
        other = _solved(trial, base, name, of, own, by_chance)
        if found is None or (other is not None and other.share > found.share):
            return other
    return found


def _solved(
    trial: Trial, base: Rounding, name: str, of: list[str], own: Tensor, signs: Tensor
) -> Read | None:
    """The same from moves of these signs."""
    size = float(own.square().mean().sqrt()) or 1.0
    value, best = own, (0.0, own, own * 0)
    for _ in range(TURNS):
        by = BY * signs * torch.where(value == 0, size, value)
        start, moved = (trial.emulated(base, (put(name, x),)) for x in (value, value + by))
        if start is None or moved is None:
            return None
        slope = along = torch.zeros(own.shape, dtype=torch.float64)
        for n in of:
            change = (moved[n] - start[n])[0].nan_to_num(0.0, 0.0, 0.0)
            off = (trial.kernel[n] - start[n])[0].nan_to_num(0.0, 0.0, 0.0)
            squared, product = (_summed_to(x, own.shape) for x in (change * change, change * off))
            if squared is not None and product is not None:
                weight = 1 / max(trial.errors[n], 1e-300)
                slope, along = slope + weight * squared, along + weight * product
        if not bool(slope.any()):
            return None
        moves = along / slope.clamp_min(1e-300)
        value = value + moves.clamp(-FARTHEST / BY, FARTHEST / BY) * by
        made = trial.emulated(base, (put(name, value),))
        if made is None:
            return None
        share = sum(1 - trial.left(made, n) / max(trial.errors[n], 1e-300) for n in of) / len(of)
        if share < best[0] + 1e-4:
            break
        best = share, value, slope / by.square()
    share, value, shown = best
    return Read(name, own, value, shown, share)


def _summed_to(x: Tensor, shape: torch.Size) -> Tensor | None:
    x = x.reshape(x.shape + (1,) * (len(shape) - x.ndim))
    try:
        return x.sum_to_size(shape)
    except RuntimeError:
        return None


def _logarithms(read: Read) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of both numbers where they have one sign, and by how much results show them."""
    here = (read.own * read.found > 0) & (read.shown > 0)
    if int(here.sum()) < 3:
        return None
    own, found = read.own[here].abs(), read.found[here].abs()
    weight = read.shown[here] * found.square()
    return own.log(), found.log(), weight / weight.sum()


def _line(x: Tensor, y: Tensor, weight: Tensor) -> tuple[float, float, float]:
    """Slope and start of the line through points, and the share of the variance on it."""
    dx, dy = x - (weight * x).sum(), y - (weight * y).sum()
    xx, yy, xy = ((weight * a * b).sum() for a, b in ((dx, dx), (dy, dy), (dx, dy)))
    slope = float(xy / xx.clamp_min(1e-300))
    start = float((weight * (y - slope * x)).sum())
    return slope, start, float(xy * xy / (xx * yy).clamp_min(1e-300))


def _powers(trial: Trial, read: Read) -> Iterator[Way]:
    if (logs := _logarithms(read)) is None:
        return
    x, y, weight = logs
    spread = float((weight * (x - (weight * x).sum()).square()).sum()) ** 0.5
    power, _, straight = _line(x, y, weight)
    if spread < SPREAD or straight < STRAIGHT or abs(power - 1) < OTHER:
        return
    near = round(4 * power) / 4
    power = near if abs(near - power) < OTHER else float(f"{power:.3g}")
    start = float((weight * (y - power * x)).sum())
    yield from numbered(trial, partial(_to_the_power, read.name, power), math.exp(start))


def _to_the_power(name: str, power: float, factor: float, told: str = "") -> Way:
    def alter(x: Tensor) -> Tensor:
        return factor * x.sign() * x.abs() ** power

    of = f", times {told or f'{factor:.3g}'}" if abs(factor - 1) > OTHER else ""
    factor = factor if of else 1.0
    text = f"{said(name)} is what it should be to the power of {power:g}{of}"
    return Way("factor", text, {name: alter})


def _straight(trial: Trial, read: Read) -> Iterator[Way]:
    """A factor, a constant beside it, or both."""
    own, found, weight = (t.flatten() for t in (read.own, read.found, read.shown))
    weight = weight / weight.sum()
    factor = float((weight * own * found).sum() / (weight * own * own).sum().clamp_min(1e-300))
    yield from numbered(trial, partial(times, read.name), factor)
    constant = float((found - own)[weight > 0].median())
    for number in dict.fromkeys((float(f"{constant:.1g}"), constant)):
        yield from numbered(trial, partial(with_constant, read.name), number)


def _limits(_: Trial, read: Read) -> Iterator[Way]:
    change = torch.where(read.shown > 0, read.found - read.own, 0.0)
    for word, sign, end in (("least", 1, "min"), ("most", -1, "max")):
        risen = sign * change
        here = risen > LARGE * risen.max()
        # a limit that all are at is a constant, which fits whatever is alike
        if bool((risen > 0).any()) and 1 < int(here.sum()) < here.numel():
            limit = float(f"{float(read.found[here].median()):.3g}")
            text = f"{said(read.name)} is at {word} {limit:g}"
            yield Way("limited", text, {read.name: partial(torch.clamp, **{end: limit})})


def _within_logarithms(_: Trial, read: Read) -> Iterator[Way]:
    """A logarithm, or its negative, of a number below 1 that has another added to it."""
    sign = -1.0 if float(read.own.sum()) > 0 else 1.0
    own, risen = sign * read.own, sign * (read.found - read.own)
    here = (read.shown > 0) & (risen > LARGE * risen.max()) & (risen > 0)
    if not bool(here.any()):
        return
    added = own[here] + torch.expm1(risen[here]).log()
    number = math.exp(min(0.0, float(added.median())))
    for by in dict.fromkeys((float(f"{number:.1g}"), number)):
        if 0 < by < 1:
            text = f"{said(read.name)} is a logarithm of what has {by:.3g} added to it"
            yield Way("limited", text, {read.name: partial(_added_within, sign, by)})


def _added_within(sign: float, by: float, x: Tensor) -> Tensor:
    return sign * torch.logaddexp(sign * x, torch.full_like(x, math.log(by)))


def _beside_another(trial: Trial, read: Read) -> Iterator[Way]:
    """The larger or smaller of a step and another step or operand."""
    for other, values in values_of(trial.calls).items():
        if values.shape == read.own.shape and other != read.name:
            for word, choose in (("larger", torch.maximum), ("smaller", torch.minimum)):
                text = f"{said(read.name)} is the {word} of itself and {said(other)}"
                way = partial(_chosen, read.name, other, choose)
                yield Way("limited", text, of_calls=way)


def _chosen(name: str, other: str, choose: Any, calls: OperationCalls) -> Way:
    return Way("", "", {name: lambda x: choose(x, values_of(calls)[other].to(x.dtype))})


def _grids(_: Trial, read: Read) -> Iterator[Way]:
    """Multiples of one number, as codes and fixed points are."""
    change = (read.found - read.own)[read.shown > 0].abs()
    most = float(change.quantile(0.98)) if change.numel() < 2**20 else 0.0
    if not most > 0:
        return
    bits = -math.log2(2 * most)
    for k in (math.floor(bits), math.ceil(bits)):
        for grid, told in ((2.0**-k, f"2^{-k}"), (1 / (2.0**k - 1) if k > 0 else 0.0,
                                                   f"1 / {2 ** max(k, 0) - 1}")):  # fmt: skip
            for how, alter in (("rounded", torch.round), ("cut", torch.trunc)) if grid else ():
                text = f"{said(read.name)} is {how} to multiples of {told}"
                yield Way("coarser", text, {read.name: partial(_on_grid, grid, alter)})


def _on_grid(grid: float, alter: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return alter(x / grid) * grid


def _few_bits(_: Trial, read: Read) -> Iterator[Way]:
    own = read.own.abs()
    change = ((read.found - read.own).abs() / own)[(read.shown > 0) & (own > 0)]
    most = float(change.quantile(0.9)) if 0 < change.numel() < 2**20 else 0.0
    if not 2.0**-22 < most < 0.5:
        return
    bits = -math.log2(most) - 1
    for k in range(math.floor(bits) - 1, math.ceil(bits) + 2):
        for how, alter in (("rounded", rounded), ("cut", cut)) if 1 <= k <= 22 else ():
            text = f"{said(read.name)} is {how} to {k} bits"
            yield Way("coarser", text, {read.name: alter(Format(f"e8m{k}", 8, k))})


def _with_another(trial: Trial, read: Read) -> Iterator[Way]:
    """The same times a power of another step or operand."""
    if (logs := _logarithms(read)) is None:
        return
    x, y, weight = logs
    here = (read.own * read.found > 0) & (read.shown > 0)
    for other, values in values_of(trial.calls).items():
        try:
            wide = values.double().expand(read.own.shape)[here].abs()
        except RuntimeError:
            continue
        if other == read.name or not bool((wide > 0).all()):
            continue
        power, _, straight = _line(wide.log(), y - x, weight)
        near = round(2 * power) / 2
        if straight > STRAIGHT and near and abs(near - power) < OTHER:
            start = float((weight * (y - x - near * wide.log())).sum())
            make = partial(_times_another, read.name, other, near)
            yield from numbered(trial, make, math.exp(start))


def _times_another(name: str, other: str, power: float, factor: float, told: str = "") -> Way:
    def of(calls: OperationCalls) -> Way:
        by = factor * values_of(calls)[other].abs() ** power
        return Way("", "", {name: lambda x: x * by.to(x.dtype)})

    whole = said(other) if power == 1 else f"{said(other)}^{power:g}"
    number = f"{told or f'{factor:.3g}'} × " if abs(factor - 1) > OTHER else ""
    factor = factor if number else 1.0
    return Way("factor", f"{said(name)} is {number}{whole} times what it should be", of_calls=of)


_RELATIONS = (
    _straight,
    _powers,
    _limits,
    _within_logarithms,
    _beside_another,
    _with_another,
    _grids,
    _few_bits,
)
