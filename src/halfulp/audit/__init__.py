"""Is this attention kernel numerically sound? Probe inputs, invariants, statistics, a verdict, and
the smallest input that shows a defect.
"""

from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.probes import PROBES, Probe, Shape
from halfulp.audit.report import AuditReport
from halfulp.audit.run import audit, fingerprint_of
from halfulp.audit.shrink import reproduce
from halfulp.audit.targets import Outcome, Target, builtin_targets, resolve

__all__ = [
    "PROBES",
    "AuditReport",
    "Case",
    "Inputs",
    "Outcome",
    "Probe",
    "Shape",
    "Target",
    "audit",
    "builtin_targets",
    "fingerprint_of",
    "reproduce",
    "resolve",
]
