"""The calls of an audit: what a target gives on every case and relation, measured, in this process
or in shares over several.

The first case is called here whatever the number of processes, since it says in which form the
target is called and whether it runs at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, chdir
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfulp.audit.choosing import Budget
from halfulp.audit.figures import GRADIENTS, Measured
from halfulp.audit.inputs import GENERATOR, Case, Inputs
from halfulp.audit.invariants import Relation
from halfulp.audit.operation_plan import name_of as relation_name
from halfulp.audit.planning import GROWTH_PROBE, Depth, Plan, relations_of
from halfulp.audit.references import References, references
from halfulp.audit.statistics import drift_exponent
from halfulp.calls import Result
from halfulp.operations import ATTENTION, OperationCalls, operation_named
from halfulp.runs.parallel import run_jobs
from halfulp.runs.results import Progress
from halfulp.targets import Form, Outcome, Target, in_its_form, run_operation, run_target

Call = Callable[[Any], Outcome]
"""Calls the target on `Inputs`, or on an operation's `OperationCalls`."""


@dataclass(frozen=True)
class Asked:
    """What an audit was asked for, beside its cases."""

    target: Target
    dtype: str
    depth: Depth
    device: str
    forward: bool
    explain: bool
    tell: Progress
    wanted: Budget
    jobs: int = 1

    @property
    def gradients(self) -> tuple[str, ...]:
        """The operands that have a gradient."""
        if self.target.operation == ATTENTION:
            return tuple(name.removeprefix("grad_") for name in GRADIENTS)
        return tuple(x.name for x in operation_named(self.target.operation).differentiable)


@dataclass(frozen=True)
class _Seen:
    """What one case gave."""

    outcome: Outcome  # without its tensors' elements
    measured: Measured | None = None
    reference: References | None = None  # what it was measured by; None: as `references` has it
    drift: float | None = None


@dataclass(frozen=True)
class _Related:
    """What the relations of one case gave."""

    case: Case
    relations: list[Relation]
    calls: list[tuple[str, Outcome]]


@dataclass
class Gathered:
    """What the calls gave, before any test."""

    measured: dict[Case, tuple[Measured, References]]
    outcomes: dict[Case, Outcome]
    relations: list[tuple[Relation, Case]]
    drift: float | None = None
    target: Target | None = None  # as it was called, its form known
    related: list[tuple[str, Outcome]] = field(default_factory=list)  # calls of the relations

    def calls(self) -> list[tuple[str, Outcome]]:
        """Every call, by the name of its probe or relation."""
        # "sizes" of all cases of the covering array
        named = [(c.probe.partition("/")[0], found) for c, found in self.outcomes.items()]
        return named + self.related

    def keep(self, case: Case, seen: _Seen) -> None:
        """Take in what a case gave."""
        self.outcomes[case] = seen.outcome
        if seen.measured is not None:
            self.measured[case] = (seen.measured, seen.reference or references(case))
        self.drift = seen.drift if self.drift is None else self.drift

    def keep_related(self, found: _Related) -> None:
        """Take in what relations gave."""
        self.relations += [(relation, found.case) for relation in found.relations]
        self.related += found.calls


def call(target: Target, x: Inputs | OperationCalls, device: str, forward: bool) -> Outcome:
    """The target's results on given inputs, on the CPU."""
    if isinstance(x, OperationCalls):
        with torch.random.fork_rng([]):
            _seed(GENERATOR, device)  # a kernel that rounds stochastically draws from it
            return _on_cpu(run_operation(target, x.to(device), forward=forward), device)
    if x.dropout is not None and "dropout_p" in target.accepts and not target.same_dropout:
        return Outcome(None, "drops weights of its own, which nobody else knows", "unsupported")
    x = x.to(device)
    with torch.random.fork_rng([]):
        _seed(x.generator_seed, device)  # a kernel with dropout draws its seed
        asked = x.options() | {"manner": x.manner, "num_splits": x.num_splits}
        grad_out = None if forward else x.grad_out
        tensors = (x.query, x.key, x.value, grad_out)
        outcome = run_target(target, *tensors, grad_lse=None if forward else x.grad_lse, **asked)
    return _on_cpu(outcome, device)


def _seed(seed: int, device: str) -> None:
    # torch.manual_seed writes down where it was called for each device that is not there
    (torch.default_generator.manual_seed if device == "cpu" else torch.manual_seed)(seed)


def _on_cpu(outcome: Outcome, device: str) -> Outcome:
    if outcome.result is None or device == "cpu":
        return outcome
    return replace(outcome, result=outcome.result.map(torch.Tensor.cpu))


def gather(asked: Asked, todo: Plan) -> Gathered:
    """Call the target on every case and relation, or on the first case alone where that fails."""
    gathered = Gathered({}, {}, [])
    first = todo.all_cases[0]
    asked.tell(0.0, f"{first.probe} {first.shape}")
    reference = references(first)
    one = partial(call, device=asked.device, forward=asked.forward)
    outcome = one(asked.target, reference.inputs)
    gathered.target, outcome = in_its_form(
        asked.target, lambda t: one(t, reference.inputs), lambda: reference.truth.out, outcome
    )
    gathered.keep(first, _measured(first, reference, outcome))
    if outcome.kind == "error":
        gathered.target = None
        return gathered
    asked = replace(asked, target=gathered.target)
    for case, found in (_here if asked.jobs == 1 else _spread)(asked, todo):
        if isinstance(found, _Seen):
            gathered.keep(case, found)
        elif found is not None:
            gathered.keep_related(found)
    return gathered


