"""A relation between calls, checked again on one case: what a program that shows a broken one, and
a test that failed on one, run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from halfulp.audit import invariants
from halfulp.audit.figures import short as short_name
from halfulp.audit.inputs import Case
from halfulp.audit.invariants import Relation, Run
from halfulp.audit.operation_plan import operation_relations
from halfulp.audit.references import references
from halfulp.audit.statistics import log_ratios
from halfulp.audit.verdict import LIMITS
from halfulp.operations import ATTENTION, operation_named

RELATIONS = {
    "same call twice": invariants.repeated_call,
    "power-of-two scaling": invariants.powers_of_two,
    "batch position": invariants.batch_position,
    "permuted keys": invariants.permuted_keys,
    "duplicated keys": invariants.duplicated_keys,
    "key shift": invariants.shifted_keys,
    "NaN confined": invariants.poison,
    "causal prefix and padding": invariants.causal_prefix,
}
"""By the name that each gives its findings, held equal to it by test."""


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
    return (RELATIONS[name],)


def _severity(found: Relation, case: Case) -> float:
    if not found.confined:
        return 2.0
    stock = {f.tensor: f for f in references(case).stock.figures if f.name.endswith("error")}
    reference = stock.get(found.tensor)
    if reference is None or reference.error.numel() != found.difference.numel():
        return 0.0
    own = replace(reference, name=found.invariant, error=found.difference)
    ratio = math.exp(float(log_ratios(own, reference, through_delta=True).mean()))
    return ratio / LIMITS[case.dtype].stock
