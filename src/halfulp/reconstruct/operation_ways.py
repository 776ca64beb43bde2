"""What kernels of any operation are known to do otherwise, as ways to compute its definition: a
mistake of the table at a step, an operand, a gradient or a result, an option not read. Sums are
operation_sums'.

Nothing here knows an operation: steps, operands, options and symbols are the operation's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.formats import BF16, Format
from halfulp.operations import (
    OF_DTYPE,
    PLACE,
    OperationCalls,
    Recorded,
    Rounding,
    Tensors,
    changed,
    defined,
    first_calls,
    in_own_dtypes,
    sizes_of,
)
from halfulp.reconstruct.operation_mistakes import (
    CAPS,
    AlongMistake,
    Alter,
    Mistake,
    Region,
    beside_one,
    ends,
    of_tf32,
    other_values,
    padded,
    random_errors,
    rare_ends,
    rare_roundings,
    rare_shifts,
    rare_values,
    rounded,
    roundings,
    shifts,
)
from halfulp.reconstruct.operation_steps import (
    OPERAND,
    RESULT,
    said,
    shapes_of_steps,
    values_of_steps,
)

TOLD = 3  # steps that are named one by one


class Natural(IntEnum):
    """How readily a kernel comes to do what a way says: of ways that explain alike on every call
    the most natural one is named.
    """

    COMMON = 0  # a mistake of the table, an option that is not read, what the operation names
    FORMULA = 1  # its definition written otherwise
    NUMBER = 2  # what a fitted number says, or an option as another call has it
    RARE = 3


class Condition(NamedTuple):
    """Calls alone in which a kernel does something, and how that is told."""

    text: str
    holds: Callable[[OperationCalls], bool]


@dataclass(frozen=True)
class Way:
    """One thing that a kernel may do: steps altered by name, options read otherwise, operands or
    results altered.
    """

    cause: str  # its key in `CAUSES`
    text: str
    steps: Mapping[str, Alter] = field(default_factory=dict)
    formats: Mapping[str, Alter] = field(default_factory=dict)  # in place of the recipe's rounding
    options: Mapping[str, Any] = field(default_factory=dict)
    operands: Callable[[Tensors], Tensors] | None = None
    results: Callable[[Tensors], Tensors] | None = None
    # "forward" or "backward": in that pass alone; or the name of the one result that it is made in
    alone: str = ""
    # the way on other calls, where what it does hangs on their values
    of_calls: Callable[[OperationCalls], Way] | None = None
    within: Callable[[], AbstractContextManager[Any]] | None = None  # what runs around it
    # the definition, and what rounds in place of a recipe while it runs
    eager: Callable[[], tuple[Any, Any]] | None = None
    define: Any = None  # another definition
    region: Region | None = None  # where alone
    only: Condition | None = None  # and in which calls
    natural: Natural = Natural.COMMON
    sketched: bool = False  # whether it is nearly right alone between the numbers it was read off

    def __str__(self) -> str:
        text = f"{self.text}, {self.region.text}" if self.region is not None else self.text
        text = f"{text}, {self.only.text}" if self.only is not None else text
        of_pass = self.alone in ("forward", "backward")
        where = f"in the {self.alone} pass" if of_pass else f"in what makes {self.alone}"
        return f"{text} {where} alone" if self.alone else text

    @property
    def key(self) -> str:
        """Its cause: what is left out where no whole block is are ends, and no others are that end
        in some rows or columns alone.
        """
        if self.region is None:
            return self.cause
        if self.region.kind != "tail":
            return "term-missing" if self.cause == "end" else self.cause
        return "end" if torch.zeros_like in self.steps.values() else self.cause

    @property
    def may_be_in_part(self) -> bool:
        """Whether it may be made in a region: it is of tensors, not of all that is computed."""
        return not (self.eager or self.define or self.within or self.options)


def is_made(alone: str, result: str) -> bool:
    """Whether what is made in one pass, or what makes one gradient, is made where a result is."""
    of_pass = "backward" if result.startswith("grad_") else "forward"
    return alone in ("", of_pass, result)


def _on(calls: OperationCalls, way: Way) -> Way:
    """The way where what it does hangs on values, on these calls; none on calls it is not of."""
    if way.only is not None and not way.only.holds(calls):
        return Way(way.cause, way.text)
    while way.of_calls is not None:
        way = replace(way.of_calls(calls), region=way.region)
    return way


def _called_by(calls: OperationCalls, way: Way) -> OperationCalls:
    """The calls with the options and operands that a way takes."""
    if way.options:
        calls = replace(calls, options={**calls.options, **way.options})
    if way.operands is None:
        return calls
    given = {**calls.operands, **calls.grads}
    given |= way.operands(given)
    operands = {n: given[n] for n in calls.operands}
    return replace(calls, operands=operands, grads={n: given[n] for n in calls.grads})


FAILS = (ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError,
         ValueError)  # fmt: skip
"""What a definition raises where it has no value in some way."""


def computed(
    calls: OperationCalls,
    base: Rounding,
    ways: tuple[Way, ...],
    recorded: Recorded | None = None,  # what `base` makes of these calls
    only: Collection[str] | None = None,  # of what is recorded
) -> Tensors:
    """The results and gradients of a kernel that is `base` but for these ways."""
    recipe, define = base.change(calls.dtype), calls.operation.define
    running_as: AbstractContextManager[Any] = nullcontext()
    sizes = sizes_of(calls)
    sizes |= {f"{symbol} / 2": n // 2 for symbol, n in sizes.items()}  # of pairs
    # eager code first, which may be of another definition
    ways = tuple(sorted((_on(calls, way) for way in ways), key=lambda way: way.eager is None))

    def where(way: Way, other: Tensor, own: Tensor) -> Tensor:
        """Another value, in the way's region."""
        if way.region is None:
            return other
        here = way.region.mask(own.shape, sizes)
        return own if here is None else torch.where(here, other, own)

    def altered(name: str, value: Tensor) -> Tensor:
        for way in ways:
            if name in way.steps:
                value = where(way, way.steps[name](value), value)
        return value

    def each(name: str, stacked: Tensor) -> Tensor:
        """The same of the calls' stacked tensors, where anything is altered."""
        if not any(name in way.steps for way in ways):
            return stacked
        # 16 bits do not hold what is rounded to others on the way
        wide = stacked.float() if stacked.is_floating_point() else stacked
        return torch.stack([altered(name, x) for x in wide]).to(stacked.dtype)

    for way in ways:
        if way.eager is not None:
            define, recipe = way.eager()
            running_as = recipe
        define = way.define or define
        if way.within is not None:
            running_as = way.within()
        calls = _called_by(calls, way)
    calls = replace(
        calls,
        operands={n: each(OPERAND + n, x) for n, x in calls.operands.items()},
        grads={n: each(OPERAND + n, x) for n, x in calls.grads.items()},
    )

    def change(name: str, exact: Tensor) -> Tensor:
        if name.startswith(RESULT):  # stacked, and rounded as the caller rounds it
            return recipe(name, each(name, exact.detach()))
        value = altered(name, exact.detach())
        for way in ways:
            if name in way.formats:
                return where(way, way.formats[name](value), recipe(name, value))
        return recipe(name, value)

    names = {name for way in ways for name in (*way.steps, *way.formats)}
    if recorded is not None and all(way.may_be_in_part for way in ways):
        found = in_own_dtypes(calls, change, recorded.again(calls, change, names, only))
    else:
        eager = any(way.eager is not None for way in ways)  # sees every step
        with running_as:
            found = changed(calls, change, define, None if eager else {*base.steps, *names})
    for way in ways:
        if way.results is not None:
            other = way.results(found)
            found = {n: torch.stack([where(way, *pair) for pair in zip(other[n], x, strict=True)])
                     for n, x in found.items()}  # fmt: skip
    return found


