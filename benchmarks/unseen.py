"""What a set of unseen faults consists of, and when a cause that is named is the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A kernel, or the name of a target, and the keys of causes that are right for it; none for a
    sound one.
    """

    name: str
    right: frozenset[str]
    fn: Callable[..., Any] | str
    dtype: str = "bfloat16"


def verdict(found: Any, fault: Fault) -> tuple[str, list[str]]:
    """right, vague or wrong, and the keys that are named, the first first.

    Right: what is named first is the fault's cause or its place; of a fault that does no harm its
    field; of a sound kernel nothing. Vague: nothing is named, or the right one behind another.
    """
    named = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    if not named and fault.right:  # a field that rounds otherwise than stock and does no harm
        named = [d.cause for d in found.harmless if d.cause]
    named = list(dict.fromkeys(named))
    if not fault.right:
        return ("right" if not named else "vague" if not found.causes else "wrong"), named
    if named and named[0] in fault.right:
        return "right", named
    honest = not named or named[0].endswith("unexplained")
    if honest or set(named) & fault.right:
        return "vague", named
    return "wrong", named
