"""The searches against oracles that are plain functions: what is found is guilty and minimal, by
few questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfulp.isolate.search import (
    guilty_sets,
    least_surviving,
    minimal_failing,
    rescuing_set,
    share_bound,
    spare,
)

Sets = Sequence[frozenset[int]]


class Oracle:
    """Fails where any of the planted causes is there as a whole; counts what it is asked."""

    def __init__(self, *causes: frozenset[int]) -> None:
        self.causes, self.asked = causes, 0

    def fails(self, items: frozenset[int]) -> bool:
        return any(cause <= items for cause in self.causes)

    def __call__(self, sets: Sets) -> list[bool]:
        self.asked += len(sets)
        return [self.fails(items) for items in sets]


@st.composite
def planted(draw: st.DrawFn) -> tuple[int, list[frozenset[int]]]:
    n = draw(st.integers(1, 40))
    causes = draw(
        st.lists(
            st.frozensets(st.integers(0, n - 1), min_size=1, max_size=4), min_size=1, max_size=3
        )
    )
    return n, causes


@given(planted())
def test_what_is_found_fails_and_has_no_member_to_spare(
    case: tuple[int, list[frozenset[int]]],
) -> None:
    n, causes = case
    oracle = Oracle(*causes)
    found = minimal_failing(range(n), oracle)
    assert oracle.fails(found)
    assert len(found) == 1 or not any(oracle.fails(found - {item}) for item in found)


@given(st.integers(1, 300), st.data())
def test_one_guilty_item_takes_two_questions_a_halving(n: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, n - 1))
    oracle = Oracle(frozenset({guilty}))
    assert minimal_failing(range(n), oracle) == {guilty}
    assert oracle.asked <= 2 * math.ceil(math.log2(n))


@given(planted())
def test_without_all_that_is_found_nothing_fails(case: tuple[int, list[frozenset[int]]]) -> None:
    n, causes = case
    oracle = Oracle(*causes)
    found = guilty_sets(range(n), oracle)
    assert not oracle.fails(frozenset(range(n)) - found.all)
    assert sum(map(len, found.sets)) == len(found.all), "the sets are disjoint"
    assert all(oracle.fails(one) for one in found.sets)


def test_two_heads_that_need_each_other_are_found_together() -> None:
    oracle = Oracle(frozenset({3, 12}))
    assert guilty_sets(range(16), oracle).sets == (frozenset({3, 12}),)


@given(st.dictionaries(st.frozensets(st.integers(0, 4)), st.booleans()))
def test_an_oracle_without_sense_still_gets_a_failing_set(
    answers: dict[frozenset[int], bool],
) -> None:
    """Real runs need not be monotone: more of the cause may fail later. The answer is then minimal
    all the same.
    """
    everything = frozenset(range(5))

    def fails(sets: Sets) -> list[bool]:
        return [items == everything or answers.get(items, False) for items in sets]

    found = minimal_failing(range(5), fails)
    assert fails([found]) == [True]
    assert len(found) == 1 or not any(fails([found - {item} for item in found]))


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40))
def test_the_least_that_survives(low: int, span: int, need: int) -> None:
    asked: list[int] = []

    def survives(numbers: Sequence[int]) -> list[bool]:
        asked.extend(numbers)
        return [number >= need for number in numbers]

    high = low + span
    assert least_surviving(low, high, survives) == (None if need > high else max(low, need))
    assert len(asked) <= 2 + math.ceil(math.log2(span + 1))


@dataclass(frozen=True, order=True)
class Score:
    """Greater is better."""

    value: float
    survived: bool


def scoring(
    rescue: frozenset[int], hint: Callable[[frozenset[int]], float], asked: list[frozenset[int]]
) -> Callable[[Sets], list[Score | None]]:
    def scores(sets: Sets) -> list[Score | None]:
        asked.extend(sets)
        return [Score(hint(items), rescue <= items) for items in sets]

    return scores


@given(st.frozensets(st.integers(0, 5), min_size=1, max_size=4))
def test_changes_that_help_only_together_are_found_and_none_is_spare(
    rescue: frozenset[int],
) -> None:
    asked: list[frozenset[int]] = []
    scores = scoring(rescue, lambda items: len(items & rescue), asked)
    assert rescuing_set(range(6), scores) == rescue
    assert max(map(len, asked)) == len(rescue)


@given(st.frozensets(st.integers(0, 5), min_size=1, max_size=6))
def test_misleading_hints_cost_questions_and_not_the_answer(rescue: frozenset[int]) -> None:
    scores = scoring(rescue, lambda items: -len(items & rescue), [])
    assert rescuing_set(range(6), scores) == rescue


def test_sets_that_cannot_be_made_are_passed_over() -> None:
    def scores(sets: Sets) -> list[Score | None]:
        return [None if {0, 1} <= items else Score(len(items), {0, 2} <= items) for items in sets]

    assert rescuing_set(range(3), scores) == {0, 2}
    assert rescuing_set([0, 1], scores) is None, "nothing saves, and nothing is left to add"
    assert rescuing_set(range(3), lambda sets: [Score(0, False) for _ in sets], most=2) is None


def test_what_is_spare_is_left_out() -> None:
    def scores(sets: Sets) -> list[Score | None]:
        return [Score(0, {1, 3} <= items or {4} <= items) for items in sets]

    assert spare(range(5), frozenset({0, 1, 2, 3, 4}), scores) == {1, 3}


@pytest.mark.parametrize(
    ("held", "tried", "expected"),
    [(6, 6, 0.05 ** (1 / 6)), (1, 1, 0.05), (0, 5, 0.0), (20, 20, 0.05 ** (1 / 20))],
)
def test_the_bound_where_it_is_known_in_closed_form(held: int, tried: int, expected: float) -> None:
    assert share_bound(held, tried) == pytest.approx(expected)


@given(st.integers(1, 12), st.data())
def test_the_bound_is_the_share_at_which_so_many_or_more_would_be_rare(
    tried: int, data: st.DataObject
) -> None:
    """The definition: were the share at the bound, `held` or more of `tried` would have a chance of
    5 %.
    """
    held = data.draw(st.integers(1, tried))
    p = share_bound(held, tried)
    chance = sum(
        math.comb(tried, k) * p**k * (1 - p) ** (tried - k) for k in range(held, tried + 1)
    )
    assert chance == pytest.approx(0.05)


@pytest.mark.parametrize(("held", "tried"), [(2, 1), (-1, 3), (0, 0)])
def test_impossible_counts_are_refused(held: int, tried: int) -> None:
    with pytest.raises(ValueError, match=f"held={held}, tried={tried}: accepted"):
        share_bound(held, tried)