def put(name: str, value: Tensor) -> Way:
    """A step, or an operand, that is this value."""
    return Way("", "", {name: lambda x: value.to(x.dtype) if x.shape == value.shape else x})


def rare_ways(calls: OperationCalls) -> Iterator[Way]:
    """What is tried where nothing common explains."""
    own = OF_DTYPE[calls.dtype] if calls.dtype != "float32" else BF16
    given = calls.operands | calls.grads
    names = [OPERAND + n for n, x in given.items() if x.is_floating_point()]
    for cause, text, alter in (*roundings(own, "coarser", False, False), *of_tf32("coarser")):
        yield Way(cause, f"what is read {text}", dict.fromkeys(names, alter))
    for spot in (*_spots(calls), *_together(calls)):
        for mistake in (*_rare(spot, own), *spot.along(rare_ends, rare_shifts)):
            yield spot.way(*mistake)
    yield from _capped_steps(calls)


def _capped_steps(calls: OperationCalls) -> Iterator[Way]:
    """Steps that are capped softly, and their gradients with them."""
    shapes = shapes_of_steps(calls)
    for name, x in values_of_steps(calls).items():
        if f"grad_{name}" in shapes and x.is_floating_point():
            for most in CAPS:
                if float(x.abs().amax()) > most / 8:
                    text = f"{said(name)} and its gradient are those of"
                    text = f"{text} {most:g} tanh({said(name)} / {most:g}): it is capped softly"
                    yield Way("limited", text, of_calls=partial(_capped_step, name, most))


