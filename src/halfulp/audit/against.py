"""Two audits of one plan beside each other: every figure better, same or worse, with its
significance.

Both were fed the same inputs, head by head, so that the heads are pairs: the test is Student's t on
the logarithms of their ratios, at the family's level divided by the number of figures. What is
significant and smaller than `LEAST` counts as the same, and is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from halfulp.audit.statistics import Estimate, estimate
from halfulp.runs.folder import read_json
from halfulp.runs.results import Plain

Report = Mapping[str, Any]
"""An audit's plain data: `AuditReport.as_dict()`, or what was saved of it."""

Change = Literal["better", "same", "worse"]

FAMILY_LEVEL = 0.01
"""Chance of any figure being called better or worse that is as before."""

LEAST = {"bfloat16": 1.05, "float16": 1.05, "float32": 2.0}
"""By how much an error must have grown or shrunk to count; in float32 another order of the same
sums does more than the 5 % of the others.
"""

_RANK = {"sound": 0, "stock": 1, "incomplete": 2, "defect": 3, "error": 4}
_KEYS = ("probe", "shape", "seed", "file")
_NEEDED = ("target", "dtype", "verdict", "cases", "findings")


@dataclass(frozen=True)
class Pair(Plain):
    """One figure before and after."""

    case: str
    property: str
    change: Change
    times: float | None  # after over before, the geometric mean over heads; None: not finite
    at_least: float | None
    at_most: float | None
    before: float | None  # relative error
    after: float | None
    heads: int


@dataclass(frozen=True)
class Comparison(Plain):
    """What became of one target."""

    BESIDE = ("change", "family_level")

    before: str  # what it is compared with
    after: str
    verdicts: tuple[str, str]
    pairs: tuple[Pair, ...]  # worst first
    worse: tuple[str, ...]  # what is worse, in lines; empty: nothing
    unpaired: tuple[str, ...]  # what only one of them has

    @property
    def change(self) -> Change:
        """Worse if anything is; better if something is and nothing is worse."""
        if self.worse:
            return "worse"
        return "better" if any(pair.change == "better" for pair in self.pairs) else "same"

    def counted(self, change: Change) -> int:
        """How many figures changed so."""
        return sum(pair.change == change for pair in self.pairs)

    @property
    def family_level(self) -> float:
        """The chance of any false change, as JSON says it."""
        return FAMILY_LEVEL


def compare(before: Report, after: Report) -> Comparison:
    """Compare two audits' plain data.

    Raises:
        ValueError: they share no figure, or one was saved without the figures of single heads.
    """
    if before["dtype"] != after["dtype"]:
        raise ValueError(
            f"{before['target']} was audited in {before['dtype']}, {after['target']} in"
            f" {after['dtype']}: accepted are audits of the same inputs"
        )
    found = list(_rows(before, after))
    # Bonferroni, twice: a figure may be called better or worse
    level = FAMILY_LEVEL / max(1, 2 * len(found))
    least = LEAST[after["dtype"]]
    pairs = [_pair(*row, level, least) for row in found]
    if not pairs:
        raise ValueError(
            f"{before['target']} and {after['target']} share no measured case: accepted are audits"
            " of the same shapes, seeds and dtype"
        )
    order = {"worse": 0, "better": 1, "same": 2}
    pairs.sort(key=lambda p: (order[p.change], -abs(math.log(p.times)) if p.times else 0.0))
    return Comparison(
        before["target"],
        after["target"],
        (before["verdict"], after["verdict"]),
        tuple(pairs),
        tuple(_worse(before, after, pairs)),
        tuple(_unpaired(before, after)),
    )


def read_audits(file: str, argument: str = "against") -> list[dict[str, Any]]:
    """The audits that `halfulp audit --json` wrote; ValueError, in one line, for anything else."""
    plain = read_json(Path(file))
    reports = plain if isinstance(plain, list) else [plain]
    whole = [
        r
        for r in reports
        if isinstance(r, dict) and all(key in r for key in _NEEDED) and isinstance(r["cases"], list)
    ]
    if not whole or len(whole) != len(reports):
        reason = "it holds something else" if Path(file).exists() else "there is no such file"
        raise ValueError(
            f"{argument}={file!r}: {reason}; accepted is what `halfulp audit --json` wrote"
        )
    return whole


