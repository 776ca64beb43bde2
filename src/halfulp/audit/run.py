"""`audit`: call a target on every probe, measure, test, and say what it is."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from halfulp.audit.choosing import Budget, budget, chosen, left_out
from halfulp.audit.coverage import Coverage, coverage
from halfulp.audit.diagnosis import Diagnosis, diagnose, operation_causes, reconstructed
from halfulp.audit.figures import GRADIENTS, Measured
from halfulp.audit.in_form import in_its_form
from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.invariants import Relation
from halfulp.audit.operation_plan import name_of as relation_name
from halfulp.audit.planning import GROWTH_PROBE, Depth, Plan, plan, plan_of, relations_of
from halfulp.audit.probes import Shape
from halfulp.audit.references import References, references
from halfulp.audit.report import AuditReport, CaseReport, Verdict
from halfulp.audit.shrink import script, shrink
from halfulp.audit.statistics import drift_exponent, growth_exponent
from halfulp.audit.verdict import (
    FAMILY_LEVEL,
    LIMITS,
    Finding,
    Row,
    beside,
    errors_of,
    judge_case,
    judge_relation,
    tests_in,
    verdict_of,
)
from halfulp.calls import Result
from halfulp.operations import ATTENTION, OperationCalls, OperationResult, operation_named
from halfulp.reconstruct import Reconstruction
from halfulp.targets import (
    BHND,
    CallLimits,
    Outcome,
    Target,
    check_device,
    isolated,
    name_of_function,
    operation_target,
    resolve,
    run_operation,
    run_target,
)

Progress = Callable[[float, str], None]


def runner(
    target: Target, device: str = "cpu", forward: bool = False
) -> Callable[[Inputs], Result | None]:
    """A function that calls the target on given inputs; None where it refuses or fails."""
    return lambda x: _call(target, x, device, forward).result


def _call(target: Target, x: Inputs | OperationCalls, device: str, forward: bool) -> Outcome:
    if isinstance(x, OperationCalls):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)  # a kernel that rounds stochastically draws from it
            return _on_cpu(run_operation(target, x.to(device), forward=forward), device)
    if x.dropout is not None and "dropout_p" in target.accepts and not target.same_dropout:
        return Outcome(None, "drops weights of its own, which nobody else knows", "unsupported")
    x = x.to(device)
    with torch.random.fork_rng([]):
        torch.manual_seed(x.generator_seed)  # a kernel with dropout draws its seed
        asked = x.options() | {"manner": x.manner}
        grad_out = None if forward else x.grad_out
        outcome = run_target(target, x.query, x.key, x.value, grad_out, **asked)
    return _on_cpu(outcome, device)


def _on_cpu(outcome: Outcome, device: str) -> Outcome:
    if outcome.result is None or device == "cpu":
        return outcome
    if isinstance(outcome.result, OperationResult):
        found = {name: t.cpu() for name, t in outcome.result.tensors.items()}
        return replace(outcome, result=OperationResult(found))
    moved = {name: t.cpu() for name, t in vars(outcome.result).items() if t is not None}
    return replace(outcome, result=replace(outcome.result, **moved))


@dataclass
class _Gathered:
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


def audit(
    target: str | Target | Callable[..., Any],
    *,
    op: str = ATTENTION,
    dtype: str = "bfloat16",
    depth: Depth = "quick",
    shapes: Sequence[Shape] = (),
    captured: Sequence[str] = (),
    seed: int = 0,
    device: str = "cpu",
    forward: bool = False,
    isolate: bool | CallLimits = False,
    form: str | None = None,
    explain: bool = True,
    only: Sequence[str] = (),
    seconds: float | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Is this kernel numerically sound? A black box: only calls, outputs and gradients are used.

    Args:
        target: a built-in name (`halfulp ls targets`), "module:function", "file.py:function", or a
            function `f(query, key, value, *, is_causal, scale)` on `[B, H, N, D]` tensors that
            returns out or (out, lse). Of another operation its signature is that of
            torch.nn.functional's function of that name, or as `halfulp ls operations` shows.
        op: the operation: "attention", another of `halfulp ls operations`, or a folder that defines
            one (docs/operations.md).
        dtype: "bfloat16", "float16" or "float32", in which only errors 32 times the stock recipe's
            count.
        depth: "quick" (under a minute on two cores) or "full" (under ten).
        shapes: sizes to use instead of the depth's own.
        captured: safetensors files with query, key, value, grad_out (or q, k, v, do) to audit on as
            well.
        seed: of the probe inputs.
        device: where the target runs; references are computed on the CPU.
        forward: ask for no gradients, of a kernel that has no backward pass.
        isolate: make the calls in a process of their own, as `halfulp audit` does: an exit, a
            crash, a hang or endless memory is then a line of the report. The target must be named.
        form: how a function takes its tensors, in a line such as "qkv[B,N,3,H,D]" (docs/forms.md);
            None: what its parameters are called and its first result say. `forward` is meant where
            it has no gradients, as of a cache.
        explain: also reconstruct what the kernel does, which names causes, and shrink the smallest
            failing input.
        only: names of the probes to run, "sizes" or "relations"; what is left out is missing.
        seconds: after how long no further case is begun; the most telling come first.
        progress: called with (fraction done, what is being done).

    Returns:
        An `AuditReport`. "sound" and "stock" are said only where every planned call went through,
        every gradient came and the inputs stayed whole; of a kernel without a backward pass
        "forward sound" and "forward stock"; else "incomplete", with what is missing. What a target
        declares not to take (no `attn_mask` in its signature) is left out and said. One that fails
        on plain Gaussian input has verdict "error".

    Raises:
        ValueError: for an unknown or missing target, dtype, depth or file, in one line.
    """
    if isinstance(target, Target):
        op = target.operation
    said = (depth, dtype, seed, shapes, captured)
    todo = plan(*said) if op == ATTENTION else plan_of(op, *said)
    check_device(device)
    if isolate and not isinstance(target, str):
        why = "a function cannot be handed to another process; accepted is with its name"
        raise ValueError(f"isolate={isolate!r}: {why}")
    limits = isolate if isinstance(isolate, CallLimits) else None
    opened = isolated(str(target), device, limits, op, form) if isolate else nullcontext(target)
    with opened as given:
        chosen = _target(given, op, form)
        forward = forward or (chosen.form or BHND).forward_only is not None
        rest = (explain, progress or _silent, budget(only, seconds))
        return _audit(_Asked(chosen, dtype, depth, device, forward, *rest), todo)


