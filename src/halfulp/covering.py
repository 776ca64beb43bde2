"""Covering arrays: few rows in which every pair of levels of every two factors occurs, so that a
fault which needs two things at once is met (Cohen et al., IEEE Trans. Software Eng. 23(7), 1997).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[int, int]  # two levels of different factors, each by its number among all levels


@dataclass
class _Levels:
    """Every level of every factor under one number, and of which two a pair is still open."""

    factors: Mapping[str, Sequence[Any]]
    allowed: Callable[[Row], bool]
    numbers: dict[str, range] = field(default_factory=dict)  # of a factor's levels
    # a set of bits for each level: the levels that it has an open pair with; how many pairs a level
    # closes in a row is then one `and`, which is asked a hundred thousand times
    partners: list[int] = field(default_factory=list)
    pairs: dict[Pair, None] = field(default_factory=dict)  # open, in their order

    def __post_init__(self) -> None:
        for name, levels in self.factors.items():
            begin = len(self.partners)
            self.numbers[name] = range(begin, begin + len(levels))
            self.partners += [0] * len(levels)
        for one, two in combinations(sorted(self.factors), 2):
            for i, a in zip(self.numbers[one], self.factors[one], strict=True):
                for j, b in zip(self.numbers[two], self.factors[two], strict=True):
                    if self.allowed({one: a, two: b}):
                        self.pairs[i, j] = None
                        self._flip(i, j)

    def _flip(self, one: int, two: int) -> None:
        self.partners[one] ^= 1 << two
        self.partners[two] ^= 1 << one

    def close(self, pair: Pair) -> None:
        if pair in self.pairs:
            del self.pairs[pair]
            self._flip(*pair)

    def row(self, chosen: Mapping[str, int]) -> Row:
        return {n: self.factors[n][i - self.numbers[n].start] for n, i in chosen.items()}


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
    levels = _Levels(factors, allowed)
    factor_of = {i: name for name, numbers in levels.numbers.items() for i in numbers}
    rows: list[Row] = []
    while levels.pairs:
        best: dict[str, int] = {}
        covered: set[Pair] = set()
        # each try begins with an open pair, so every row covers one at least
        for first in _some(levels.pairs, 6, chance):
            trial = _filled({factor_of[i]: i for i in first}, levels, chance)
            if trial is None:
                levels.close(first)  # no whole row can have it
                continue
            in_order = [trial[name] for name in sorted(trial)]
            gained = set(combinations(in_order, 2)) & levels.pairs.keys()
            if len(gained) > len(covered):
                best, covered = trial, gained
        for pair in covered:
            levels.close(pair)
        if covered:
            rows.append(levels.row(best))
    return rows


def _some(pairs: Mapping[Pair, None], count: int, chance: random.Random) -> list[Pair]:
    listed = list(pairs)
    # the oldest is always tried: a pair that no whole row can have is met, and dropped, in the end
    return [listed[0], *(chance.choice(listed) for _ in range(count - 1))]


def _filled(
    chosen: dict[str, int], levels: _Levels, chance: random.Random
) -> dict[str, int] | None:
    """A whole row with these levels that covers many open pairs, or None."""
    rest = [name for name in levels.factors if name not in chosen]
    chance.shuffle(rest)
    row = levels.row(chosen)
    taken = sum(1 << i for i in chosen.values())
    for name in rest:
        ranked = []
        for i, level in zip(levels.numbers[name], levels.factors[name], strict=True):
            row[name] = level
            if levels.allowed(row):
                gain = (levels.partners[i] & taken).bit_count()
                # chance between equals, or the first levels would fill every row's rest
                ranked.append((-gain, chance.random(), i))
        if not ranked:
            return None
        chosen[name] = i = min(ranked)[2]
        row[name] = levels.factors[name][i - levels.numbers[name].start]
        taken |= 1 << i
    return chosen
