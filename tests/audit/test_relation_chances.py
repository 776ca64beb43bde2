"""The verdict on two calls that should agree: how often it accuses a kernel that does no wrong."""

from __future__ import annotations

import math

import pytest
import torch

from halfulp.audit.figures import Figure
from halfulp.audit.invariants import Relation
from halfulp.audit.verdict import LIMITS, judge_relation

HEADS, RUNS, LEVEL, SPREAD = 8, 600, 0.05, 0.3
LIMIT = LIMITS["bfloat16"]


def alarms(ratio: float, seed: int) -> float:
    """The share of audits in which two calls are accused that differ by `ratio` times the stock
    recipe's rounding in the geometric mean over all heads there are, and by chance in each.
    """
    generator = torch.Generator().manual_seed(seed)
    one, none = torch.ones(HEADS, dtype=torch.float64), torch.zeros(HEADS, dtype=torch.float64)
    stock = Figure("O error", "out", one, none, none, none, one)
    found = 0
    for _ in range(RUNS):
        chance = SPREAD * torch.randn(HEADS, generator=generator, dtype=torch.float64)
        relation = Relation("batch", "out", ratio * chance.exp(), identical=0.5)
        found += judge_relation(relation, stock, LEVEL, LIMIT) is not None
    return found / RUNS


@pytest.mark.parametrize("seed", [0, 1])
def test_at_the_limit_it_is_accused_as_often_as_the_level_says(seed: int) -> None:
    """By its mean alone it would be accused every other time."""
    most = LEVEL + 4 * math.sqrt(LEVEL * (1 - LEVEL) / RUNS)
    assert LEVEL / 3 < alarms(LIMIT.stock, seed) < most


def test_below_it_hardly_ever_and_far_above_it_always() -> None:
    assert alarms(1.0, 2) < LEVEL / 5
    assert alarms(2.5 * LIMIT.stock, 3) == 1.0


def test_nan_outside_its_row_is_no_matter_of_chance() -> None:
    relation = Relation("nan", "out", torch.zeros(HEADS), identical=1.0, confined=False)
    finding = judge_relation(relation, None, LEVEL, LIMIT)
    assert finding is not None
    assert finding.ratio == math.inf
