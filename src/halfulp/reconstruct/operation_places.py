"""Where an operation's unexplained error is: at which step it begins, found by asking which other
values of that step would make it; and along which sizes, or at which values of an operand, it sits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from halfulp.operations import OperationCalls, Rounding, sizes_of
from halfulp.reconstruct.operation_called import trial
from halfulp.reconstruct.operation_read import steps_read
from halfulp.reconstruct.operation_steps import said, shapes_of_steps
from halfulp.reconstruct.operation_trials import BROKEN, Run, Trial
from halfulp.reconstruct.operation_ways import Condition, Way
from halfulp.targets.manner import PLAIN

BY = 0.05  # of its size, by which a step is moved to see what hangs on it
SITS = 0.9  # share of an error that sits where it is said to
WILD = 1e3  # times its size, from which on a change has none to be told by
FEW = 0.34  # of the elements that may be
OTHERS = 3  # steps at which an error may begin as well that are told
LEAST = 1e-6  # of the mean variance, which every element may have
DRAWS = 8  # of random errors of a step
MORE = 1  # calls, beside the one that is told of, that are asked where their errors begin


@dataclass(frozen=True)
class Place:
    """Where an error is."""

    text: str
    relative: float  # the first tensor's error
    told: bool  # whether more is known than which tensor
    finite: bool  # whether the tensor is, wherever it should be


def place(trial: Trial, base: Rounding, others: Sequence[Trial]) -> Place:
    """Which tensor is off, where alone, at which step that begins and where it sits."""
    # gradients inherit what is wrong with results
    name = min(trial.failing, key=lambda n: n.startswith("grad_"))
    exact = float(trial.exact[name].nan_to_num(0.0, 0.0, 0.0).square().sum())
    relative = (trial.errors[name] / exact) ** 0.5 if exact else float("inf")
    broken = int((trial.kernel[name].isfinite() != trial.exact[name].isfinite()).sum())
    off = f"is {100 * relative:.2g} % off" if exact else "is not 0"
    off = f"is not finite in {broken} elements" if broken else off
    alone = " alone" if len(trial.failing) == 1 < len(trial.kernel) else ""
    parts = [f"{name}{alone} {off}"]
    if only := only_in(trial, others):
        parts.append(only.text)
    # NaN and Inf have no size that another value of a step would make
    # and where one call does not tell a step another that fails may
    asked = (trial, *[t for t in others if t.failing and not t.nonfinite][:MORE])
    begins = (
        _begins_broken(trial, base, name)
        if broken
        else next((b for one in asked if (b := _begins(one, base))), "")
    )
    if begins or (not broken and (begins := _like_noise(trial, base))):
        parts.append(begins)
    if sits := _overflows(trial, name) or _sits(trial, name):
        parts.append(sits)
    return Place("; ".join(parts), relative, bool(broken) or len(parts) > 1, not broken)


_MANNERS = {
    "transposed": "{} are transposed in memory",
    "packed": "{} are views into wider rows",
    "expanded": "{} are one row that is repeated, of stride 0",
    "twice": "it is called a second time",
    "backward-twice": "its backward pass is run a second time",
    "filled": "memory that it takes is full of NaN: not all of it is written",
}


def manner_of(run: Run, one: Trial) -> str:
    """In which memory or way of being called alone an error is; nothing where it is in any."""

    def fails(manner: str) -> bool:
        again = trial(run, replace(one.calls, manner=manner), None)
        return again is not None and bool(again.failing)

    if fails(PLAIN) or not fails(one.calls.manner):
        return ""
    own, plain = one.calls.manner.split("/"), PLAIN.split("/")
    of = ("operands", "gradients that reach it", "")
    told = [
        _MANNERS[own[i]].format(of[i])
        for i in range(3)
        if own[i] != plain[i] and fails("/".join((*plain[:i], own[i], *plain[i + 1 :])))
    ]
    told = told or [
        _MANNERS[x].format(o) for x, o, no in zip(own, of, plain, strict=True) if x != no
    ]
    return f"{one.failing[0]} is off only where {' and '.join(told)}"


def only_in(one: Trial, others: Sequence[Trial]) -> Condition | None:
    """Options and sizes that all calls which fail share, and no other has."""
    wrong, right = [one, *(t for t in others if t.failing)], [t for t in others if not t.failing]
    for name in one.calls.options if right else ():
        values, elsewhere = (
            {repr(t.calls.options[name]) for t in group} for group in (wrong, right)
        )
        if not values & elsewhere:
            told = " or ".join(sorted(values))
            return Condition(f"only where {name} is {told}", partial(_has_option, name, values))
    sizes, rows = sizes_of(one.calls), one.calls.operation.independent
    inner = sorted(sizes, key=lambda symbol: symbol in rows)  # rows do not see each other
    for symbol in inner if right and len(wrong) > 1 else ():
        bad, good = ([sizes_of(t.calls)[symbol] for t in group] for group in (wrong, right))
        if min(bad) > max(good):
            text = f"only from {symbol} = {min(bad)} on, not up to {max(good)}"
            return Condition(text, partial(_is_between, symbol, min(bad), math.inf))
        if max(bad) < min(good):
            text = f"only up to {symbol} = {max(bad)}, not from {min(good)} on"
            return Condition(text, partial(_is_between, symbol, 0, max(bad)))
        for block in (8, 16, 32, 64, 128):
            for whole, told in ((False, "no multiple"), (True, "a multiple")):
                own, other = ({(n % block == 0) is whole for n in group} for group in (bad, good))
                if own == {True} and other == {False}:
                    text = f"only where {symbol} is {told} of {block}"
                    return Condition(text, partial(_is_whole, symbol, block, whole))
    # two options, each of which has its value elsewhere too
    alike = {n: repr(v) for n, v in one.calls.options.items()
             if all(repr(t.calls.options[n]) == repr(v) for t in wrong)}  # fmt: skip
    for pair in combinations(alike.items(), 2) if right and len(wrong) > 1 else ():
        if not any(_has_all(pair, t.calls) for t in right):
            told = " and ".join(f"{name} is {value}" for name, value in pair)
            return Condition(f"only where {told}", partial(_has_all, pair))
    return None


def _has_option(name: str, values: set[str], calls: OperationCalls) -> bool:
    return repr(calls.options[name]) in values


def _has_all(options: tuple[tuple[str, str], ...], calls: OperationCalls) -> bool:
    return all(repr(calls.options[name]) == value for name, value in options)


def _is_between(symbol: str, least: int, most: float, calls: OperationCalls) -> bool:
    return least <= sizes_of(calls)[symbol] <= most


def _is_whole(symbol: str, block: int, whole: bool, calls: OperationCalls) -> bool:
    return (sizes_of(calls)[symbol] % block == 0) is whole


def _begins_broken(trial: Trial, base: Rounding, name: str) -> str:
    """The steps without numbers in which results would lack those that the kernel's lack."""
    # gradients inherit what is wrong with results, or are another function's
    results = [n for n in trial.kernel if not n.startswith("grad_")]
    broken = {
        n: ~trial.kernel[n].isfinite() & trial.exact[n].isfinite()
        for n in (results if name in results else trial.kernel)
    }
    found = []
    for step, shape in shapes_of_steps(trial.calls).items():
        where = broken[name][0]
        for dim, n in enumerate(shape) if len(shape) == where.ndim else ():
            where = where if n == where.shape[dim] else where.any(dim, keepdim=True)
        for here in (torch.ones(shape, dtype=torch.bool), where):
            way = Way("", "", {step: partial(torch.masked_fill, mask=here, value=torch.nan)})
            made = trial.emulated(base, (way,)) if here.shape == shape else None
            if made and all(torch.equal(~made[n].isfinite(), x) for n, x in broken.items()):
                found.append(said(step))
                break
    # of those that results do not tell apart the last is where numbers were lost at the latest
    *more, last = found or [""]
    told = f" (or at {' or '.join(more[: -OTHERS - 1 : -1])})" if more else ""
    return f"numbers are missing from {last} on{told}" if last else ""