@dataclass(frozen=True)
class _Asked:
    """What an audit was asked for, beside its cases."""

    target: Target
    dtype: str
    depth: Depth
    device: str
    forward: bool
    explain: bool
    tell: Progress
    wanted: Budget

    @property
    def gradients(self) -> tuple[str, ...]:
        """The operands that have a gradient."""
        if self.target.operation == ATTENTION:
            return tuple(name.removeprefix("grad_") for name in GRADIENTS)
        return tuple(x.name for x in operation_named(self.target.operation).differentiable)


def _audit(asked: _Asked, todo: Plan) -> AuditReport:
    start = time.perf_counter()
    whole = todo.fitted(asked.target.accepts, asked.target.form or BHND)
    todo = chosen(whole, asked.wanted)
    gathered = _gather(asked, todo)
    seen = coverage(gathered.calls(), asked.forward, asked.gradients)
    unseen = left_out(whole, todo, asked.wanted, list(gathered.outcomes))
    seen = replace(seen, missing=seen.missing + unseen)
    level = FAMILY_LEVEL / max(1, tests := _count(gathered))
    findings, rows = _judge(gathered, level)
    growth = _growth(todo, gathered)
    asked.tell(0.9, "reconstruction")
    run = runner(gathered.target or asked.target, asked.device, asked.forward)
    found, causes = _explained(asked, gathered, run, findings)
    smallest, shown = _shrink(run, findings, asked.explain, asked.tell)
    verdict, reason = _verdict(gathered, seen, findings, tests, causes)
    name = asked.target.name
    text = None
    if smallest is not None and shown is not None:
        text = script(name, shown, smallest, (gathered.target or asked.target).form)
    reports = tuple(_case_report(case, gathered, rows) for case in todo.all_cases)
    notes = tuple(dict.fromkeys(note for _, found in gathered.calls() for note in found.notes))
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    asked.tell(1.0, verdict)
    return AuditReport(
        target=name,
        dtype=asked.dtype,
        device=asked.device,
        depth=asked.depth,
        forward=asked.forward,
        missing=seen.missing,
        limits=seen.limits,
        verdict=verdict,
        reason=reason,
        findings=tuple(findings),
        causes=tuple(d.cause for d in causes),
        evidence=tuple(d.evidence for d in causes),
        cases=reports,
        relations=tuple(r for r, _ in gathered.relations),
        fingerprint=found,
        growth=growth,
        drift=gathered.drift,
        tests=tests,
        family_level=FAMILY_LEVEL,
        smallest=smallest,
        script=text,
        notes=notes,
        seconds=time.perf_counter() - start,
        versions=versions,
        operation=asked.target.operation,
        form=_form_text(gathered.target or asked.target),
    )