def _capped_step(name: str, most: float, _: OperationCalls) -> Way:
    shares: list[Tensor] = []

    def capped(x: Tensor) -> Tensor:
        shares[:] = [(x / most).tanh()]
        return most * shares[0]

    def sloped(grad: Tensor) -> Tensor:
        known = bool(shares) and shares[0].shape == grad.shape
        return grad * (1 - shares[0].square()) if known else grad

    return Way("", "", {name: capped, f"grad_{name}": sloped})


def ways(calls: OperationCalls) -> Iterator[Way]:
    """What is tried for every kernel that errs on these calls."""
    own = OF_DTYPE[calls.dtype] if calls.dtype != "float32" else BF16
    every = _spots(calls)
    for spot in every:
        for mistake in _of_spot(spot, own):
            yield spot.way(*mistake)
        yield from _of_lengths(calls, spot)
    for spot in _together(calls):
        for mistake in spot.along(ends, shifts):
            yield spot.way(*mistake)
    low = {name: rounded(own) for s in every for name in s.names
           if not name.startswith((PLACE, OPERAND, RESULT, f"grad_{PLACE}"))}  # fmt: skip
    forward = {name: alter for name, alter in low.items() if not name.startswith("grad_")}
    names = f" ({', '.join(forward)})" if len(forward) <= TOLD else ""
    yield Way("step-low", f"every step{names} is rounded to {own}", forward)
    early: dict[str, Alter] = {}
    for name in (n for n in shapes_of_steps(calls) if not n.startswith("grad_")):
        early |= {name: rounded(own)}
        if len(early) > 1:
            text = f"every step up to {said(name)} is rounded to {own}"
            yield Way("step-low", text, dict(early))
    yield Way("step-low", f"every step{names} and its gradient are rounded to {own}", low)


def random_ways(calls: OperationCalls) -> Iterator[Way]:
    """Random errors that differ from call to call, and are of no known size where no cause is
    named.
    """
    chance = torch.Generator().manual_seed(0)
    for spot in _spots(calls):
        for mistake in random_errors(_low(spot), spot.kind == "result", chance):
            yield spot.way(*mistake)


@dataclass(frozen=True)
class _Spot:
    """What mistakes are made of: a step, its gradient, an operand, a gradient that arrives, a
    result, or all of them that have a symbol.
    """

    names: tuple[str, ...]
    said: str
    shapes: tuple[torch.Size, ...]  # of each
    symbols: Mapping[int, str]  # by length
    values: Tensor | None = None  # where they are known
    holds: bool = False  # whether it is of the low format as it is
    small: bool = False  # whether many elements share it
    largest: bool = False  # whether it is the maximum of every row of something

    @property
    def kind(self) -> str:
        """ "step", "gradient", "operand" or "result"."""
        first = self.names[0]
        kinds = {OPERAND: "operand", RESULT: "result", "grad_": "gradient"}
        return next((kind for start, kind in kinds.items() if first.startswith(start)), "step")

    def way(self, cause: str, text: str, alter: Any) -> Way:
        """A mistake made here."""
        by_name = alter if isinstance(alter, dict) else dict.fromkeys(self.names, alter)
        return Way(cause, f"{self.said} {text}", by_name)

    def along(
        self,
        by_length: Callable[[int], Iterator[AlongMistake]],
        of_any: Callable[[], Iterator[AlongMistake]],
    ) -> Iterator[tuple[str, str, dict[str, Alter]]]:
        """Mistakes along every length, of all that have it."""
        for length in dict.fromkeys(n for shape in self.shapes for n in shape if n > 1):
            of = {n: shape.index(length) for n, shape in zip(self.names, self.shapes, strict=True)
                  if length in shape}  # fmt: skip
            symbol = self.symbols.get(length, "")
            for cause, text, alter in (*by_length(length), *of_any()):
                along = f"{text} along {symbol}" if symbol else text
                yield cause, along, {n: partial(alter, dim=dim) for n, dim in of.items()}


def _symbols(calls: OperationCalls) -> dict[int, str]:
    """Symbols by length; of two that are as long the first, as mistakes are made along that."""
    return {size: symbol for symbol, size in reversed(sizes_of(calls).items())}


