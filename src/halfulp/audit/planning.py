"""Which cases an audit runs, and which relations it looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from halfulp.audit import invariants
from halfulp.audit.inputs import CAPTURED, Case, case_of, read_captured, shape_of
from halfulp.audit.invariants import Relation
from halfulp.audit.operation_plan import (
    in_only_values,
    operation_cases,
    operation_relations,
    same_random_numbers,
)
from halfulp.audit.operation_plan import size_cases as size_cases_of
from halfulp.audit.probes import PROBES, Shape, probe_named
from halfulp.audit.size_array import held, size_cases, without
from halfulp.formats import dtype_named
from halfulp.operations import ATTENTION, DTYPES, operation_named
from halfulp.targets import SEEDED
from halfulp.targets.form import BHND, Form

Depth = Literal["quick", "full"]
GROWTH_PROBE = "gaussian"


@dataclass(frozen=True)
class Plan:
    """Which cases an audit runs; the last cases are the growing lengths."""

    cases: tuple[Case, ...]
    lengths: tuple[Case, ...]
    relations: tuple[Case, ...]  # of attention plain, causal
    sizes: tuple[Case, ...] = ()  # the covering array
    chosen: tuple[Case, ...] | None = None  # of all these, in the order they run; None: all

    @property
    def all_cases(self) -> tuple[Case, ...]:
        """Every case that is measured against golden."""
        return self.cases + self.sizes + self.lengths if self.chosen is None else self.chosen

    def fitted(self, accepts: frozenset[str], form: Form = BHND) -> Plan:
        """The plan for a target that takes these options: the array's cases without the others, and
        all in sizes that its form can hold; of another operation with the values that it has alone.
        """
        if self.relations and self.relations[0].operation != ATTENTION:
            names = ("cases", "sizes", "relations")
            accepts -= {SEEDED}
            changed: dict[str, Any] = {
                name: tuple(in_only_values(case, accepts) for case in getattr(self, name))
                for name in names
            }
            return replace(self, **changed)
        fitted = (
            replace(case, probe=name, shape=shape)
            for case in self.sizes
            for name, shape in (without(case.probe, case.shape, accepts, form),)
        )
        sizes = tuple(dict.fromkeys(fitted))
        held = {
            name: tuple(
                dict.fromkeys(c for case in getattr(self, name) if (c := held_by(form, case)))
            )
            for name in ("cases", "lengths", "relations")
        }
        return replace(self, sizes=sizes, **held)


def plan(
    depth: Depth,
    dtype: str,
    seed: int = 0,
    shapes: Sequence[Shape] = (),
    captured: Sequence[str] = (),
) -> Plan:
    """The cases of a depth: every probe at (4, 4, 256, 64) (quick), or at two sizes and two seeds
    (full), and lengths up to 2k or 8k.
    """
    if depth not in ("quick", "full"):
        raise ValueError(f"depth={depth!r}: accepted are 'quick' and 'full'")
    dtype = dtype_named(dtype, DTYPES)
    for shape in shapes:
        if not isinstance(shape, Shape):
            raise ValueError(
                f"shapes={shape!r}: accepted is halfulp.audit.Shape(batch, heads, n_query, n_key,"
                " head_dim)"
            )
    main = tuple(shapes) or (
        # 3 heads and 320 keys, of which the last tile of 128 is half full, beside sizes that divide
        (Shape(),) if depth == "quick" else (Shape(4, 4, 384, 384, 64), Shape(4, 3, 320, 320, 128))
    )
    seeds = (seed,) if depth == "quick" else (seed, seed + 1)
    cases = [case_of(p, shape, s, dtype) for shape in main for s in seeds for p in PROBES]
    for file in captured:
        size = shape_of(read_captured(file))
        cases.append(Case(CAPTURED, size, 0, dtype, file))
    sizes: tuple[int, ...] = (
        (512, 1024, 2048) if depth == "quick" else (512, 1024, 2048, 4096, 8192)
    )
    if shapes:  # small sizes are asked for to be fast
        sizes = (
            tuple(n for n in sizes if n <= 8 * max(shape.n_key for shape in shapes)) or sizes[:2]
        )
    # few heads: golden costs N² a head, and an exponent needs no test
    lengths = [
        Case(GROWTH_PROBE, Shape(1, 4 if n <= 4096 else 2, n, n, 64), seed, dtype) for n in sizes
    ]
    small = Shape(2, 4, 192, 192, 64)
    relations = (
        Case("free_feature", small, seed, dtype),
        Case("free_feature_causal", small, seed, dtype),
    )
    array = [Case(name, shape, s, dtype) for s in seeds for name, shape in size_cases(s)]
    return Plan(tuple(cases), tuple(lengths), relations, () if shapes else tuple(array))


def plan_of(
    op: str,
    depth: Depth,
    dtype: str,
    seed: int = 0,
    shapes: Sequence[Any] = (),
    captured: Sequence[str] = (),
) -> Plan:
    """The cases of an operation that is not attention: every probe at its own sizes."""
    for name, given in (("shapes", shapes), ("captured", captured)):
        if given:
            raise ValueError(f"{name}={list(given)!r}: accepted with op='attention' alone")
    if depth not in ("quick", "full"):
        raise ValueError(f"depth={depth!r}: accepted are 'quick' and 'full'")
    dtype = dtype_named(dtype, DTYPES)
    cases, sizes = (
        of(operation_named(op), depth, dtype, seed) for of in (operation_cases, size_cases_of)
    )
    return Plan(cases, (), cases[:1], sizes)


def relations_of(
    todo: Plan, accepts: frozenset[str]
) -> list[tuple[Case, tuple[Callable[..., list[Relation]], ...]]]:
    """Each case that relations are looked at on, with those that hold there, of a kernel that takes
    these options.
    """
    if not todo.relations:
        return []
    if todo.relations[0].operation != ATTENTION:
        case = todo.relations[0]
        relations = operation_relations(operation_named(case.operation))
        return [(case, tuple(r for r in relations if r is not same_random_numbers or (
            SEEDED not in accepts)))]  # fmt: skip
    lacks = () if "num_splits" in accepts else (invariants.split_count,)  # there is nothing to say
    found = []
    for case in todo.relations:
        causal = probe_named(case.probe).is_causal
        own = (invariants.CAUSAL if causal else invariants.PLAIN).values()
        found.append((case, tuple(relation for relation in own if relation not in lacks)))
    return found


def held_by(form: Form, case: Case) -> Case | None:
    """The case at a size that the form can hold; None where nothing is left of it: one query a
    sequence sees all keys. Captured tensors stay as they are.
    """
    if case.file is not None:
        return case
    if form.decodes and probe_named(case.probe).is_causal:
        return None
    return replace(case, shape=held(form, case.shape))
