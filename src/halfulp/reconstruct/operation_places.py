"""Where an operation's unexplained error is: at which step it begins, found by asking which other
values of that step would make it; and along which sizes, or at which values of an operand, it sits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halfulp.operations import Rounding, Tensors, defined
from halfulp.reconstruct.operation_trials import BROKEN, Trial
from halfulp.reconstruct.operation_ways import Way, first_calls, said, shapes_of_steps

BY = 0.05  # of its size, by which a step is moved to see what hangs on it
BEGINS = 0.8  # share of an error from which on it begins at a step
UNKNOWNS = 0.6  # of the numbers that fail, which the values of such a step may be at most
SITS = 0.9  # share of an error that sits where it is said to
FEW = 0.34  # of the elements that may be
FACTOR = 0.02  # a constant that is nearer to 1 is none
NOTHING = 1e-3  # and one that is nearer to 0 leaves out


@dataclass(frozen=True)
class Place:
    """Where an error is."""

    text: str
    relative: float  # the first tensor's error
    told: bool  # whether more is known than which tensor


def place(trial: Trial, base: Rounding) -> Place:
    """Which tensor is off, at which step that begins and where it sits."""
    name = trial.failing[0]
    exact = float(trial.exact[name].nan_to_num(0.0, 0.0, 0.0).square().sum())
    relative = (trial.errors[name] / exact) ** 0.5 if exact else float("inf")
    broken = int((trial.kernel[name].isfinite() != trial.exact[name].isfinite()).sum())
    off = f"is {100 * relative:.2g} % off" if exact else "is not 0"
    off = f"is not finite in {broken} elements" if broken else off
    alone = " alone" if len(trial.failing) == 1 < len(trial.kernel) else ""
    parts = [f"{name}{alone} {off}"]
    if not broken and (begins := _begins(trial, base)):
        parts.append(begins)
    if sits := _sits(trial, name):
        parts.append(sits)
    return Place("; ".join(parts), relative, len(parts) > 1)


def further_ways(trial: Trial, base: Rounding) -> Iterator[Way]:
    """What is tried where no common way explains: a step that is another of its shape; steps,
    results and options so many times what they should be, by the number that fits.
    """
    yield from _taken_for_others(trial)
    yield from _fitted_ways(trial, base)


def _taken_for_others(trial: Trial) -> Iterator[Way]:
    values: Tensors = {}

    def seen(name: str, exact: Tensor) -> Tensor:
        if not name.startswith("grad_"):
            values[name] = exact.detach().float()
        return exact

    defined(first_calls(trial.calls, 1), seen)
    values |= {
        f"result_{n}": x[0].float() for n, x in (trial.calls.operands | trial.calls.grads).items()
    }
    for name, own in values.items():
        for other, x in values.items():
            if name != other and own.shape == x.shape and not name.startswith("result_"):
                text = f"{said(name)} is taken for {said(other)}"
                yield Way("term-missing", text, {name: lambda _, x=x: x}, here=True)  # type: ignore[misc]


def _fitted_ways(trial: Trial, base: Rounding) -> Iterator[Way]:
    """Steps, results and options so many times what they should be, by the number that fits."""
    calls = trial.calls

    def of_step(name: str, factor: float) -> Way:
        cause = "factor" if abs(factor) > NOTHING else "term-missing"
        text = f"{said(name)} is {factor:.4g} times what it should be"
        text = text if cause == "factor" else f"{said(name)} is left out"
        return Way(cause, text, {name: partial(torch.mul, other=factor)}, here=True)

    def of_option(name: str, factor: float) -> Way:
        own, other = calls.options[name], factor * calls.options[name]
        return Way("option", f"{name} is taken as {other:.3g} instead of {own!r}",
                   options={name: other})  # fmt: skip

    for name in [f"result_{n}" for n in trial.failing] + list(shapes_of_steps(calls)):
        if (way := _fitted(trial, base, partial(of_step, name))) is not None:
            yield way
    for name, value in calls.options.items():
        one = _fitted(trial, base, partial(of_option, name)) if _varies(value) else None
        if one is not None:
            yield one


def _varies(value: object) -> bool:
    return isinstance(value, float) and value != 0


def _fitted(trial: Trial, base: Rounding, make: Callable[[float], Way]) -> Way | None:
    """The way whose number brings the emulation nearest, by secants from 1."""
    start, factor, at = trial.emulated(base, ()), 1.0, 1 + BY
    for _ in range(4):
        moved = trial.emulated(base, (make(at),))
        if start is None or moved is None:
            return None
        slopes, errors = _weighted(trial, moved, start), _weighted(trial, trial.kernel, start)
        by = float((slopes * errors).sum() / (slopes * slopes).sum().clamp_min(1e-300))
        factor, last = 1 + by * (at - 1), factor
        if not abs(factor) < 1e6 or abs(factor - last) < 1e-4:
            break
        at = factor if abs(factor - 1) > 1e-3 else 1 + BY
    return make(factor) if FACTOR < abs(factor - 1) < 1e6 else None


def _weighted(trial: Trial, a: Tensors, b: Tensors) -> Tensor:
    """What fails, as one vector, each tensor in its error's size."""
    parts = [(a[n] - b[n]).flatten() / max(trial.errors[n], 1e-300) ** 0.5 for n in trial.failing]
    return torch.cat(parts).nan_to_num(0.0, 0.0, 0.0)


