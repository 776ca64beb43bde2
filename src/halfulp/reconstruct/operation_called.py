"""Calls that a kernel is asked for, each a trial: one of those that fail, made small and of few
steps, and one of every probe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfulp.operations import (
    STOCHASTIC,
    Operation,
    OperationCalls,
    Tensors,
    calls_at,
    defined,
    drawn_calls,
    first_calls,
    sizes_of,
)
from halfulp.reconstruct.operation_trials import Run, Trial, power, square
from halfulp.reconstruct.operation_ways import computed

LARGEST = 2**15  # elements of a call that is computed some hundred times
STEPS = 6  # of a loop that is emulated some hundred times, where they show as much as all
FEW = 0.01  # of the squared error of the worst of some calls, below which one does not show it
PLAIN = 0.1  # relative error that is no rounding, however much larger it becomes
LONGEST = 2**18  # of one that fails, if it cannot be made smaller
FEWEST = 4  # rows of a call that is made short for its probe's sake


@dataclass(frozen=True)
class Failure:
    """A case that fails: its calls and the tensors that fail, the worst first."""

    calls: OperationCalls
    failing: tuple[str, ...]
    exact: Tensors | None = None  # the definition, where it is known

    @property
    def is_long(self) -> bool:
        """Whether a call takes long to be computed some hundred times."""
        return sum(x[0].numel() for x in self.calls.operands.values()) > LARGEST


def trial(
    run: Run,
    calls: OperationCalls,
    failing: tuple[str, ...] | None,
    exact: Tensors | None = None,
) -> Trial | None:
    """One call of these, made small where it is too large, and of few steps where it errs as much
    then; where it is not known what fails, tensors that are twice as far off as both recipes. None
    where the kernel gives nothing.
    """
    some = _small(_telling(run, calls, failing, exact), LONGEST if failing else LARGEST)
    if some is None:
        return None
    whole = _trial(run, some, failing)
    if whole is None or not whole.failing or (few := _of_few_steps(some)) is None:
        return whole
    short = _trial(run, few, failing)
    as_bad = short is not None and short.failing and short.relative > min(PLAIN, whole.relative / 2)
    return short if as_bad and short is not None else whole


def _telling(
    run: Run, calls: OperationCalls, failing: tuple[str, ...] | None, exact: Tensors | None
) -> OperationCalls:
    """One of these calls: of those that fail together the one that errs most, if it is not all."""
    one = first_calls(calls, 1)
    result = run(calls) if failing and calls.count > 1 else None
    if result is None or not failing or failing[0] not in result.tensors:
        return one
    kernel, due = (x[failing[0]].double() for x in (result.tensors, exact or defined(calls)))
    found = [power(a, b, b) / max(square(b), 1e-300) for a, b in zip(kernel, due, strict=True)]
    most = max(range(len(found)), key=found.__getitem__)
    return one if found[0] > FEW * found[most] else calls_at(calls, [most])


def _of_few_steps(calls: OperationCalls) -> OperationCalls | None:
    """The call with less of a size that nothing which is written has; None where there is none."""
    operation, found = calls.operation, calls
    shapes = operation.shapes_of_results
    written = {symbol for name in calls.expected() for symbol in shapes[name].split()}
    for symbol, size in sizes_of(calls).items():
        if symbol not in written and size > STEPS:
            found = _at_most(found, symbol, STEPS)
    return None if found is calls else found


def _trial(run: Run, some: OperationCalls, failing: tuple[str, ...] | None) -> Trial | None:
    result = run(some)
    if result is None:
        return None
    truth = defined(some)
    kernel = {
        name: x.double()
        for name, x in result.tensors.items()
        if name in truth and x.is_floating_point() and x.shape == truth[name].shape
    }
    exact = {name: truth[name].double() for name in kernel}
    operation = some.operation
    floor, stock = (computed(some, base, ()) for base in (operation.floor, operation.stock))
    spared = _without_consequences(some, kernel, exact)
    errors = {name: power(x, exact[name], exact[name]) for name, x in kernel.items()}
    made = {n: power(floor[n].double(), exact[n], exact[n]) for n in kernel}
    other = {n: power(stock[n].double(), exact[n], exact[n]) for n in kernel}
    times = 2.0
    if STOCHASTIC in operation.stock.steps.values():  # and no other's random numbers are a kernel's
        made, times = {n: max(made[n], other[n]) for n in kernel}, 4.0
    if failing is None:
        off = [
            n
            for n in kernel
            if errors[n] > times * max(made[n], other[n]) + 1e-12 * square(exact[n])
        ]
        failing = tuple(sorted(off, key=lambda n: -errors[n] / max(square(exact[n]), 1e-300)))
    else:
        failing = tuple(n for n in failing if errors.get(n, 0.0) > 0)
    return Trial(some, kernel, exact, errors, made, failing, spared)


def _without_consequences(calls: OperationCalls, kernel: Tensors, exact: Tensors) -> Tensors:
    """Takes rows of numbers for right where another result of the same row is none: what is chosen
    among NaN tells nothing. Which these are, by result.
    """
    shapes, independent = calls.operation.shapes_of_results, calls.operation.independent
    broken: dict[str, Tensor] = {}  # by symbol, of each call the rows without a number
    spared: Tensors = {}
    whole = []
    for name, x in kernel.items():
        symbol, none = shapes[name].split()[0], ~x.isfinite() & exact[name].isfinite()
        if symbol in independent and bool(none.any()):
            rows = none.flatten(2).any(2) if none.ndim > 2 else none
            broken[symbol] = rows | broken.get(symbol, torch.zeros_like(rows))
        elif symbol in independent:
            whole.append((name, symbol))
    for name, symbol in whole:
        if symbol in broken:
            x, rows = kernel[name], broken[symbol]
            spared[name] = rows.view(*rows.shape, *(1,) * (x.ndim - 2))
            kernel[name] = torch.where(spared[name], exact[name], x)
    return spared


def _small(calls: OperationCalls, longest: int) -> OperationCalls | None:
    """A call of few enough elements, of rows that do not depend on each other no more than that."""
    operation, elements = calls.operation, sum(x.numel() for x in calls.operands.values())
    for symbol, size in sizes_of(calls).items():
        if elements <= LARGEST or symbol not in operation.independent:
            continue
        keep = max(2, size * LARGEST // elements)
        calls = _at_most(calls, symbol, keep)
        elements = sum(x.numel() for x in calls.operands.values())
    return calls if elements <= longest else None


def _at_most(calls: OperationCalls, symbol: str, keep: int) -> OperationCalls:
    """No more than so many along a symbol."""
    shapes = {n: shape.split() for n, shape in calls.operation.shapes_of_operands.items()}
    operands, grads = (
        {n: _narrowed(x, shapes[n], symbol, keep) for n, x in given.items()}
        for given in (calls.operands, calls.grads)
    )
    return replace(calls, operands=operands, grads=grads)


def _narrowed(x: Tensor, shape: list[str], symbol: str, keep: int) -> Tensor:
    if symbol not in shape:
        return x
    dim = 1 + shape.index(symbol)
    return x.narrow(dim, 0, min(keep, x.shape[dim])).contiguous()


def panel(
    run: Run, operation: Operation, dtype: str, seed: int = 0, short: bool = False
) -> list[Trial]:
    """A call of every probe at the operation's first size; of fewer rows that see no other where it
    is too large, if it may be `short`: beside calls that are known to fail.
    """
    found = []
    for probe in operation.probes:
        sizes = operation.sizes[0].with_(**{**probe.sizes, "calls": 1})
        for symbol in operation.independent if short else ():
            fewer = max(FEWEST, sizes[symbol] * 4 * LARGEST // sizes.work)
            sizes = sizes.with_(**{symbol: min(sizes[symbol], fewer)})
        if sizes.work > 4 * LARGEST:
            continue
        generator = torch.Generator().manual_seed(seed)
        one = trial(run, drawn_calls(operation, probe.name, sizes, dtype, generator), None)
        if one is not None:
            found.append(one)
    return found
