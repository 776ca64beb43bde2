"""What a reader of an audit wants to know, picked from its plain data: a row a probe and a row a
relation.

Terminal and page show the same rows, so they are chosen here once. An audit's plain data is
`AuditReport.as_dict()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from halfulp.complaints import alike
from halfulp.report.text import duration_text, percent_text, times_text

Report = Mapping[str, Any]

MEANING = {
    "sound": "free of bias, within the budget of the format",
    "stock": "as good as FlashAttention-2's recipe, with its known bias",
    "forward sound": (
        "its forward pass is free of bias, within the budget of the format; it gave no gradients,"
        " so its backward pass was not audited"
    ),
    "forward stock": (
        "its forward pass is as good as FlashAttention-2's recipe; it gave no gradients, so its"
        " backward pass was not audited"
    ),
    "defect": "worse than the stock recipe",
    "incomplete": "not all that was planned could be audited",
    "error": "could not be audited",
}
"""In the order of a list that begins with what is well."""
_STOCK = "FlashAttention-2's recipe, with its known bias", "FlashAttention-2's recipe"
_GRADES = {"defect": 2, "stock": 1}
_SHORT = {"out": "O", "lse": "lse", "grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}


@dataclass(frozen=True)
class ProbeRow:
    """The worst figure of one case: the failing one where one fails, else the farthest above the
    floor.
    """

    grade: str  # sound, stock or defect, for this case alone
    probe: str
    shape: str
    exposes: str
    figure: str
    relative: float | None = None
    times_stock: float | None = None
    stock_at_least: float | None = None  # lower bound of times_stock
    times_floor: float | None = None
    floor_at_least: float | None = None
    note: str = ""  # what the numbers do not say: NaN, a lean
    beyond: float = 0.0  # of an element that fails, how many times what rounding makes

    @property
    def said(self) -> str:
        """The figure with its note."""
        return f"{self.figure}; {self.note}" if self.note else self.figure


HOLDS = ("beyond rounding", "within rounding", "bitwise equal")
"""How two calls that exact arithmetic makes equal compare: a finding, or none."""


@dataclass(frozen=True)
class RelationRow:
    """What became of one relation between calls."""

    relation: str
    outcome: str  # one of HOLDS
    detail: str


def of_attention(report: Report) -> bool:
    """Whether it is attention that was audited; another operation's kernels say which."""
    return bool(report.get("operation", "attention") == "attention")


def meaning(report: Report) -> str:
    """What the verdict means, in words that go before its reason."""
    said = MEANING[report["verdict"]]
    if of_attention(report):
        return said
    for text in _STOCK:
        said = said.replace(text, "the stock recipe, above the floor")
    return said


def probe_rows(report: Report) -> list[ProbeRow]:
    """Return one row for every case that was measured, of the covering array's for the worst that
    fails alone: the failing ones first, the worst of them first.
    """
    rows = [
        _probe_row(case, findings_of(report, case))
        for case in report["cases"]
        if case["status"] == "ok"
    ]
    rows.sort(key=_severity)
    of_sizes = [row for row in rows if _of_sizes(row.probe)]
    shown = [_shown(row) for row in of_sizes[:1] if row.grade != "sound"]
    return shown + [row for row in rows if not _of_sizes(row.probe)]


def _shown(row: ProbeRow) -> ProbeRow:
    """A case of the covering array as a row, its levels beside its figure."""
    probe, *levels = row.probe.split("/")
    return replace(row, probe=probe, figure=f"{row.figure} ({', '.join(levels)})")


def _of_sizes(probe: str) -> bool:
    """Whether a case is one of the covering array's, too many to show those that are well."""
    return probe.startswith("sizes/")


def _sizes_text(report: Report) -> str | None:
    """What became of the covering array, in one line; None where there was none."""
    cases = [case for case in report["cases"] if _of_sizes(case["probe"])]
    judged = [case for case in cases if case["status"] == "ok"]
    bad = sum(bool(findings_of(report, case)) for case in judged)
    if not cases:
        return None
    lost = f", {len(cases) - len(judged)} not run" if len(judged) < len(cases) else ""
    found = f"{bad} with an element beyond rounding" if bad else "no element beyond rounding"
    return f"{len(judged)} cases over sizes, strides and ways to be called{lost}: {found}"


