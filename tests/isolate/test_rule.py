"""The rule of failure: it agrees with the judgement of whole runs, says when, and holds runs
against their twin.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from halfulp.isolate.rule import RULE, Rule, Watcher, judge, judge_rows, read_curves, rule_for
from halfulp.training.config import Language, LayerTask

STEPS = 80


def rows(
    loss: list[float], score: list[float] | None = None, **figures: list[float]
) -> list[dict[str, Any]]:
    columns = {"loss": loss, "mean_score": score or [0.0] * len(loss), **figures}
    return [
        {"step": i + 1, **{name: column[i] for name, column in columns.items()}}
        for i in range(len(loss))
    ]


@pytest.mark.parametrize(
    ("loss", "score"),
    [
        ([1.0 / (i + 1) for i in range(80)], [0.1] * 80),
        ([1e-3] * 20 + [1e-5] * 40 + [1e-3] * 20, [0.0] * 80),
        ([1e-3] * 20 + [1e-4] * 40 + [2.9e-4] * 20, [0.0] * 80),
        ([1e-3] * 20 + [1e-7] * 40 + [9e-6] * 20, [0.0] * 80),
        ([1e-3] * 40 + [1e-5] * 40, [0.1 * i for i in range(80)]),
        ([1e-3] * 40 + [1e-5] * 40, [-0.1 * i for i in range(80)]),
        ([1e-3] * 40 + [1e-5] * 40, [30.0] * 80),
        ([1e-3] * 79 + [1.0], [0.0] * 80),
        ([1e-3] * 79 + [math.inf], [0.0] * 80),
        ([1e-3] * 80, [0.0] * 79 + [math.nan]),
        ([1.0], [0.0]),
    ],
)
def test_watching_line_by_line_ends_as_the_judgement_of_the_whole_run(
    loss: list[float], score: list[float]
) -> None:
    assert judge_rows(rows(loss, score), Rule(), len(loss)).outcome == judge(loss, score)[0]


def test_the_time_to_failure_is_the_first_step_whose_median_is_over() -> None:
    """Windows of 8 steps; the loss is 1e-3 from step 41 on: half of a window at step 44, whose
    median lies between.
    """
    found = judge_rows(rows([1e-4] * 40 + [1e-3] * 40), Rule(), STEPS)
    assert (found.outcome, found.failed_at) == ("failed", 44)
    assert found.reason == "loss 0.00055, 5.5 times its best at step 44"
    patient = judge_rows(rows([1e-4] * 40 + [1e-3] * 40), Rule(patience=20), STEPS)
    assert patient.failed_at == 50
    assert (
        judge_rows(rows([1e-4] * 40 + [1e-3] * 40), Rule(loss_factor=11), STEPS).outcome
        == "survived"
    )


def test_a_run_that_recovers_has_failed_all_the_same() -> None:
    loss = [1e-4] * 30 + [1e-3] * 10 + [1e-4] * 40
    assert judge(loss, [0.0] * 80)[0] == "survived", "at the end nothing is to be seen"
    assert judge_rows(rows(loss), Rule(), STEPS).failed_at == 34


def test_sparse_lines_and_a_later_start_do_not_change_the_rule() -> None:
    dense = rows([1e-4] * 40 + [1e-3] * 40)
    assert judge_rows(dense[3::4], Rule(), STEPS).failed_at == 44
    assert judge_rows(dense[20:], Rule(), STEPS).failed_at == 44


def test_a_number_that_is_not_finite_fails_at_its_step() -> None:
    lines = rows([1.0] * 9, max_score=[1.0] * 9)
    lines[5]["max_score"] = None  # as a file has it
    found = judge_rows(lines, Rule(), STEPS)
    assert (found.outcome, found.reason, found.failed_at) == (
        "failed",
        "max score not finite at step 6",
        6,
    )


def test_scores_that_run_away_from_the_twin_fail_after_a_tenth_of_the_run() -> None:
    twin = read_curves(rows([1e-3] * STEPS, max_score=[2.0] * 40 + [4.0] * 40))
    away = rows([1e-3] * STEPS, max_score=[2.0] * 30 + [39.0] * 10 + [41.0] * 40)
    found = judge_rows(away, Rule(), STEPS, twin)
    # over 10 × 2 at step 31, not over 10 × 4 at no step but from 41 on, where the twin has 4
    assert (found.failed_at, found.reason) == (39, "max score 39, 20 times the twin's at step 39")
    spike = rows([1e-3] * STEPS, max_score=[2.0] * 30 + [100.0] * 7 + [2.0] * 43)
    assert judge_rows(spike, Rule(), STEPS, twin).outcome == "survived"
    assert judge_rows(away, Rule(), STEPS).outcome == "survived", (
        "without a twin it is not looked at"
    )
    assert judge_rows(away, Rule(run_away=25), STEPS, twin).outcome == "survived"


def test_measurements_are_held_head_by_head() -> None:
    def measured(sigma: float) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for i in range(1, 41):
            lines.append(
                {"step": i, "measure": {"sigma_query": [[1.0, 1.0], [1.0, sigma]], "count": 3}}
            )
            lines.append({"step": i, "loss": 1.0})
        return lines

    twin = read_curves(measured(1.0))
    found = judge_rows(measured(20.0), Rule(), 40, twin)
    assert found.reason == "sigma query of layer 1, head 1 20, 20 times the twin's at step 5"
    assert judge_rows(measured(9.0), Rule(), 40, twin).outcome == "survived"


def test_drift_is_what_goes_beyond_the_twin() -> None:
    wander = [0.1 * i for i in range(80)]
    twin = read_curves(rows([1.0] * 80, wander))
    assert judge_rows(rows([1.0] * 80, wander), Rule(), STEPS).outcome == "drifting"
    assert judge_rows(rows([1.0] * 80, wander), Rule(), STEPS, twin).outcome == "survived"
    found = judge_rows(rows([1.0] * 80, [2 * x for x in wander]), Rule(), STEPS, twin)
    assert found.outcome == "drifting"
    assert found.score_moved == pytest.approx(3.9)
    assert found.reason.endswith("mean score moved +3.9")


def test_the_first_reason_stands() -> None:
    watcher = Watcher(Rule(), STEPS)
    said = [watcher(row) for row in rows([1e-4] * 40 + [1e-3] * 39 + [math.nan])]
    assert said[42] is None
    assert set(said[43:]) == {"loss 0.00055, 5.5 times its best at step 44"}


def test_the_rule_is_said_with_its_numbers() -> None:
    text = Rule(loss_factor=1.5, patience=7, run_away=20).text(1000)
    assert "median of 7 steps) is over 1.5 times" in text
    assert "20 times the fp32 twin's" in text
    assert "median of 100 steps" in Rule().text(1000)
    assert "over 3 times its lowest" in RULE
    assert rule_for(LayerTask()) == Rule()
    assert rule_for(Language()).loss_factor < 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_factor": 1.0}, "loss_factor=1.0: accepted is a finite factor above 1"),
        ({"run_away": math.inf}, "run_away=inf: accepted is a finite factor above 1"),
        ({"least_loss": -1.0}, "least_loss=-1.0: accepted is a finite number of at least 0"),
        ({"score_drift": math.nan}, "score_drift=nan: accepted"),
        ({"patience": 0}, "patience=0: accepted is an integer of at least 1, or None"),
    ],
)
def test_bad_rules_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Rule(**changes)


def test_nothing_recorded_is_no_judgement() -> None:
    with pytest.raises(ValueError, match="without a loss"):
        judge_rows([{"step": 1, "measure": {}}], Rule(), STEPS)
