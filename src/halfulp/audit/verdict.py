"""From figures to a verdict: sound, stock or defect, with the failing property, its figure and what
it does to training.

`defect`: some error is worse than the stock recipe's by more than a quarter, or leans, or is not
finite, or a relation between calls breaks. `stock`: nothing is worse than the stock recipe, but
some error lies above one and a half times the floor of the format (δ's known bias). `sound`:
neither. All comparisons are tests at a level that is divided by their number; beside them no
element may be farther off than rounding can make it.

In float32 nothing is rounded but what every kernel rounds in an order of its own, and errors of
sound kernels lie up to five times, leans up to 70 unit roundoffs apart (docs/log.md). There only an
error 32 times the reference's counts, or a lean of 128 unit roundoffs beyond its: what a lost digit
makes (TF32: 2¹³).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from halfulp.audit.figures import Figure, Lean, Measured, excess, short, unlike
from halfulp.audit.inputs import Case
from halfulp.audit.invariants import SHARED, Relation
from halfulp.audit.probes import Probe
from halfulp.audit.references import References
from halfulp.audit.size_array import is_abyss
from halfulp.audit.statistics import Estimate, error_ratio, estimate, excess_lean, log_ratios
from halfulp.formats import FORMAT_OF
from halfulp.operations import ATTENTION, DTYPES
from halfulp.runs.results import Plain, plain_data

Grade = Literal["defect", "stock"]
FAMILY_LEVEL = 0.01  # chance of any false alarm over all tests of one audit


@dataclass(frozen=True)
class Limits:
    """What errors may be before they count."""

    stock: float  # times the stock recipe's error on the same inputs
    floor: float  # times the floor's
    lean: float  # unit roundoffs beyond the reference's lean


# sound kernels reach 2.3 (bf16), 5.2 (fp16) and 26 (fp32) of these 12.5 and 320; heads that are
# never written are beyond 20 in bf16 (docs/log.md, "The worst element")
PEAK = 10.0
"""Times `Limits.stock`: beyond that the largest error of an element is no rounding."""

LSE_OF_ABYSS = 3 * math.log(2) * 2.0**-8
"""Of a weight: what rounding the lse of scores of −61440 to float32 makes, half a unit of 2⁻⁷ in
base 2, of two parts of the keys and of both together."""

GROSS = 20.0
"""Times stock: from there on rounding is a cause only where it explains the error."""

MEASURELESS = 1e9
"""Times what it is held against, which is 0 or all but 0: no number says more."""

PART_LEAN = 0.2
"""Unit roundoffs of a step beyond the stock recipe's lean: what is fixed for all calls, such as a
table of sines, leans by chance."""

LIMITS = {
    "bfloat16": Limits(stock=1.25, floor=1.5, lean=0.1),
    "float16": Limits(stock=1.25, floor=1.5, lean=0.1),
    "float32": Limits(stock=32.0, floor=32.0, lean=128.0),
}
"""By the dtype of the inputs."""


@dataclass(frozen=True)
class Finding(Plain):
    """One property that a target fails."""

    APART = ("case", "times_stock")

    grade: Grade
    kind: Literal["error", "lean", "non-finite", "element", "relation"]
    property: str
    tensor: str
    case: Case | None
    figure: str  # the measured figure in words
    ratio: float  # times the limit's reference; how bad it is, for sorting
    times_stock: float | None = None  # an error's, over the stock recipe's on the same inputs

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return super().as_dict() | {"case": None if self.case is None else self.case.told}


@dataclass(frozen=True)
class Row(Plain):
    """One figure of one case beside the stock recipe's and the floor's."""

    APART = ("times_stock", "times_floor", "heads", "tensor")

    property: str
    relative: float
    stock: float
    floor: float
    times_stock: Estimate
    times_floor: Estimate
    samples: int
    heads: tuple[float, ...] = ()  # times_stock head by head: what a comparison pairs
    tensor: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = super().as_dict()
        for name, times in (("times_stock", self.times_stock), ("times_floor", self.times_floor)):
            plain |= {name: times.mean, f"{name}_lower": times.lower, f"{name}_upper": times.upper}
        plain["heads"] = [float(f"{times:.7g}") for times in self.heads]
        finite: dict[str, Any] = plain_data(plain)
        return finite


def tests_in(measured: Measured, reference: References) -> int:
    """How many tests one case makes: every figure against the stock recipe and the floor, every
    lean against 0 and the stock recipe; a tensor's leans along steps, in parts, are one.
    """
    if _elements_only(reference):
        return 0
    leans = lean_pairs(measured.leans, reference.stock.leans)
    return 2 * (
        len(pairs(measured.figures, reference.stock.figures))
        + len({(f.tensor, bool(f.along)) for f, _ in leans})
    )


def _elements_only(reference: References) -> bool:
    """Whether a case is judged by its elements alone; no other operation's is."""
    return isinstance(reference.probe, Probe) and reference.probe.elements_only


