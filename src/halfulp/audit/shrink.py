"""The smallest input that shows a defect, and a Python file that runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from halfulp.audit.figures import Measured, excess
from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.invariants import Run
from halfulp.audit.operation_plan import smaller
from halfulp.audit.probes import Shape
from halfulp.audit.references import References, references
from halfulp.audit.relation_replay import relation_severity
from halfulp.audit.verdict import LIMITS, Finding, overruled, peak_limit
from halfulp.calls import Result
from halfulp.operations import ATTENTION, Sizes, operation_names
from halfulp.runs.threads import own_thread
from halfulp.targets.form import BHND, Form

# of which shrinking takes 11 to 16 (docs/log.md)
MOST_CALLS = 40


def severity(run: Run, case: Case, finding: Finding) -> float:
    """How bad a finding is on one case, 1 being the limit of a defect; 0 where the target refuses
    the case.
    """
    if finding.kind == "relation":
        return relation_severity(run, case, finding.property)
    reference = references(case)
    result = run(reference.inputs)
    if result is None:
        return 0.0
    return _severity(reference.measure(result), reference, finding, case)


def _severity(measured: Measured, reference: References, finding: Finding, case: Case) -> float:
    # without a test: a single head, which is what is looked for, has no standard error
    limits = LIMITS[case.dtype]
    if finding.kind == "non-finite":
        return float(measured.nonfinite.get(finding.tensor, 0) > 0) * 2
    if finding.kind == "lean":
        stock = {f.name: f for f in reference.stock.leans}
        for lean in measured.leans:
            if lean.name == finding.property and lean.name in stock:
                return abs(float((lean.lean - stock[lean.name].lean).mean())) / limits.lean
        return 0.0
    by_name = {f.name: f for f in reference.stock.figures}
    if finding.kind == "element":
        own = (f for f in measured.figures if f.tensor == finding.tensor and f.peak is not None)
        beyond = (float(excess(f, by_name[f.name]).max()) for f in own if f.name in by_name)
        proven = measured.beyond.get(finding.tensor, (0.0, ""))[0]
        if overruled(case, measured, finding.tensor):
            return proven
        return max(max(beyond, default=0.0) / peak_limit(case), proven)
    for got in measured.figures:
        if got.name == finding.property:
            allowed = torch.maximum(
                by_name[got.name].error, (got.own.square() + got.through_delta.square()).sqrt()
            )
            stock_error = float((allowed + got.slack).square().sum().sqrt())
            return float((got.error + got.slack).square().sum().sqrt()) / stock_error / limits.stock
    return 0.0


def shrink(run: Run, finding: Finding) -> Case | None:
    """Fewest heads, shortest N and smallest d on which a defect still shows clearly, at the
    finding's own seed.

    "Clearly" keeps half of the excess over the limit, so that the smallest case is not a matter of
    chance. None for a finding without a case.
    """
    if finding.case is None or finding.kind == "relation":
        return finding.case
    case, calls = finding.case, 0
    start = severity(run, case, finding)
    needed = 1 + (start - 1) / 2 if start > 1 else 1.0

    def shows(trial: Case) -> bool:
        nonlocal calls
        calls += 1
        return calls <= MOST_CALLS and _defined(trial) and severity(run, trial, finding) >= needed

    of_attention = case.operation == ATTENTION
    attempts = (_one_head, _half_length, _fewer_queries, _half_width)
    for attempt in attempts if of_attention else smaller(case):
        while (trial := attempt(case)) is not None and shows(trial):
            case = trial
    return _refine(case, shows) if of_attention else case


def _defined(case: Case) -> bool:
    """Whether an operation has a value at these sizes: of one expert two cannot be chosen, and half
    of a feature's pair does not turn. Any definition, a user's too, may need what was halved.
    """
    if case.operation == ATTENTION:
        return True
    try:
        references(case)
    except (ArithmeticError, LookupError, RuntimeError, ValueError):
        return False
    return True


def _with(case: Case, **changes: int) -> Case:
    return replace(case, shape=replace(case.shape, **changes))


def _one_head(case: Case) -> Case | None:
    s = case.shape
    if s.batch > 1:
        return _with(case, batch=1)
    if s.kv_heads is not None:
        return _with(case, heads=2, kv_heads=1) if s.heads > 2 else None
    return _with(case, heads=1) if s.heads > 1 else None


def _half_length(case: Case) -> Case | None:
    s = case.shape
    return (
        None
        if min(s.n_query, s.n_key) < 4
        else _with(case, n_query=s.n_query // 2, n_key=s.n_key // 2)
    )


def _fewer_queries(case: Case) -> Case | None:
    return None if case.shape.n_query < 2 else _with(case, n_query=case.shape.n_query // 2)


def _half_width(case: Case) -> Case | None:
    s = case.shape
    if s.head_dim < 16 or case.file is not None:
        return None
    value = {} if s.value_dim is None else {"value_dim": s.value_dim // 2}
    return _with(case, head_dim=s.head_dim // 2, **value)


def _refine(case: Case, shows: Callable[[Case], bool]) -> Case:
    """Between the last length that shows it and the half that does not: bisect."""
    low, high = case.shape.n_key // 2, case.shape.n_key
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        trial = _with(case, n_key=middle, n_query=min(case.shape.n_query, middle))
        if shows(trial):
            case, high = trial, middle
        else:
            low = middle
    return case


@own_thread()
def reproduce(
    target: str, case: Case, kind: str, property: str, tensor: str, form: str | None = None
) -> int:
    """Run a target on one case, print the figure, and return 1 if the defect shows, 0 if not, 2 if
    the target cannot be loaded or called: what the written file calls.
    """
    from halfulp.audit.run import runner
    from halfulp.targets import resolve

    finding = Finding("defect", kind, property, tensor, case, "", 0.0)  # type: ignore[arg-type]
    results: list[Result | None] = []

    def run(x: Inputs) -> Result | None:
        results.append(call(x))
        return results[-1]

    try:
        call = runner(resolve(target, operation=case.operation, form=form))
        bad = severity(run, case, finding)
    except ValueError as error:
        print(f"not run: {error}", file=sys.stderr)
        return 2
    if None in results:
        print(f"not run: {target} refuses or fails on this input", file=sys.stderr)
        return 2
    print(
        f"{target}: {property} on {case.probe} {case.shape}, seed {case.seed}: {bad:.3g} × the"
        " limit of a defect"
    )
    return int(bad > 1)


def script(target: str, finding: Finding, case: Case, form: Form | None = None) -> str:
    """A Python file that shows the defect: `python FILE` prints the figure and exits 1 while it is
    there, from whatever folder it is started.
    """
    kind, arguments = _arguments(case.shape)
    file = "" if case.file is None else f", file={str(Path(case.file).resolve())!r}"
    if case.operation != ATTENTION:
        inside = case.operation in operation_names()
        folder = case.operation if inside else str(Path(case.operation).resolve())
        file += f", operation={folder!r}"
    about = f"{target}: {finding.property} on {case.probe}."
    about += f" Found by halfulp audit: {finding.figure}."
    target = _from_anywhere(target)
    turned = "" if form is None or form == BHND else f", form={form.name!r}"
    # as a literal, in which no name is more than text
    return (
        f"{about!r}\n\nfrom halfulp.audit import Case, {kind}, reproduce\n\ncase ="
        f" Case({case.probe!r}, {kind}{arguments}, seed={case.seed},"
        f" dtype={case.dtype!r}{file})\nraise SystemExit(reproduce({target!r}, case,"
        f" {finding.kind!r}, {finding.property!r}, {finding.tensor!r}{turned}))\n"
    )


def _arguments(shape: Shape | Sizes) -> tuple[str, str]:
    """The name of a size's class, and the rest of the expression that makes it."""
    if isinstance(shape, Sizes):
        symbols = "".join(f", {symbol}={n}" for symbol, n in shape.of)
        return "Sizes", f".given({shape.calls}{symbols})"
    default = Shape()
    values = {field.name: getattr(shape, field.name) for field in fields(Shape)}
    given = ", ".join(
        f"{k}={v}" for k, v in values.items() if v is not None or getattr(default, k) is not None
    )
    return "Shape", f"({given})"


def _from_anywhere(target: str) -> str:
    """The target's name where the program is not started in this folder."""
    where, colon, function = target.rpartition(":")
    return f"{Path(where).resolve()}:{function}" if colon and where.endswith(".py") else target
