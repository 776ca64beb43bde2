"""What kernels do to operands before they compute: exchange two, hold them within limits, fill them
up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfulp.operations import OperationCalls, Tensors, sizes_of
from halfulp.reconstruct.operation_mistakes import BLOCKS, LIMITS, padded
from halfulp.reconstruct.operation_steps import OPERAND, said, values_of_steps
from halfulp.reconstruct.operation_ways import Natural, Way, put


def operand_ways(calls: OperationCalls) -> Iterator[Way]:
    """What the operation says that is computed in its place; operands or gradients exchanged, and
    operands within limits.
    """
    for text, (cause, define) in calls.operation.related.items():
        yield Way(cause, text, define=define)
    yield from _exchanges(calls)
    yield from _maxima(calls)
    for name, x in calls.operands.items():
        yield from _limits_of_operand(name, x)


def _maxima(calls: OperationCalls) -> Iterator[Way]:
    """A maximum of a row that is of a part of it."""
    given = {OPERAND + n: x[0].float() for n, x in calls.operands.items() if x.ndim > 2}
    wide = {n: x for n, x in (given | values_of_steps(calls)).items() if x.shape[-1:] > (1,)}
    for name, own in values_of_steps(calls).items():
        for source, x in wide.items():
            if own.shape[-1:] != (1,) or not torch.equal(own, x.amax(-1, keepdim=True)):
                continue
            length, of = x.shape[-1], partial(_maximum_of, name, source)
            for block in (1, *BLOCKS, 128):
                whole = length // block * block
                if block < length:
                    these = f"the first {block} of" if block > 1 else "the first of"
                    text = f"{said(name)} is that of {these} {length}"
                    yield Way("maximum", text, of_calls=partial(of, slice(block)))
                    these = f"block of {block} of" if block > 1 else "of"
                    text = f"{said(name)} is that of the last {these} {length}"
                    last = slice((length - 1) // block * block, None)
                    yield Way("maximum", text, of_calls=partial(of, last))
                if 0 < whole < length:
                    text = f"{said(name)} ends at {whole} of {length}"
                    yield Way("maximum", text, of_calls=partial(of, slice(whole)))
            break


def _maximum_of(name: str, source: str, part: slice, calls: OperationCalls) -> Way:
    given = {OPERAND + n: x[0].float() for n, x in calls.operands.items()}
    rows = (given | values_of_steps(calls))[source][..., part]
    if not rows.numel():
        return Way("", "")
    most = rows.amax(-1, keepdim=True)
    return Way("", "", {name: lambda x: most.to(x.dtype) if x.shape == most.shape else x})


def _exchanges(calls: OperationCalls) -> Iterator[Way]:
    expected = calls.expected()
    for first, (_, kinds) in expected.items():
        for second, (_, others) in expected.items():
            if first < second and kinds[0] == others[0] and first[:5] == second[:5] == "grad_":
                text = f"{first} and {second} are exchanged"
                yield Way("exchanged", text, results=partial(_exchanged, first, second))

    for first, own in calls.operands.items():
        for second, other in calls.operands.items():
            if first < second and own.shape == other.shape and own.dtype == other.dtype:
                exchanged = partial(_exchanged, first, second)
                of_results = partial(_exchanged, f"grad_{first}", f"grad_{second}")
                yield Way("exchanged", f"{first} and {second} are exchanged",
                          operands=exchanged, results=of_results)  # fmt: skip


def overwritten(calls: OperationCalls) -> Iterator[Way]:
    """One value where another should be: what is stored where an operand or a step was, before that
    is read again, or is not made of it yet.
    """
    values = _held(calls)
    order = list(values)
    for name, own in values.items():
        for other, value in values.items():
            alike = other == name or torch.equal(own, value)
            if own.shape == value.shape and own.numel() > 1 and not alike:
                later = order.index(other) > order.index(name)
                text = f"{said(other)} stands where {said(name)} should"
                of_calls = partial(_stands, name, other)
                cause = "exchanged" if later else "term-missing"
                yield Way(cause, text, of_calls=of_calls, natural=Natural.RARE)


def _stands(name: str, other: str, calls: OperationCalls) -> Way:
    value = _held(calls).get(other)
    return Way("", "") if value is None else put(name, value)


def _held(calls: OperationCalls) -> Tensors:
    """Operands that have numbers, and steps, of the first call."""
    given = {OPERAND + n: x[0].float() for n, x in calls.operands.items() if x.is_floating_point()}
    return given | values_of_steps(calls)


def _exchanged(first: str, second: str, found: Tensors) -> Tensors:
    if first not in found or found[first].shape != found[second].shape:
        return found
    return found | {first: found[second], second: found[first]}


def _limits_of_operand(name: str, x: Tensor) -> Iterator[Way]:
    """An operand held within limits, past which it has no gradient."""
    own = x.double()
    for most in (5.0, 10.0, 15.0, 20.0, 30.0, 50.0):
        if x.is_floating_point() and float(own.abs().amax()) > most / 4:
            text = f"{name} is capped softly: {most:g} tanh({name} / {most:g})"
            yield Way("limited", text, of_calls=partial(_capped, name, most))
    ends = {"at most": (None, 1.0), "at least": (-1.0, None), "within ±": (-1.0, 1.0)}
    for most in LIMITS:
        for word, (low, high) in ends.items():
            beyond = own.amax() > most, own.amin() < -most
            if (high and beyond[0]) or (low and beyond[1]):
                low_end, high_end = (None if end is None else end * most for end in (low, high))
                of = most if high or not low else -most
                text = f"{name} is held {word}{'' if word.endswith('±') else ' '}{of:g}"
                limit = partial(_limited, name, low_end, high_end)
                yield Way("limited", text, of_calls=limit)


def _capped(name: str, most: float, calls: OperationCalls) -> Way:
    whole = calls.operands[name]
    share = (whole.double() / most).tanh()

    def sloped(found: Tensors) -> Tensors:
        grad = f"grad_{name}"
        return found | {grad: found[grad] * (1 - share.square())} if grad in found else found

    return Way("", "", operands=lambda _: {name: most * share}, results=sloped)


def _limited(name: str, low: float | None, high: float | None, calls: OperationCalls) -> Way:
    whole = calls.operands[name]
    held = whole.clamp(min=low, max=high)
    inside = held == whole

    def masked(found: Tensors) -> Tensors:
        grad = f"grad_{name}"
        return found | {grad: found[grad] * inside} if grad in found else found

    return Way("limited", "", operands=lambda _: {name: held}, results=masked)


def filled_up(calls: OperationCalls) -> Iterator[Way]:
    """Operands filled up with zeros to a whole block, or by one, which count."""
    for symbol, n in sizes_of(calls).items():
        text = f"{symbol} has one zero more, which counts"
        yield Way("end", text, of_calls=partial(_filled, symbol, 0))
        for block in (*BLOCKS, 128):
            if padded(block, n) not in (n, *(padded(b, n) for b in BLOCKS if b < block)):
                text = f"zeros that fill up {symbol} to a whole {block} count"
                yield Way("end", text, of_calls=partial(_filled, symbol, block))
                text += f" in sums, whose means are over {symbol}"
                yield Way("end", text, of_calls=partial(_filled, symbol, block, apart=True))


class _MeansOver(TorchFunctionMode):
    """Means along a dimension of a length as if it had another."""

    def __init__(self, length: int, own: int) -> None:
        super().__init__()
        self.length, self.own = length, own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        of_last = getattr(func, "__name__", "") == "mean" and args[1:2] == (-1,)
        return (
            found * (self.length / self.own)
            if of_last and args[0].shape[-1] == self.length
            else found
        )


def _filled(symbol: str, block: int, calls: OperationCalls, apart: bool = False) -> Way:
    n = sizes_of(calls)[symbol]
    of_operands, of_results = (
        {name: 1 + shape.split().index(symbol) for name, shape in shapes.items()
         if symbol in shape.split()}
        for shapes in (calls.operation.shapes_of_operands, calls.operation.shapes_of_results)
    )  # fmt: skip

    def wide(given: Tensors) -> Tensors:
        found = {}
        for name, dim in of_operands.items():
            if name in given:
                more = list(given[name].shape)
                more[dim] = padded(block, n) - n if block else 1
                found[name] = torch.cat([given[name], given[name].new_zeros(more)], dim)
        return found

    def narrow(found: Tensors) -> Tensors:
        return {name: x.narrow(of_results[name], 0, n) if name in of_results else x
                for name, x in found.items()}  # fmt: skip

    means = partial(_MeansOver, padded(block, n), n) if apart else None
    return Way("end", "", operands=wide, results=narrow, within=means)
