"""Covering arrays: few rows in which every pair of levels of every two factors occurs, so that a
fault which needs two things at once is met (Cohen et al., IEEE Trans. Software Eng. 23(7), 1997).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]  # (factor, number of its level) twice


def covering_array(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], seed: int = 0
) -> list[Row]:
    """Rows in which every pair of levels occurs that an allowed row can have, greedily few; the
    same at every call.

    Args:
        factors: the levels of each factor, in any order.
        allowed: whether a row may be taken. It is also asked about rows that lack factors, and
            then says whether any row with these levels may be.
        seed: of the order in which equals are tried.
    """
    chance = random.Random(seed)
    names = list(factors)
    open_pairs = _pairs(factors, allowed)
    rows: list[Row] = []
    while open_pairs:
        best: dict[str, int] = {}
        covered: set[Pair] = set()
        # each try begins with an open pair, so every row covers one at least
        for first in _some(open_pairs, 6, chance):
            trial = _filled(dict(first), names, factors, allowed, open_pairs, chance)
            gained = set() if trial is None else _in_row(trial) & open_pairs.keys()
            if trial is not None and len(gained) > len(covered):
                best, covered = trial, gained
            if trial is None:
                open_pairs.pop(first, None)  # no whole row can have it
        for pair in covered:
            open_pairs.pop(pair, None)
        if covered:
            rows.append({name: factors[name][level] for name, level in best.items()})
    return rows


def _pairs(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]
) -> dict[Pair, None]:
    """Every pair that may be, in a set that keeps its order."""
    found: dict[Pair, None] = {}
    for one, two in combinations(sorted(factors), 2):
        for i, a in enumerate(factors[one]):
            for j, b in enumerate(factors[two]):
                if allowed({one: a, two: b}):
                    found[(one, i), (two, j)] = None
    return found


def _some(pairs: Mapping[Pair, None], count: int, chance: random.Random) -> list[Pair]:
    listed = list(pairs)
    # the oldest is always tried: a pair that no whole row can have is met, and dropped, in the end
    return [listed[0], *(chance.choice(listed) for _ in range(count - 1))]


def _filled(
    chosen: dict[str, int],
    names: Sequence[str],
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    open_pairs: Mapping[Pair, None],
    chance: random.Random,
) -> dict[str, int] | None:
    """A whole row with these levels that covers many open pairs, or None."""
    rest = [name for name in names if name not in chosen]
    chance.shuffle(rest)
    for name in rest:
        ranked = []
        for level in range(len(factors[name])):
            row = {n: factors[n][i] for n, i in chosen.items()} | {name: factors[name][level]}
            if allowed(row):
                gain = sum(_pair((name, level), item) in open_pairs for item in chosen.items())
                # chance between equals, or the first levels would fill every row's rest
                ranked.append((-gain, chance.random(), level))
        if not ranked:
            return None
        chosen[name] = min(ranked)[2]
    return chosen


def _pair(one: tuple[str, int], two: tuple[str, int]) -> Pair:
    return (one, two) if one[0] < two[0] else (two, one)


def _in_row(row: Mapping[str, int]) -> set[Pair]:
    return {_pair(one, two) for one, two in combinations(row.items(), 2)}