def _begins(trial: Trial, base: Rounding) -> str:
    """The step other values of which would make the error, the last of those that explain it."""
    names = list(shapes_of_steps(trial.calls))
    found = [read for read in steps_read(trial, base) if read.name in names]
    if not found:
        return ""
    near = [read for read in found if read.share > found[0].share - 0.02]
    last = max(near, key=lambda read: names.index(read.name))
    size = last.own.square().mean().clamp_min(1e-300)
    by = float((last.found - last.own).square().mean() / size) ** 0.5
    # of steps that are each other's functions, row by row, results do not tell which it is
    alike = [said(read.name) for read in near if read.own.shape == last.own.shape][:OTHERS]
    alike = [name for name in alike if name != said(last.name)]
    told = f" (or at {' or '.join(alike)})" if alike else ""
    return (
        f"it begins at {said(last.name)}" + (f", by {100 * by:.2g} %" if by < WILD else "") + told
    )


def _like_noise(trial: Trial, base: Rounding) -> str:
    """The step that makes errors of the sizes that the kernel's have, element by element, where it
    is off by random parts of itself: by the likelihood of normal errors of such variances.
    """
    start, found = trial.emulated(base, ()), []
    generator = torch.Generator().manual_seed(0)
    for name in shapes_of_steps(trial.calls):
        way = Way(
            "", "", {name: lambda x: x * (1 + BY * torch.randn(x.shape, generator=generator))}
        )
        if start is None or not trial.concerns(base, way):
            continue
        moved = [trial.emulated(base, (way,)) for _ in range(DRAWS)]
        likely, size = 0.0, 0.0
        for n in trial.failing:
            if any(m is None for m in moved):
                break
            signs = trial.exact[n].nan_to_num(0.0, 0.0, 0.0).sign()
            off, *drawn = (
                _with_sums((x[n] - start[n]).nan_to_num(0.0, 0.0, 0.0), signs)
                for x in (trial.kernel, *(m for m in moved if m is not None))
            )
            spread = torch.stack(drawn).square().mean(0) / BY**2
            due = trial.exact[n].nan_to_num(0.0, 0.0, 0.0).square()
            least = due * (trial.rounding[n] / float(due.sum().clamp_min(1e-300)))
            least = _with_sums(least + LEAST * float(off.square().mean()) + 1e-300, signs.abs())
            sizes = torch.logspace(-8, 1, 37, dtype=torch.float64)[:, None]
            variance = sizes * spread + least
            own = -(variance.log() + off.square() / variance).sum(-1)
            likely += float(own.max())
            size = max(size, float(sizes[own.argmax()]))
        found.append((likely, name, size))
    if not found:
        return ""
    _, name, size = max(found)
    by = f"of {100 * size**0.5:.2g} % " if size < 1 else ""
    return f"it is spread as errors {by}of {said(name)} are"


