"""Whether an audit saw all that it planned.

A kernel that fails a third of its calls, gives no gradient or writes over its inputs has no figure
that is too large: what is missing must be looked for by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfulp.targets import Outcome
from halfulp.targets.calling import MODIFIES

_SHOWN = 4  # names of probes in a line


@dataclass(frozen=True)
class Coverage:
    """What of the planned calls was not seen, in lines."""

    missing: tuple[str, ...] = ()  # failed: no verdict but a defect can be given
    limits: tuple[str, ...] = ()  # the target declares that it does not take it
    forward_only: bool = False  # no call gave any gradient, or none was asked for


def coverage(calls: Sequence[tuple[str, Outcome]], forward: bool) -> Coverage:
    """What is missing of calls, each with the name of its probe or relation.

    `forward`: no gradients were asked for.
    """
    went = [(name, outcome) for name, outcome in calls if outcome.kind == "ok"]
    failed: list[tuple[str, str]] = []
    limits: list[tuple[str, str]] = []
    for name, outcome in calls:
        if outcome.kind != "ok":
            group = limits if outcome.kind == "unsupported" else failed
            group.append((str(outcome.refusal), name))
    lacking = [] if forward else [(name, absent) for name, o in went if (absent := _absent(o))]
    silent = bool(went) and len(lacking) == len(went) and all(len(a) == 3 for _, a in lacking)
    if not silent:
        failed += [(f"no gradient for {', '.join(absent)}", name) for name, absent in lacking]
    failed += [
        (note, name) for name, o in went for note in o.notes if note.startswith(f"{MODIFIES}: ")
    ]
    return Coverage(_lines(failed, len(calls)), _lines(limits, len(calls)), forward or silent)


def _absent(outcome: Outcome) -> tuple[str, ...]:
    names = ("query", "key", "value")
    return tuple(name for name in names if getattr(outcome.result, f"grad_{name}") is None)


def _lines(found: Sequence[tuple[str, str]], total: int) -> tuple[str, ...]:
    """One line a reason, that of the most calls first."""
    by_reason: dict[str, list[str]] = {}
    for reason, name in found:
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        distinct = list(dict.fromkeys(names))
        more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
        where = f"{', '.join(distinct[:_SHOWN])}{more}"
        lines.append(f"{reason} in {len(names)} of {total} calls ({where})")
    return tuple(lines)