def _begins(trial: Trial, base: Rounding) -> str:
    """The step other values of which would make the error, the last of those that explain it."""
    shapes, found = shapes_of_steps(trial.calls), []
    numbers = sum(trial.kernel[n].numel() for n in trial.failing)
    start = trial.emulated(base, ())
    for name, shape in shapes.items():
        if start is None or shape.numel() > UNKNOWNS * numbers or shape.numel() < 1:
            continue
        moved = trial.emulated(base, (Way("", "", {name: lambda x: x * (1 + BY)}),))
        if moved is None:
            continue
        slope = error = torch.zeros(shape, dtype=torch.float64)
        for n in trial.failing:
            by = (moved[n] - start[n])[0].nan_to_num(0.0, 0.0, 0.0) / BY
            off = (trial.kernel[n] - start[n])[0].nan_to_num(0.0, 0.0, 0.0)
            weight = 1 / max(trial.errors[n], 1e-300)
            squared, along = _summed_to(by * by, shape), _summed_to(by * off, shape)
            if squared is not None and along is not None:
                slope, error = slope + weight * squared, error + weight * along
        factor = (error / slope.clamp_min(1e-300)).clamp(-1e6, 1e6)
        if not bool(slope.any()):
            continue
        way = Way("", "", {name: lambda x, f=factor: x * (1 + f.to(x.dtype))})  # type: ignore[misc]
        found.append((trial.share(base, (way,)), -shape.numel(), name, factor))
    if not found or max(found)[0] < BEGINS:
        return ""
    best = max(found)[0]
    name, factor = [(n, f) for share, _, n, f in found if share > best - 0.02][-1]
    return f"it begins at {said(name)}, by {100 * float(factor.square().mean()) ** 0.5:.2g} %"


def _summed_to(x: Tensor, shape: torch.Size) -> Tensor | None:
    x = x.reshape(x.shape + (1,) * (len(shape) - x.ndim))
    try:
        return x.sum_to_size(shape)
    except RuntimeError:
        return None


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
    operation = calls.operation
    shape = {r.name: r.shape for r in operation.results}
    shape |= {f"grad_{o.name}": o.shape for o in operation.operands}
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
    for operand, x in (calls.operands | calls.grads).items():
        if x[0].shape != kernel.shape or not x.is_floating_point():
            continue
        for values, word in ((x[0].double(), "above"), (-x[0].double(), "below")):
            order = values.flatten().argsort(descending=True)
            held = error.flatten()[order].cumsum(0) >= SITS * total
            count = 1 + int((~held).sum())
            fits = float(size.flatten()[order[:count]].sum()) < 0.7 * of
            if count <= FEW * error.numel() and fits:
                limit = float(x[0].flatten()[order[count - 1]])
                text = f"where {operand} is {limit:.3g} or {word}"
                found.append((count / error.numel(), text))
    return f"{100 * SITS:.0f} % of it sits {min(found)[1]}" if found else ""
