"""Other optimizers, heads picked at the onset, and weights at a loss spike."""

from __future__ import annotations

import math

import pytest
import torch

from halfulp.papers.claims.a_heads import HEADS, PICKED, pick_heads
from halfulp.papers.claims.loss_spike import ratio_at
from halfulp.papers.figures_b import spike_figures
from halfulp.papers.run_changes import Lion, optimizer_named
from halfulp.papers.runs_a import TASK_STOCK, Plan, Traced, trace
from halfulp.papers.spike_run import Approach, approach


def test_lion_against_the_written_out_rule() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    lion, w, m = Lion([weight], lr=0.1, betas=(0.9, 0.99)), [1.0, -2.0, 3.0], [0.0, 0.0, 0.0]
    for grads in ([1.0, -1.0, 0.5], [-20.0, 0.01, -0.1]):
        weight.grad = torch.tensor(grads)
        lion.step()
        for i, g in enumerate(grads):
            w[i] -= 0.1 * math.copysign(1, 0.9 * m[i] + 0.1 * g)
            m[i] = 0.99 * m[i] + 0.01 * g
    torch.testing.assert_close(weight.detach(), torch.tensor(w))
    torch.testing.assert_close(lion.state[weight]["momentum"], torch.tensor(m))


def test_a_run_follows_the_optimizer_that_its_plan_names() -> None:
    curves = {
        name: trace(Plan((TASK_STOCK,), 0, 20, optimizer=name))
        for name in ("adamw", "sgd", "lion", "muon")
    }
    losses = {name: run.loss()[1] for name, run in curves.items()}
    assert len(set(losses.values())) == 4
    rates = {name: run.metrics[-1]["learning_rate"] for name, run in curves.items()}
    assert rates["sgd"] == pytest.approx(0.3 * 20 / 50)  # the same warm-up
    with pytest.raises(ValueError, match="optimizer='adam': accepted are sgd, lion, muon"):
        optimizer_named("adam", [])  # type: ignore[arg-type]


def test_scores_are_clipped_in_a_run_that_says_so() -> None:
    plans = [Plan((TASK_STOCK,), 0, 20, most_score=most) for most in (None, 1e9, 0.5)]
    losses = [trace(plan).loss()[1] for plan in plans]
    assert losses[0] == losses[1] != losses[2]


def measured(sigmas: dict[int, list[float]]) -> Traced:
    rows = [{"step": step, "measure": {"sigma_query": [row]}} for step, row in sigmas.items()]
    return Traced(Plan((TASK_STOCK,)).config(), [], rows, {})


def test_heads_are_picked_at_the_onset_and_not_at_the_end() -> None:
    calm = [1.0] * HEADS
    early = [1.0, 3.0, 1.1, 2.0, 1.9, 1.8, 1.7, 1.6, 1.0, 1.0, 1.0, 1.0]
    late = [float(9 - i % 2) for i in range(HEADS)]
    run = measured({20: calm, 40: early, 60: late})
    found = pick_heads(run, measured({20: calm, 40: calm, 60: calm}), seed=3)
    assert (found.onset, found.outliers) == (40, (1, 3, 4, 5, 6, 7))
    for heads in found.controls:
        assert len(set(heads)) == PICKED
        assert heads != found.outliers
    assert len(set(found.controls)) == len(found.controls)
    never = pick_heads(measured({20: calm, 40: late}), measured({20: late, 40: late}), seed=3)
    assert never.onset == 40


def spiking(seed: int, factor: float) -> Approach:
    steps = tuple(range(10, 210, 10))
    level = (2.0,) * len(steps)
    control = tuple(1e-3 * step for step in steps)
    distance = tuple(factor * x for x in control)
    return Approach(seed, steps, level, level, level, distance, control, distance)


def test_the_distance_at_a_rise_is_taken_over_the_controls() -> None:
    runs = [spiking(seed, factor) for seed, factor in enumerate((2.0, 3.0, 4.5))]
    found = ratio_at(runs, [100, 150, 200])
    assert found.value == pytest.approx(3.0)
    assert 1 < found.low < 2 < 4.5 < found.high
    assert math.isnan(ratio_at(runs, [100, 150, math.inf]).low)
    assert math.isnan(ratio_at(runs, [100, 150, 0]).low)  # before the first step
    loss, distance = spike_figures(runs[0], 100, "c")
    assert [one["label"] for one in loss["series"]][-1] == "the loss rises"
    assert distance["series"][-1]["y"] == [pytest.approx(0.2)]
    assert len(spike_figures(runs[0], math.inf, "c")[0]["series"]) == 3


def test_an_approach_measures_weights_that_differ_in_arithmetic_alone() -> None:
    found = approach((0, 20, 1))
    assert found.steps == (10, 20)
    assert all(x > 0 for x in (*found.distance, *found.control_distance))
    assert found.largest[-1] > found.distance[-1]
    alone = trace(Plan(("BF16_STANDARD",), 0, 20, layers=1))  # in step with others or not
    assert found.twin_loss == alone.loss()[1]
