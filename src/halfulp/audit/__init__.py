"""Is this kernel numerically sound? Probe inputs, invariants, statistics, a verdict, and
the smallest input that shows a defect.
"""

from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.probes import PROBES, Probe, Shape
from halfulp.audit.report import AuditReport
from halfulp.audit.run import audit
from halfulp.audit.shrink import reproduce
from halfulp.operations import Sizes

__all__ = [
    "PROBES",
    "AuditReport",
    "Case",
    "Inputs",
    "Probe",
    "Shape",
    "Sizes",
    "audit",
    "reproduce",
]
