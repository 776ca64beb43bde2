"""Alarms on runs whose end is known, and on figures written by hand."""

from dataclasses import replace

import pytest
from scipy.stats import t as student

from halfulp.training.loop import train
from halfulp.training.presets import seconds
from halfulp.watch.alarms import LEVEL, alarms
from halfulp.watch.running import WINDOW


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("attention", ["BF16_FLASH2", "BF16_HALFULP"])
def test_the_run_that_will_fail_is_named_and_its_repaired_twin_is_not(attention):
    """Step 1000 of 4000: the loss of the stock recipe is a twentieth of what it will be.

    The O of the halfulp recipe errs like the stock recipe's; its gradient does not.
    """
    run = train(replace(seconds(attention, steps=1000), measure_every=25))
    found = alarms(run.measures)
    assert run.status == "done"
    assert run.measures[-1]["measure"]["delta_error_t"][0][0] > 5, "O alone would raise both alarms"
    if attention == "BF16_HALFULP":
        assert found == []
        return
    (alarm,) = found
    assert (alarm.kind, alarm.layer, alarm.head, alarm.step) == ("run-away", 0, 0, 1000)
    assert str(alarm).startswith("step 1000, layer 0, head 0: run-away (t = ")


def rows(t: float | None, score: float, count: int = WINDOW) -> list[dict]:
    """Two layers of two heads, of which the first of the second layer has this t and moves by this
    score.
    """
    return [
        {
            "step": step,
            "measure": {
                "delta_error_in_gradient_steps_t": [[0.1, -0.2], [t, 0.0]],
                "mean_score": [[0.0, 0.0], [score * step / count * 2, 0.0]],
            },
        }
        for step in range(1, count + 1)
    ]


def test_the_level_is_over_all_heads():
    least = student.isf(LEVEL / 8, WINDOW - 1)
    for sign in (1, -1):
        assert alarms(rows(sign * least * 0.999, 0.0)) == []
        (alarm,) = alarms(rows(sign * least * 1.001, 0.0))
        assert (alarm.kind, alarm.layer, alarm.head) == ("biased", 1, 0)


def test_kinds_and_what_is_too_little_to_say():
    assert alarms(rows(50.0, 5.0))[0].kind == "run-away"
    assert alarms(rows(50.0, -5.0))[0].kind == "run-away"
    assert alarms(rows(50.0, 1.0))[0].kind == "biased"
    assert alarms(rows(0.0, 50.0)) == [], "scores may grow for good reasons"
    assert alarms(rows(50.0, 5.0, WINDOW // 2 - 1)) == []
    assert alarms(rows(None, 5.0)) == [], "null in a file: not finite"
    assert alarms([{"step": 1, "loss": 1.0}]) == []
