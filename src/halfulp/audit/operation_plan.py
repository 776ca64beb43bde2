"""Which cases an audit of an operation runs, and which relations hold between its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from halfulp.audit.inputs import Case
from halfulp.audit.invariants import SHARED, Relation, between
from halfulp.operations import (
    STOCHASTIC,
    Operation,
    OperationCalls,
    OperationResult,
    Sizes,
    Tensors,
    defined,
    operation_named,
    probe_of,
    size_rows,
)

SIZE_CASES = {"quick": 36, "full": 200}
"""By the depth of an audit."""

_SAME = 1e-9
"""Of fp64 values near 1: sums in another order are no other function."""

Run = Callable[[OperationCalls], OperationResult | None]


def operation_cases(operation: Operation, depth: str, dtype: str, seed: int) -> tuple[Case, ...]:
    """Every probe at the operation's first size (quick), or at all of them and two seeds (full)."""
    sizes = operation.sizes[:1] if depth == "quick" else operation.sizes
    seeds = (seed,) if depth == "quick" else (seed, seed + 1)
    return tuple(
        Case(probe.name, size.with_(**probe.sizes), s, dtype, None, operation.folder)
        for size in sizes
        for s in seeds
        for probe in operation.probes
    )


def size_cases(operation: Operation, depth: str, dtype: str, seed: int) -> tuple[Case, ...]:
    """Cases over sizes, values, memory and ways to be called, few (quick) or many (full)."""
    # in float32 small or tied values cancel farther than natural noise, which is relative, tells
    rows = size_rows(operation.folder, seed, SIZE_CASES[depth], plain=dtype == "float32")
    return tuple(Case(name, sizes, seed, dtype, None, operation.folder) for name, sizes in rows)


def operation_relations(operation: Operation) -> tuple[Callable[..., list[Relation]], ...]:
    """The same call twice, for each symbol whose order means nothing fewer in reverse, and of what
    rounds by random numbers, and has no options that might seed them, whether calls share them.
    """
    random = STOCHASTIC in operation.stock.steps.values() and not operation.options
    others = (partial(_reversed, symbol) for symbol in operation.independent)
    return (_repeated_call, *others, *((same_random_numbers,) if random else ()))


def in_only_values(case: Case, only: frozenset[str]) -> Case:
    """The case with the values that a kernel has alone ("reduction='mean'") of options that its
    probe leaves at the operation's own.
    """
    probe = probe_of(operation_named(case.operation), case.probe)
    new = [text for text in sorted(only) if text.partition("=")[0] not in probe.options]
    return replace(case, probe="/".join((case.probe, *new)))


def name_of(relation: Callable[..., list[Relation]]) -> str:
    """A relation's name in lines about its calls."""
    if isinstance(relation, partial):
        return f"{relation.args[0]} reversed"
    return relation.__name__.strip("_").replace("_", " ")


def _repeated_call(run: Run, x: OperationCalls, base: OperationResult) -> list[Relation]:
    again = run(x)
    return [] if again is None else _compared("same call twice", base.tensors, again.tensors)


def same_random_numbers(_: Run, x: OperationCalls, base: OperationResult) -> list[Relation]:
    """Whether the errors of independent calls, each in its own size, add up to no more than chance
    makes of them, in one direction or away from zero, as those of shared random numbers do.
    """
    found, exact = [], defined(x)
    for result in x.operation.results:
        given, due = base.tensors.get(result.name), exact[result.name]
        if given is None or len(result.shape.split()) < 2 or len(given) < 2:
            continue
        off = (given.double() - due).nan_to_num(0.0, 0.0, 0.0).flatten(1)
        own = off.norm(dim=1, keepdim=True)
        each = off / own.clamp_min(1e-300)
        sums = [(each * by).sum(0).norm() for by in (1.0, due.flatten(1).sign())]
        norm = own[:, 0] * torch.stack(sums).max() / len(off) ** 0.5
        found.append(Relation(SHARED, result.name, norm, 0.0))
    return found


def _reversed(symbol: str, run: Run, x: OperationCalls, base: OperationResult) -> list[Relation]:
    """Along one symbol without its last, in reverse order: a row does not depend on its
    neighbors, except where an option, such as a mean, lets the definition's do.
    """
    if x.options != x.operation.options:
        exact = OperationResult(defined(x))
        made = _in_reverse(symbol, lambda calls: OperationResult(defined(calls)), x, exact)
        if any(float(relation.difference.max()) > _SAME for relation in made):
            return []
    return _in_reverse(symbol, run, x, base)


def _in_reverse(symbol: str, run: Run, x: OperationCalls, base: OperationResult) -> list[Relation]:
    shapes = x.operation.shapes_of_operands

    def turned(tensors: Tensors) -> Tensors:
        return {name: _flipped(t, shapes[name], symbol) for name, t in tensors.items()}

    other = run(replace(x, operands=turned(x.operands), grads=turned(x.grads)))
    if other is None:
        return []
    own = x.operation.shapes_of_results
    first, second = {}, {}
    for name, t in base.tensors.items():
        if symbol in own[name].split() and name in other.tensors:
            first[name] = _flipped(t, own[name], symbol)
            second[name] = other.tensors[name]
    return _compared(f"{symbol}: neighbors and place", first, second)


def _flipped(x: Tensor, shape: str, symbol: str) -> Tensor:
    """Without the last along a symbol, in reverse; the first dimension counts calls."""
    for place, own in enumerate(shape.split(), 1):
        if own == symbol:
            x = x.narrow(place, 0, max(1, x.shape[place] - 1)).flip(place)
    return x.contiguous()


def _compared(name: str, first: Tensors, second: Tensors) -> list[Relation]:
    found = []
    for tensor in first.keys() & second.keys():
        a, b = first[tensor], second[tensor]
        if not a.is_floating_point() or a.shape != b.shape:
            continue
        off, same = between(a, b)
        # two independent calls differ by √2 of one rounding
        norm = off.flatten(1).square().sum(-1).sqrt() / 2**0.5
        found.append(Relation(name, tensor, norm, float(same.double().mean())))
    return sorted(found, key=lambda relation: relation.tensor)


def smaller(case: Case) -> list[Callable[[Case], Case | None]]:
    """Ways to make a case of an operation smaller: fewer calls, then half of every symbol."""
    sizes = case.shape
    assert isinstance(sizes, Sizes)

    def fewer(trial: Case) -> Case | None:
        assert isinstance(trial.shape, Sizes)
        return None if trial.shape.calls == 1 else _at(trial, calls=1)

    def half(symbol: str, trial: Case) -> Case | None:
        assert isinstance(trial.shape, Sizes)
        n = trial.shape[symbol]
        return None if n < 2 else _at(trial, **{symbol: n // 2})

    return [fewer, *(partial(half, symbol) for symbol, _ in sizes.of)]


def _at(case: Case, **changes: int) -> Case:
    assert isinstance(case.shape, Sizes)
    return replace(case, shape=case.shape.with_(**changes))
