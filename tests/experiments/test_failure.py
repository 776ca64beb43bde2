"""The failing run in its first steps, the rule that calls a run failed, and that workers change
nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfulp.experiments.failure import (
    curves,
    final_loss,
    judge,
    run_failure,
    run_failures,
)
from halfulp.experiments.failure_recipes import RUNGS
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP
from halfulp.training.config import LayerTask

STEPS = 700


def test_the_stock_recipe_walks_off_and_halfulp_and_fp32_do_not() -> None:
    """Long before the loss shows it the mean score does: about 8 against about 0 after 700 of the
    4000 steps.
    """
    runs = {
        name: run_failure(attention, 0, STEPS)
        for name, attention in (
            ("stock", BF16_FLASH2),
            ("halfulp", BF16_HALFULP),
            ("fp32", "torch:fp32"),
        )
    }
    assert runs["stock"].mean_score[-1] > 4
    assert runs["stock"].outcome != "survived"
    for name in ("halfulp", "fp32"):
        assert abs(runs[name].mean_score[-1]) < 1.5
        assert runs[name].outcome == "survived"
    assert runs["stock"].sigma_key[-1] > 1.2 * runs["fp32"].sigma_key[-1]


def test_seeds_share_data_and_weights_and_repeat_bit_for_bit() -> None:
    first, again = (run_failure(BF16_FLASH2, 3, 8, record_every=2) for _ in range(2))
    assert first == again
    assert first.steps == (2, 4, 6, 8)
    exact, rounded = (run_failure(name, 3, 1).loss[0] for name in ("torch:fp32", "torch:math"))
    assert rounded == pytest.approx(exact, rel=1e-2)
    assert run_failure("torch:fp32", 4, 1).loss[0] != exact


def test_an_emulated_kernel_starts_on_the_real_one() -> None:
    real, emulated = (
        run_failure(name, 0, 100, record_every=20) for name in ("torch:flash", "BF16_FLASH2")
    )
    assert emulated.loss == pytest.approx(real.loss, rel=2e-2)


def test_a_run_that_breaks_stops_and_says_where() -> None:
    calls = []

    def breaking(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        calls.append(1)
        return value * (math.nan if len(calls) == 5 else 1.0)

    found = run_failure(breaking, 0, 50, record_every=2)
    assert (found.outcome, found.broke_at, found.steps[-1], found.attention) == (
        "failed",
        5,
        5,
        "breaking",
    )
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["loss"][-1] is None


@pytest.mark.parametrize(
    ("loss", "score", "outcome"),
    [
        ([1.0 / (i + 1) for i in range(80)], [0.1] * 80, "survived"),
        ([1e-3] * 20 + [1e-5] * 40 + [1e-3] * 20, [0.0] * 80, "failed"),
        # below the factor of 3
        ([1e-3] * 20 + [1e-4] * 40 + [2.9e-4] * 20, [0.0] * 80, "survived"),
        ([1e-3] * 20 + [1e-7] * 40 + [9e-6] * 20, [0.0] * 80, "survived"),  # fp32's own noise
        ([1e-3] * 40 + [1e-5] * 40, [0.1 * i for i in range(80)], "drifting"),
        ([1e-3] * 40 + [1e-5] * 40, [-0.1 * i for i in range(80)], "drifting"),
        ([1e-3] * 40 + [1e-5] * 40, [30.0] * 80, "survived"),  # large but not moving
        ([1e-3] * 79 + [1.0], [0.0] * 80, "survived"),  # one spike is no failure
        ([1e-3] * 79 + [math.inf], [0.0] * 80, "failed"),
        ([1e-3] * 80, [0.0] * 79 + [math.nan], "failed"),
        ([1.0], [0.0], "survived"),
    ],
)
def test_the_rule(loss: list[float], score: list[float], outcome: str) -> None:
    assert judge(loss, score)[0] == outcome


def test_a_run_that_broke_is_failed_whatever_its_curves() -> None:
    assert judge([1.0, 0.1], [0.0, 0.0], broke_at=7) == ("failed", "not finite at step 7")


def test_workers_give_the_numbers_of_one_process_in_order() -> None:
    said: list[tuple[float, str]] = []
    spread = run_failures(
        [BF16_FLASH2, "torch:math"],
        (0, 1),
        6,
        workers=2,
        progress=lambda fraction, message: said.append((fraction, message)),
    )
    alone = run_failures([BF16_FLASH2, "torch:math"], (0, 1), 6, workers=1)
    assert spread == alone
    assert [(run.attention, run.seed) for run in alone] == [
        (name, seed) for name in ("BF16_FLASH2", "torch:math") for seed in (0, 1)
    ]
    fractions = [fraction for fraction, _ in said]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_an_unknown_attention_is_refused_before_any_worker_starts() -> None:
    with pytest.raises(ValueError, match="attention='nothing'"):
        run_failures(["torch:fp32", "nothing"], (0, 1), 2, workers=2)


def test_threads_are_left_as_they_were() -> None:
    torch.set_num_threads(2)
    run_failure("torch:fp32", 0, 2)
    assert torch.get_num_threads() == 2


def test_a_run_that_broke_has_no_final_loss() -> None:
    whole = run_failure("torch:fp32", 0, 20, 1, task=LayerTask(batch=1, tokens=4))
    assert final_loss(whole) == statistics.median(whole.loss[-2:])
    assert math.isnan(final_loss(replace(whole, broke_at=20)))


def test_rungs_are_the_recipes_they_are_called() -> None:
    assert list(RUNGS) == [recipe.name for recipe in RUNGS.values()]
    assert RUNGS["residual+row_sum"].row_sum_from == "rounded"
    assert all(recipe.block_key == 16 for recipe in RUNGS.values())


def test_figures_show_the_median_and_the_range_of_the_seeds() -> None:
    runs = [
        run_failure("torch:fp32", seed, 6, 2, task=LayerTask(batch=1, tokens=4))
        for seed in range(3)
    ]
    loss = curves(runs, "halfulp demo")[0]
    (line,) = loss.series
    assert line.x == (2, 4, 6)
    for i in range(3):
        values = sorted(run.loss[i] for run in runs)
        assert (line.low[i], line.y[i], line.high[i]) == tuple(values)  # type: ignore[index]


@pytest.mark.parametrize("change", [{"steps": 0}, {"record_every": 0}])
def test_bad_numbers_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="accepted are integers"):
        run_failure("torch:fp32", 0, **change)
