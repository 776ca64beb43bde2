"""What a kernel of an operation does, found in its own error: the definition is computed in every
known way, and the one whose results are the kernel's explains it.

Ways that explain a failing call equally well are told apart on a call of every probe: one that is
wrong where the kernel is right is not what it does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from halfulp.operations import STOCHASTIC, sizes_of
from halfulp.reconstruct.causes import CAUSES
from halfulp.reconstruct.found import FoundWay
from halfulp.reconstruct.operation_called import Failure, panel, trial
from halfulp.reconstruct.operation_codes import codes_asked
from halfulp.reconstruct.operation_judge import DO, GROSS, OTHERWISE, WHOLLY, WRONG, Judge
from halfulp.reconstruct.operation_noise import noise_of
from halfulp.reconstruct.operation_numbers import tiny_factor
from halfulp.reconstruct.operation_others import SLIGHT
from halfulp.reconstruct.operation_places import manner_of
from halfulp.reconstruct.operation_random import all_random, is_steady, random_cause
from halfulp.reconstruct.operation_reached import Reached, reached
from halfulp.reconstruct.operation_scales import scales_read
from halfulp.reconstruct.operation_trials import Run, Trial

OTHERS = 18  # calls that they are held against: first those of its options, and that fail
CASES = 2  # that are looked at until one is explained: the third named nothing in 20 searches
FEW = 64  # numbers of an operand, below which functions are not told apart by them
BEYOND = 1e3  # relative error of what should be nearly 0: much that is not 0 explains it
SCALED = 0.05  # relative error that scales of others make at least


def of_operation(
    run: Run, failures: Sequence[Failure], others: Sequence[Trial] | None = None
) -> FoundWay | None:
    """The way that explains most of an error on any of these cases, or of the `others`, which are a
    call of every probe where they are not given; where none explains enough, one that says where
    the first's error is. None where nothing errs, or the kernel gives nothing.
    """
    trials = _trials(run, failures)
    if others is None:
        of = failures[0].calls if failures else None
        others = panel(run, of.operation, of.dtype, short=True) if of is not None else ()
    found: list[FoundWay] = []
    wrong = [t for t in (*trials, *others) if t.failing]
    worst = max((t.relative for t in wrong), default=0.0)
    # a panel's calls are in no order: what is off by a last bit is seldom what a kernel does; and
    # wrong numbers say more than that there are none
    numbers = any(t.relative > GROSS and not t.nonfinite for t in wrong)
    few = {id(t) for t in wrong if _has_few_numbers(t)}
    many = max((t.relative for t in wrong if id(t) not in few), default=0.0)
    wrong.sort(
        key=lambda t: (
            bool(t.calls.manner),
            not trials and t.relative < SLIGHT * worst,
            numbers and (bool(t.nonfinite) or t.relative < GROSS),
            id(t) in few and GROSS * t.relative < many,
            t.relative > BEYOND,
        )
    )
    if wrong and wrong[0].calls.manner and (text := manner_of(run, wrong[0])):
        return FoundWay("operation-place", text, 0.0, 0.0, ", ".join(wrong[0].failing))
    # of what is short along a symbol chance tells little
    telling = max(wrong[:CASES], key=lambda t: min(sizes_of(t.calls).values()), default=None)
    if telling is not None and (noise := noise_of(run, telling)):
        return FoundWay(noise.cause, noise.text, noise.share, 0.0, ", ".join(telling.failing))
    for one in wrong[:CASES]:
        failing = ", ".join(one.failing)
        if one.relative > SCALED and (scales := scales_read(run, one)):
            # where numbers are another row's their scales are too
            rows = reached(run, one, signs=True) if scales.of_others else None
            if rows is not None and rows.cause == "neighbor":
                return FoundWay(rows.cause, rows.text, 0.0, 0.0, failing)
            return FoundWay("block-scale", scales.text, 0.0, 0.0, failing)
        if tiny := tiny_factor(one):
            return FoundWay("factor", tiny, 1.0, 0.0, failing)
    for one in wrong[:CASES]:
        rest = [t for t in (*trials, *others) if t is not one]
        rest.sort(key=lambda t: (t.calls.options != one.calls.options, not t.failing))
        del rest[OTHERS:]
        # what a candidate of ours makes torch warn of tells nobody anything
        with warnings.catch_warnings(action="ignore"):
            found.append(Judge(one, rest, thorough=not found).found())
        of_rounding = CAUSES[found[-1].cause].kind == "rounding"
        if found[-1].share >= (DO if of_rounding else WHOLLY) and found[-1].fits >= WRONG:
            break
    best = max(found, key=_rank, default=None)
    if best is not None and _may_be_random(run, wrong[0], (*trials, *others), best):
        for calls in (*(f.calls for f in failures), *(t.calls for t in others)):
            if text := random_cause(run, calls):
                return FoundWay("random", text, 0.0, 0.0, best.tensor)
    if best is not None and not best.share and (asked := _asked(run, wrong[:CASES])):
        return replace(best, cause=asked.cause, text=f"{asked.text}; {best.text}")
    if best is None or best.share or not (trials and all(t.nonfinite for t in trials)):
        return best
    # what was asked about comes first, where other calls' numbers were looked at
    first, name = trials[0], trials[0].nonfinite[0]
    broken = int((first.kernel[name].isfinite() != first.exact[name].isfinite()).sum())
    text = f"{name} is not finite in {broken} elements; on another call {best.text}"
    return best if "not finite" in best.text else replace(best, text=text)


def _may_be_random(run: Run, one: Trial, every: Sequence[Trial], found: FoundWay) -> bool:
    """Whether all that fails hangs on random numbers, and what is named may have drawn some: it is
    no other function, and not what gives the numbers of a kernel that draws none.
    """
    if not all_random(one, found.tensor) or (found.share and found.cause in OTHERWISE):
        return False
    # on some calls all random numbers but a few go one way
    return found.share < WHOLLY or not all(is_steady(run, t.calls) for t in every)


def _trials(run: Run, failures: Sequence[Failure]) -> list[Trial]:
    found = (trial(run, f.calls, f.failing, f.exact) for f in failures)
    return [one for one in found if one is not None]


def _has_few_numbers(one: Trial) -> bool:
    """Whether much is alike by chance: operands of a few numbers, or results of zeros; where random
    numbers are rounded by, many that are equal show them.
    """
    if STOCHASTIC in one.calls.operation.stock.steps.values():
        return False
    backward = all(name.startswith("grad_") for name in one.failing)
    given = one.calls.operands | (one.calls.grads if backward else {})
    few = all(torch.unique(x[0]).numel() < FEW for x in given.values())
    return few or not all(bool(one.kernel[name].any()) for name in one.failing)


def _asked(run: Run, wrong: Sequence[Trial]) -> Reached | None:
    """What a kernel that no way explains says itself."""
    for one in wrong:
        if codes := codes_asked(run, one):
            return Reached(*codes)
    return next((found for one in wrong if (found := reached(run, one))), None)


def _rank(found: FoundWay) -> tuple[float, int]:
    """Where one case is off by no more than rounding may be, it is not another function."""
    order = ("operation-function", "operation-unexplained", "operation-place")
    known = order.index(found.cause) if found.cause in order else len(order)
    return found.share + min(0.0, found.fits), known
