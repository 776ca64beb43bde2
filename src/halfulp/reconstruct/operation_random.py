"""What is wrong with the random numbers of stochastic rounding, read off what comes out: no way to
compute the definition can draw the kernel's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.formats import round_to
from halfulp.operations import (
    OF_DTYPE,
    STOCHASTIC,
    OperationCalls,
    calls_at,
    defined,
    emulated,
)
from halfulp.reconstruct.operation_trials import Run, Trial

SURE = 6.0  # standard deviations from which on a mean is no chance
SHARED = 4.0  # times the variance of means that independent numbers have
APART = 1.3  # times the error that they make
FEW = 0.05  # of the elements, which may be off by more than random numbers can make
BINS = 8  # of the share of a step that is cut off


def random_cause(run: Run, calls: OperationCalls) -> str:
    """What is wrong in words; nothing where the recipe does not round stochastically."""
    if STOCHASTIC not in calls.operation.stock.steps.values():
        return ""
    result = run(calls)
    name = calls.operation.results[0].name
    if result is None or name not in result.tensors:
        return ""
    exact = defined(calls)[name]
    # of several calls the rest, which is of noise, names worse what does not differ (docs/log.md)
    if calls.count > 1 and is_steady(run, calls):
        return _of_value(result.tensors[name].double(), exact, calls.dtype)
    own = result.tensors[name].double() - exact
    if float((own.abs() > 2 * _steps(calls)).double().mean()) > FEW:
        return ""  # no random number does that
    stock = emulated(calls, calls.operation.stock)[name].double() - exact
    if not bool(own.isfinite().all()) or own.ndim != 3 or not bool(stock.any()):
        return ""
    return _shared(own, stock) or _probability(own, exact, calls.dtype) or _size(own, stock)


def all_random(one: Trial, tensors: str) -> bool:
    """Whether all of these tensors hang on steps of random numbers."""
    operation = one.calls.operation
    drawn = [n for n, f in operation.stock.steps.items() if f == STOCHASTIC]
    reached = (one.hangs_on(operation.floor, n) for n in drawn)
    return set(tensors.split(", ")) <= set().union(*reached)


def is_steady(run: Run, calls: OperationCalls) -> bool:
    """Whether a call that is made twice, between which other random numbers would be drawn, gives
    the same.
    """
    found, name = run(calls_at(calls, [0, 0])), calls.operation.results[0].name
    return found is not None and name in found.tensors and torch.equal(*found.tensors[name])


def _of_value(given: Tensor, exact: Tensor, dtype: str) -> str:
    """Whether a kernel that draws nothing goes up and down among numbers that lie alike."""
    due, up, _ = _shares(given, exact, dtype)
    alike = up[(due > 0.3) & (due < 0.45)]
    if not alike.numel() or not 0.1 < float(alike.mean()) < 0.9:
        return ""
    return "random numbers are made of the numbers themselves: equal ones go one way"


def _shares(given: Tensor, exact: Tensor, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """How far numbers are from the one below in a format, in steps, 1 where they go up, and which
    are negative; nothing where results are not one rounding.
    """
    below, above = (round_to(exact, OF_DTYPE[dtype], rounding=way) for way in ("down", "up"))
    between = above > below
    due, up = (((x - below) / (above - below))[between] for x in (exact, given))
    of = slice(None) if bool(((up == 0) | (up == 1)).all()) else slice(0)
    return due[of], up[of], (exact < 0)[between][of]


def _shared(own: Tensor, stock: Tensor) -> str:
    """Whether means along a size vary more than those of independent numbers."""
    spread = (own.var() / stock.var()).clamp_min(1.0)
    rows, columns = (own.mean(d).var() / stock.mean(d).var() / spread > SHARED for d in (2, 1))
    if rows and columns:
        return "all elements share random numbers"
    if rows or columns:
        return f"the elements of a {'row' if rows else 'column'} share random numbers"
    for told, x in (("elements of a row", own), ("rows", own.mT)):
        for lag in range(1, x.shape[2] * 3 // 4 + 1):
            a, b = x[..., lag:].flatten(), x[..., :-lag].flatten()
            if float((a * b).mean() / x.square().mean()) > 1 / SHARED:
                return f"random numbers repeat after {lag} {told}"
    return ""


def _steps(calls: OperationCalls) -> Tensor:
    """The most that stochastic rounding may put each element off: a unit of the last place every
    time that it is rounded.
    """
    drawn = [n for n, f in calls.operation.stock.steps.items() if f == STOCHASTIC]
    last = 2.0 ** -OF_DTYPE[calls.dtype].mantissa_bits
    passed: list[Tensor] = []

    def seen(step: str, exact: Tensor) -> Tensor:
        if step in drawn:
            passed.append(exact.detach().double().abs() * last)
        return exact

    defined(calls, seen)
    return torch.stack(passed).view(calls.count, -1, *passed[0].shape).sum(1)


def _probability(own: Tensor, exact: Tensor, dtype: str) -> str:
    """Whether numbers go up as often as what is cut off says, where results are one rounding."""
    due, up, signs = _shares(own + exact, exact, dtype)
    worst, text = SURE, ""
    for low in range(BINS):
        for sign in (False, True):
            here = (due * BINS >= low) & (due * BINS < low + 1) & (signs == sign)
            if int(here.sum()) < 30:
                continue
            p, seen = float(due[here].mean()), float(up[here].mean())
            off = abs(seen - p) / max(1e-9, (p * (1 - p) / float(here.sum())) ** 0.5)
            if off > worst:
                of = "negative numbers" if sign else "positive numbers"
                worst, text = (
                    off,
                    (
                        f"random numbers are biased: {of} go up with probability {seen:.2f} where"
                        f" {p:.2f} is due"
                    ),
                )
    return text


def _size(own: Tensor, stock: Tensor) -> str:
    """Whether the error as a whole is another than independent numbers make."""
    mean = own.mean() / (stock.std() / stock.numel() ** 0.5)
    if abs(float(mean)) > SURE:
        return f"random numbers are biased: results lean by {float(mean):.0f} standard deviations"
    ratio = float(own.std() / stock.std())
    if ratio > APART:
        return f"random numbers are not independent of step to step: {ratio:.2g} × the error"
    return "" if ratio > 1 / APART else f"what is rounded is not random: {ratio:.2g} × the error"
