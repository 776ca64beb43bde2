"""Finding what matters among many, with few questions: pure logic, which knows nothing of training.

A question is a set of suspects, and the answer comes from a run: does it still fail when only these
are left in place? Halves that carry the failure are halved again, so that one guilty head of 144
takes 8 questions and not 144. Where neither half fails alone, what is guilty is spread over both,
and the search goes finer and says so (delta debugging: Zeller & Hildebrandt 2002). Questions come
in batches, since runs go in parallel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from halfulp.chances import beta_quantile

Item = TypeVar("Item", bound=Hashable)
Fails = Callable[[Sequence[frozenset[Item]]], Sequence[bool]]
"""Answers a batch of questions: does the run fail with the cause in these alone?"""


def minimal_failing(items: Sequence[Item], fails: Fails[Item]) -> frozenset[Item]:
    """Return a set that fails and of which no member can be spared, given that all of `items`
    together fail.

    Of a single guilty item among n it asks two questions for every halving of n; of several that
    need each other, more.
    """
    current, parts = list(items), 2
    while len(current) > 1:
        whole = frozenset(current)
        chunks = [frozenset(chunk) for chunk in _split(current, parts)]
        # first one part alone, which shrinks the set most
        smaller = _first_failing(chunks, fails)
        if smaller is not None:
            parts = 2
        elif (
            # then all but one part; with two parts these are the parts themselves, just asked
            parts > 2
            and (smaller := _first_failing([whole - chunk for chunk in chunks], fails)) is not None
        ):
            # one part is gone, the others stay as long as they were
            parts -= 1
        elif parts < len(current):
            parts = min(len(current), 2 * parts)
            continue
        else:
            break
        current = [item for item in current if item in smaller]
        parts = max(2, min(parts, len(current)))
    return frozenset(current)


def _first_failing(
    questions: Sequence[frozenset[Item]], fails: Fails[Item]
) -> frozenset[Item] | None:
    answers = fails(questions)
    return next(
        (question for question, failed in zip(questions, answers, strict=True) if failed), None
    )


def _split(items: Sequence[Item], parts: int) -> list[list[Item]]:
    """Consecutive parts of about equal length, none empty."""
    edges = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in itertools.pairwise(edges) if b > a]


@dataclass(frozen=True)
class Guilty(Generic[Item]):
    """Disjoint sets each of which fails alone and has no member to spare; without all of them the
    run does not fail.
    """

    sets: tuple[frozenset[Item], ...]

    @property
    def all(self) -> frozenset[Item]:
        """Every item of any of the sets."""
        return frozenset().union(*self.sets)


def guilty_sets(items: Sequence[Item], fails: Fails[Item]) -> Guilty[Item]:
    """Return what carries a failure, given that all of `items` together fail.

    One set is looked for, then the rest without it is asked whether it still fails; if so, it holds
    another.
    """
    found: list[frozenset[Item]] = []
    rest = list(items)
    while rest and (not found or fails([frozenset(rest)])[0]):
        found.append(minimal_failing(rest, fails))
        rest = [item for item in rest if item not in found[-1]]
    return Guilty(tuple(found))


def least_surviving(
    low: int, high: int, survives: Callable[[Sequence[int]], Sequence[bool]]
) -> int | None:
    """Return the smallest of low … high that survives, if more never hurts; None: not even high."""
    if not survives([high])[0]:
        return None
    while low < high:
        middle = (low + high) // 2
        if survives([middle])[0]:
            high = middle
        else:
            low = middle + 1
    return high


class Comparable(Protocol):
    """How far a run got: greater is better."""

    @property
    def survived(self) -> bool:
        """Whether it got to the end and did not drift."""
        ...

    def __lt__(self, other: Any, /) -> bool: ...


Scores = Callable[[Sequence[frozenset[Item]]], Sequence[Comparable | None]]
"""Answers a batch: how far does the run get with these changes? None: they cannot be made together.
"""


def rescuing_set(
    items: Iterable[Item],
    scores: Scores[Item],
    most: int = 6,
) -> frozenset[Item] | None:
    """Return changes that together save the run, none of which can be left out; None if no set of
    `most` was found.

    The change that gets the run furthest is added until it survives, whether or not the last one
    helped by itself, since some help only together. Then every change is tried without.
    """
    items, current, saved = list(items), frozenset[Item](), False
    # one change at a time: all pairs of the 17 operations alone would be 136 runs
    while not saved and len(current) < most:
        options = [current | {item} for item in items if item not in current]
        found = scores(options) if options else ()
        ranked = [
            (score, option)
            for score, option in zip(found, options, strict=True)
            if score is not None
        ]
        if not ranked:
            return None
        best = ranked[0]
        for one in ranked[1:]:
            if best[0] < one[0]:
                best = one
        current, saved = best[1], best[0].survived
    return spare(items, current, scores) if saved else None


def spare(
    order: Sequence[Item],
    chosen: frozenset[Item],
    scores: Scores[Item],
) -> frozenset[Item]:
    """Return a surviving set without the changes that it survives without, tried from the last in
    `order`.
    """
    current, smaller = chosen, True
    # what was needed may be spared once another change is gone, so that all are asked again
    while smaller:
        smaller = False
        for item in reversed([item for item in order if item in current]):
            if len(current) > 1:
                (score,) = scores([current - {item}])
                if score is not None and score.survived:
                    current, smaller = current - {item}, True
    return current


def share_bound(held: int, tried: int, confidence: float = 0.95) -> float:
    """Return the least share of all seeds that would hold, given so many of those tried, at that
    confidence.

    Clopper & Pearson 1934, one-sided.

    Raises:
        ValueError: more held than were tried, or none was.
    """
    if not 0 <= held <= tried or tried < 1:
        raise ValueError(f"held={held}, tried={tried}: accepted are 0 to tried of at least 1")
    # there Clopper and Pearson's lower end is 0, and Beta(0, n + 1) no distribution
    if held == 0:
        return 0.0
    return beta_quantile(1 - confidence, held, tried - held + 1)
