"""A relation between calls, checked again on one case: what a program that shows a broken one, and
a test that failed on one, run.
"""

from __future__ import annotations

from collections.abc import Callable

from halfulp.audit import invariants
from halfulp.audit.figures import short as short_name
from halfulp.audit.inputs import Case
from halfulp.audit.invariants import Relation, Run
from halfulp.audit.operation_plan import operation_relations
from halfulp.audit.references import references
from halfulp.audit.verdict import LIMITS, beside, errors_of
from halfulp.operations import ATTENTION, operation_named


def relation_severity(run: Run, case: Case, property: str) -> float:
    """How far a relation is broken on one case, 1 being the limit of a defect; 0 where the target
    refuses a call.

    `property` is a finding's, "key shift: dQ". Unlike an audit this makes no test: it repeats one
    that was significant, and takes the mean over heads alone.
    """
    name, _, short = property.rpartition(": ")
    x = references(case).inputs
    base = run(x)
    if base is None:
        return 0.0
    for relation in _relations(case, name):
        for found in relation(run, x, base):
            if found.invariant == name and short_name(found.tensor) == short:
                return _severity(found, case)
    return 0.0


def _relations(case: Case, name: str) -> tuple[Callable[..., list[Relation]], ...]:
    if case.operation != ATTENTION:
        return operation_relations(operation_named(case.operation))
    return ((invariants.PLAIN | invariants.CAUSAL)[name],)


def _severity(found: Relation, case: Case) -> float:
    if not found.confined:
        return 2.0
    stock, _ = errors_of(references(case), found.tensor)
    return (beside(found, stock) or 0.0) / LIMITS[case.dtype].stock
