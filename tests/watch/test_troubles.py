"""Causes other than rounding: rules on series that are written by hand, and planted causes in small
trainings; `benchmarks/watch_causes.py` has the whole table.
"""

import math
import random

import pytest
import torch

import halfulp
from halfulp.runs.threads import one_thread
from halfulp.watch.health import Step, jumps, rises
from halfulp.watch.troubles import CAUSES, Seen, find
from tests.watch.breaking import CAUSES as PLANTS
from tests.watch.breaking import broken

BEGUN = 40


def steps(losses, norms=None, rate=1e-3, marks=None, **more) -> list[Step]:
    norms = [1.0 + 0.01 * (i % 7) for i in range(len(losses))] if norms is None else norms
    marks = [float(i) for i in range(len(losses))] if marks is None else marks
    rates = rate if isinstance(rate, list) else [rate] * len(losses)
    return [
        Step(i + 1, loss, norms[i], rates[i], math.nan, marks[i], **more)
        for i, loss in enumerate(losses)
    ]


def noisy(level: float, count: int, seed: int = 0, spread: float = 0.05) -> list[float]:
    drawn = random.Random(seed)
    return [level * (1 + spread * drawn.gauss(0, 1)) for _ in range(count)]


def kinds(series, rows=(), first=3.0, **more) -> list[str]:
    seen = Seen(series, len(series), rows, ["a"], "Model", (), first_loss=first, **more)
    return [one.kind for one in find(seen)]


def weighed(count, sizes=lambda name, i: 1.0, more=(), update=1e-3) -> list[dict]:
    return [
        {
            "step": 10 * i + 1,
            "measure": {},
            "weights": {x: {"rms": sizes(x, i), "update": update} for x in [*"abcdef", *more]},
        }
        for i in range(count)
    ]


def test_noise_is_no_cause():
    for seed in range(20):
        assert kinds(steps(noisy(1.0, 200, seed)), weighed(8)) == []


def test_a_jump_is_measured_in_robust_deviations():
    values = [*noisy(1.0, 40), 2.0]
    assert jumps(values, 40) > 8
    assert math.isnan(jumps(values, 10)), "too few before"
    assert jumps([1.0] * 20 + [1.1], 20) == pytest.approx(5.0), "2 % at least are no jump"


def test_one_bad_step_is_the_batch_and_a_slow_one_is_not():
    losses = noisy(1.0, 60)
    losses[50] = 3.0
    assert kinds(steps(losses)) == ["bad_batch"]
    norms = noisy(1.0, 60)
    norms[49] = 9.0  # the update before was none like the others
    assert kinds(steps(losses, norms)) == []
    losses[50], norms[50] = 3.0, 12.0  # but it left the next batches alone, so it was small
    assert kinds(steps(losses, norms)) == ["bad_batch"]
    losses[52] = 3.0
    assert kinds(steps(losses[:54], norms[:54])) == []
    losses[52], norms = 1.0, None
    rates = [1e-3] * 48 + [1e-2] * 12
    assert kinds(steps(losses, rate=rates)) == [], "the rate had risen"


def test_a_loss_that_rises_without_a_cause_is_said_to():
    losses = noisy(1.0, 60) + [1.0 + 0.02 * i for i in range(60)]
    assert kinds(steps(losses), weighed(8)) == ["unexplained"]
    assert kinds(steps(losses), weighed(8, update=0.05)) == ["rate_too_high"]
    since, lowest, last = rises(steps(losses), 3.0)
    assert 60 < since < 90
    assert lowest == pytest.approx(1.0, abs=0.05)
    assert last > 2
    tiny = [1e-5 * loss for loss in losses]
    assert rises(steps(tiny), 3.0) is None, "beside what it has fallen it is nothing"


