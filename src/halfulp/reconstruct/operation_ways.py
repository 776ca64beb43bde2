"""What kernels of any operation are known to do otherwise, as ways to compute its definition: a
step rounded, a sum kept short, a result cut, an option not read, an end left out.

Nothing here knows an operation: steps, operands, options and symbols are the operation's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfulp.formats import BF16, FP16, FP32, FP64, OCP_E4M3, OCP_E5M2, Format, round_to
from halfulp.operations import PLACE, OperationCalls, Rounding, Tensors, changed, defined

Alter = Callable[[Tensor], Tensor]

_OWN = {"bfloat16": BF16, "float16": FP16, "float32": FP32}
_BLOCKS = (1, 8, 16, 32)  # terms that are summed exactly before the running sum is rounded
_ENDS = (8, 16, 32)  # blocks past the last of which an end is left out
_LONGEST = 4096  # terms of a sum that is emulated one after the other


@dataclass(frozen=True)
class Way:
    """One thing that a kernel may do: steps altered by name, options read otherwise, operands or
    results altered.
    """

    cause: str  # its key in `CAUSES`
    text: str
    steps: Mapping[str, Alter] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    operands: Callable[[Tensors], Tensors] | None = None
    results: Callable[[Tensors], Tensors] | None = None


def computed(calls: OperationCalls, base: Rounding, ways: tuple[Way, ...]) -> Tensors:
    """The results and gradients of a kernel that is `base` but for these ways."""
    rounded = base.change(calls.dtype)
    for way in ways:
        if way.options:
            calls = replace(calls, options={**calls.options, **way.options})
        if way.operands is not None:
            calls = replace(calls, operands=way.operands(calls.operands))

    def change(name: str, exact: Tensor) -> Tensor:
        value = exact.detach()
        for way in ways:
            if name in way.steps:
                value = way.steps[name](value)
        return rounded(name, value)

    found = changed(calls, change)
    for way in ways:
        if way.results is not None:
            found = way.results(found)
    return found


def ways(calls: OperationCalls) -> Iterator[Way]:
    """All that is tried for a kernel that errs on these calls."""
    yield from _of_steps(calls)
    yield from _of_results(calls)
    yield from _of_operands(calls)
    yield from _of_options(calls)
    yield from _of_ends(calls)


def _rounded(fmt: Format) -> Alter:
    """Rounding that leaves alone what would all become 0 or would be infinite."""

    def alter(x: Tensor) -> Tensor:
        y = round_to(x.contiguous(), fmt)
        return y if bool((y != 0).any()) and bool(y.isfinite().all()) else x

    return alter


def _cut(fmt: Format) -> Alter:
    return lambda x: round_to(x.contiguous(), fmt, rounding="toward_zero")


def running(x: Tensor, fmt: Format, dim: int, block: int) -> Tensor:
    """Terms whose exact sum is the sum that is rounded after every `block` of them."""
    parts = torch.split(x, block, dim)
    total = torch.zeros_like(parts[0].sum(dim))
    found = torch.zeros_like(x)
    for number, part in enumerate(parts):
        risen = round_to(total + part.sum(dim), fmt)
        found.select(dim, number * block).copy_(risen - total)
        total = risen
    return found


def _shapes(calls: OperationCalls) -> dict[str, torch.Size]:
    """The steps of the definition on these calls, forward and backward, and their shapes."""
    shapes: dict[str, torch.Size] = {}

    def seen(name: str, exact: Tensor) -> Tensor:
        shapes[name] = exact.shape
        return exact

    defined(first_calls(calls, 1), seen)
    return shapes


def first_calls(calls: OperationCalls, count: int) -> OperationCalls:
    """So many of them."""
    operands = {name: x[:count] for name, x in calls.operands.items()}
    return replace(calls, operands=operands, grads={n: x[:count] for n, x in calls.grads.items()})


def _of_steps(calls: OperationCalls) -> Iterator[Way]:
    own = _OWN[calls.dtype] if calls.dtype != "float32" else BF16
    widest = max(x[0].numel() for x in calls.operands.values())
    shapes = _shapes(calls)
    low = {name: _rounded(own) for name in shapes if not name.startswith(PLACE)}
    forward = {name: alter for name, alter in low.items() if not name.startswith("grad_")}
    yield Way("step-low", f"every step is rounded to {own}", forward)
    yield Way("step-low", f"every step and its gradient are rounded to {own}", low)
    for name, shape in shapes.items():
        back = name.startswith("grad_")
        step = f"{'the gradient of ' if back else ''}{name.removeprefix('grad_').lstrip(PLACE)}"
        small = shape.numel() < widest
        cause = "grad-step-low" if back else "statistic-low" if small else "step-low"
        yield Way(cause, f"{step} is rounded to {own}", {name: _rounded(own)})
        yield Way(cause, f"{step} is cut to {own}", {name: _cut(own)})
        for fmt in (FP16, OCP_E4M3, OCP_E5M2):
            if fmt is not own:
                yield Way("coarser", f"{step} passes through {fmt}", {name: _rounded(fmt)})
        if back:
            yield Way("term-missing", f"{step} is left out", {name: torch.zeros_like})
        for dim, length in enumerate(shape):
            if length > 1:
                yield from _ends_of_step(name, step, dim, length)
            if 4 <= length <= _LONGEST and _is_summed(calls, name, dim):
                yield from _sums(name, step, own, dim, length)
        if "grad_" + name in shapes and small:
            for n in set(sizes_of(calls).values()) - {1}:
                text = f"{step} is {n}/{n - 1} times what it should be"
                yield Way("factor", text, {name: partial(torch.mul, other=n / (n - 1))})


def _ends_of_step(name: str, step: str, dim: int, length: int) -> Iterator[Way]:
    for whole in dict.fromkeys([length // block * block for block in _ENDS] + [length - 1]):
        if 0 < whole < length:
            text = f"{step} ends at {whole} of {length}"
            ended = partial(_step_ended, dim=dim, whole=whole)
            yield Way("end", text, {name: ended})
            mean = partial(_step_ended, dim=dim, whole=whole, factor=length / whole)
            yield Way("end", f"{text}, and its mean is theirs", {name: mean})
    stale = partial(_step_ended, dim=dim, whole=length - 1, repeats=True)
    yield Way("neighbor", f"the last of {step} repeats the one before", {name: stale})


def _step_ended(
    x: Tensor, dim: int, whole: int, factor: float = 1.0, repeats: bool = False
) -> Tensor:
    kept = x.narrow(dim, 0, whole) * factor
    rest = x.narrow(dim, whole, x.shape[dim] - whole) * 0
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
    for block in _BLOCKS:
        if block < length:
            each = "every term" if block == 1 else f"every {block} terms"
            text = f"the sum over {step} is rounded to {own} after {each}"
            yield Way(cause, text, {name: partial(running, fmt=own, dim=dim, block=block)})


def _of_results(calls: OperationCalls) -> Iterator[Way]:
    expected = calls.expected()
    own = _OWN[calls.dtype]
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
    for name, x in calls.operands.items():
        if not x.is_floating_point():
            continue
        for fmt in (BF16, FP16, OCP_E4M3, OCP_E5M2):
            if not fmt.holds(x.dtype):
                alter = partial(_operand, name, fmt)
                yield Way("coarser", f"{name} passes through {fmt}", operands=alter)


def _operand(name: str, fmt: Format, operands: Tensors) -> Tensors:
    x = operands[name]
    return operands | {name: round_to(x.float(), fmt).to(x.dtype)}


def _of_options(calls: OperationCalls) -> Iterator[Way]:
    """Each option as another probe has it, or as it is where nobody gives it."""
    operation = calls.operation
    for name, value in calls.options.items():
        others = [operation.options[name]] + [p.options.get(name, value) for p in operation.probes]
        if isinstance(value, float):
            others += [0.0, 10 * value, float(torch.tensor(value).bfloat16())]
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
        for whole in dict.fromkeys([n // block * block for block in _ENDS] + [n - 1]):
            if not 0 < whole < n:
                continue
            left = f"the last {n - whole} along {symbol}"
            given = partial(_ended, of_operands, symbol, whole, False)
            written = partial(_ended, of_results, symbol, whole, False)
            yield Way("end", f"{left} are left out of what is read", operands=given)
            yield Way("end", f"{left} are not written", results=written)
        if n > 1:
            stale = partial(_ended, of_results, symbol, n - 1, True)
            turned = partial(_turned, of_results, symbol)
            yield Way("neighbor", f"the last along {symbol} repeats the one before", results=stale)
            yield Way("neighbor", f"each along {symbol} is its neighbor's", results=turned)


def _ended(
    shapes: Mapping[str, list[str]], symbol: str, whole: int, repeats: bool, found: Tensors
) -> Tensors:
    """Zeros past `whole` along a symbol, or the last before it once more."""
    other = {}
    for name, x in found.items():
        other[name] = x
        if symbol in shapes.get(name, ()) and x.is_floating_point():
            dim = 1 + shapes[name].index(symbol)
            other[name] = _step_ended(x, dim, whole, repeats=repeats)
    return other


def _turned(shapes: Mapping[str, list[str]], symbol: str, found: Tensors) -> Tensors:
    return {
        name: x.roll(1, 1 + shapes[name].index(symbol)) if symbol in shapes.get(name, ()) else x
        for name, x in found.items()
    }