def audit_of(
    reports: Sequence[dict[str, Any]], file: str, target: str, argument: str = "against"
) -> dict[str, Any]:
    """The audit of a target among those of a file, or the only one that is there; ValueError where
    there are others.
    """
    by_name = {report["target"]: report for report in reports}
    if target not in by_name and len(reports) > 1:
        raise ValueError(
            f"{argument}={file!r}: it holds no audit of {target}; it holds {', '.join(by_name)}"
        )
    return by_name.get(target, reports[0])


def _cases(report: Report) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {tuple(case.get(key) for key in _KEYS): case for case in report["cases"]}


def _rows(
    before: Report, after: Report
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """The figures that both have, each with the name of its case."""
    old = _cases(before)
    for key, case in _cases(after).items():
        rows = {row["property"]: row for row in old.get(key, {"rows": []})["rows"]}
        for row in case["rows"]:
            if row["property"] in rows:
                yield _case_name(case), rows[row["property"]], row


def _case_name(case: Mapping[str, Any]) -> str:
    return f"{case['probe']} {case['shape']}, seed {case['seed']}"


def _pair(
    case: str, before: Mapping[str, Any], after: Mapping[str, Any], level: float, least: float
) -> Pair:
    one, two = (_heads(row) for row in (before, after))
    if len(one) != len(two):
        raise ValueError(
            f"{case}: {len(one)} heads before, {len(two)} after; accepted are the same"
        )
    times = _logarithms(two) - _logarithms(one)
    whole: Estimate = estimate(times, level)
    low, high = math.exp(max(whole.lower, -700.0)), math.exp(min(whole.upper, 700.0))
    mean = math.exp(whole.mean)
    change: Change = "same"
    if low > 1 and mean > least:
        change = "worse"
    elif high < 1 and mean < 1 / least:
        change = "better"
    return Pair(
        case,
        after["property"],
        change,
        mean,
        low,
        high,
        before["relative"],
        after["relative"],
        len(two),
    )


def _heads(row: Mapping[str, Any]) -> Sequence[float]:
    heads: Sequence[float] = row.get("heads") or ()
    if len(heads) < 2:
        raise ValueError(
            "an audit was saved without the figures of its heads: accepted is one that this version"
            " wrote with --json"
        )
    return heads


def _logarithms(heads: Sequence[float | None]) -> torch.Tensor:
    """Heads that are exact, or whose error is beyond all numbers, count as 2⁻⁶⁴ and 2⁶⁴."""
    known = [math.inf if x is None else x for x in heads]
    return torch.tensor(known, dtype=torch.float64).clamp(2.0**-64, 2.0**64).log()


def _worse(before: Report, after: Report, pairs: Sequence[Pair]) -> Iterator[str]:
    for pair in pairs:
        if pair.change == "worse":
            times = f"{pair.times:.3g} × (at least {pair.at_least:.3g})"
            yield f"{pair.property} on {pair.case}: {times}"
    known = {_finding_name(f) for f in before["findings"] if f["grade"] == "defect"}
    for finding in after["findings"]:
        if finding["grade"] != "defect" or finding["kind"] == "error":
            continue  # errors are paired
        if _finding_name(finding) not in known:
            yield f"{_finding_name(finding)}: {finding['figure']}"
    old, new = (_RANK[r["verdict"].removeprefix("forward ")] for r in (before, after))
    if new > old and after["verdict"] in ("incomplete", "error"):
        yield f"it is {after['verdict']} now: {after['reason']}"
    if before.get("differentiable") and not after.get("differentiable", True):
        yield "it gives no gradients any more"


def _finding_name(finding: Mapping[str, Any]) -> str:
    where = "" if finding["case"] is None else f" on {_case_name(finding['case'])}"
    return f"{finding['property']}{where}"


def _unpaired(before: Report, after: Report) -> Iterator[str]:
    """Cases that only one of the two measured."""
    for one, two, when in ((before, after, "before"), (after, before, "now")):
        other = _cases(two)
        lone = [
            case["probe"]
            for key, case in _cases(one).items()
            if case["status"] == "ok" and (key not in other or other[key]["status"] != "ok")
        ]
        if lone:
            yield f"measured only {when}: {', '.join(dict.fromkeys(lone))}"