_Found = Iterator[tuple[Case, _Seen | _Related | None]]
"""What every case but the first gave and then what relations gave, None where the time was up."""


def _here(asked: Asked, todo: Plan) -> _Found:
    """In this process; work is estimated by the number of scores."""
    one = partial(call, asked.target, device=asked.device, forward=asked.forward)
    total = sum(case.shape.work for case in todo.all_cases) * 1.1
    done = todo.all_cases[0].shape.work
    for case in todo.all_cases[1:]:
        if asked.wanted.over:
            return
        asked.tell(0.9 * done / total, f"{case.probe} {case.shape}")
        yield case, _see(one, case)
        done += case.shape.work
    for case, relations in relations_of(todo, asked.target.accepts):
        asked.tell(0.9 * done / total, f"relations, {case.probe}")
        yield case, _relate(one, case, relations)


@dataclass(frozen=True)
class _Share:
    """What one of several processes calls the target on."""

    again: Callable[[], AbstractContextManager[Target]]
    form: Form | None
    accepts: frozenset[str]
    folder: Path  # that names of files are relative to: a process may serve a second audit
    asked: dict[str, Any]  # keyword arguments of `call`
    wanted: Budget
    cases: tuple[Case, ...]
    plan: Plan
    relations: tuple[int, ...]  # which of `relations_of(plan)`


def _spread(asked: Asked, todo: Plan) -> _Found:
    """In so many processes, each with about as many scores."""
    assert asked.target.again is not None
    cases, related = todo.all_cases[1:], relations_of(todo, asked.target.accepts)
    work = [float(case.shape.work) for case in cases]
    work += [float(case.shape.work * len(relations)) for case, relations in related]
    loads = [0.0] * asked.jobs
    parts: list[list[int]] = [[] for _ in loads]
    # the largest first, each to the least loaded: at most 4/3 of the best schedule (Graham 1969)
    for number in sorted(range(len(work)), key=lambda i: -work[i]):
        least = loads.index(min(loads))
        loads[least] += work[number]
        parts[least].append(number)
    # in the plan's order again: where the time is up, what is left out is what the plan has last
    parts = [sorted(part) for part in parts if part]
    shares = [
        _Share(
            asked.target.again,
            asked.target.form,
            asked.target.accepts,
            Path.cwd(),
            {"device": asked.device, "forward": asked.forward},
            asked.wanted,
            tuple(cases[i] for i in part if i < len(cases)),
            todo,
            tuple(i - len(cases) for i in part if i >= len(cases)),
        )
        for part in parts
    ]
    done = run_jobs(
        _share,
        shares,
        workers=asked.jobs,
        progress=lambda fraction, message: asked.tell(0.9 * fraction, message),
        what="shares of the calls",
    )
    numbers = [number for part in parts for number in part]
    found = dict(zip(numbers, (each for gave in done for each in gave), strict=True))
    of = (*cases, *(case for case, _ in related))
    yield from ((case, found[number]) for number, case in enumerate(of))


def _share(share: _Share) -> list[_Seen | _Related | None]:
    with chdir(share.folder), share.again() as opened:
        target = replace(opened, form=share.form, accepts=share.accepts)
        one = partial(call, target, **share.asked)
        found: list[_Seen | _Related | None] = [
            None if share.wanted.over else _see(one, case) for case in share.cases
        ]
        if None in found:
            return found + [None for _ in share.relations]
        related = relations_of(share.plan, share.accepts) if share.relations else []
        return found + [_relate(one, *related[number]) for number in share.relations]


def _see(one: Call, case: Case) -> _Seen:
    """Call on a case, and measure."""
    reference = references(case)
    return _measured(case, reference, one(reference.inputs))


def _measured(case: Case, reference: Any, outcome: Outcome) -> _Seen:
    if outcome.result is None:
        return _Seen(outcome)
    measured, drift = reference.measure(outcome.result), None
    attention = case.operation == ATTENTION
    if attention and case.probe == GROWTH_PROBE and "out" not in measured.nonfinite:
        difference = outcome.result.out.double() - reference.truth.out
        # along O's sign, so that a cut toward zero drifts one way over elements of both signs
        signed = difference * reference.truth.out.sign()
        drift = drift_exponent(signed.flatten(0, 1).mT.flatten(0, 1))
    # another operation's references hold its functions, and cost little to have again
    return _Seen(outcome.without_memory(), measured, reference if attention else None, drift)


def _relate(one: Call, case: Case, relations: Sequence[Callable[..., list[Relation]]]) -> _Related:
    """Look at the relations of a case, and keep what became of every call."""
    found = _Related(case, [], [])

    def run(name: str, x: Inputs) -> Result | None:
        outcome = one(x)
        found.calls.append((f"relation {name}", outcome.without_memory()))
        result: Result | None = outcome.result
        return result

    x = references(case).inputs
    base = run(case.probe, x)
    if base is not None:
        for relation in relations:
            found.relations.extend(relation(partial(run, relation_name(relation)), x, base))
    return found
