"""What an audit found, as data: the verdict, every case's figures, the relations, the fingerprint
and the smallest failing input.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from halfulp.audit.figures import short
from halfulp.audit.inputs import Case
from halfulp.audit.invariants import Relation
from halfulp.audit.verdict import LIMITS, Finding, Row
from halfulp.operations import ATTENTION
from halfulp.reconstruct import Cause, Reconstruction

Verdict = Literal[
    "sound", "stock", "forward sound", "forward stock", "defect", "incomplete", "error"
]


@dataclass(frozen=True)
class CaseReport:
    """One case: its rows, or why there are none."""

    case: Case
    status: Literal["ok", "unsupported", "refused", "error", "not called"]
    reason: str | None = None
    rows: tuple[Row, ...] = ()
    leans: dict[str, float] = field(default_factory=dict)  # tensor → mean lean in unit roundoffs
    ulps: dict[str, tuple[float, float, float]] = field(
        default_factory=dict
    )  # tensor → mean |·|, largest |·|, mean signed error, in ulps
    nonfinite: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        probe = self.case.known_probe
        return {
            **self.case.told,
            "exposes": "real activations" if probe is None else probe.exposes,
            "source": "captured" if probe is None else probe.source,
            "status": self.status,
            "reason": self.reason,
            "rows": [row.as_dict() for row in self.rows],
            "leans": self.leans,
            "ulps": {k: list(v) for k, v in self.ulps.items()},
            "nonfinite": self.nonfinite,
        }


@dataclass(frozen=True)
class AuditReport:
    """The result of `halfulp.audit`."""

    target: str
    dtype: str
    device: str
    depth: str
    forward: bool  # no gradients were asked for
    verdict: Verdict
    reason: str  # one line: the failing property, or what holds
    missing: tuple[str, ...]  # planned and not seen, a line a reason
    limits: tuple[str, ...]  # left out, since the target declares that it does not take it
    findings: tuple[Finding, ...]  # worst first
    causes: tuple[Cause, ...]  # first the worst
    evidence: tuple[str, ...]  # of each cause
    cases: tuple[CaseReport, ...]
    relations: tuple[Relation, ...]
    fingerprint: Reconstruction | None  # what the kernel does; of attention alone
    # tensor → exponent by which its error outgrows the stock recipe's with N
    growth: dict[str, float]
    drift: float | None  # exponent of the summed error of O over tokens: 0.5 random walk, 1 drift
    tests: int
    family_level: float  # chance of any false alarm over all tests
    smallest: Case | None
    script: str | None  # a runnable Python file that shows the defect
    # what calls showed beside figures: "not differentiable", "modifies its inputs", warnings
    notes: tuple[str, ...]
    seconds: float
    versions: dict[str, str]
    operation: str = ATTENTION
    form: str | None = None  # in which a function was called, if not on [B, H, N, D]

    @property
    def cause(self) -> Cause | None:
        """The likeliest cause of the worst finding."""
        return self.causes[0] if self.causes else None

    @property
    def differentiable(self) -> bool:
        """Whether any case gave gradients."""
        return any(row.tensor.startswith("grad_") for case in self.cases for row in case.rows)

    @property
    def exit_code(self) -> int:
        """0 sound or stock, 1 defect, 2 the target could not be audited, or not wholly.

        A kernel without a backward pass is audited wholly where only that was asked for.
        """
        if self.verdict in ("sound", "stock"):
            return 0
        if self.verdict in ("forward sound", "forward stock"):
            return 0 if self.forward else 2
        return 1 if self.verdict == "defect" else 2

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; NaN and infinities become None."""
        causes = [
            {
                "code": c.code,
                "key": c.key,
                "name": c.name,
                "resembles": c.resembles,
                "effect": c.effect,
                "evidence": evidence,
            }
            for c, evidence in zip(self.causes, self.evidence, strict=True)
        ]
        smallest = (
            None
            if self.smallest is None
            else {
                "probe": self.smallest.probe,
                "shape": str(self.smallest.shape),
                "seed": self.smallest.seed,
            }
        )
        relations = [
            {
                "invariant": r.invariant,
                "tensor": r.tensor,
                "identical": r.identical,
                "times_floor": r.times_floor,
                "confined": r.confined,
            }
            for r in self.relations
        ]
        bounds = LIMITS[self.dtype]
        plain = {
            "format": 1,  # of this dictionary: report/audit.schema.json
            "target": self.target,
            "operation": self.operation,
            "dtype": self.dtype,
            "device": self.device,
            "depth": self.depth,
            "forward": self.forward,
            "form": self.form,
            "verdict": self.verdict,
            "reason": self.reason,
            "missing": list(self.missing),
            "left_out": list(self.limits),
            "findings": [f.as_dict() for f in self.findings],
            "causes": causes,
            "cause": causes[0] if causes else None,
            "cases": [c.as_dict() for c in self.cases],
            "relations": relations,
            "fingerprint": self._fingerprint(),
            "growth": {short(k): v for k, v in self.growth.items()},
            "drift": self.drift,
            "tests": self.tests,
            "bounds": {"stock": bounds.stock, "floor": bounds.floor},
            "family_level": self.family_level,
            "smallest": smallest,
            "script": self.script,
            "notes": list(self.notes),
            "differentiable": self.differentiable,
            "seconds": self.seconds,
            "versions": self.versions,
        }
        finite: dict[str, Any] = _plain(plain)
        return finite

    def _fingerprint(self) -> dict[str, Any] | None:
        """The reconstruction without its time, which is in the report's."""
        if self.fingerprint is None:
            return None
        return {k: v for k, v in self.fingerprint.as_dict().items() if k != "seconds"}

    def __repr__(self) -> str:
        """Return one line: pytest shows it of `assert report.verdict != "defect", report`."""
        return f"<AuditReport {self}>"

    def __str__(self) -> str:
        return f"{self.target}: {self.verdict}. {self.reason}"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinities."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