def _form_text(target: Target) -> str | None:
    return None if target.form in (None, BHND) else str(target.form)


def _explained(
    asked: _Asked,
    gathered: _Gathered,
    run: Callable[[Inputs], Result | None],
    findings: list[Finding],
) -> tuple[Reconstruction | None, tuple[Diagnosis, ...]]:
    """What the kernel does, by its own errors: a recipe of attention, or a way to compute another
    operation.
    """
    if asked.target.operation != ATTENTION:
        return None, operation_causes(run, findings) if asked.explain else ()
    found = None
    if asked.explain and gathered.measured:
        found = reconstructed(run, asked.target.name, asked.dtype, findings)
    return found, diagnose(findings, found)


def _silent(_: float, __: str) -> None:
    """Progress that nobody looks at."""


def _target(
    target: str | Target | Callable[..., Any], op: str = ATTENTION, form: str | None = None
) -> Target:
    if isinstance(target, Target):
        chosen = target
    elif isinstance(target, str):
        chosen = resolve(target, operation=op, form=form)
    elif op == ATTENTION:
        chosen = Target.of(target, form=form)
    else:
        chosen = operation_target(operation_named(op), target, name_of_function(target))
    if chosen.missing is not None:
        raise ValueError(f"target={chosen.name!r}: {chosen.missing}")
    return chosen


def _gather(asked: _Asked, todo: Plan) -> _Gathered:
    """Call the target on every case and relation, or on the first case alone where that fails. Work
    is estimated by the number of scores.
    """
    gathered = _Gathered({}, {}, [])
    work = {c: c.shape.work for c in todo.all_cases}
    total, done = sum(work.values()) * 1.1, 0.0
    for case in todo.all_cases:
        if gathered.outcomes and asked.wanted.over:
            return gathered
        asked.tell(0.9 * done / total, f"{case.probe} {case.shape}")
        reference = references(case)
        outcome = gathered.outcomes[case] = _call(
            asked.target, reference.inputs, asked.device, asked.forward
        )
        if len(gathered.outcomes) == 1:
            call = partial(_call, device=asked.device, forward=asked.forward)
            found, outcome = in_its_form(asked.target, call, reference, outcome)
            asked = replace(asked, target=found)
            if outcome.kind == "error":
                gathered.outcomes[case] = outcome
                return gathered
            gathered.outcomes[case], gathered.target = outcome, asked.target
        if outcome.result is not None:
            measured = reference.measure(outcome.result)
            gathered.measured[case] = (measured, reference)
            if (
                case.operation == ATTENTION
                and case.probe == GROWTH_PROBE
                and gathered.drift is None
                and "out" not in measured.nonfinite
            ):
                difference = outcome.result.out.double() - reference.truth.out
                gathered.drift = drift_exponent(
                    (difference * reference.truth.out.sign()).flatten(0, 1).mT.flatten(0, 1)
                )
        gathered.outcomes[case] = outcome.without_memory()
        done += work[case]
    for case, relations in relations_of(todo):
        asked.tell(0.9 * done / total, f"relations, {case.probe}")
        x = references(case).inputs
        base = _related(asked, gathered, case.probe)(x)
        if base is not None:
            gathered.relations += [
                (found, case)
                for relation in relations
                for found in relation(_related(asked, gathered, relation_name(relation)), x, base)
            ]
    return gathered


