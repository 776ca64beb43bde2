"""Weight drift: planted drifts are read off run folders to the digit, twins are matched, the
repeated run gives 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress, ttest_1samp, wasserstein_distance
from tests.planted_drift import BASE, STEPS, drift, flash, planted_run

from halfulp.diff.weights_apart import distance, wasserstein
from halfulp.experiments.compare import (
    INITIALIZATION,
    REPEATED,
    CompareResult,
    compare_runs,
    drift_between,
)
from halfulp.experiments.compare_summary import (
    Distances,
    Drift,
    Interval,
    interval_of,
    ratio_by_seed,
    slope_of,
    summarize,
    unevenness_of,
)
from halfulp.report.compare_page import compare_page

# --- the distance

numbers = st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5)


@given(numbers, numbers)
def test_the_distance_is_the_cheapest_of_all_transports(
    one: list[float], other: list[float]
) -> None:
    a, b = np.array(one, np.float32), np.array(other, np.float32)
    cheapest = min(
        sum(abs(float(x) - float(y)) for x, y in zip(a, chosen, strict=True)) / 5
        for chosen in itertools.permutations(b)
    )
    assert wasserstein(a, b) == pytest.approx(cheapest, rel=1e-6, abs=1e-12)


def test_the_largest_difference_is_of_either_sign() -> None:
    start, moved = {"w": torch.zeros(2)}, {"w": torch.tensor([-3.0, 1.0])}
    assert distance(start, moved).largest == distance(moved, start).largest == 3.0


def test_the_distance_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for scale, size in ((1.0, 1000), (1e-6, 333), (1e5, 17)):
        a, b = (rng.standard_normal((2, size)) * scale).astype(np.float32)
        assert wasserstein(a, b) == pytest.approx(wasserstein_distance(a, b), rel=1e-6)
    x = rng.standard_normal((20, 3))
    assert wasserstein(x, x[::-1]) == 0  # the same numbers in another order
    assert wasserstein(x, x + 2) == pytest.approx(2)
    with pytest.raises(
        ValueError, match="other of 59 values: accepted are as many as the first has, 60"
    ):
        wasserstein(x, x.ravel()[1:])


# --- drifts of one pair


def test_a_planted_drift_is_read_to_the_digit(tmp_path: Path) -> None:
    """Every weight of one tensor moves by a quarter a step; a shift is its own transport."""
    base = planted_run(tmp_path / "base", BASE)
    moved = planted_run(
        tmp_path / "moved", flash(), lambda step, name, x: x + 0.25 * step * (name == "b")
    )
    found = drift_between(base, moved)
    assert found.name == "attention: torch:math → torch:flash"
    assert found.steps == STEPS
    assert found.max_difference == pytest.approx([2.5, 5.0, 7.5], rel=1e-6)
    assert found.tensors["b"].wasserstein == pytest.approx([2.5, 5.0, 7.5], rel=1e-6)
    assert found.tensors["a"] == Distances((0.0,) * 3, (0.0,) * 3)
    assert found.wasserstein == pytest.approx([x * 7 / 37 for x in (2.5, 5.0, 7.5)], rel=1e-5)
    assert found.slope == pytest.approx(0.25 * 7 / 37, rel=1e-5)


def test_weights_in_another_order_differ_and_keep_their_distribution(tmp_path: Path) -> None:
    base = planted_run(tmp_path / "base", BASE)
    turned = planted_run(tmp_path / "turned", BASE, lambda step, name, x: x.flip(0))
    found = drift_between(base, turned)
    assert min(found.max_difference) > 0.1
    assert found.wasserstein == (0.0,) * 3


def test_the_same_run_repeated_differs_by_exactly_nothing(tmp_path: Path) -> None:
    base, again = (planted_run(tmp_path / name, BASE) for name in ("base", "again"))
    (found,) = compare_runs([base, again]).drifts
    assert found.name == REPEATED
    assert found.max_difference == found.wasserstein == (0.0,) * 3

    # one bit of one weight of the last checkpoint is seen
    def last(step: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x, x + torch.eye(7)[3]) if (step, name) == (30, "b") else x

    other = planted_run(tmp_path / "other", BASE, last)
    (seen,) = compare_runs([base, other]).drifts
    assert seen.max_difference[:2] == (0.0, 0.0)
    assert 0 < seen.max_difference[2] < 1e-6


def test_numbers_that_are_not_finite_are_not_hidden(tmp_path: Path) -> None:
    base = planted_run(tmp_path / "base", BASE)
    broken = planted_run(
        tmp_path / "broken", flash(), lambda step, name, x: x / (step != 30) if name == "a" else x
    )
    result = compare_runs([base, broken])
    assert not math.isfinite(result.drifts[0].max_difference[-1])
    plain = result.as_dict()
    assert plain["drifts"][0]["max_difference"][-1] is None
    json.dumps(plain, allow_nan=False)
    assert "No longer finite" in compare_page(plain)


def test_a_torn_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    base, moved = planted_run(tmp_path / "base", BASE), planted_run(tmp_path / "moved", flash())
    torn = moved / "checkpoints" / "step-20" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:40])
    with pytest.warns(UserWarning, match=r"skipped: .*step-20"):
        assert drift_between(base, moved).steps == (10, 30)


# --- which run belongs to which


def test_runs_of_several_seeds_find_their_own_baselines(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1, 2):
        seeded = {"seed": seed, "data_seed": seed}
        runs.append(planted_run(tmp_path / f"base-{seed}", dataclasses.replace(BASE, **seeded)))
    for seed in (2, 0, 1):
        shift = 0.01 * (seed + 1)
        config = flash(seed=seed, data_seed=seed)
        runs.append(
            planted_run(
                tmp_path / f"flash-{seed}", config, lambda step, name, x, by=shift: x + by * step
            )
        )  # type: ignore[misc]
    runs.append(planted_run(tmp_path / "weights", dataclasses.replace(BASE, seed=1000)))
    runs.append(planted_run(tmp_path / "both", flash(seed=1000), lambda step, name, x: x + 1))
    result = compare_runs(runs)
    name = "attention: torch:math → torch:flash"
    assert result.names == [name, INITIALIZATION, f"{name}, {INITIALIZATION}"]
    assert {drift.seed: round(drift.max_difference[0], 4) for drift in result.of(name)} == {
        0: 0.1,
        1: 0.2,
        2: 0.3,
    }
    (line, *_) = result.summary
    assert line.seeds == 3
    assert line.slope.value == pytest.approx(0.02, rel=1e-4)
    assert line.slope.low < 0.02 < line.slope.high
    plain = result.as_dict()
    assert plain["figures"][0]["series"][0]["low"] is not None
    assert [row[0] for row in plain["tables"][0]["rows"]] == result.names


def test_another_baseline_may_be_named_and_what_a_run_records_makes_no_difference(
    tmp_path: Path,
) -> None:
    base = planted_run(tmp_path / "base", BASE)
    moved = planted_run(
        tmp_path / "moved", flash(keep=None, checkpoint_every=10, metrics_every=3, preset="x")
    )
    assert compare_runs([moved], base).names == ["attention: torch:math → torch:flash"]
    assert compare_runs([base], moved).names == ["attention: torch:flash → torch:math"]


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path: Path) -> None:
    base = planted_run(tmp_path / "base", BASE)
    other_data = planted_run(tmp_path / "data", flash(data_seed=7))
    wide = planted_run(tmp_path / "wide", flash(), lambda step, name, x: torch.cat((x, x)))
    late = planted_run(tmp_path / "late", flash())
    for step in STEPS:
        (late / "checkpoints" / f"step-{step}").rename(late / "checkpoints" / f"step-{step + 1}")
    for runs, said in (
        ([base, other_data], "its data seed is 7; accepted are data seeds of a baseline: 0"),
        ([base, wide], "its model has other tensors"),
        ([base, late], "no checkpoint in common"),
        ([base], "accepted are two or more run folders"),
        ([base, tmp_path], "there is no run.json, or it is torn"),
        (
            [base, planted_run(tmp_path / "seed", dataclasses.replace(BASE, data_seed=5))],
            "all are baselines",
        ),
    ):
        with pytest.raises(ValueError, match=said) as error:
            compare_runs(runs)
        assert "\n" not in str(error.value)


# --- over seeds


def test_slope_and_unevenness_are_those_of_the_least_squares_line() -> None:
    x, y = (10, 20, 30, 40), (1.0, 4.0, 3.0, 8.0)
    line = linregress(x, y)
    assert slope_of(x, y) == pytest.approx(line.slope)
    residual = np.array(y) - line.intercept - line.slope * np.array(x)
    assert unevenness_of(x, y) == pytest.approx(np.sqrt((residual**2).sum() / 2) / 8)
    assert unevenness_of(x, (1.0, 2.0, 3.0, 4.0)) == pytest.approx(0, abs=1e-12)
    assert math.isnan(slope_of((10,), (1.0,)))
    assert math.isnan(unevenness_of(x, (0.0,) * 4))


def test_the_interval_is_students_and_needs_three_seeds() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    found = interval_of(values)
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert math.isnan(interval_of(values[:2]).low)
    assert str(interval_of([2.0])) == "2 (n = 1)"


def slope_ratio(over: list[Drift], under: list[Drift]) -> Interval:
    return ratio_by_seed(over, under, lambda one: one.slope)


def test_ratios_are_matched_by_seed_and_geometric() -> None:
    flat = [drift(seed, (1.0 * k, 2.0 * k)) for seed, k in ((0, 1), (1, 10), (2, 100))]
    steep = [drift(seed, (3.0 * k, 6.0 * k)) for seed, k in ((2, 100), (0, 1), (1, 10))]
    found = slope_ratio(steep, flat)
    assert (found.value, found.low, found.high, found.count) == pytest.approx((3, 3, 3, 3))
    falling = slope_ratio([drift(0, (3.0, 1.0))], flat)
    assert found.count == 3
    assert falling.value == pytest.approx(-2)
    assert math.isnan(falling.low)
    assert slope_ratio([drift(9, (1.0, 2.0))], flat).count == 0


def test_a_summary_speaks_of_the_last_step_that_all_seeds_have() -> None:
    found = summarize("x", [drift(0, (1.0, 2.0, 9.0)), drift(1, (3.0, 4.0))])
    assert (found.steps, found.wasserstein, found.seeds) == (20, 3.0, 2)


# --- what is shown


def test_a_result_names_what_it_compares_in_order() -> None:
    result = CompareResult(
        (drift(0, (0.0, 0.0), "still"), drift(0, (1.0, 2.0), "moving")), "command"
    )
    assert result.names == ["still", "moving"]
    assert "not in the picture: still" in result.figures[0].caption
    said = "Not one bit apart: still. Farthest apart at step 20: moving, Wasserstein distance 2."
    assert said in compare_page(result.as_dict())
