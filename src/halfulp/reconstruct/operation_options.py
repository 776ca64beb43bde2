"""Options that a kernel reads otherwise than it is told: not, as another call has them, one for the
other, or another function of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import torch

from halfulp.operations import OperationCalls, sizes_of
from halfulp.reconstruct.operation_ways import Natural, Way

# of the formats themselves, and as libraries have them
_SLIGHT = (2.0**-7, 2.0**-10, 2.0**-23, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12)


def _swapped(first: str, second: str, calls: OperationCalls) -> Way:
    given = calls.options
    return Way("", "", options={first: given[second], second: given[first]})


def _other_of(name: str, pair: tuple[str, str], calls: OperationCalls) -> Way:
    first, second = pair
    own = calls.options[name]
    return Way("", "", options={name: {first: second, second: first}.get(own, own)})


def option_ways(calls: OperationCalls) -> Iterator[Way]:
    """Each option as another probe has it, or as it is where nobody gives it."""
    operation = calls.operation
    numbers = [n for n, value in calls.options.items() if isinstance(value, float)]
    for first, second in combinations(numbers, 2):
        text = f"{first} and {second} are exchanged"
        yield Way("option", text, of_calls=partial(_swapped, first, second))
    for name, value in calls.options.items():
        others = [operation.options[name]] + [p.options.get(name, value) for p in operation.probes]
        if isinstance(value, float):
            others += [0.0, float(f"{10 * value:.12g}"), float(torch.tensor(value).bfloat16())]
            others += _SLIGHT if 0 < value < _SLIGHT[0] else ()
        if isinstance(value, int) and not isinstance(value, bool):
            others += [value - 1, value + 1]  # counted from another number
        tried = {repr(value)}
        for other in others:
            if repr(other) not in tried:
                tried.add(repr(other))
                text = f"{name} is taken as {other!r} instead of {value!r}"
                unread = isinstance(other, bool | str) or other in (operation.options[name], 0)
                natural = Natural.COMMON if unread else Natural.NUMBER
                yield Way("option", text, options={name: other}, natural=natural)
                if isinstance(other, str):
                    text = f"{name} {value!r} and {other!r} are exchanged"
                    yield Way("option", text, of_calls=partial(_other_of, name, (value, other)))
        if isinstance(value, float) and value > 0:
            yield from _functions_of(calls, name)


_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "squared": lambda x: x * x, "as its root": lambda x: x**0.5, "inverted": lambda x: 1 / x,
}  # fmt: skip


def _functions_of(calls: OperationCalls, name: str) -> Iterator[Way]:
    """An option that is another function of itself, or has the size of what it is a mean over."""
    for told, of in _FUNCTIONS.items():
        way = partial(_function_of, name, of)
        yield Way("option", f"{name} is taken {told}", of_calls=way, natural=Natural.NUMBER)
    powers = [n for n, k in calls.options.items() if isinstance(k, int) and k > 1 and k is not True]
    for power in powers if 0 < calls.options[name] < 1 else ():
        way = partial(_to_the_power, name, power)
        text = f"{name} is taken to the power of {power}"
        yield Way("option", text, of_calls=way, natural=Natural.NUMBER)
    for symbol, n in sizes_of(calls).items():
        for told, sign in ((f"1 / {symbol}", -1), (f"{symbol}", 1)) if n > 1 else ():
            way = partial(_times_size, name, symbol, sign)
            text = f"{name} is taken {told} times"
            yield Way("option", text, of_calls=way, natural=Natural.NUMBER)


def _function_of(name: str, of: Callable[[float], float], calls: OperationCalls) -> Way:
    own = calls.options[name]
    return Way("", "", options={name: of(own) if own else own})


def _to_the_power(name: str, power: str, calls: OperationCalls) -> Way:
    return Way("", "", options={name: calls.options[name] ** calls.options[power]})


def _times_size(name: str, symbol: str, sign: int, calls: OperationCalls) -> Way:
    return Way("", "", options={name: calls.options[name] * sizes_of(calls)[symbol] ** sign})
