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
from halfulp.runs.results import Plain, plain_data

Verdict = Literal[
    "sound", "stock", "forward sound", "forward stock", "defect", "incomplete", "error"
]


@dataclass(frozen=True)
class CaseReport(Plain):
    """One case: its rows, or why there are none."""

    APART = ("case",)

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
        exposes = "real activations" if probe is None else probe.exposes
        source = "captured" if probe is None else probe.source
        return self.case.told | super().as_dict() | {"exposes": exposes, "source": source}


@dataclass(frozen=True)
class AuditReport(Plain):
    """The result of `halfulp.audit`."""

    APART = ("causes", "evidence", "fingerprint", "growth", "limits", "smallest")
    BESIDE = ("differentiable",)

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
        named = ("code", "key", "name", "resembles", "effect")
        causes = [
            {name: getattr(cause, name) for name in named} | {"evidence": evidence}
            for cause, evidence in zip(self.causes, self.evidence, strict=True)
        ]
        smallest = self.smallest
        plain: dict[str, Any] = super().as_dict() | {
            "format": 1,  # of this dictionary: report/audit.schema.json
            "left_out": list(self.limits),
            "causes": causes,
            "cause": causes[0] if causes else None,
            "fingerprint": plain_data(self._fingerprint()),
            "growth": {short(k): plain_data(v) for k, v in self.growth.items()},
            "bounds": {name: getattr(LIMITS[self.dtype], name) for name in ("stock", "floor")},
            "smallest": smallest and {k: x for k, x in smallest.told.items() if k != "file"},
        }
        return plain

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
