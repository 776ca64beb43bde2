"""Causes of findings: what the reconstruction says the kernel does; and of what is not finite, or
not the same twice, which no error vector can tell, the probes that show it.

A cause is named on evidence or not at all: what the reconstruction leaves unexplained is called so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from halfulp.audit.figures import short
from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.invariants import SHARED
from halfulp.audit.probes import probes_with
from halfulp.audit.references import references
from halfulp.audit.verdict import GROSS, Finding
from halfulp.calls import Call, Result
from halfulp.reconstruct import (
    CAUSES,
    Cause,
    Failure,
    Named,
    Reconstruction,
    Trial,
    of_kernel,
    of_operation,
)
from halfulp.targets.calling import UNWRITTEN
from halfulp.targets.forming import MISAPPENDED

BACKWARD = {"grad_query", "grad_key", "grad_value"}
LEVELS = probes_with("level")
PROVEN = 0.9  # share of an error that is "explains it"
EFFORT = 1500  # emulations of the reconstruction
PROBES = 2  # failing probes that the reconstruction looks at beside its own inputs
FAILURES = 3  # failing cases of another operation that are looked at
UNTOLD = ("operation-function", "operation-unexplained")  # causes that say no more than so
SYMPTOMS = ("maximum", "non-finite")  # told by where NaN is alone
HIDE = ("causal-mask", "mask", "window", "key-tail")  # causes of rows without a key, which are NaN
LONGEST = 512  # keys of a probe that is emulated hundreds of times


@dataclass(frozen=True)
class Diagnosis:
    """A cause and what it is told from."""

    cause: Cause
    evidence: str


def reconstructed(
    run: Callable[[Inputs], Result | None], name: str, dtype: str, findings: Sequence[Finding]
) -> Reconstruction | None:
    """What the kernel does, asked on the reconstruction's own inputs and on the worst failing
    probes; None where it gives nothing.
    """
    cases: dict[str, Case] = {}
    for finding in findings:
        case = finding.case
        plain = case is not None and case.file is None and finding.kind in ("error", "element")
        if plain and case is not None and case.shape.n_key <= LONGEST:
            cases.setdefault(case.probe, case)
    extra = []
    for probe, case in list(cases.items())[:PROBES]:
        x = case.inputs()
        if x.dropout is None:
            extra.append(Trial(f"probe {probe}", x, x.grad_out))
    defect = any(f.grade == "defect" for f in findings)
    asked = (lambda t: run(_inputs(t)), name, dtype)
    return of_kernel(*asked, extra=extra, effort=EFFORT, rarer=defect)


def operation_causes(
    run: Callable[[Any], Any], findings: Sequence[Finding]
) -> tuple[Diagnosis, ...]:
    """The causes of an operation's defects: what is not finite or not the same twice, and the way
    to compute its definition that errs as the kernel does on the worst cases.
    """
    defects = [f for f in findings if f.grade == "defect"]
    broken = tuple(f for f in defects if f.kind == "non-finite" or f.ratio == float("inf"))
    causes: list[Diagnosis] = []
    tensors: dict[Case, dict[str, None]] = {}
    for f in defects:
        if f.case is not None and f.kind != "relation":
            tensors.setdefault(f.case, {})[f.tensor] = None
    # probes say more than sizes do: they are of one thing each
    cases = sorted(tensors.items(), key=lambda item: item[0].probe.startswith("sizes/"))
    known = [(references(case), tuple(failing)) for case, failing in cases[: 2 * FAILURES]]
    failures = [Failure(of.inputs, failing, of.truth) for of, failing in known]
    failures = sorted(failures, key=lambda f: f.is_long)[:FAILURES]
    found = of_operation(run, failures)
    shared = [f for f in defects if f.property.startswith(SHARED)]
    if shared and len(shared) == len(defects):
        text = f"calls share random numbers: {shared[0].figure}"
        return (Diagnosis(CAUSES["random"], text),)
    unsteady = [f.figure for f in defects if f.property.startswith("same call twice")]
    if found is not None and found.cause == "unstable":
        causes.append(Diagnosis(CAUSES["unstable"], "; ".join((*unsteady[:1], found.text))))
    elif unsteady and (found is None or not found.share):
        causes.append(Diagnosis(CAUSES["unstable"], unsteady[0]))
    if found is not None and found.cause == "unstable":
        pass
    elif found is not None and (found.share or found.cause == "random" or not broken):
        causes.append(Diagnosis(CAUSES[found.cause], found.told))
    elif not broken and cases and not causes:  # too large to be computed hundreds of times
        worst = defects[0]
        probes = ", ".join(dict.fromkeys(case.probe.partition("/")[0] for case in tensors))
        text = f"{worst.tensor}, on {probes}: {worst.figure}"
        causes.append(Diagnosis(CAUSES["operation-unexplained"], text))
    elif broken:
        of = _of_broken(broken)
        if found is not None:  # what is read of it says more than that it is so
            begun = of.cause if found.cause in UNTOLD else CAUSES[found.cause]
            of = Diagnosis(begun, f"{of.evidence}: {found.text}")
        causes.append(of)
    if unsteady and causes[0].cause.key != "unstable":  # what makes calls differ stands first
        causes.insert(1, Diagnosis(CAUSES["unstable"], unsteady[0]))
    return tuple(causes)


def _inputs(trial: Trial) -> Inputs:
    call = {f.name: getattr(trial.call, f.name) for f in fields(Call)}
    return Inputs(**call, grad_out=trial.grad_out, manner=trial.manner)


RELATION_CAUSES = {
    "same call twice": "unstable",
    "NaN confined": "nan-escapes",
    "lse in the loss": "lse-gradient",
}
"""What a broken relation is a proof of."""


def diagnose(
    findings: Sequence[Finding], found: Reconstruction | None, notes: Collection[str] = ()
) -> tuple[Diagnosis, ...]:
    """The causes: of what is not finite, then of the other defects; of stock findings where nothing
    is worse. Without a reconstruction only what findings themselves prove, and `notes` of calls.
    """
    defects = tuple(f for f in findings if f.grade == "defect")
    if not defects:
        return _stock(findings, found)
    left = [f for f in defects if f.property.startswith("memory full of NaN")]
    cached = sorted(note for note in notes if MISAPPENDED in note)
    # what is appended to the wrong place makes every later error
    if cached:
        return (Diagnosis(CAUSES["cache"], cached[0]),)
    if UNWRITTEN in notes or left:  # it explains the rest, or hides what does
        tensors = ", ".join(dict.fromkeys(short(f.tensor) for f in left)) or "O"
        text = f"{tensors}: what memory held before shows in the results"
        return (Diagnosis(CAUSES["unwritten"], text),)
    causes: list[Diagnosis] = []
    escapes: list[Diagnosis] = []  # of what is wrong without NaN as well
    for name, key in RELATION_CAUSES.items():
        shown = [f for f in defects if f.property.startswith(f"{name}: ")]
        if shown:
            which = escapes if key == "nan-escapes" else causes
            which.append(Diagnosis(CAUSES[key], f"{shown[0].property}: {shown[0].figure}"))
            defects = tuple(f for f in defects if f not in shown)
    broken = tuple(f for f in defects if f.kind == "non-finite" or f.ratio == float("inf"))
    rest = tuple(f for f in defects if f not in broken and not _same_place(f, broken))
    explained = _explained(rest, found) if rest else []
    # sizes alone may leave memory as it was, where something else is wrong on every call
    sizes = all(f.case is not None and f.case.probe.startswith("sizes") for f in broken)
    last = sizes and bool(explained) and explained[0].cause.kind == "function"
    if broken and not last:
        of = _of_broken(broken)
        if of.cause.key in SYMPTOMS and found is not None:
            hidden = [n for n in found.causes if n.cause.key in HIDE and n.explained >= PROVEN]
            causes += map(_of_named, hidden)
        causes.append(of)
    causes += explained
    if broken and last:
        causes.append(_of_broken(broken))
    causes += escapes
    first: dict[str, Diagnosis] = {}
    for cause in causes:
        first.setdefault(cause.cause.key, cause)
    return tuple(first.values())


def _explained(rest: tuple[Finding, ...], found: Reconstruction | None) -> list[Diagnosis]:
    """What the reconstruction says of these defects."""
    tensors = {f.tensor for f in rest if f.tensor}
    elements = all(f.kind == "element" for f in rest)
    if found is None:
        return [Diagnosis(CAUSES["elements"], rest[0].figure)] if elements else []
    gross = [{f.tensor} - {None, ""} for f in rest if f.ratio >= GROSS]

    def beyond(tensor: str) -> bool:
        """Whether what shows on a result is to explain more than rounding can do."""
        return any(_concerns(tensor, failing) for failing in gross)

    named = [_of_named(n) for n in found.causes if _concerns(n.tensor, tensors) and (
        n.cause.kind != "rounding" or not beyond(n.tensor) or n.explained >= PROVEN)]  # fmt: skip
    # what nothing explains upstream is no reason for what is off further down
    places = sorted(found.places, key=lambda p: (
        CAUSES[p.cause].kind == "unexplained" and p.tensor not in tensors))  # fmt: skip
    told = [
        Diagnosis(CAUSES[p.cause], f"told by its place: {short(p.tensor)}, {p.text}")
        for p in places
        if _concerns(p.tensor, tensors)
        and not (CAUSES[p.cause].kind == "rounding" and p.left > 1 - PROVEN and beyond(p.tensor))
    ]
    if named or told:
        return named + [p for p in told if not named or p.cause.kind != "unexplained"]
    if elements:
        return [Diagnosis(CAUSES["elements"], rest[0].figure)]
    # what is said of a gradient is no reason for O's errors
    shown = [n for n in found.ingredients if n.tensor == "out" or not tensors or tensors & BACKWARD]
    if not gross and shown and found.understood:
        return [_of_ingredient(shown[0], found)]
    key = "gradient-unexplained" if tensors <= BACKWARD else "out-unexplained"
    return [Diagnosis(CAUSES[key], f"on other inputs it {found.sentence}")]


def _concerns(tensor: str, failing: set[str]) -> bool:
    """Whether what shows on one result may be why others fail: gradients inherit the forward
    pass's errors.
    """
    return not failing or tensor in failing or (tensor in ("out", "lse") and bool(failing))


def _of_named(named: Named) -> Diagnosis:
    if not named.trial:
        return Diagnosis(named.cause, named.text)
    share = f"{100 * named.explained:.0f} %"
    return Diagnosis(
        named.cause,
        f"{named.text}: {named.harm:.3g} × the error without it, explains {share} of"
        f" {short(named.tensor)}'s error on {named.trial}",
    )


def _of_ingredient(named: Named, found: Reconstruction) -> Diagnosis:
    return Diagnosis(named.cause, f"{named.text}: it {found.sentence}")


def _stock(findings: Sequence[Finding], found: Reconstruction | None) -> tuple[Diagnosis, ...]:
    """What of the recipe rounds more than operands and results demand."""
    if not findings or found is None:
        return ()
    if found.ingredients:
        return (_of_ingredient(found.ingredients[0], found),)
    return (Diagnosis(CAUSES["stock"], f"it {found.sentence}"),)


def _of_broken(broken: tuple[Finding, ...]) -> Diagnosis:
    """Why results are not finite, from the probes that show it."""
    outs = {f.case.probe for f in broken if f.case is not None and f.tensor == "out"}
    every = {f.case.probe.partition("/")[0] for f in broken if f.case is not None}
    # the published fix shifts by a multiple of a repeated maximum, so that all weights underflow
    underflows = "ties_many" in outs or ("ties_negative" in outs and "deep_negative" not in outs)
    # the first that holds is named: from the narrowest rule to the one that always holds
    rules: tuple[tuple[bool, str], ...] = (
        (underflows, "underflow"),
        (bool(every & {"lse_below_88", "deep_negative"}) and not outs, "exp-of-lse"),
        (every == {"masked_rows"}, "masked-row"),
        (bool(every & LEVELS), "maximum"),
        (True, "non-finite"),
    )
    key = next(key for holds, key in rules if holds)
    return Diagnosis(CAUSES[key], f"not finite on {', '.join(sorted(every))}")


def _same_place(finding: Finding, broken: tuple[Finding, ...]) -> bool:
    """Errors on a probe that also gave NaN have the NaN's cause."""
    return finding.case is not None and any(
        b.case is not None and b.case.probe == finding.case.probe for b in broken
    )