def _related(asked: _Asked, gathered: _Gathered, name: str) -> Callable[[Inputs], Result | None]:
    """Calls the target for a relation, and keeps what became of it."""

    def run(x: Inputs) -> Result | None:
        outcome = _call(asked.target, x, asked.device, asked.forward)
        gathered.related.append((f"relation {name}", outcome.without_memory()))
        result: Result | None = outcome.result
        return result

    return run


def _count(gathered: _Gathered) -> int:
    return sum(tests_in(*pair) for pair in gathered.measured.values()) + len(gathered.relations)


def _judge(gathered: _Gathered, level: float) -> tuple[list[Finding], dict[Case, list[Row]]]:
    findings: list[Finding] = []
    rows: dict[Case, list[Row]] = {}
    for case, (measured, reference) in gathered.measured.items():
        rows[case], found = judge_case(case, measured, reference, level)
        findings += found
    for number, (relation, case) in enumerate(gathered.relations):
        stock, floor = errors_of(references(case), relation.tensor)
        gathered.relations[number] = (replace(relation, times_floor=beside(relation, floor)), case)
        broken = judge_relation(relation, stock, level, LIMITS[case.dtype], case.shape.unit)
        if broken is not None:
            findings.append(replace(broken, case=case))
    order = {"non-finite": 0, "error": 1, "lean": 1, "element": 2, "relation": 3}
    findings.sort(key=lambda f: (f.grade != "defect", order[f.kind], -f.ratio))
    return findings, rows


def _growth(todo: Plan, gathered: _Gathered) -> dict[str, float]:
    """By which exponent of N each tensor's error outgrows the stock recipe's."""
    growth = {}
    for tensor in ("out", *GRADIENTS):
        points = []
        for case in todo.lengths:
            if case in gathered.measured:
                measured, reference = gathered.measured[case]
                got, stock = (
                    {f.tensor: f for f in m.figures if f.name.endswith(" error")}
                    for m in (measured, reference.stock)
                )
                if tensor in got:
                    points.append(
                        (
                            case.shape.n_key,
                            got[tensor].relative / max(stock[tensor].relative, 1e-300),
                        )
                    )
        if len(points) > 1:
            growth[tensor] = growth_exponent([n for n, _ in points], [e for _, e in points])
    return growth


def _shrink(
    run: Callable[[Inputs], Result | None],
    findings: list[Finding],
    wanted: bool,
    tell: Progress,
) -> tuple[Case | None, Finding | None]:
    worst = next((f for f in findings if f.grade == "defect"), None)
    if worst is None or not wanted:
        return None, None
    tell(0.95, "shrinking the input")
    return shrink(run, worst), worst


def _verdict(
    gathered: _Gathered,
    seen: Coverage,
    findings: list[Finding],
    tests: int,
    causes: tuple[Diagnosis, ...],
) -> tuple[Verdict, str]:
    first = next(iter(gathered.outcomes.values()))
    if not gathered.measured or first.kind == "error":
        return "error", first.refusal or "no case could be run"
    grade = verdict_of(findings)
    reason = f"no property fails in {tests} tests"
    if grade != "sound":
        worst = next(f for f in findings if f.grade == grade)
        where = "" if worst.case is None else f" on {worst.case.probe} {worst.case.shape}"
        reason = f"{worst.property}{where}: {worst.figure}"
        if causes:
            reason = f"{causes[0].cause.name} ({causes[0].evidence}); {reason}"
    if grade == "defect":
        return grade, reason
    if seen.missing:
        return "incomplete", f"{'; '.join(seen.missing)}; what was seen is {grade}: {reason}"
    if seen.forward_only:
        return ("forward sound" if grade == "sound" else "forward stock"), reason
    return grade, reason


def _case_report(case: Case, gathered: _Gathered, rows: dict[Case, list[Row]]) -> CaseReport:
    outcome = gathered.outcomes.get(case)
    if outcome is None:
        why = "the time was up" if gathered.measured else "the first case failed"
        return CaseReport(case, "not called", f"not called, since {why}")
    if outcome.kind != "ok":
        return CaseReport(case, outcome.kind, outcome.refusal)
    measured, _ = gathered.measured[case]
    leans = {lean.tensor: float(lean.lean.mean()) for lean in measured.leans}
    return CaseReport(
        case, "ok", outcome.refusal, tuple(rows[case]), leans, measured.ulps, measured.nonfinite
    )
