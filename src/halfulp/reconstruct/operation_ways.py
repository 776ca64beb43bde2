"""What kernels of any operation are known to do otherwise, as ways to compute its definition: a
step rounded, a result cut, an option not read, an end left out. Sums are operation_sums'.

Nothing here knows an operation: steps, operands, options and symbols are the operation's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.formats import BF16, FP16, FP32, OCP_E4M3, OCP_E5M2, Format, round_to
from halfulp.operations import (
    OF_DTYPE,
    PLACE,
    OperationCalls,
    Rounding,
    Tensors,
    changed,
    defined,
)

Alter = Callable[[Tensor], Tensor]

_LIMITS = (1.0, 5.0, 6.0, 7.0, 8.0, 10.0, 16.0, 20.0, 30.0, 32.0, 50.0, 64.0, 80.0, 88.0, 100.0,
           240.0, 448.0, 57344.0, 65504.0,
           *(float(2**n - less) for n in range(7, 18) for less in (0, 1)))  # fmt: skip
_OF_FORMATS = (1.0, 240.0, 448.0, 57344.0, 65504.0)  # those of gradients
_ENDS = (8, 16, 32, 64)  # blocks past the last of which an end is left out
TOLD = 3  # steps that are named one by one
_SCALED_FP8 = Format("e8m3", 8, 3)


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
    alone: str = ""  # "forward" or "backward": in that pass alone
    # the way on other calls, where what it does hangs on their values
    of_calls: Callable[[OperationCalls], Way] | None = None
    within: Callable[[], AbstractContextManager[Any]] | None = None  # what runs around it
    # the definition, and what rounds in place of a recipe while it runs
    eager: Callable[[], tuple[Any, Any]] | None = None

    def __str__(self) -> str:
        return f"{self.text} in the {self.alone} pass alone" if self.alone else self.text


def computed(calls: OperationCalls, base: Rounding, ways: tuple[Way, ...]) -> Tensors:
    """The results and gradients of a kernel that is `base` but for these ways."""
    rounded, define = base.change(calls.dtype), calls.operation.define
    running_as: AbstractContextManager[Any] = nullcontext()
    ways = tuple(w if w.of_calls is None else w.of_calls(calls) for w in ways)
    for way in ways:
        if way.eager is not None:
            define, rounded = way.eager()
            running_as = rounded
        if way.within is not None:
            running_as = way.within()
        if way.options:
            calls = replace(calls, options={**calls.options, **way.options})
        if way.operands is not None:
            given = way.operands({**calls.operands, **calls.grads})
            operands = {name: given[name] for name in calls.operands}
            calls = replace(calls, operands=operands, grads={n: given[n] for n in calls.grads})

    def change(name: str, exact: Tensor) -> Tensor:
        value = exact.detach()
        for way in ways:
            if name in way.steps:
                value = way.steps[name](value)
        for way in ways:
            if name in way.formats:
                return way.formats[name](value)
        return rounded(name, value)

    with running_as:
        found = changed(calls, change, define)
    for way in ways:
        if way.results is not None:
            found = way.results(found)
    return found


def ways(calls: OperationCalls) -> Iterator[Way]:
    """All that is tried for a kernel that errs on these calls."""
    yield from _of_results(calls)
    yield from _of_options(calls)
    yield from _of_steps(calls)
    yield from _of_operands(calls)
    yield from _of_ends(calls)


def _rounded(fmt: Format) -> Alter:
    return lambda x: round_to(x.contiguous(), fmt)


def _beside_1(x: Tensor, fmt: Format, times: int) -> Tensor:
    """A share, from 0 to 1, as it comes out of 1 + x or of 2 x − 1."""
    if not bool(((x >= 0) & (x <= 1)).all()):
        return x
    by = 1 if times == 1 else -1
    return (round_to(times * x + by, fmt) - by) / times


def _cut(fmt: Format) -> Alter:
    return lambda x: round_to(x.contiguous(), fmt, rounding="toward_zero")


def said(name: str) -> str:
    """A step, its gradient or a result in words."""
    if name.startswith("result_"):
        return name.removeprefix("result_")
    back = "the gradient of " if name.startswith("grad_") else ""
    return back + name.removeprefix("grad_").lstrip(PLACE)


def shapes_of_steps(calls: OperationCalls, define: Any = None) -> dict[str, torch.Size]:
    """The steps of the definition on these calls, forward and backward, and their shapes."""
    shapes: dict[str, torch.Size] = {}

    def seen(name: str, exact: Tensor) -> Tensor:
        shapes[name] = exact.shape
        return exact

    changed(first_calls(calls, 1), seen, define)
    return {n: shape for n, shape in shapes.items() if not n.startswith("result_")}


def values_of_steps(calls: OperationCalls) -> Tensors:
    """What the steps of the forward pass are on the first of these calls."""
    values: Tensors = {}

    def seen(name: str, exact: Tensor) -> Tensor:
        if not name.startswith("grad_"):
            values[name] = exact.detach().float()
        return exact

    defined(first_calls(replace(calls, grads={}), 1), seen)
    return values


def first_calls(calls: OperationCalls, count: int) -> OperationCalls:
    """So many of them."""
    operands = {name: x[:count] for name, x in calls.operands.items()}
    return replace(calls, operands=operands, grads={n: x[:count] for n, x in calls.grads.items()})


def _of_steps(calls: OperationCalls) -> Iterator[Way]:
    own = OF_DTYPE[calls.dtype] if calls.dtype != "float32" else BF16
    widest = max(x[0].numel() for x in calls.operands.values())
    shapes = shapes_of_steps(calls)
    low = {name: _rounded(own) for name in shapes if not name.startswith(PLACE)}
    forward = {name: alter for name, alter in low.items() if not name.startswith("grad_")}
    # what a row shares before what each element has, and late before early
    order = list(shapes)[::-1]
    order.sort(key=lambda name: shapes[name].numel() >= widest)
    values = values_of_steps(calls)
    for name in order:
        largest = float(values[name].abs().amax()) if name in values else 0.0
        yield from _of_step(calls, name, shapes, largest, own, widest)
    names = f" ({', '.join(forward)})" if len(forward) <= TOLD else ""
    yield Way("step-low", f"every step{names} is rounded to {own}", forward)
    yield Way("step-low", f"every step{names} and its gradient are rounded to {own}", low)


def _of_step(
    calls: OperationCalls,
    name: str,
    shapes: dict[str, torch.Size],
    largest: float,
    own: Format,
    widest: int,
) -> Iterator[Way]:
    shape, back, step = shapes[name], name.startswith("grad_"), said(name)
    along = {size: f" along {symbol}" for symbol, size in sizes_of(calls).items()}
    small = shape.numel() < widest
    cause = "grad-step-low" if back else "statistic-low" if small else "step-low"
    yield Way(cause, f"{step} is rounded to {own}", {name: _rounded(own)})
    yield Way(cause, f"{step} is cut to {own}", {name: _cut(own)})
    for fmt in (FP16, OCP_E4M3, OCP_E5M2, _SCALED_FP8):
        if fmt is not own:
            told = "fp8 of a scale of its own" if fmt is _SCALED_FP8 else str(fmt)
            yield Way("coarser", f"{step} passes through {told}", {name: _rounded(fmt)})
    if not back:
        beside = f"{step} loses what {own} does not hold beside 1"
        yield Way(cause, beside, {name: partial(_beside_1, fmt=own, times=1)})
        yield Way(cause, beside, {name: partial(_beside_1, fmt=own, times=2)})
    yield Way("term-missing", f"{step} is left out", {name: torch.zeros_like})
    yield Way("limited", f"{step} is at least 0", {name: partial(torch.clamp, min=0)})
    for most in _OF_FORMATS if back else _LIMITS:
        if back or largest / 100 < most < largest:
            ends = partial(torch.clamp, min=-most, max=most)
            yield Way("limited", f"{step} is held within ±{most:g}", {name: ends})
    if shape.numel() == 1:
        for symbol, size in sizes_of(calls).items():
            text = f"{step} is {symbol}, which is {size} there"
            yield Way("option", text, of_calls=partial(_size_for, name, symbol))
    for dim, length in enumerate(shape):
        if length > 1:
            yield from _ends_of_step(name, step, dim, length, along.get(length, ""))
    if "grad_" + name in shapes and small:
        for symbol, n in sizes_of(calls).items():
            if n > 1:
                text = f"{step} is {symbol} / ({symbol} − 1) times what it should be"
                yield Way("factor", text, of_calls=partial(_of_one_less, name, symbol))


def _of_one_less(name: str, symbol: str, calls: OperationCalls) -> Way:
    n = sizes_of(calls)[symbol]
    return Way("", "", {name: partial(torch.mul, other=n / (n - 1) if n > 1 else torch.nan)})


def _size_for(name: str, symbol: str, calls: OperationCalls) -> Way:
    size = sizes_of(calls)[symbol]
    return Way("option", "", {name: lambda x: torch.full_like(x, size)})


def _ends_of_step(name: str, step: str, dim: int, length: int, along: str) -> Iterator[Way]:
    for block, whole in _wholes(length):
        text = f"{step} ends at {whole} of {length}{along}"
        ended = partial(_step_ended, dim=dim, block=block)
        yield Way("end", text, {name: ended})
        yield Way("end", f"{text}, and its mean is theirs", {name: partial(ended, mean=True)})
    stale = partial(_step_ended, dim=dim, repeats=True)
    yield Way("neighbor", f"the last of {step}{along} repeats the one before", {name: stale})


def _wholes(length: int) -> Iterator[tuple[int, int]]:
    """Blocks whose last is not whole, and where it begins; the block 0 leaves out the last one."""
    seen = set()
    for block in (*_ENDS, 0):
        whole = length // block * block if block else length - 1
        if 0 < whole < length and whole not in seen:
            seen.add(whole)
            yield block, whole


def _step_ended(
    x: Tensor, dim: int, block: int = 0, mean: bool = False, repeats: bool = False
) -> Tensor:
    """Zeros, or the last one again, past the last whole block."""
    length = x.shape[dim]
    whole = length // block * block if block else length - 1
    if whole in (0, length):  # nothing, whose mean is none; or all
        return x if whole else x * (torch.nan if mean else 0)
    kept = x.narrow(dim, 0, whole) * (length / whole if mean else 1.0)
    rest = x.narrow(dim, whole, length - whole) * 0
    return torch.cat([kept, kept.narrow(dim, whole - 1, 1) if repeats else rest], dim)


def _of_results(calls: OperationCalls) -> Iterator[Way]:
    expected = calls.expected()
    own = OF_DTYPE[calls.dtype]
    for name, (_, kinds) in expected.items():
        if not kinds[0].is_floating_point:
            continue
        step = f"result_{name}"
        yield Way("result-cut", f"{name} is cut to {own}", {step: _cut(own)})
        if kinds[0] is torch.float32 and own is not FP32:
            yield Way("result-low", f"{name} is rounded to {own}", {step: _rounded(own)})
        for fmt in (OCP_E5M2, OCP_E4M3):
            yield Way("coarser", f"{name} passes through {fmt}", {step: _rounded(fmt)})
    for first, (_, kinds) in expected.items():
        for second, (_, others) in expected.items():
            if first < second and kinds[0] == others[0] and first[:5] == second[:5] == "grad_":
                text = f"{first} and {second} are exchanged"
                yield Way("exchanged", text, results=partial(_exchanged, first, second))


def _exchanged(first: str, second: str, found: Tensors) -> Tensors:
    if found[first].shape != found[second].shape:
        return found
    return found | {first: found[second], second: found[first]}


def _of_operands(calls: OperationCalls) -> Iterator[Way]:
    shapes = {o.name: o.shape.split() for o in calls.operation.operands}
    for name, x in (calls.operands | calls.grads).items():
        for dim, symbol in enumerate(shapes.get(name, ()), 1):
            for by in (1, -1):
                turned = partial(_operand, name, partial(torch.roll, shifts=by, dims=dim))
                yield Way("neighbor", f"{name} is its neighbor's along {symbol}", operands=turned)
        if name not in calls.grads:
            yield from _limits_of_operand(name, x)
        if not x.is_floating_point():
            for by in (1, -1):
                moved = partial(_operand, name, partial(torch.add, other=by))
                yield Way("neighbor", f"{name} is off by {by}", operands=moved)
            yield Way(
                "option",
                f"{name} is not read: 0, 1, 2 …",
                operands=partial(_operand, name, _places),
            )
            continue
        for fmt in (BF16, FP16, OCP_E4M3, OCP_E5M2):
            if not fmt.holds(x.dtype):
                alter = partial(_operand, name, partial(_through, fmt))
                yield Way("coarser", f"{name} passes through {fmt}", operands=alter)
        if name in calls.grads:
            ones = partial(_operand, name, torch.ones_like)
            yield Way("term-missing", f"{name} is taken as 1", operands=ones)


def _limits_of_operand(name: str, x: Tensor) -> Iterator[Way]:
    """An operand held within limits, past which it has no gradient."""
    own = x.double()
    ends = {"at most": (None, 1.0), "at least": (-1.0, None), "within ±": (-1.0, 1.0)}
    for most in _LIMITS:
        for word, (low, high) in ends.items():
            beyond = own.amax() > most, own.amin() < -most
            if (high and beyond[0]) or (low and beyond[1]):
                low_end, high_end = (None if end is None else end * most for end in (low, high))
                of = most if high or not low else -most
                text = f"{name} is held {word}{'' if word.endswith('±') else ' '}{of:g}"
                limit = partial(_limited, name, low_end, high_end)
                yield Way("limited", text, of_calls=limit)


def _limited(name: str, low: float | None, high: float | None, calls: OperationCalls) -> Way:
    whole = calls.operands[name]
    held = whole.clamp(min=low, max=high)
    inside = held == whole

    def masked(found: Tensors) -> Tensors:
        grad = f"grad_{name}"
        return found | {grad: found[grad] * inside} if grad in found else found

    return Way("limited", "", operands=lambda given: given | {name: held}, results=masked)


def _operand(name: str, alter: Alter, operands: Tensors) -> Tensors:
    return operands | {name: alter(operands[name])}


def _through(fmt: Format, x: Tensor) -> Tensor:
    return round_to(x.float(), fmt).to(x.dtype)


def _places(x: Tensor) -> Tensor:
    return torch.arange(x[0].numel()).view(x[:1].shape).expand(x.shape).to(x.dtype)


def _of_options(calls: OperationCalls) -> Iterator[Way]:
    """Each option as another probe has it, or as it is where nobody gives it."""
    operation = calls.operation
    for name, value in calls.options.items():
        others = [operation.options[name]] + [p.options.get(name, value) for p in operation.probes]
        if isinstance(value, float):
            others += [0.0, 10 * value, float(torch.tensor(value).bfloat16())]
        if isinstance(value, int) and not isinstance(value, bool):
            others += [value - 1, value + 1]  # counted from another number
        tried = {repr(value)}
        for other in others:
            if repr(other) not in tried:
                tried.add(repr(other))
                text = f"{name} is taken as {other!r} instead of {value!r}"
                yield Way("option", text, options={name: other})


def sizes_of(calls: OperationCalls) -> dict[str, int]:
    """What each symbol stands for in these calls."""
    return {
        symbol: calls.operands[operand.name].shape[1 + place]
        for operand in calls.operation.operands
        for place, symbol in enumerate(operand.shape.split())
        if not symbol.isdigit()
    }


def _of_ends(calls: OperationCalls) -> Iterator[Way]:
    operation = calls.operation
    of_operands = {o.name: o.shape.split() for o in operation.operands}
    of_results = {r.name: r.shape.split() for r in operation.results}
    of_results |= {f"grad_{name}": shape for name, shape in of_operands.items()}
    for symbol, n in sizes_of(calls).items():
        for block, whole in _wholes(n):
            left = f"the last {n - whole} along {symbol}"
            given = partial(_ended, of_operands, symbol, block, False)
            written = partial(_ended, of_results, symbol, block, False)
            yield Way("end", f"{left} are left out of what is read", operands=given)
            yield Way("end", f"{left} are not written", results=written)
        if n > 1:
            stale = partial(_ended, of_results, symbol, 0, True)
            turned = partial(_turned, of_results, symbol)
            yield Way("neighbor", f"the last along {symbol} repeats the one before", results=stale)
            yield Way("neighbor", f"each along {symbol} is its neighbor's", results=turned)


def _ended(
    shapes: Mapping[str, list[str]], symbol: str, block: int, repeats: bool, found: Tensors
) -> Tensors:
    """Zeros past the last whole block along a symbol, or the last before it once more."""
    other = {}
    for name, x in found.items():
        other[name] = x
        if symbol in shapes.get(name, ()) and x.is_floating_point():
            dim = 1 + shapes[name].index(symbol)
            other[name] = _step_ended(x, dim, block, repeats=repeats)
    return other


def _turned(shapes: Mapping[str, list[str]], symbol: str, found: Tensors) -> Tensors:
    return {
        name: x.roll(1, 1 + shapes[name].index(symbol)) if symbol in shapes.get(name, ()) else x
        for name, x in found.items()
    }