def pairs(target: tuple[Figure, ...], reference: tuple[Figure, ...]) -> list[tuple[Figure, Figure]]:
    """Figures of the same name on both sides, with two or more samples."""
    by_name = {f.name: f for f in reference}
    return [(f, by_name[f.name]) for f in target if f.name in by_name and f.error.numel() > 1]


def lean_pairs(target: tuple[Lean, ...], reference: tuple[Lean, ...]) -> list[tuple[Lean, Lean]]:
    """Leans of the same tensor on both sides, with two or more samples."""
    by_name = {f.name: f for f in reference}
    return [(f, by_name[f.name]) for f in target if f.name in by_name and f.lean.numel() > 1]


def judge_case(
    case: Case, measured: Measured, reference: References, level: float
) -> tuple[list[Row], list[Finding]]:
    """All rows and findings of one case, each test at `level`."""
    findings = [_nonfinite(case, tensor, count) for tensor, count in measured.nonfinite.items()]
    if _elements_only(reference):
        return [], findings + _elements(case, measured, reference)
    rows, limits = [], LIMITS[case.dtype]
    floor = {f.name: f for f in reference.floor.figures}
    for got, stock in pairs(measured.figures, reference.stock.figures):
        times_stock = error_ratio(got, stock, level, through_delta=True)
        # what O's rounding makes through δ is forgiven beside the stock recipe, which has it too,
        # and not beside the floor: it is what the grade `stock` tells
        times_floor = error_ratio(got, floor[got.name], level, through_delta=False)
        row = Row(
            got.name,
            got.relative,
            stock.relative,
            floor[got.name].relative,
            times_stock,
            times_floor,
            times_stock.samples,
            tuple(log_ratios(got, stock, through_delta=True).exp().tolist()),
            got.tensor,
        )
        rows.append(row)
        # both: where the stock recipe happens to do better than its format can, the floor says what
        # rounding costs
        if times_stock.lower > limits.stock and times_floor.lower > limits.stock:
            findings.append(_too_large("defect", got, case, row, times_stock.mean))
        elif times_floor.lower > limits.floor:
            findings.append(_too_large("stock", got, case, row, times_floor.mean))
    findings += _leans(case, measured, reference, level)
    findings += _elements(case, measured, reference)
    return rows, findings


def _too_large(grade: Grade, got: Figure, case: Case, row: Row, ratio: float) -> Finding:
    return Finding(
        grade,
        "error",
        got.name,
        got.tensor,
        case,
        _error_text(row, case),
        ratio,
        row.times_stock.mean,
    )


def _error_text(row: Row, case: Case) -> str:
    if row.relative > MEASURELESS:
        return f"not 0 where exact results are; {row.samples} {case.shape.unit}"
    return (
        f"{row.relative:.1e} relative, {row.times_stock.mean:.3g} × the stock recipe "
        f"(at least {row.times_stock.lower:.3g}), "
        f"{row.times_floor.mean:.3g} × the floor; {row.samples} {case.shape.unit}"
    )


def _nonfinite(case: Case, tensor: str, count: int) -> Finding:
    text = f"{count} elements NaN or Inf where the golden value is finite"
    return Finding(
        "defect", "non-finite", f"{short(tensor)} not finite", tensor, case, text, float("inf")
    )


def _leans(case: Case, measured: Measured, reference: References, level: float) -> list[Finding]:
    findings = []
    own = lean_pairs(measured.leans, reference.stock.leans)
    parts = Counter(got.tensor for got, _ in own if got.along)
    for got, stock in own:
        least = PART_LEAN if got.along else LIMITS[case.dtype].lean
        # a tensor's parts share the level of one test: they must not blunt all others
        shared = level / (parts[got.tensor] if got.along else 1)
        # A lean counts if it is there, is more than the stock recipe's on the same inputs, and is
        # larger than the stock recipe's own.
        itself = estimate(got.lean, shared / 2)
        if itself.reach <= least:  # as nearly all of some thousand
            continue
        excess, stock_mean = excess_lean(got, stock, shared), float(stock.lean.mean())
        if excess.reach <= least or abs(itself.mean) <= abs(stock_mean):
            continue
        along = got.along or "its own size"
        text = (
            f"leans by {itself.mean:+.3g} unit roundoffs of {along} (stock {stock_mean:+.3g},"
            f" difference {excess.mean:+.3g} ± {excess.standard_error:.2g})"
        )
        if abs(itself.mean) > MEASURELESS:
            text = f"leans along {along}, by more than any rounding"
        text = f"{text}; {excess.samples} {case.shape.unit}"
        findings.append(
            Finding(
                "defect",
                "lean",
                got.name,
                got.tensor,
                case,
                text,
                1 + abs(excess.mean),
            )
        )
    return findings