def test_a_sampler_that_begins_again_is_told_from_an_epoch_of_a_few_batches():
    fresh = [float(i) for i in range(100)]
    assert kinds(steps(noisy(1.0, 100), marks=fresh)) == []
    again = fresh[:60] + fresh[20:60]
    assert kinds(steps(noisy(1.0, 100), marks=again)) == ["data_repeat"]
    stuck = fresh[:60] + [60.0] * 40
    assert kinds(steps(noisy(1.0, 100), marks=stuck)) == ["data_repeat"]
    whole = [0.0] * 100  # all data in one batch: meant
    assert kinds(steps(noisy(1.0, 100), marks=whole)) == []
    few = [float(i % 4) for i in range(100)]
    assert kinds(steps(noisy(1.0, 100), marks=few)) == []
    unknown = [math.nan] * 100
    assert kinds(steps(noisy(1.0, 100), marks=unknown)) == []


def test_one_matrix_that_grows_is_told_from_all_that_do():
    def one(name, i):
        return 1.3**i if name == "c" else 1.0

    losses = steps(noisy(1.0, 100))
    assert kinds(losses, weighed(8, one)) == ["exploding_layer"]
    assert kinds(losses, weighed(8, lambda _, i: 1.3**i)) == []
    assert kinds(losses, weighed(8, lambda name, i: 6 - 5 * 0.5**i if name == "c" else 1.0)) == []
    # all query weights of a model whose attention forms
    layers = [f"layers.{i}.q" for i in range(3)]
    grows = weighed(8, lambda name, i: 1.3**i if name in layers else 1.0, layers)
    assert kinds(losses, grows) == []


def test_every_cause_says_its_rule_and_its_fix():
    for cause in CAUSES.values():
        assert all((cause.name, cause.says, cause.rule, cause.fix))
        assert not cause.says.endswith(".")


def alarmed(outcome) -> set[str]:
    return {alarm.kind for alarm in outcome.alarms}


@pytest.mark.parametrize(
    "plant", ["sound", "rate", "bad batch", "fp16 overflow", "data repeat", "mask"]
)
def test_a_planted_cause_is_named_in_a_hand_written_gpt(plant):
    # a loss that still falls is a poor measure of jumps
    begun = 80 if plant == "bad batch" else BEGUN
    with one_thread():
        steps = {"rate": 16, "sound": 60}.get(plant, begun + 10)
        found = broken("hand-written GPT", plant, 0, steps, every=BEGUN // 2, begun=begun)
    right = PLANTS[plant]
    assert alarmed(found) == ({right} if right else set())
    if right is None:
        assert "No other cause was found" in " ".join(str(found.report).split())
        return
    text = " ".join(str(found.report).split())
    assert f"; {CAUSES[right].name}" in text, "in the first line"
    assert CAUSES[right].fix.split(";")[0] in text
    (first,) = (alarm.step for alarm in found.alarms[:1])
    assert first >= (1 if plant == "rate" else begun)
    if plant == "mask":
        assert found.alarms[0].layer == "blocks.1.attention"


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.zeros(12, 12, dtype=torch.bool), "share of queries that see no key 1"),
        (torch.ones(12, 12).tril(), "adds 0 and 1"),
    ],
)
def test_masks_that_hide_everything_or_were_turned_into_numbers(mask, says):
    from torch.nn import functional

    from tests.watch.test_foreign import One, watched_step

    model = One(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    report = watched_step(model)
    assert any(says in one["text"] for one in report.findings), report


@pytest.mark.filterwarnings("ignore:.*NaN:RuntimeWarning")
def test_the_first_place_that_was_not_finite_is_named():
    from tests.watch.gpt import GPT, train

    def overflow(_module, _args, out):
        return out * torch.inf

    with halfulp.watch(model := GPT(), every=50) as watcher:
        train(model, 3)
        handle = model.blocks[1].mlp[1].register_forward_hook(overflow)
        train(model, 1)
        handle.remove()
    (found,) = watcher.report().findings
    assert found["kind"] == "not_finite"
    assert found["detail"].startswith("blocks.1.mlp.1 gave the first numbers that are not finite")
    assert found["since"] == 4