def _overflows(trial: Trial, name: str) -> str:
    """That what has no number is too large, not nothing: Inf of the right sign."""
    kernel, exact = trial.kernel[name], trial.exact[name]
    broken = ~kernel.isfinite()
    if not bool(broken.any()) or not bool((kernel * exact)[broken].isposinf().all()):
        return ""
    return "all of them are Inf of the right sign: something overflows, or is divided by 0"


def _with_sums(x: Tensor, signs: Tensor) -> Tensor:
    """Elements, and their sums along each dimension, which tell what a row shares from what each
    element has.
    """
    return torch.cat([x.flatten(), *((x * signs).sum(d).flatten() for d in range(1, x.ndim))])


def _sits(trial: Trial, name: str) -> str:
    """The indices, or the values of an operand, that hold nearly all of a tensor's error though few
    of its elements.
    """
    calls, kernel, exact = trial.calls, trial.kernel[name][0], trial.exact[name][0]
    broken = kernel.isfinite() != exact.isfinite()
    error = (kernel - exact).nan_to_num(0.0, 0.0, 0.0).square() + BROKEN * broken
    size = exact.nan_to_num(0.0, 0.0, 0.0).square() + (0.0 if bool(exact.any()) else 1.0)
    error = broken.double() if bool(broken.any()) else error
    total, of = float(error.sum()), float(size.sum())
    shape = calls.operation.shapes_of_results
    found: list[tuple[float, str]] = []
    for dim, symbol in enumerate(shape[name].split()):
        other = [d for d in range(kernel.ndim) if d != dim]
        each, own = (t.sum(other) if other else t for t in (error, size))
        order = each.argsort(descending=True)
        count = 1 + int((each[order].cumsum(0) < SITS * total).sum())
        if count <= FEW * len(each) and float(own[order[:count]].sum()) < 0.7 * of:
            told = ", ".join(str(int(i)) for i in order[:count].sort().values[:4])
            told += " …" if count > 4 else ""
            found.append((count / len(each), f"at {told} of {len(each)} along {symbol}"))
    for operand, x in calls.operands.items():
        rows = x[0]
        if x.is_floating_point() or rows.shape != kernel.shape[: rows.ndim]:
            continue
        inner = tuple(range(rows.ndim, kernel.ndim))
        each = error.sum(inner) if inner else error
        worst = int(rows[each == each.max()][0])
        here, count = each[rows == worst].sum(), int((rows == worst).sum())
        if count < FEW * 2 * rows.numel() and float(here) > SITS * total:
            named = [n for n, v in calls.options.items() if v == worst and not isinstance(v, bool)]
            found.append((0.0, f"where {operand} is {named[0] + ', ' if named else ''}{worst}"))
    given = {n: x[0].double() for n, x in (calls.operands | calls.grads).items()
             if x.is_floating_point()}  # fmt: skip
    for operand, x in (given | {f"its exact value, {name},": exact}).items():
        if x.shape != kernel.shape:
            continue
        for values, word in ((x, "above"), (-x, "below")):
            order = values.flatten().argsort(descending=True)
            held = error.flatten()[order].cumsum(0) >= SITS * total
            count = 1 + int((~held).sum())
            fits = float(size.flatten()[order[:count]].sum()) < 0.7 * of
            if count <= FEW * error.numel() and fits:
                limit = float(x.flatten()[order[count - 1]])
                text = f"where {operand} is {limit:.3g} or {word}"
                found.append((count / error.numel(), text))
    return f"{100 * SITS:.0f} % of it sits {min(found)[1]}" if found else ""
