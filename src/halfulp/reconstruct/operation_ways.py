"""What kernels of any operation are known to do otherwise, as ways to compute its definition: a
step rounded, a sum kept short, a result cut, an option not read, an end left out.

Nothing here knows an operation: steps, operands, options and symbols are the operation's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.formats import BF16, FP16, FP32, FP64, OCP_E4M3, OCP_E5M2, Format, round_to
from halfulp.operations import (
    OF_DTYPE,
    PLACE,
    OperationCalls,
    Rounding,
    Tensors,
    changed,
    defined,
    exactly,
)

Alter = Callable[[Tensor], Tensor]

_BLOCKS = (1, 8, 16, 32)  # terms that are summed exactly before the running sum is rounded
_LIMITS = (1.0, 7.0, 10.0, 20.0, 30.0, 50.0, 88.0, 240.0, 448.0, 57344.0, 65504.0)
_ENDS = (8, 16, 32, 64)  # blocks past the last of which an end is left out
TOLD = 3  # steps that are named one by one
_SCALED_FP8 = Format("e8m3", 8, 3)
_LONGEST = 4096  # terms of a sum that is emulated one after the other


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
    here: bool = False  # of this call alone: its numbers are not those of others
    alone: str = ""  # "forward" or "backward": in that pass alone
    # the definition, and what rounds in place of a recipe while it runs
    eager: Callable[[], tuple[Any, Any]] | None = None

    def __str__(self) -> str:
        return f"{self.text} in the {self.alone} pass alone" if self.alone else self.text


def computed(calls: OperationCalls, base: Rounding, ways: tuple[Way, ...]) -> Tensors:
    """The results and gradients of a kernel that is `base` but for these ways."""
    rounded, define = base.change(calls.dtype), calls.operation.define
    running_as: AbstractContextManager[Any] = nullcontext()
    for way in ways:
        if way.eager is not None:
            define, rounded = way.eager()
            running_as = rounded
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


_RUNNING: deque[tuple[tuple[Format, int, int], Tensor, Tensor]] = deque(maxlen=8)


def running(x: Tensor, fmt: Format, dim: int, block: int) -> Tensor:
    """Terms whose exact sum is the sum that is rounded after every `block` of them.

    A way that is tried beside others meets the same terms again and again, and a rounding for every
    term is what a search costs most: the last sums are kept.
    """
    asked = (fmt, dim, block)
    for known, terms, found in _RUNNING:
        if known == asked and terms.dtype == x.dtype and torch.equal(terms, x):
            return found.clone()
    found = _running(x, fmt, dim, block)
    _RUNNING.append((asked, x.clone(), found.clone()))
    return found


def _running(x: Tensor, fmt: Format, dim: int, block: int) -> Tensor:
    parts = torch.split(x, block, dim)
    total = torch.zeros_like(parts[0].sum(dim))
    found = torch.zeros_like(x)
    for number, part in enumerate(parts):
        risen = round_to(total + part.sum(dim), fmt)
        found.select(dim, number * block).copy_(risen - total)
        total = risen
    return found


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
    for name in order:
        yield from _of_step(calls, name, shapes, own, widest)
    names = f" ({', '.join(forward)})" if len(forward) <= TOLD else ""
    yield Way("step-low", f"every step{names} is rounded to {own}", forward)
    yield Way("step-low", f"every step{names} and its gradient are rounded to {own}", low)


def _of_step(
    calls: OperationCalls, name: str, shapes: dict[str, torch.Size], own: Format, widest: int
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
    for most in _LIMITS:
        ends = partial(torch.clamp, min=-most, max=most)
        yield Way("limited", f"{step} is held within ±{most:g}", {name: ends})
    for dim, length in enumerate(shape):
        if length > 1:
            yield from _ends_of_step(name, step, dim, length, along.get(length, ""))
        if 4 <= length <= _LONGEST:
            if _is_summed(calls, name, dim):
                yield from _sums(name, step, own, dim, length)
            elif dim == 0 and (index := _index_of(calls, length)) is not None:
                yield from _sums_by(calls, name, step, own, index)
    if "grad_" + name in shapes and small:
        for n in set(sizes_of(calls).values()) - {1}:
            text = f"{step} is {n}/{n - 1} times what it should be"
            yield Way("factor", text, {name: partial(torch.mul, other=n / (n - 1))})


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
    if not 0 < whole < length:
        return x
    kept = x.narrow(dim, 0, whole) * (length / whole if mean else 1.0)
    rest = x.narrow(dim, whole, length - whole) * 0
    return torch.cat([kept, kept.narrow(dim, whole - 1, 1) if repeats else rest], dim)


def _is_summed(calls: OperationCalls, name: str, dim: int) -> bool:
    """Whether all that becomes of a step is its sum along a dimension."""
    some = first_calls(calls, 1)

    def gathered(own: str, exact: Tensor) -> Tensor:
        return running(exact, FP64, dim, 4) if own == name else exact

    exact, other = defined(some), defined(some, gathered)
    finite = {n: x.isfinite() for n, x in exact.items()}
    return all(
        torch.allclose(other[n][finite[n]], x[finite[n]], rtol=1e-9, atol=1e-12)
        for n, x in exact.items()
    )


def _sums(name: str, step: str, own: Format, dim: int, length: int) -> Iterator[Way]:
    back = name.startswith("grad_")
    cause = "grad-sum-low" if back else "sum-low"
    for fmt in (own, FP16 if own is not FP16 else BF16):
        for block in _BLOCKS:
            if block < length:
                each = "every term" if block == 1 else f"every {block} terms"
                text = f"the sum over {step} is rounded to {fmt} after {each}"
                yield Way(cause, text, {name: partial(running, fmt=fmt, dim=dim, block=block)})


def _index_of(calls: OperationCalls, length: int) -> Tensor | None:
    """Numbers of an operand by which rows may be summed."""
    some = [x[0] for x in calls.operands.values() if not x.is_floating_point()]
    return next((x for x in some if x.shape == (length,)), None)


def _sums_by(
    calls: OperationCalls, name: str, step: str, own: Format, index: Tensor
) -> Iterator[Way]:
    """What may become of rows that are summed where their numbers are the same."""

    def by_number(alter: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        found = torch.empty_like(x)
        for number in torch.unique(index):
            found[index == number] = alter(x[index == number])
        return found

    def regrouped(seen: str, exact: Tensor) -> Tensor:
        gather = partial(running, fmt=FP64, dim=0, block=4)
        return by_number(gather, exact) if seen == name else exact

    exact, other = (defined(first_calls(calls, 1), change) for change in (exactly, regrouped))
    if not all(torch.allclose(other[n], x, rtol=1e-9, atol=1e-12) for n, x in exact.items()):
        return
    of = f"{step} of one number"
    for block in _BLOCKS:
        low = partial(by_number, partial(running, fmt=own, dim=0, block=block))
        each = "every term" if block == 1 else f"every {block} of them"
        yield Way(
            "grad-sum-low", f"the sum over {of} is rounded to {own} after {each}", {name: low}
        )
        if block > 1:
            blocks = partial(_sum_in_blocks, index=index, own=own, block=block)
            text = f"the sum over {of} is rounded to {own} after every {block} rows"
            yield Way("grad-sum-low", text, {name: blocks})
    last = partial(by_number, lambda x: torch.cat([x[:-1] * 0, x[-1:]]))
    yield Way("term-missing", f"all but the last {of} are left out", {name: last})
    first = partial(by_number, lambda x: torch.cat([x[:1], x[1:] * 0]))
    yield Way("term-missing", f"all but the first {of} are left out", {name: first})
    mean = partial(by_number, lambda x: x / len(x))
    yield Way("factor", f"{of} are averaged: 1 / count times what it should be", {name: mean})


def _sum_in_blocks(x: Tensor, index: Tensor, own: Format, block: int) -> Tensor:
    """Rows summed exactly in blocks of all of them, and the blocks in `own`."""
    found, totals = torch.zeros_like(x), torch.zeros(int(index.max()) + 1, *x.shape[1:])
    for start in range(0, len(x), block):
        numbers, rows = index[start : start + block], x[start : start + block]
        risen = round_to(totals + torch.zeros_like(totals).index_add(0, numbers, rows.float()), own)
        for number in torch.unique(numbers):
            place = start + int((numbers == number).nonzero()[0])
            found[place] = risen[number] - totals[number]
        totals = risen
    return found


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