def _severity(row: ProbeRow) -> tuple[int, float, float]:
    ratio = row.times_stock if row.grade == "defect" else row.times_floor
    worst = float("inf") if ratio is None else ratio
    return -_GRADES.get(row.grade, 0), 0.0 if row.grade == "sound" else -worst, -row.beyond


def findings_of(report: Report, case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what was found in one case, relations between calls aside."""
    keys = ("probe", "shape", "seed", "file")
    named = [f for f in report["findings"] if f["case"] and f["kind"] != "relation"]
    return [f for f in named if all(f["case"].get(key) == case.get(key) for key in keys)]


def _probe_row(case: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> ProbeRow:
    grade = max((f["grade"] for f in findings), key=lambda g: _GRADES.get(g, 0), default="sound")
    failing = [f for f in findings if f["grade"] == grade]
    names = {f["property"] for f in failing}
    rows = [row for row in case["rows"] if row["property"] in names] or case["rows"]
    reference = "times_stock" if grade == "defect" else "times_floor"
    worst = max(rows, key=lambda row: row[reference] or 0.0, default=None)
    other = [f for f in failing if f["kind"] in ("non-finite", "lean", "element")]
    note = _by_kind(dict.fromkeys(map(_named, other)))
    name = case["probe"] if _of_sizes(case["probe"]) else case["probe"].partition("/")[0]
    beyond = max((_beyond(f) for f in other), default=0.0)
    row = ProbeRow(grade, name, case["shape"], case["exposes"], note or "–", beyond=beyond)
    if worst is None or (other and not any(f["kind"] == "error" for f in failing)):
        return row
    return replace(
        row,
        figure=worst["property"],
        relative=worst["relative"],
        times_stock=worst["times_stock"],
        stock_at_least=worst["times_stock_lower"],
        times_floor=worst["times_floor"],
        floor_at_least=worst["times_floor_lower"],
        note=note,
    )


def _beyond(finding: Mapping[str, Any]) -> float:
    """How far an element is off that is no number, or that rounding cannot make; 0 of a lean."""
    if finding["kind"] == "lean":
        return 0.0
    ratio = finding["ratio"]
    return float("inf") if finding["kind"] == "non-finite" or ratio is None else float(ratio)


def _named(finding: Mapping[str, Any]) -> str:
    """A finding's property, an element's with how far it is off: no column says it."""
    if finding["kind"] != "element" or not isfinite(_beyond(finding)):
        return str(finding["property"])
    return f"{finding['property']} {times_text(_beyond(finding))} × rounding"


def _by_kind(properties: Iterable[str]) -> str:
    """Properties such as `O leans`, `dV leans`, `O element`: "O, dV leans; O element"; what is so
    in several parts of an operation's result is said once, with how many.
    """
    parts: dict[str, list[str]] = {}
    for name in properties:
        whole, _, part = name.partition(", in ")
        parts.setdefault(whole, []).append(part)
    tensors: dict[str, list[str]] = {}
    for whole, found in parts.items():
        tensor, _, kind = whole.partition(" ")
        where = found[0] if len(found) == 1 else f"{len(found)} parts"
        tensors.setdefault(f"{kind}, in {where}" if where else kind, []).append(tensor)
    return "; ".join(f"{', '.join(named)} {kind}".rstrip() for kind, named in tensors.items())


def relation_rows(report: Report) -> list[RelationRow]:
    """Return one row a relation: beyond rounding if any tensor is, bitwise equal if all are, bit
    for bit.
    """
    broken = {f["property"]: f["figure"] for f in report["findings"] if f["kind"] == "relation"}
    rows = []
    for name in dict.fromkeys(r["invariant"] for r in report["relations"]):
        same = [r for r in report["relations"] if r["invariant"] == name]
        bad = [
            f"{_short(r)}: {broken[key]}" for r in same if (key := f"{name}: {_short(r)}") in broken
        ]
        differ = [r for r in same if r["identical"] < 1]
        if bad:
            rows.append(RelationRow(name, "beyond rounding", "; ".join(bad)))
        elif differ:
            rows.append(RelationRow(name, "within rounding", _differences(differ)))
        else:
            rows.append(RelationRow(name, "bitwise equal", ", ".join(_short(r) for r in same)))
    return sorted(rows, key=lambda row: HOLDS.index(row.outcome))


def _short(relation: Mapping[str, Any]) -> str:
    tensor = str(relation["tensor"])
    own = f"d{tensor.removeprefix('grad_')}" if tensor.startswith("grad_") else tensor
    return _SHORT.get(tensor, own)


def _differences(relations: Iterable[Mapping[str, Any]]) -> str:
    """By how much each tensor differs, and in how many elements not at all."""
    return ", ".join(
        f"{_short(r)} {times_text(times)} × the floor ({percent_text(r['identical'])} same bits)"
        if (times := r.get("times_floor")) is not None
        else f"{_short(r)} same bits in {percent_text(r['identical'])}"
        for r in relations
    )


def not_run(report: Report) -> list[tuple[str, str]]:
    """Return reason and probes of the cases without a result, one entry a reason."""
    reasons: dict[str, list[str]] = {}
    failed = [case for case in report["cases"] if case["status"] != "ok"]
    said = alike([case["reason"] or case["status"] for case in failed])
    for reason, case in zip(said, failed, strict=True):
        name = case["probe"].partition("/")[0]  # of the covering array's cases
        reasons.setdefault(reason, []).append(name)
    return [(reason, ", ".join(dict.fromkeys(probes))) for reason, probes in reasons.items()]


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what is known beyond the tables, as (name, value)."""
    print_of, found = report["fingerprint"], []
    if report.get("form"):
        found.append(("called as", report["form"]))
    if report.get("missing") and report["verdict"] != "incomplete":  # there it is the reason
        found.append(("missing", "; ".join(report["missing"])))
    if report.get("left_out"):
        found.append(("not audited", "; ".join(report["left_out"])))
    for i, cause in enumerate(report["causes"]):
        name = "" if i == 0 else f"{cause['name']}; "  # the first is named in the reason
        code = f" ({cause['code']})" if cause.get("code") else ""
        found.append(("resembles" if i == 0 else "also", f"{name}{cause['resembles']}{code}"))
    if report["causes"]:
        found.append(("in training", report["causes"][0]["effect"]))
        if code := report["causes"][0].get("code"):
            found.append(("how to mend it", f"halfulp explain {code}"))
    if print_of:
        found.append(("the kernel", print_of["text"]))
    if grown := {name: p for name, p in report["growth"].items() if abs(p) >= 0.1}:
        text = ", ".join(f"{name} as N^{p:.2f}" for name, p in grown.items())
        found.append(("growth", f"error relative to the stock recipe's over N: {text}"))
    if report["drift"] is not None:
        found.append(
            (
                "drift",
                f"summed error of O grows as n^{report['drift']:.2f} (0.5 random walk, 1 drift)",
            )
        )
    if (sizes := _sizes_text(report)) is not None:
        found.append(("sizes", sizes))
    if report["notes"]:
        found.append(("notes", "; ".join(report["notes"])))
    if report["smallest"]:
        small = report["smallest"]
        found.append(("smallest input", f"{small['probe']} {small['shape']}, seed {small['seed']}"))
    return found


def worst_ratios(report: Report) -> tuple[float | None, float | None]:
    """Return the largest error of any case as a multiple of the stock recipe's and of the
    floor's.
    """
    rows = [row for case in report["cases"] for row in case["rows"]]
    stock, floor = (
        max((row[name] for row in rows if row[name] is not None), default=None)
        for name in ("times_stock", "times_floor")
    )
    return stock, floor


def why(report: Report) -> str:
    """Return the cause of a verdict in a few words; empty where a target is sound."""
    if report["causes"]:
        return str(report["causes"][0]["name"])
    if report["verdict"] == "incomplete":
        return "; ".join(report["missing"])
    return "" if report["verdict"].endswith("sound") else str(report["reason"])


def false_alarms(report: Report) -> str:
    """Return how many tests were made, and how likely a false alarm is over all of them."""
    level = 100 * report["family_level"]
    return (
        f"{report['tests']} tests; chance of any false alarm over all of them: at most {level:g} %"
    )


def headline(report: Report) -> str:
    """Return what was audited and how, in one line."""
    parts = [] if of_attention(report) else [report["operation"]]
    parts += [report["dtype"], report["depth"], report["device"], f"{report['tests']} tests"]
    parts += ["forward pass alone"] if report.get("forward") else []
    return ", ".join([*parts, duration_text(report["seconds"])])
