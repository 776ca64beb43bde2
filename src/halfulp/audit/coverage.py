"""Whether an audit saw all that it planned.

A kernel that fails a third of its calls, gives no gradient or writes over its inputs has no figure
that is too large: what is missing must be looked for by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from halfulp.complaints import alike
from halfulp.targets import Outcome
from halfulp.targets.calling import MODIFIES

MOST_LEFT_OUT = 2 / 3
"""Of the calls; attention without masks or options leaves out 0.51 of a quick audit's."""

_SHOWN = 4  # names of probes in a line


@dataclass(frozen=True)
class Coverage:
    """What of the planned calls was not seen, in lines."""

    missing: tuple[str, ...] = ()  # failed: no verdict but a defect can be given
    limits: tuple[str, ...] = ()  # the target declares that it does not take it
    forward_only: bool = False  # no call gave any gradient, or none was asked for


def coverage(
    calls: Sequence[tuple[str, Outcome]],
    forward: bool,
    expected: Sequence[str] = ("query", "key", "value"),
) -> Coverage:
    """What is missing of calls, each with the name of its probe or relation.

    `forward`: no gradients were asked for; `expected` are the operands that have one, and an
    operation without any is audited wholly without.
    """
    went = [(name, outcome) for name, outcome in calls if outcome.kind == "ok"]
    failed: list[tuple[str, str]] = []
    limits: list[tuple[str, str]] = []
    for name, outcome in calls:
        if outcome.kind != "ok":
            group = limits if outcome.kind == "unsupported" else failed
            group.append((str(outcome.refusal), name))
    # a call of other values than an option's declared ones is another kernel's to make
    own = [reason for reason, _ in limits if not re.match(r"does not take \w+=", reason)]
    if len(own) > MOST_LEFT_OUT * len(calls):
        failed += [
            ("declared as not meant for more than two thirds of the plan", name)
            for reason, name in limits
            if reason in own
        ]
    absent = [] if forward else [(name, _absent(o, expected)) for name, o in went]
    lacking = [(name, operands) for name, operands in absent if operands]
    # no gradient in any call is a kernel without a backward pass, and no fault of each call
    silent = bool(lacking) and all(len(operands) == len(expected) for _, operands in absent)
    if not silent:
        failed += [(f"no gradient for {', '.join(operands)}", name) for name, operands in lacking]
    failed += [
        (note, name) for name, o in went for note in o.notes if note.startswith(f"{MODIFIES}: ")
    ]
    forward_only = bool(expected) and (forward or silent)
    return Coverage(_lines(failed, len(calls)), _lines(limits, len(calls)), forward_only)


def _absent(outcome: Outcome, expected: Sequence[str]) -> tuple[str, ...]:
    given = outcome.result.given()
    return tuple(name for name in expected if f"grad_{name}" not in given)


def _lines(found: Sequence[tuple[str, str]], total: int) -> tuple[str, ...]:
    """One line a reason, that of the most calls first."""
    by_reason: dict[str, list[str]] = {}
    for reason, (_, name) in zip(alike([reason for reason, _ in found]), found, strict=True):
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        distinct = list(dict.fromkeys(names))
        more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
        where = f"{', '.join(distinct[:_SHOWN])}{more}"
        lines.append(f"{reason} in {len(names)} of {total} calls ({where})")
    return tuple(lines)
