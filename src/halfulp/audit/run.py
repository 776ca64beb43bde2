"""`audit`: call a target on every probe, measure, test, and say what it is."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from halfulp.audit.choosing import budget, chosen, left_out
from halfulp.audit.coverage import Coverage, coverage
from halfulp.audit.diagnosis import Diagnosis, diagnose, operation_causes, reconstructed
from halfulp.audit.figures import GRADIENTS
from halfulp.audit.gathering import Asked, Gathered, call, gather
from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.planning import Depth, Plan, plan, plan_of
from halfulp.audit.probes import Shape
from halfulp.audit.references import references
from halfulp.audit.report import AuditReport, CaseReport, Verdict
from halfulp.audit.shrink import script, shrink
from halfulp.audit.statistics import growth_exponent
from halfulp.audit.verdict import (
    FAMILY_LEVEL,
    GROSS,
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
from halfulp.complaints import alike
from halfulp.formats import dtype_named
from halfulp.operations import ATTENTION, DTYPES
from halfulp.reconstruct import Reconstruction
from halfulp.runs.results import Progress, no_progress
from halfulp.runs.threads import one_thread, own_thread
from halfulp.targets import (
    BHND,
    SEEDED,
    CallLimits,
    Target,
    device_named,
    isolated,
    target_of,
)


def runner(
    target: Target, device: str = "cpu", forward: bool = False
) -> Callable[[Inputs], Result | None]:
    """A function that calls the target on given inputs; None where it refuses or fails."""
    return lambda x: call(target, x, device, forward).result


def audit(
    target: str | Target | Callable[..., Any],
    *,
    op: str = ATTENTION,
    dtype: str | torch.dtype = "bfloat16",
    depth: Depth = "quick",
    shapes: Sequence[Shape] = (),
    captured: Sequence[str] = (),
    seed: int = 0,
    device: str | torch.device = "cpu",
    forward: bool = False,
    isolate: bool | CallLimits = False,
    form: str | None = None,
    explain: bool = True,
    only: Sequence[str] = (),
    seconds: float | None = None,
    jobs: int = 1,
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
        dtype: bfloat16, float16 or float32, by name or as torch has it; in float32 only errors 32
            times the stock recipe's count.
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
        jobs: processes that the calls and their measuring are shared over, each on one thread of
            torch, but not the search for causes and the smallest input; the figures are those of
            one job on one thread. The target must be named, and is opened in each, so that what it
            keeps from call to call it keeps by process.
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
    kind, device = dtype_named(dtype, DTYPES), device_named(device)
    said = (depth, kind, seed, shapes, captured)
    todo = plan(*said) if op == ATTENTION else plan_of(op, *said)
    with _opened(target, op, device, isolate, form, jobs) as chosen:
        forward = forward or (chosen.form or BHND).forward_only is not None
        rest = (explain, progress or no_progress, budget(only, seconds), jobs)
        return _audit(Asked(chosen, kind, depth, device, forward, *rest), todo)


@contextmanager
def _opened(
    target: str | Target | Callable[..., Any],
    op: str,
    device: str,
    isolate: bool | CallLimits,
    form: str | None,
    jobs: int,
) -> Iterator[Target]:
    """The target, in a process of its own where asked for, ready for so many jobs."""
    if isolate and not isinstance(target, str):
        why = "a function cannot be handed to another process; accepted is with its name"
        raise ValueError(f"isolate={isolate!r}: {why}")
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: accepted is an integer of at least 1")
    limits = isolate if isinstance(isolate, CallLimits) else None
    opened = isolated(str(target), device, limits, op, form) if isolate else nullcontext(target)
    with one_thread() if jobs > 1 else own_thread(), opened as given:
        chosen = target_of(given, op, form)
        if jobs > 1 and chosen.again is None:
            why = "a function cannot be handed to other processes; accepted is with its name"
            raise ValueError(f"jobs={jobs}: {why}")
        yield chosen


def _audit(asked: Asked, todo: Plan) -> AuditReport:
    start = time.perf_counter()
    whole = todo.fitted(asked.target.accepts, asked.target.form or BHND)
    todo = chosen(whole, asked.wanted)
    gathered = gather(asked, todo)
    seen = coverage(gathered.calls(), asked.forward, asked.gradients)
    unseen = left_out(whole, todo, asked.wanted, list(gathered.outcomes))
    seen = replace(seen, missing=seen.missing + unseen)
    # Bonferroni over the tests that can be made: what was refused or not finite makes none
    level = FAMILY_LEVEL / max(1, tests := _count(gathered))
    findings, rows = _judge(gathered, level)
    growth = _growth(todo, gathered)
    asked.tell(0.9, "reconstruction")
    run = runner(gathered.target or asked.target, asked.device, asked.forward)
    found, causes, failed = _explained(asked, gathered, run, findings)
    smallest, shown = _shrink(run, findings, asked.explain, asked.tell)
    verdict, reason = _verdict(gathered, seen, findings, tests, causes)
    name = asked.target.name
    text = None
    if smallest is not None and shown is not None:
        text = script(name, shown, smallest, (gathered.target or asked.target).form)
    reports = tuple(_case_report(case, gathered, rows) for case in todo.all_cases)
    notes = tuple(dict.fromkeys(alike([n for _, o in gathered.calls() for n in o.notes]))) + failed
    if asked.target.operation != ATTENTION and (only := sorted(asked.target.accepts - {SEEDED})):
        notes += (f"called with {', '.join(only)}, which it has alone",)
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
    asked: Asked,
    gathered: Gathered,
    run: Callable[[Inputs], Result | None],
    findings: list[Finding],
) -> tuple[Reconstruction | None, tuple[Diagnosis, ...], tuple[str, ...]]:
    """What the kernel does, by its own errors: a recipe of attention, or a way to compute another
    operation; and a note where the search itself fails, without which the verdict stands.
    """
    found: Reconstruction | None = None
    failed: tuple[str, ...] = ()
    causes: tuple[Diagnosis, ...] = ()
    attention = asked.target.operation == ATTENTION
    try:
        if asked.explain and not attention:
            causes = operation_causes(run, findings)
        elif asked.explain and gathered.measured:
            found = reconstructed(run, asked.target.name, asked.dtype, findings)
    except Exception as error:
        failed = (f"the search for a cause failed ({type(error).__name__}: {error}), which is"
                  " halfulp's own mistake; the verdict does not hang on it",)  # fmt: skip
    if attention:
        notes = {note for _, outcome in gathered.calls() for note in outcome.notes}
        causes = diagnose(findings, found, notes)
    return found, causes, failed


def _count(gathered: Gathered) -> int:
    return sum(tests_in(*pair) for pair in gathered.measured.values()) + len(gathered.relations)


def _judge(gathered: Gathered, level: float) -> tuple[list[Finding], dict[Case, list[Row]]]:
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
    # the first is what the verdict cites and what is shrunk, so the plainest kind leads its grade:
    # of a gross error nobody asks which way it leans
    findings.sort(
        key=lambda f: (
            f.grade != "defect",
            order[f.kind],
            f.kind == "lean" or f.ratio < GROSS,
            -f.ratio,
        )
    )
    return findings, rows


def _growth(todo: Plan, gathered: Gathered) -> dict[str, float]:
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
                # over the stock recipe's error at that length, or what any kernel's error does with
                # N would count
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
    gathered: Gathered,
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
    # before what is missing: no call that failed takes back a defect that was seen
    if grade == "defect":
        return grade, reason
    if seen.missing:
        return "incomplete", f"{'; '.join(seen.missing)}; what was seen is {grade}: {reason}"
    if seen.forward_only:
        return ("forward sound" if grade == "sound" else "forward stock"), reason
    return grade, reason


def _case_report(case: Case, gathered: Gathered, rows: dict[Case, list[Row]]) -> CaseReport:
    outcome = gathered.outcomes.get(case)
    if outcome is None:
        why = "the time was up" if gathered.measured else "the first case failed"
        return CaseReport(case, "not called", f"not called, since {why}")
    if outcome.kind != "ok":
        return CaseReport(case, outcome.kind, outcome.refusal)
    measured, _ = gathered.measured[case]
    leans = {lean.tensor: float(lean.lean.mean()) for lean in measured.leans if not lean.along}
    return CaseReport(
        case, "ok", outcome.refusal, tuple(rows[case]), leans, measured.ulps, measured.nonfinite
    )
