"""The table of mistakes: what kernels may do to a tensor on its way through any operation, each a
change of that tensor, everywhere or in a region of it.

Nothing here knows an operation: a tensor is an operand, a step, a gradient or a result by its
values and its lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.formats import BF16, FP16, OCP_E4M3, OCP_E5M2, TF32, Format, round_to

Alter = Callable[[Tensor], Tensor]
AlongAlter = Callable[..., Tensor]  # of a tensor, along `dim`

LIMITS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 16.0, 20.0, 30.0, 32.0, 50.0, 64.0, 80.0,
          88.0, 100.0, 240.0, 448.0, 57344.0, 65504.0,
          *(float(2**n - less) for n in range(7, 18) for less in (0, 1)))  # fmt: skip
OF_FORMATS = (1.0, 240.0, 448.0, 57344.0, 65504.0)  # those of gradients
_BELOW = (
    2.0**-24,
    1e-6,
    2.0**-14,
    1e-4,
    2.0**-12,
    1e-3,
    2.0**-8,
    1e-2,
)  # of what may be flushed to 0
_FACTORS = {-1.0: "has the other sign", 0.5: "is half of what it should be",
            2.0: "is twice what it should be"}  # fmt: skip
_LOST = 0.001  # share of a tensor below such a number from which on that shows
CAPS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0)  # of logits, as models have them
BLOCKS = (8, 16, 32, 64)  # past the last of which an end is left out
_SCALED_FP8 = Format("e8m3", 8, 3)


class Mistake(NamedTuple):
    """One thing that may happen to a tensor; `text` follows its name."""

    cause: str
    text: str
    alter: Alter


class AlongMistake(NamedTuple):
    """One along a dimension."""

    cause: str
    text: str
    alter: AlongAlter


class Region(NamedTuple):
    """A part of the indices along one symbol."""

    text: str
    symbol: str
    rule: Callable[[int], Tensor]  # of so many, which
    kind: str = (
        ""  # "tail" of what no whole block covers, "modulo", "half", "first", "last", "rest"
    )

    def mask(self, shape: torch.Size, sizes: dict[str, int]) -> Tensor | None:
        """What of a tensor is in it; None where no dimension is of that length. Of two that are, it
        is the one where the symbol stands among the operand's.
        """
        length = sizes.get(self.symbol, 0)
        dims = [d for d, n in enumerate(shape) if n == length]
        if not dims:
            return None
        dim = dims[0] if self.symbol == next(iter(sizes)) else dims[-1]
        here: Tensor = self.rule(length).view(-1, *(1,) * (len(shape) - dim - 1))
        return here


def padded(block: int, n: int) -> int:
    """So many, up to a whole block."""
    return -(-n // block) * block


def _past(block: int, n: int) -> Tensor:
    return torch.arange(n) >= n // block * block


def regions(symbol: str) -> Iterator[Region]:
    """Parts that kernels treat otherwise: ends, every second, first and last blocks."""
    odd, even = (partial(lambda of, n: torch.arange(n) % 2 == of, of) for of in (1, 0))
    yield Region(f"where {symbol} is odd", symbol, odd, "modulo")
    yield Region(f"where {symbol} is even", symbol, even, "modulo")
    for block in (4, 8, 16, 32, 64, 128):
        rule = partial(_past, block)
        yield Region(f"past the last whole {block} along {symbol}", symbol, rule, "tail")
    late, early = (lambda n: torch.arange(n) >= n // 2), (lambda n: torch.arange(n) < n // 2)
    yield Region(f"in the last half along {symbol}", symbol, late, "half")
    yield Region(f"in the first half along {symbol}", symbol, early, "half")
    for count in (1, 2, 4, 8, 16, 32, 64):
        these = f"{count} along {symbol}" if count > 1 else f"along {symbol}"
        first = partial(lambda c, n: torch.arange(n) < c, count)
        last = partial(lambda c, n: torch.arange(n) >= n - c, count)
        rest = partial(lambda c, n: torch.arange(n) >= c, count)
        yield Region(f"at the first {these}", symbol, first, "first")
        yield Region(f"at the last {these}", symbol, last, "last")
        yield Region(f"after the first {these}", symbol, rest, "rest")


def fitting(symbol: str, here: Tensor, clean: Tensor) -> list[Region]:
    """Regions that hold every index that is known to be in one and none that is known not to be:
    those that are common, and so many in a row of every third, fourth … 64th.
    """
    every, length = list(regions(symbol)), len(here)
    for block in (3, 4, 5, 6, 7, 8, 16, 32, 64):
        seen = sorted({int(i) % block for i in here.nonzero()[:, 0]})
        if seen and seen[-1] - seen[0] < block - 1 and length >= 2 * block:
            low, high = seen[0], seen[-1]
            of = f"{low} to {high}" if low < high else f"{low}"
            rule = partial(_of_every, block, low, high)
            every.append(Region(f"where {symbol} modulo {block} is {of}", symbol, rule, "modulo"))
    places = here.nonzero()[:, 0]
    if len(places):
        first, last = int(places[0]), int(places[-1])
        start, end = partial(_between, first, length), partial(_between, 0, last)
        every.append(Region(f"from {first} along {symbol} on", symbol, start))
        every.append(Region(f"up to {last} along {symbol}", symbol, end))
    rules = [(region, region.rule(length)) for region in every]
    return [r for r, held in rules if bool(held[here].all()) and not bool(held[clean].any())]


def _of_every(block: int, low: int, high: int, n: int) -> Tensor:
    place = torch.arange(n) % block
    return (place >= low) & (place <= high)


def _between(low: int, high: int, n: int) -> Tensor:
    place = torch.arange(n)
    return (place >= low) & (place <= high)


def moved(
    place: Tensor, length: int, symbol: str, known: int, sources: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Rules by which an index is another, the plain ones first: such as send the `known`-th of some
    places to one of these sources.
    """
    yield "", place
    for other in map(int, sources):
        by = (other - int(place[known]) + length // 2) % length - length // 2
        if by:
            side = "before" if by < 0 else "after"
            yield f"{abs(by)} along {symbol} {side}", (place + by) % length
        yield f"at {other} along {symbol}", torch.full_like(place, other)
    for block in (2, 4, 8, 16, 32, 64, 128):
        if block < length:
            yield f"at the first of every {block} along {symbol}", place // block * block
            yield f"at the index modulo {block} along {symbol}", place % block


def cut(fmt: Format) -> Alter:
    """Rounding toward zero."""
    return lambda x: round_to(x.contiguous(), fmt, rounding="toward_zero")


def rounded(fmt: Format) -> Alter:
    """Rounding to nearest."""
    return lambda x: round_to(x.contiguous(), fmt)


def roundings(own: Format, low: str, holds: bool, result: bool) -> Iterator[Mistake]:
    """A tensor rounded: to `own`, whose cause is `low`, unless it `holds` no more anyway; cut,
    where it is a `result` that is another cause; to coarser formats.
    """
    if not holds:
        yield Mistake(low, f"is rounded to {own}", rounded(own))
    if result or not holds:
        yield Mistake("result-cut" if result else low, f"is cut to {own}", cut(own))
    for fmt in (FP16, BF16, OCP_E4M3, OCP_E5M2, _SCALED_FP8):
        if fmt is not own:
            told = "fp8 of a scale of its own" if fmt is _SCALED_FP8 else str(fmt)
            yield Mistake("coarser", f"passes through {told}", rounded(fmt))


def of_tf32(low: str) -> Iterator[Mistake]:
    """What tensor cores make of operands in float32, and of what they are given uncut."""
    for how, alter in (("rounded", rounded), ("cut", cut)):
        yield Mistake(low, f"is {how} to {TF32}", alter(TF32))


def rare_roundings(own: Format, low: str, result: bool) -> Iterator[Mistake]:
    """Roundings that few kernels have."""
    yield from of_tf32(low)
    for way in ("down", "up"):
        alter = partial(_directed, own, way)
        yield Mistake("result-cut" if result else low, f"is rounded {way} to {own}", alter)
    yield Mistake("coarser", "is rounded to integers", torch.round)
    for per, dim in (("the largest", None), ("the largest of a row", -1)):
        for fmt in (OCP_E4M3, OCP_E5M2):
            text = f"passes through {fmt}, scaled by {per}"
            yield Mistake("coarser", text, partial(_scaled, fmt, dim))


def random_errors(low: str, result: bool, chance: torch.Generator) -> Iterator[Mistake]:
    """Errors that no two calls share: such as rounding by random numbers makes, or of any size."""
    for fmt in (BF16, FP16, OCP_E4M3):
        # where a result's own rounding follows, variances alone do not do
        alter = partial(_stochastic if result else _by_chance, fmt, chance)
        yield Mistake(low, f"is rounded to {fmt} by random numbers", alter)
    yield Mistake("", "were off", lambda x: x * (1 + torch.randn(x.shape, generator=chance)))


def _stochastic(fmt: Format, chance: torch.Generator, x: Tensor) -> Tensor:
    seed = int(torch.randint(0, 1 << 31, (), generator=chance))
    return round_to(x.contiguous(), fmt.with_(rounding="stochastic"), seed=seed)


def _by_chance(fmt: Format, chance: torch.Generator, x: Tensor) -> Tensor:
    """Errors of the variances of those that stochastic rounding makes, none of them rare."""
    x = x.contiguous()
    below, above = (round_to(x, fmt, rounding=way) for way in ("down", "up"))
    size = ((x - below) * (above - x)).sqrt().nan_to_num(0.0)
    return x + size * torch.randn(x.shape, generator=chance)


def _scaled(fmt: Format, dim: int | None, x: Tensor) -> Tensor:
    """Through a format whose largest number the largest one becomes."""
    sizes = x.abs().nan_to_num(0.0, 0.0, 0.0)
    whole = sizes.amax() if dim is None or not x.ndim else sizes.amax(dim, keepdim=True)
    scale = whole.clamp_min(1e-30) / fmt.max
    return round_to((x / scale).contiguous(), fmt) * scale


def _directed(fmt: Format, way: str, x: Tensor) -> Tensor:
    return round_to(x.contiguous(), fmt, rounding=way)  # type: ignore[arg-type]


def beside_one(own: Format) -> Iterator[Mistake]:
    """A share, from 0 to 1, as it comes out of 1 + x or of 2 x − 1."""
    for times in (1, 2):
        alter = partial(_beside_1, fmt=own, times=times)
        yield Mistake("step-low", f"loses what {own} does not hold beside 1", alter)


def _beside_1(x: Tensor, fmt: Format, times: int) -> Tensor:
    if not bool(((x >= 0) & (x <= 1)).all()):
        return x
    by = 1 if times == 1 else -1
    return (round_to(times * x + by, fmt) - by) / times


def other_values(values: Tensor | None) -> Iterator[Mistake]:
    """Values left out, taken as 1, negated, held within limits or flushed; of gradients, whose
    values are not known, the limits of formats.
    """
    yield Mistake("term-missing", "is left out", torch.zeros_like)
    yield Mistake("term-missing", "is taken as 1", torch.ones_like)
    for by, text in _FACTORS.items():
        yield Mistake("factor", text, partial(torch.mul, other=by))
    for least in (0, 1):
        low = partial(torch.clamp, min=least)
        yield Mistake("limited", f"is at least {least}", low)
    largest = float(values.abs().amax()) if values is not None and values.numel() else 0.0
    for most in OF_FORMATS if values is None else LIMITS:
        if values is None or largest / 100 < most < largest:
            ends = partial(torch.clamp, min=-most, max=most)
            yield Mistake("limited", f"is held within ±{most:g}", ends)


def rare_values(values: Tensor | None) -> Iterator[Mistake]:
    """Values that are flushed to 0, or in the place of which stands another power of them; of large
    ones those that a table does not hold, left out or read from its beginning.
    """
    for least in _BELOW:
        few = values is not None and float((values.abs() < least).double().mean()) < _LOST
        if not few and (values is None or bool(values.any())):
            alter = partial(flushed, least)
            yield Mistake("limited", f"is 0 where it is below {least:.2g}", alter)
    largest = float(values.abs().amax()) if values is not None and values.numel() else 0.0
    for most in CAPS:
        if largest > most / 8:
            alter = partial(_capped, most)
            yield Mistake("limited", f"is capped softly, by {most:g} tanh(x / {most:g})", alter)
    for most in (2.0**n for n in range(7, 18)):
        if largest / 256 < most <= largest:
            alter = partial(_within, most)
            yield Mistake("limited", f"is left out where it is {most:g} or above", alter)
            yield Mistake("limited", f"is taken modulo {most:g}", partial(torch.fmod, other=most))
    yield Mistake("term-missing", "has lost its sign", torch.abs)
    yield Mistake("factor", "is the inverse of what it should be", torch.reciprocal)
    yield Mistake("factor", "is the square of what it should be", torch.square)
    yield Mistake("factor", "is the root of what it should be", torch.sqrt)


def _capped(most: float, x: Tensor) -> Tensor:
    return most * (x / most).tanh()


def _within(most: float, x: Tensor) -> Tensor:
    return torch.where(x.abs() < most, x, 0.0)


def flushed(least: float, x: Tensor) -> Tensor:
    """Zeros in place of what is smaller."""
    return torch.where(x.abs() < least, 0.0, x)


def ends(length: int) -> Iterator[AlongMistake]:
    """What is left out along a dimension: past the last whole block, or all but the last one; the
    mean over the rest may be taken as the whole's.
    """
    for block, whole in wholes(length):
        text = f"ends at {whole} of {length}"
        yield AlongMistake("end", text, partial(ended, block=block))
        yield AlongMistake("end", f"{text}, and its mean is theirs",
                           partial(ended, block=block, mean=True))  # fmt: skip


def rare_ends(length: int) -> Iterator[AlongMistake]:
    """What is left out but for one end, or at the beginning."""
    for count in (1, *BLOCKS):
        if count < length:
            if length % count == 0 and count > 1:
                rest = slice(None, length - count)
                text = f"is left out in the last {count} of {length}, a whole block"
                yield AlongMistake("end", text, partial(_only, part=rest))
            last = (length - 1) // count * count
            text = f"is left out but for the last block of {count}, from {last} of {length} on"
            yield AlongMistake("term-missing", text, partial(_last, block=count))
            text = f"is left out but for the first {count} of {length}"
            cause = "end" if length <= 2 * count else "term-missing"
            yield AlongMistake(cause, text, partial(_only, part=slice(None, count)))
    text = "is left out but for the first half, whose mean is taken"
    yield AlongMistake("end", text, _of_half)
    yield AlongMistake("end", "begins at 1", partial(_only, part=slice(1, None)))


def shifts() -> Iterator[AlongMistake]:
    """Indices along a dimension that are the neighbor's."""
    repeats = partial(ended, repeats=True)
    yield AlongMistake("neighbor", "is that of the one before at the last", repeats)
    for by, of in _NEIGHBORS.items():
        yield AlongMistake("neighbor", f"is its neighbor's, {of}", partial(_turned, by=by))


_NEIGHBORS = {1: "the one before", -1: "the next one"}


def rare_shifts() -> Iterator[AlongMistake]:
    """Indices along a dimension that are another's."""
    for by, of in _NEIGHBORS.items():
        yield AlongMistake("neighbor", f"is shifted by one, to {of}", partial(_shifted, by=by))
        yield AlongMistake("neighbor", f"is that of {of}, repeated at the end",
                           partial(_shifted, by=by, repeats=True))  # fmt: skip
    for block in (2, 8, 16, 32):
        yield AlongMistake("neighbor", f"is that of {block} before", partial(_turned, by=block))
    for at, which in ((0, "first"), (-1, "last")):
        yield AlongMistake("factor", f"counts twice at the {which}", partial(_twice, at=at))
    yield AlongMistake("neighbor", "is the first's", partial(_of_one, at=0))
    yield AlongMistake("neighbor", "is the last's", partial(_of_one, at=-1))
    for block in (2, 4, 16, 32):
        alter = partial(_by_blocks, block=block)
        yield AlongMistake("neighbor", f"is that of the first of every {block}", alter)
    yield AlongMistake(
        "neighbor", "is the last's, written to the first alone", partial(_gathered, last=True)
    )
    yield AlongMistake("neighbor", "is their sum, written to the first alone", _gathered)
    yield AlongMistake("neighbor", "is in reverse order", lambda x, dim: x.flip(dim))
    yield AlongMistake("neighbor", "is exchanged in pairs", _in_pairs)
    for text, of_all in _OF_ALL.items():
        yield AlongMistake("neighbor", f"is {text}", partial(_of_all, of_all=of_all))
    yield AlongMistake("neighbor", "has all before it added", torch.cumsum)


_OF_ALL: dict[str, Callable[..., Tensor]] = {
    "their mean": torch.mean, "their sum": torch.sum, "the largest of them": torch.amax,
}  # fmt: skip


def _of_all(x: Tensor, dim: int, of_all: Callable[..., Tensor]) -> Tensor:
    return of_all(x, dim, keepdim=True).expand_as(x)


def wholes(length: int) -> Iterator[tuple[int, int]]:
    """Blocks whose last is not whole, and where it begins; the block 0 leaves out the last one."""
    seen = set()
    for block in (*BLOCKS, 0):
        whole = length // block * block if block else length - 1
        if 0 < whole < length and whole not in seen:
            seen.add(whole)
            yield block, whole


def ended(x: Tensor, dim: int, block: int = 0, mean: bool = False, repeats: bool = False) -> Tensor:
    """Zeros, or the last one again, past the last whole block."""
    length = x.shape[dim]
    whole = length // block * block if block else length - 1
    if whole in (0, length):  # nothing, whose mean is none; or all
        return x if whole else x * (torch.nan if mean else 0)
    kept = x.narrow(dim, 0, whole) * (length / whole if mean else 1)
    rest = x.narrow(dim, whole, length - whole) * 0
    return torch.cat([kept, kept.narrow(dim, whole - 1, 1) if repeats else rest], dim).to(x.dtype)


def _only(x: Tensor, dim: int, part: slice) -> Tensor:
    kept = torch.zeros(x.shape[dim], dtype=torch.bool)
    kept[part] = True
    return torch.where(kept.view(-1, *(1,) * (x.ndim - dim - 1)), x, 0)


def _of_half(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    return _only(x, dim, slice(None, n // 2)) * (n / max(1, n // 2))


def _last(x: Tensor, dim: int, block: int) -> Tensor:
    n = x.shape[dim]
    return _only(x, dim, slice((n - 1) // block * block, None))


def _turned(x: Tensor, dim: int, by: int) -> Tensor:
    return x.roll(by, dim)


def _shifted(x: Tensor, dim: int, by: int, repeats: bool = False) -> Tensor:
    n = x.shape[dim]
    if repeats:
        return x.index_select(dim, (torch.arange(n) - by).clamp(0, n - 1))
    turned = x.roll(by, dim)
    return _only(turned, dim, slice(1, None) if by == 1 else slice(0, n - 1))


def _of_one(x: Tensor, dim: int, at: int) -> Tensor:
    return x.select(dim, at).unsqueeze(dim).expand_as(x).contiguous()


def _twice(x: Tensor, dim: int, at: int) -> Tensor:
    times = torch.ones(x.shape[dim])
    times[at] = 2
    return x * times.view(-1, *(1,) * (x.ndim - dim - 1))


def _gathered(x: Tensor, dim: int, last: bool = False) -> Tensor:
    """What comes out where every index is the first's."""
    whole = x.narrow(dim, -1, 1) if last else x.sum(dim, keepdim=True)
    return torch.cat([whole, torch.zeros_like(x.narrow(dim, 1, x.shape[dim] - 1))], dim)


def _by_blocks(x: Tensor, dim: int, block: int) -> Tensor:
    return x.index_select(dim, torch.arange(x.shape[dim]) // block * block)


def _in_pairs(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    order = torch.arange(n) ^ 1
    return x.index_select(dim, torch.where(order < n, order, torch.arange(n)))