def _elements(case: Case, measured: Measured, reference: References) -> list[Finding]:
    """The tensor whose worst element is farthest beyond what rounding can do, if any is: by proof
    on short rows, else by a bound that is measured, which sound kernels keep away from
    (docs/log.md). One wrong head of many makes the variance that a test of means would hold it
    against. In float32 the proof overrules the measured bound; in 16 bits that still tells what is
    much worse than the stock recipe, such as a bias through δ.
    """
    # a proof needs no margin: any element beyond the bound is wrong
    if passed := {name: told for name, told in measured.beyond.items() if told[0] > 1}:
        # gradients inherit O's errors
        tensor = max(passed, key=lambda name: (name == "out", passed[name]))
        ratio, text = passed[tensor]
        return [Finding("defect", "element", f"{short(tensor)} element", tensor, case, text, ratio)]
    stock = {f.name: f for f in reference.stock.figures}
    limit = peak_limit(case)
    found = []
    for got in measured.figures:
        other = stock.get(got.name)
        if got.peak is None or other is None or other.peak is None:
            continue
        if overruled(case, measured, got.tensor):
            continue
        beyond = excess(got, other)
        worst = int(beyond.argmax())
        ratio = float(beyond[worst])
        if ratio <= limit:
            continue
        named, place = short(got.tensor), got.peak.place(worst)
        told = "beyond what rounding makes there"
        if measured.inside(got.tensor):
            told = "the stock recipe's largest error there, though no more than rounding can do"
        text = (
            f"element {place} of {named} is"
            f" {unlike(float(got.peak.got[worst]), float(got.peak.exact[worst]))}:"
            f" {ratio:.3g} × {told};"
            f" in {int((beyond > limit).sum())} of {beyond.numel()} {case.shape.unit}"
        )
        found.append(
            Finding("defect", "element", f"{named} element", got.tensor, case, text, ratio)
        )
    return sorted(found, key=lambda f: -f.ratio)[:1]


def peak_limit(case: Case) -> float:
    """Times the stock recipe's: beyond that the largest error of an element is no rounding. Where
    scores lie far from 0 a weight has lse's rounding as well, which the stock recipe's own, of
    another base or of keys that are not in parts, may be without.
    """
    limit = PEAK * LIMITS[case.dtype].stock
    attention = case.operation == ATTENTION and case.dtype != "float32"
    if not attention or not is_abyss(case.probe):
        return limit
    return limit * (1 + LSE_OF_ABYSS / FORMAT_OF[DTYPES[case.dtype]].unit_roundoff)


def overruled(case: Case, measured: Measured, tensor: str) -> bool:
    """Whether a proof says that rounding suffices where a measured bound might say that it does
    not: sums in float32 have no order that all kernels share.
    """
    # the measured bound accused PyTorch's flash kernel at 0.013 of what rounding can do
    # (docs/log.md)
    return case.dtype == "float32" and measured.inside(tensor)


def errors_of(reference: Any, tensor: str) -> tuple[Figure | None, Figure | None]:
    """A tensor's error in the stock recipe and in the floor."""
    first, second = (
        next((f for f in m.figures if f.tensor == tensor and f.name.endswith("error")), None)
        for m in (reference.stock, reference.floor)
    )
    return first, second


def beside(relation: Relation, error: Figure | None) -> float | None:
    """The difference of two calls over a recipe's error, in the geometric mean over heads; None
    where they cannot be compared.
    """
    if error is None or relation.difference.numel() != error.error.numel():
        return None
    own = replace(error, name=relation.invariant, error=relation.difference)
    return math.exp(min(700.0, float(log_ratios(own, error, through_delta=True).mean())))


def judge_relation(
    relation: Relation, stock: Figure | None, level: float, limits: Limits, unit: str = "heads"
) -> Finding | None:
    """A defect if two calls differ by more than the rounding of two independent calls, or if NaN
    escapes its row.
    """

    def broken(text: str, times: float) -> Finding:
        name = f"{relation.invariant}: {short(relation.tensor)}"
        return Finding("defect", "relation", name, relation.tensor, None, text, times)

    # NaN outside of its row is wrong at any size: no test, no level
    if not relation.confined:
        nan = relation.invariant == "NaN confined"
        where = "outside the poisoned rows and heads" if nan else "where memory held NaN before"
        return broken(f"NaN or Inf {where}", float("inf"))
    if (
        stock is None
        or relation.difference.numel() != stock.error.numel()
        or relation.difference.numel() < 2
    ):
        return None
    if lacking := int((~relation.difference.isfinite()).sum()):  # of which no mean is taken
        text = f"one call gives no numbers where the other does; in {lacking} of"
        return broken(f"{text} {relation.difference.numel()} {unit}", float("inf"))
    # the two calls round independently; their √2 is taken out in `Relation.difference`
    ratio = error_ratio(
        replace(stock, name=relation.invariant, error=relation.difference),
        stock,
        level,
        through_delta=True,
    )
    if ratio.lower <= limits.stock:
        return None
    differ = "errors of calls add up to" if relation.invariant == SHARED else "two calls differ by"
    text = (
        f"{differ} {ratio.mean:.3g} × the rounding of the stock recipe "
        f"(at least {ratio.lower:.3g}); {ratio.samples} {unit}"
    )
    return broken(text, ratio.mean)


def verdict_of(findings: list[Finding]) -> Literal["sound", "stock", "defect"]:
    """The worst grade found."""
    grades = {f.grade for f in findings}
    return "defect" if "defect" in grades else "stock" if "stock" in grades else "sound"