def _spots(calls: OperationCalls) -> list[_Spot]:
    """Results, steps and operands: what a row shares before what each element has, and late before
    early.
    """
    widest = max(x[0].numel() for x in calls.operands.values())
    symbols = _symbols(calls)
    shapes, values, expected = shapes_of_steps(calls), values_of_steps(calls), calls.expected()
    exact = defined(first_calls(calls, 1))
    found = [
        _Spot((RESULT + n,), n, (x[0].shape,), symbols, x[0], kinds[0] is not torch.float32)
        for n, x in exact.items()
        if n in expected and (kinds := expected[n][1])[0].is_floating_point
    ]
    wide = [x for x in (*values.values(), *(x[0] for x in calls.operands.values())) if x.ndim > 1]
    tops = [x.float().amax(-1, keepdim=True) for x in wide if x.shape[-1] > 1]
    order = list(shapes)[::-1]
    order.sort(key=lambda name: shapes[name].numel() >= widest)
    found += [
        _Spot((n,), said(n), (shapes[n],), symbols, values.get(n),
              small=shapes[n].numel() < widest,
              largest=n in values and any(torch.equal(values[n], top) for top in tops))
        for n in order
    ]  # fmt: skip
    found += [
        _Spot((OPERAND + n,), n, (x[0].shape,), symbols, x[0], x.dtype is not torch.float32)
        for n, x in (calls.operands | calls.grads).items()
    ]
    return found


def _of_spot(spot: _Spot, own: Format) -> Iterator[tuple[str, str, Any]]:
    if spot.values is None or spot.values.is_floating_point():
        yield from roundings(own, _low(spot), spot.holds, spot.kind == "result")
        yield from beside_one(own) if spot.kind == "step" else ()
        yield from other_values(None if spot.kind == "gradient" else spot.values)
    else:
        for by in (1, -1):
            yield Mistake("neighbor", f"is off by {by}", partial(torch.add, other=by))
        yield Mistake("option", "is not read: 0, 1, 2 …", _places)
    yield from spot.along(ends, shifts)
    if spot.largest:
        yield Mistake("maximum", "is that of all rows", lambda x: x.amax().expand_as(x))


def _rare(spot: _Spot, own: Format) -> Iterator[tuple[str, str, Any]]:
    if len(spot.names) == 1 and (spot.values is None or spot.values.is_floating_point()):
        yield from rare_roundings(own, _low(spot), spot.kind == "result")
        yield from rare_values(None if spot.kind == "gradient" else spot.values)


def _low(spot: _Spot) -> str:
    """The cause where it is rounded to few bits."""
    lows = {"gradient": "grad-step-low", "result": "result-low", "operand": "coarser"}
    return lows.get(spot.kind, "statistic-low" if spot.small else "step-low")


def _together(calls: OperationCalls) -> Iterator[_Spot]:
    """All that is read, and all that is written, along each symbol."""
    sizes, operation = sizes_of(calls), calls.operation
    symbols = _symbols(calls)
    given = calls.operands | calls.grads
    read = {OPERAND + n: s for n, s in operation.shapes_of_operands.items() if n in given}
    written = {RESULT + n: s for n, s in operation.shapes_of_results.items()}
    for told, every in (("what is read", read), ("what is written", written)):
        shapes = {n: torch.Size(sizes.get(s, 0) for s in of.split()) for n, of in every.items()}
        if len(shapes) > 1:
            yield _Spot(tuple(shapes), told, tuple(shapes.values()), symbols)


def _of_lengths(calls: OperationCalls, spot: _Spot) -> Iterator[Way]:
    """A number that is a count, or was divided by another."""
    if spot.kind not in ("step", "gradient") or not spot.small:
        return
    (name,) = spot.names
    for symbol, n in sizes_of(calls).items():
        if spot.shapes[0].numel() == 1:
            text = f"{spot.said} is {symbol}, which is {n} there"
            yield Way("option", text, of_calls=partial(_size_for, name, symbol))
        # rows that do not see each other have none of their number in them
        shared = n not in spot.shapes[0] or symbol not in calls.operation.independent
        for told, count in _COUNTS.items() if shared else ():
            if n > 1 and count(n) != n:
                text = f"{spot.said} is {symbol} / {told.format(symbol)} times what it should be"
                yield Way("factor", text, of_calls=partial(_counted, name, symbol, count))


_COUNTS: dict[str, Callable[[int], int]] = {
    "({} − 1)": lambda n: n - 1,
    "({} + 1)": lambda n: n + 1,
    "({} up to a whole 32)": partial(padded, 32),
    "({} up to a whole 64)": partial(padded, 64),
    "({} up to a whole 128)": partial(padded, 128),
    "({} up to a power of two)": lambda n: 1 << (n - 1).bit_length(),
}


def _counted(name: str, symbol: str, count: Callable[[int], int], calls: OperationCalls) -> Way:
    n = sizes_of(calls)[symbol]
    factor = n / count(n) if count(n) else torch.nan
    return Way("", "", {name: partial(torch.mul, other=factor)})


def _size_for(name: str, symbol: str, calls: OperationCalls) -> Way:
    size = sizes_of(calls)[symbol]
    return Way("option", "", {name: lambda x: torch.full_like(x, size)})


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.numel()).view(x.shape).to(x.dtype)
