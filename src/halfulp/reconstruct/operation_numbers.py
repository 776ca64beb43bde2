"""Ways that are found rather than tried: a step that another stands for, numbers that bring an
emulation nearest, limits between quantiles.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from halfulp.operations import OperationCalls, Rounding, Tensors, defined, first_calls, sizes_of
from halfulp.reconstruct.operation_mistakes import Region, padded
from halfulp.reconstruct.operation_rewritten import scaled_definitions
from halfulp.reconstruct.operation_steps import (
    OPERAND,
    RESULT,
    said,
    shapes_of_steps,
    values_of_steps,
)
from halfulp.reconstruct.operation_trials import NEAR, Trial
from halfulp.reconstruct.operation_ways import Way

BY = 0.05  # of its size, by which a number is moved to see what hangs on it
CLOSER = 0.02  # of a step, where it was too large
FACTOR = 0.02  # a constant that is nearer to 1 is none
MEANT = 3e-3  # and one that is nearer to a number of meaning is that
SIGMAS = 8.0  # standard errors that a fitted number may be off: roundings are not independent
FILLED = (16, 32, 64, 128, 256)  # lanes of a block, of which those past an end may count
NAMES = 6  # numbers of meaning that one may be, at most
NOTHING = 1e-3  # and one that is nearer to 0 leaves out
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.98)  # of a step, between which its limit is looked for
ALONG = 0.05  # square of the cosine to an error, below which no number of a way is looked for
SECANTS = 8  # to a number, which near 0 needs more of them
FURTHER = 0.3  # share that one of these must explain for that

Make = Callable[..., Way]  # of a number, and how that is told


def further_ways(trial: Trial, base: Rounding, region: Region | None) -> Iterator[Way]:
    """A step that is another of its shape; steps, results and options so many times what they
    should be, and steps with a constant or so much of an operand beside them, or held within
    limits: by the number that fits; in a region alone where one is given.
    """
    others = (
        *_taken_for_others(trial),
        *_packed(trial.calls),
        *_times_steps(trial),
        *_moved_options(trial, _steps(trial, base)),
    )
    yield from (replace(way, region=region) for way in others)
    for name in _steps(trial, base):  # a secant does not find how often an angle turns
        for factor in _TIMES:
            yield _in(region, partial(times, name))(factor)
    for make, nothing, step in _numbers(trial, base):
        yield from _fitted(trial, base, _in(region, make), nothing, step)
    for name in _steps(trial, base):
        yield from _limits(trial, base, _in(region, partial(_held, name)), name)


def _in(region: Region | None, make: Make) -> Make:
    return lambda number, told="": replace(make(number, told), region=region)


def tiny_factor(trial: Trial) -> str:
    """That all that fails is a small part of what it should be, which next to it is nothing."""
    told, floor = [], trial.emulated(trial.calls.operation.floor, ()) or trial.exact
    for name in trial.failing:
        own, due = (x[name].flatten() for x in (trial.kernel, floor))
        factor = float(own.dot(due)) / max(float(due.dot(due)), 1e-300)
        left = float((own - factor * due).norm())
        if not 0 < abs(factor) < NOTHING or not left < NEAR * abs(factor) * float(due.norm()):
            return ""
        power = math.log2(abs(factor))
        number = f"2^{round(power)}" if abs(power - round(power)) < MEANT else f"{factor:.3g}"
        told.append(f"{name} is {number} times what it should be")
    return "; ".join(told)


def _taken_for_others(trial: Trial) -> Iterator[Way]:
    values = values_of(trial.calls)
    for name, own in values.items():
        for other, x in values.items():
            known = own.shape == x.shape and bool(x.any())  # zeros are a step that is left out
            if name != other and known and not name.startswith(RESULT):
                text = f"{said(name)} is taken for {said(other)}"
                yield Way("term-missing", text, of_calls=partial(_taken, name, other))


def _packed(calls: OperationCalls) -> Iterator[Way]:
    """Two steps or operands that lie beside each other in a row of memory, as sines and cosines do:
    in turns and read as halves, the other way round, or the second read where it would begin in a
    row that is filled up.
    """
    every = values_of(calls).items()
    values = {
        n.replace(RESULT, OPERAND): x
        for n, x in every
        if x.ndim > 1 and (n[len(RESULT) :] in calls.operands or not n.startswith(RESULT))
    }
    for names in permutations(values, 2):
        shape, other = (values[n].shape for n in names)
        if shape != other or shape[-1] < 2:
            continue
        first, second = map(said, names)
        for how, text in _LAYOUTS.items() if shape[-1] % 2 == 0 else ():
            way = partial(_as_packed, names, how)
            yield Way("exchanged", f"{first} and {second} {text}", of_calls=way)
        for block in (16, 32, 64, 128):
            way = partial(_as_packed, names, block)
            if padded(block, shape[-1]) != padded(block // 2, shape[-1]):
                text = f"{second} is read as if {first} before it were filled up to a whole {block}"
                yield Way("neighbor", text, of_calls=way)


_LAYOUTS = {"turns": "lie in turns, and are read as halves",
            "halves": "lie in halves, and are read in turns"}  # fmt: skip


def _as_packed(names: tuple[str, ...], how: str | int, calls: OperationCalls) -> Way:
    values = values_of(calls)
    a, b = (values[n.replace(OPERAND, RESULT)] for n in names)
    n, row = a.shape[-1], torch.cat([a, b], -1)
    if how == "turns":
        a, b = torch.stack([a, b], -1).flatten(-2).chunk(2, -1)
    elif how == "halves":
        a, b = row[..., ::2], row[..., 1::2]
    else:
        start = padded(int(how), n)
        at = torch.arange(a.numel() // n)[:, None] * 2 * n + start + torch.arange(n)
        b = torch.cat([row.flatten(), row.new_zeros(start)])[at].view(b.shape)
    pair = zip(names, (a, b), strict=True)
    return Way("", "", {name: partial(_in_place, other) for name, other in pair})


def _in_place(other: Tensor, own: Tensor) -> Tensor:
    return other.clone() if own.shape == other.shape else own  # autograd would write to it


def _times_steps(trial: Trial) -> Iterator[Way]:
    """What fails, multiplied or divided once more by a step of fewer numbers, as of each row."""
    values = values_of(trial.calls)
    for result in trial.failing:
        exact = trial.exact[result][0]
        for name, x in values.items():
            fits = x.ndim == exact.ndim and 1 < x.numel() < exact.numel()
            if fits and all(a in (1, b) for a, b in zip(x.shape, exact.shape, strict=True)):
                for word, by in (("times", torch.mul), ("divided by", torch.div)):
                    text = f"{result} is {word} {said(name)} once more"
                    way = partial(_by_step, RESULT + result, name, by)
                    yield Way("factor", text, of_calls=way)


def _by_step(result: str, name: str, by: Any, calls: OperationCalls) -> Way:
    return Way("", "", {result: partial(by, other=values_of(calls)[name])})


_KNOWN: deque[tuple[OperationCalls, Tensors]] = deque(maxlen=24)


def values_of(calls: OperationCalls) -> Tensors:
    """Steps, and under `result_` operands, gradients that arrive and results, of one call: the last
    calls' are kept, which many ways ask for.
    """
    for known, values in _KNOWN:
        if known is calls:
            return values
    _KNOWN.append((calls, _all_values(calls)))
    return _KNOWN[-1][1]


def _all_values(calls: OperationCalls) -> Tensors:
    given = {n: x[0].float() for n, x in (calls.operands | calls.grads).items()}
    given |= {n: x[0].float() for n, x in defined(first_calls(calls, 1)).items()
              if n not in given and not n.startswith("grad_")}  # fmt: skip
    return values_of_steps(calls) | {RESULT + n: x for n, x in given.items()}


def _taken(name: str, other: str, calls: OperationCalls) -> Way:
    x = values_of(calls)[other]
    return Way("", "", {name: partial(_in_place, x)})


def _steps(trial: Trial, base: Rounding) -> list[str]:
    """Steps that what fails hangs on."""
    shapes = shapes_of_steps(trial.calls)
    return [n for n in shapes if trial.concerns(base, Way("", "", {n: torch.neg}))]


def _moved_options(trial: Trial, names: list[str]) -> Iterator[Way]:
    """An option that is added to another step than it should be."""
    for option, value in trial.calls.options.items():
        for name in names if isinstance(value, float) and value else ():
            text = f"{option} is added to {said(name)}, and nowhere else"
            yield Way("option", text, options={option: 0.0},
                      of_calls=partial(_added_at, option, name))  # fmt: skip


def _added_at(option: str, name: str, calls: OperationCalls) -> Way:
    by = partial(torch.add, other=calls.options[option])
    return Way("", "", {name: by}, options={option: 0.0})


def _numbers(trial: Trial, base: Rounding) -> Iterator[tuple[Make, float, float]]:
    """Ways of one number each, the number that changes nothing, and by how much it is moved."""
    calls, names, values = trial.calls, _steps(trial, base), values_of(trial.calls)
    yield from ((make, 1.0, BY) for make in scaled_definitions(calls))
    for result in calls.operation.results:
        if f"grad_{result.name}" in calls.grads:
            yield partial(_both_times, result.name), 1.0, BY
    operands = {n: x for n, x in values.items() if n.removeprefix(RESULT) in calls.operands}
    read = [OPERAND + n for n, x in calls.operands.items() if x.is_floating_point()]
    for name in (*(RESULT + n for n in trial.failing), *names, *read):
        yield partial(times, name), 1.0, BY
    for name, value in calls.options.items():
        if isinstance(value, float) and value != 0:
            yield partial(_option_times, name, value), 1.0, BY
    for name in (*names, *read):
        own = values.get(name.replace(OPERAND, RESULT))
        size = (float(own.square().mean().sqrt()) if own is not None else 1.0) or 1.0
        yield partial(with_constant, name), 0.0, BY * size
        for other, x in operands.items() if own is not None else ():
            by = float(x.square().mean().sqrt())
            if own is not None and x.shape == own.shape and by:
                yield partial(_with_operand, calls, name, other), 0.0, BY * size / by


def times(name: str, factor: float, told: str = "") -> Way:
    """A step so many times as large."""
    if abs(factor) <= NOTHING:
        return Way("term-missing", f"{said(name)} is left out", {name: torch.zeros_like})
    text = f"{said(name)} is {told or f'{factor:.4g}'} times what it should be"
    return Way("factor", text, {name: partial(torch.mul, other=factor)})


def _both_times(name: str, factor: float, told: str = "") -> Way:
    names = (RESULT + name, f"{OPERAND}grad_{name}")
    if abs(factor) <= NOTHING:
        text = f"{name} is left out, in both passes"
        return Way("term-missing", text, dict.fromkeys(names, torch.zeros_like))
    text = f"{name} is {told or f'{factor:.4g}'} times what it should be, in both passes"
    return Way("factor", text, dict.fromkeys(names, partial(torch.mul, other=factor)))


def _option_times(name: str, own: float, factor: float, told: str = "") -> Way:
    text = f"{name} is taken as {factor * own:.3g} instead of {own!r}"
    text = f"{name} is taken {told} times" if told else text

    def of(calls: OperationCalls) -> Way:
        return Way("", "", options={name: factor * calls.options[name]})

    return Way("option", text, options={name: factor * own}, of_calls=of)


def with_constant(name: str, by: float, told: str = "") -> Way:
    """A step with a constant beside it."""
    text = f"{said(name)} has {told or f'{by:.3g}'} added to it"
    return Way("term-missing", text, {name: partial(torch.add, other=by)})


def _with_operand(calls: OperationCalls, name: str, other: str, by: float, _: str = "") -> Way:
    """A step with so much of an operand, or as much as an option says where that is the number."""
    options = {n: v for n, v in calls.options.items() if isinstance(v, float) and v}
    named = next((n for n, v in options.items() if abs(by / v - 1) < FACTOR), "")
    text = f"{said(name)} has {named or f'{by:.3g}'} × {said(other)} added to it"

    def of(calls: OperationCalls) -> Way:
        x = (calls.options[named] if named else by) * values_of(calls)[other]
        return Way("", "", {name: lambda own: own + x if own.shape == x.shape else own})

    return Way("option" if named else "term-missing", text, of_calls=of)


_TIMES = (0.125, 0.25, 1 / 3, 3.0, 4.0, 8.0)


def meant(calls: OperationCalls) -> dict[str, float]:
    """Numbers that have a meaning: constants, and what is made of sizes and options."""
    found = dict(_CONSTANTS)
    for name, n in sizes_of(calls).items():
        for block in FILLED:
            found[f"what fills {name} up to a whole {block}"] = padded(block, n) - n
    for name, n in (sizes_of(calls) | dict(calls.options)).items():
        if isinstance(n, int | float) and not isinstance(n, bool) and n > 0:
            found |= {name: n, f"1 / {name}": 1 / n, f"√{name}": n**0.5, f"1 / √{name}": n**-0.5}
            if n != 1:
                found |= {f"(1 − {name})": 1 - n, f"1 / (1 − {name})": 1 / (1 - n)}
            if n > 1:
                found |= {f"{name} / ({name} − 1)": n / (n - 1)}
                found |= {f"({name} − 1) / {name}": (n - 1) / n}
            if n > 2:  # of a base of angles whose context is so many times as long
                found |= {f"{k}^({name} / ({name} − 2))": k ** (n / (n - 2)) for k in (2, 4, 8)}
    powers = {
        f"(1 − {b}^{n})": 1 - float(x) ** k
        for b, x in calls.options.items() for n, k in calls.options.items()
        if isinstance(x, float) and 0 < x < 1 and isinstance(k, int) and k > 0
    }  # fmt: skip
    for name, x in powers.items():
        found |= {name: x, f"1 / {name}": 1 / x, f"√{name}": x**0.5, f"1 / √{name}": x**-0.5}
    return found


_CONSTANTS = {
    "ln 2": math.log(2), "log2 e": 1 / math.log(2), "ln² 2": math.log(2) ** 2,
    "1 / ln² 2": math.log(2) ** -2, "√2": 2**0.5, "1 / √2": 0.5**0.5, "π": math.pi,
    "127 / 128": 127 / 128, "128 / 127": 128 / 127, "448 / 240": 448 / 240, "240 / 448": 240 / 448,
    "256 / 448": 256 / 448, "448 / 256": 448 / 256, "⅓": 1 / 3, "⅔": 2 / 3,
}  # fmt: skip


def _called(make: Make, name: str, calls: OperationCalls) -> Way:
    return make(meant(calls).get(name, math.nan), name)


def _fitted(trial: Trial, base: Rounding, make: Make, nothing: float, step: float) -> Iterator[Way]:
    """The way whose number brings the emulation nearest, by secants from the one that changes
    nothing; none where that stays the best. Before it those of a number near it that has a meaning.
    """
    start, found, at = trial.emulated(base, ()), nothing, nothing + step
    for attempt in range(SECANTS):
        moved = trial.emulated(base, (make(at),))
        if start is None or moved is None:
            return
        slopes, errors = trial.weighted(moved, start), trial.weighted(trial.kernel, start)
        along = float(slopes.dot(errors)) ** 2
        if found == nothing and along < ALONG * float(slopes.dot(slopes) * errors.dot(errors)):
            if attempt:
                return
            at = nothing + CLOSER * step  # where so large a step is far from a straight line
            continue
        by = float((slopes * errors).sum() / (slopes * slopes).sum().clamp_min(1e-300))
        left = errors - by * slopes  # rounding, by which the number may be off
        spread = left.square().mean() / slopes.square().sum().clamp_min(1e-300)
        off = abs(at - nothing) * float(spread) ** 0.5
        found, last = nothing + by * (at - nothing), found
        if not abs(found) < 1e6 or abs(found - last) < 2e-3 * min(step, abs(found)):
            break
        at = found if abs(found - nothing) > 0.02 * step else nothing + step
    if CLOSER * FACTOR * step / BY < abs(found - nothing) < 1e6:
        yield from numbered(trial, make, found, SIGMAS * off)


def numbered(trial: Trial, make: Make, found: float, off: float = 0.0) -> Iterator[Way]:
    """The way of a number that may be so much off, before it those of a number near it that has a
    meaning.
    """
    # on other calls a number of meaning may be as good as 1, and is none here
    known = {n: x for n, x in meant(trial.calls).items() if abs(x - 1) > MEANT}
    near = {n: abs(x / found - 1) for n, x in known.items()} if found else {}
    short = float(f"{found:.2g}")  # as a person would have written it
    if found and abs(short / found - 1) < MEANT:
        yield make(short)
    least = max(MEANT, min(FACTOR, off / abs(found))) if found else 0.0
    for name in sorted((n for n, by in near.items() if by < least), key=lambda n: near[n])[:NAMES]:
        own = _called(make, name, trial.calls)
        yield replace(own, steps={}, of_calls=partial(_called, make, name))
    yield make(found)


def _held(name: str, most: float, _: str = "") -> Way:
    ends = partial(torch.clamp, min=-most, max=most)
    return Way("limited", f"{said(name)} is held within ±{most:.3g}", {name: ends})


def _limits(trial: Trial, base: Rounding, make: Make, name: str) -> Iterator[Way]:
    """The limit that explains most, between quantiles of a step, where any explains a part."""
    seen: list[Tensor] = []

    def kept(x: Tensor) -> Tensor:
        seen.append(x.abs().flatten())
        return x

    probe = Way("", f"{name} seen", {name: kept})
    if trial.emulated(base, (probe,)) is None or not seen:
        return
    sizes = seen[0].double().sort().values

    def at(share: float) -> float:
        return float(sizes[int(share * (len(sizes) - 1))])

    def explained(share: float) -> float:
        most = at(share)
        return trial.share(base, (make(most),)) if most > 0 else -1.0

    best = max((explained(share), share) for share in QUANTILES)
    if best[0] < FURTHER:
        return
    by = 0.25
    for _ in range(8):
        around = [s for s in (best[1] - by, best[1] + by) if 0 <= s <= 1]
        best = max(best, *((explained(s), s) for s in around))
        by /= 2
    yield make(at(best[1]))
