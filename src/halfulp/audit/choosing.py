"""Less than the whole plan: some probes alone, or as much as a time allows, the most telling first.

Whatever is left out is missing, and said: no verdict but a defect is given without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfulp.audit.inputs import Case
from halfulp.audit.planning import Plan
from halfulp.complaints import meant

RELATIONS, SIZES = "relations", "sizes"
TELLING = (
    "gaussian",
    "deep_negative",
    "odd_lengths_causal",
    "value_constant",
    "ties_negative",
    "keys_common",
    "sharp",
    "diffuse",
    "gqa",
    "masked_rows",
    "sizes",
    "two_live_keys",
    "ties_two",
    "lse_below_88",
    "odd_scale",
    "all_negative",
    "gaussian_causal",
    "value_offset",
    "rising",
    "ties_many",
)
"""Probes in the order in which a time budget takes them, by the kinds of faults that each alone
shows: a plain one, large scores, tails, disagreeing sums, underflow, δ, small weights, groups,
masks, sizes. The others follow in their own order, growing lengths and relations last.
"""


@dataclass(frozen=True)
class Budget:
    """How much of a plan is wanted."""

    only: tuple[str, ...] = ()  # names of probes, "sizes", "relations"; none: all
    until: float = float("inf")  # on time.perf_counter's clock

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() > self.until


def budget(only: Sequence[str], seconds: float | None) -> Budget:
    """The budget of an audit that starts now; ValueError for no time at all."""
    if seconds is None:
        return Budget(tuple(only))
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: accepted is a positive number")
    return Budget(tuple(only), time.perf_counter() + seconds)


def chosen(todo: Plan, wanted: Budget) -> Plan:
    """The plan's part that is wanted, in the order that a time budget needs; ValueError for a name
    that the plan lacks, with the nearest.
    """
    names = {_family(case): None for case in todo.all_cases} | {RELATIONS: None}
    for name in wanted.only:
        if name == SIZES and not todo.sizes:
            raise ValueError(f"only={name!r}: accepted without shapes, since it has its own")
        if name not in names:
            raise ValueError(f"only={name!r}: accepted are {', '.join(names)}{meant(name, names)}")
    cases = todo.all_cases
    if wanted.only:
        cases = tuple(case for case in cases if _family(case) in wanted.only)
        if not cases:  # relations alone: a call that says whether there is anything to relate
            cases = todo.all_cases[:1]
    if wanted.until < float("inf"):
        lengths = set(todo.lengths)
        cases = tuple(sorted(cases, key=lambda case: (case in lengths, _rank(case))))
    asked_for = not wanted.only or RELATIONS in wanted.only
    return replace(todo, chosen=cases, relations=todo.relations if asked_for else ())


def left_out(todo: Plan, run: Plan, wanted: Budget, called: Sequence[Case]) -> tuple[str, ...]:
    """What of the whole plan was not called, in lines; empty where all was."""
    lines = []
    if wanted.only:
        total, kept = len(todo.all_cases), len(run.all_cases)
        lines.append(f"only {', '.join(wanted.only)} asked for: {kept} of {total} cases")
    late = [case for case in run.all_cases if case not in set(called)]
    if late and wanted.over:
        names = list(dict.fromkeys(_family(case) for case in late))
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        lines.append(
            f"out of time after {len(called)} of {len(run.all_cases)} cases, without"
            f" {', '.join(names[:6])}{more}"
        )
    return tuple(lines)


def _family(case: Case) -> str:
    """A case's probe, "sizes" of all of the covering array."""
    return case.probe.partition("/")[0]


def _rank(case: Case) -> int:
    family = _family(case)
    return TELLING.index(family) if family in TELLING else len(TELLING)
