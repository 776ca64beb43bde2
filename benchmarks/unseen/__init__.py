"""What a set of unseen faults consists of, and when a cause that is named is the right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SETS = tuple(
    f"{of}.{each}"
    for of, last in (("attention", 79), ("operations", 14))
    for each in ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth",
                 "ninth", "tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth",
                 "sixteenth", "seventeenth", "eighteenth", "nineteenth", "twentieth",
                 "twentyfirst", "twentysecond", "twentythird",
                 "twentyfourth", "twentyfifth", "twentysixth", "twentyseventh",
                 "twentyeighth", "twentyninth", "thirtieth", "thirtyfirst", "thirtysecond",
                 "thirtythird", "thirtyfourth", "thirtyfifth", "thirtysixth",
                 "thirtyseventh", "thirtyeighth", "thirtyninth", "fortieth", "fortyfirst",
                 "fortysecond", "fortythird", "fortyfourth", "fortyfifth", "fortysixth",
                 "fortyseventh", "fortyeighth", "fortyninth", "fiftieth", "fiftyfirst",
                 "fiftysecond", "fiftythird",
                 "fiftyfourth", "fiftyfifth", "fiftysixth", "fiftyseventh", "fiftyeighth",
                 "fiftyninth", "sixtieth", "sixtyfirst", "sixtysecond", "sixtythird",
                 "sixtyfourth", "sixtyfifth", "sixtysixth", "sixtyseventh", "sixtyeighth",
                 "sixtyninth", "seventieth", "seventyfirst", "seventysecond", "seventythird",
                 "seventyfourth", "seventyfifth", "seventysixth", "seventyseventh",
                 "seventyeighth", "seventyninth")[:last]
)  # fmt: skip
"""The modules of this folder that hold a set: `FAULTS` and `SOUND`."""


@dataclass(frozen=True)
class Fault:
    """A kernel, or the name of a target, and the keys of causes that are right for it; none for a
    sound one. Keys of `second` are those of another fault that is in it as well; named first, those
    of `vague` are near enough not to be wrong.
    """

    name: str
    right: frozenset[str]
    fn: Callable[..., Any] | str
    dtype: str = "bfloat16"
    vague: frozenset[str] = frozenset()
    second: frozenset[str] = frozenset()


LATER = {"value-factor": frozenset({"operand", "unnormalized"})}
"""Causes that are younger than the sets, and those which stood for the same fault when these were
written: a number on V was an operand's, on O a row sum's, and O does not tell which."""


def verdict(found: Any, fault: Fault) -> tuple[str, list[str]]:
    """right, vague or wrong, and the keys that are named, the first first.

    Right: what is named first is the fault's cause or its place; of a fault that does no harm its
    field; of two faults both, in either order; of a sound kernel nothing. Vague: nothing is named,
    or the right one behind another, or one of two, or what the set calls vague.
    """
    named = [n.cause.key for n in found.causes] + [p.cause for p in found.places]
    harmless = [d.cause for d in found.harmless if d.cause]
    if not named and fault.right:  # a field that rounds otherwise than stock and does no harm
        named = harmless
    named = list(dict.fromkeys(named))
    if not fault.right:
        return ("right" if not named else "vague" if not found.causes else "wrong"), named
    either = fault.right | fault.second
    either |= {key for key, older in LATER.items() if either & older}
    if named and named[0] in either:
        both = not fault.second or all(
            part & {*named, *harmless} for part in (fault.right, fault.second)
        )
        return ("right" if both else "vague"), named
    honest = not named or named[0].endswith("unexplained") or named[0] in fault.vague
    if honest or set(named) & either:
        return "vague", named
    return "wrong", named


WHAT: dict[str, frozenset[str]] = {
    "rounded": frozenset(
        {"step-low", "statistic-low", "grad-step-low", "result-cut", "result-low", "coarser"}
    ),
    "summed": frozenset({"sum-low", "grad-sum-low"}),
    "codes": frozenset({"block-codes", "coarser"}),
    "scale": frozenset({"block-scale", "factor"}),
    "random": frozenset({"random"}),
    "option": frozenset({"option"}),
    "end": frozenset({"end"}),
    "neighbor": frozenset({"neighbor"}),
    "factor": frozenset({"factor"}),
    "missing": frozenset({"term-missing"}),
    "exchanged": frozenset({"exchanged"}),
    "limited": frozenset({"limited"}),
    "overflow": frozenset({"limited", "maximum", "non-finite"}),
}
"""Kinds of faults of operations, and the keys of causes that name them."""


@dataclass(frozen=True)
class OperationFault:
    """A kernel of an operation, what is wrong in it, and where.

    `what` are words of `WHAT`, any of which is right; `where` are words, any of which what is said
    has to contain: names of the operation's steps, operands, results, options or symbols.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    what: frozenset[str]
    where: tuple[str, ...] = ()
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        unknown = self.what - WHAT.keys()
        assert not unknown, (self.op, self.name, unknown)


def operation_verdict(said: list[tuple[str, str]], fault: OperationFault) -> str:
    """right, place, vague or wrong: of the keys of causes and what is said with each, in order.

    Right: the first names what is wrong, and where. Place: it says that it does not know what, and
    where is right. Vague: it says that it does not know, or the right one stands behind another.
    """
    keys = frozenset().union(*(WHAT[word] for word in fault.what))

    def there(text: str) -> bool:
        return any(word.lower() in text.lower() for word in fault.where)

    def right(key: str, text: str) -> bool:
        return key in keys and (not fault.where or there(text))

    if not said:
        return "vague"
    if right(*said[0]):
        return "right"
    if said[0][0] in _HONEST and there(said[0][1]):
        return "place"
    return "vague" if said[0][0] in _HONEST or any(right(*one) for one in said) else "wrong"


_HONEST = frozenset({"operation-place", "operation-function", "operation-unexplained"})


def part_of(asked: list[Any], which: str) -> list[Any]:
    """One of N parts of a set, "1/4", so that processes share it."""
    part, of = map(int, which.split("/"))
    return asked[part - 1 :: of]


def wilson(right: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a rate."""
    centre, spread = (
        right / of + z * z / (2 * of),
        z * math.sqrt(right * (of - right) / of**3 + z * z / (4 * of * of)),
    )
    low, high = ((centre + sign * spread) / (1 + z * z / of) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)  # of all, or of none, an interval ends there


def told(rows: list[dict[str, Any]], what: str) -> str:
    """One line: how many of some rows are right, what names the right place alone among them."""
    count = {how: sum(r["verdict"] == how for r in rows) for how in ("right", "vague", "wrong")}
    places = sum(r["verdict"] == "place" for r in rows)
    right = count["right"] + places
    low, high = wilson(right, len(rows))
    by_place = f" ({places} by place alone)" if places else ""
    return (
        f"{what}: {right} right{by_place}, {count['vague']} vague, {count['wrong']} wrong of"
        f" {len(rows)} (right {100 * right / len(rows):.0f} %, {100 * low:.0f} to"
        f" {100 * high:.0f} %)"
    )
