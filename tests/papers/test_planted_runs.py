"""A3, A6, A22, A26 and D13 over planted runs: which layer, which heads, which remedy and which
optimizer the figures name, and what the verdicts become when that is another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from halfulp.papers.claim import Lab, judge_claim
from halfulp.papers.claims import a_cause, a_growth, a_heads, optimizers, remedies
from halfulp.papers.claims.a_cause import STANDARD
from halfulp.papers.ledger import run_claims
from halfulp.papers.runs_a import Plan, Traced

CALM, AWAY = (2.0, 1.0), (3.0, 9.0)  # loss and σ


def planted(plan: Plan, ends: Sequence[Sequence[float]], loss: float) -> Traced:
    """A run whose σ(W_Q) grow evenly from 1 to what each layer's heads are given."""
    every = plan.measure_every or plan.steps
    steps = range(every, plan.steps + 1, every)
    measures = [
        {
            "step": step,
            "measure": {
                "sigma_query": [[1 + (x - 1) * step / plan.steps for x in heads] for heads in ends],
                "max_score": [[10.0 * x for x in heads] for heads in ends],
            },
        }
        for step in steps
    ]
    metrics = [
        {"step": step, "loss": loss, "mean_score": 0.0} for step in range(10, plan.steps + 1, 10)
    ]
    return Traced(plan.config(), metrics, measures, {})


def low_layers(plan: Plan) -> set[int]:
    """The layers with a coarse O."""
    base = plan.attention[0] != STANDARD
    named = {int(text[6]): not text.endswith(STANDARD) for text in plan.attention[1:]}
    return {n for n in range(plan.layers) if named.get(n, base)}


def plant(monkeypatch: pytest.MonkeyPatch, module: Any, made: Callable[[Plan], Traced]) -> None:
    def traced(lab: Lab, plans: dict[str, list[Plan]]) -> dict[str, list[Traced]]:
        return {name: [made(plan) for plan in same] for name, same in plans.items()}

    monkeypatch.setattr(module, "traced", traced)


def verdict(identifier: str) -> Any:
    (found,) = run_claims([identifier], lab=Lab(workers=1))
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.verdict == judge_claim(found.claim, found.measured)
    return found


@pytest.mark.parametrize(
    ("guilty", "holds"), [({2}, True), ({0}, True), ({1, 3}, False), (set(), False)]
)
def test_a3_finds_the_layer_that_fails_alone(
    guilty: set[int], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two guilty layers sparing one of them saves nothing."""

    def made(plan: Plan) -> Traced:
        lost, sigma = AWAY if low_layers(plan) & guilty else CALM
        return planted(plan, [[sigma, 1.0]] * plan.layers, lost)

    plant(monkeypatch, a_cause, made)
    found = verdict("A3")
    assert (found.verdict != "not reproduced") == holds
    if holds:
        assert f"the guilty layer is {min(guilty)} (from 0)" in found.measured.text
    assert found.measured.intervals["loss above the twin, everywhere"].count == 3


@pytest.mark.parametrize(
    ("carried", "holds"),
    [
        ("outliers", True),  # the heads whose σ leads
        ("all", False),  # sparing six of twelve saves nothing
        ("any six", False),  # whichever six are spared: the control is as good
    ],
)
def test_a6_holds_the_picked_heads_against_random_ones(
    carried: str, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaders = {1, 3, 4, 6, 9, 11}

    def made(plan: Plan) -> Traced:
        if plan.attention[0] == STANDARD:
            return planted(plan, [[1.0] * 12], CALM[0])
        spared = set[int]()
        for text in plan.attention[1:]:
            spared = {int(n) for n in text.removeprefix("head ").split(":")[0].split(",")}
        saved = {
            "outliers": spared >= leaders,
            "all": False,
            "any six": len(spared) == 6,
        }[carried]
        ends = [9.0 if head in leaders else 4.0 for head in range(12)]
        return planted(plan, [[1.0] * 12 if saved else ends], CALM[0] if saved else AWAY[0])

    plant(monkeypatch, a_heads, made)
    found = verdict("A6")
    assert (found.verdict != "not reproduced") == holds
    assert "heads 1, 3, 4, 6, 9, 11 picked at step" in found.measured.text
    assert found.measured.figures["random in fp32 stable"] == (1 if carried == "any six" else 0)
    assert found.measured.intervals["random in fp32 stable"].count == 6


@pytest.mark.parametrize(("layers", "holds"), [((4, 4, 4), True), ((4, 4, 5), False)])
def test_a26_wants_one_layer_on_every_seed(
    layers: tuple[int, ...], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(plan: Plan) -> Traced:
        away = layers[plan.seed] if plan.attention[0] != STANDARD else -1
        return planted(plan, [[9.0 if n == away else 1.5, 1.0] for n in range(12)], 2.0)

    plant(monkeypatch, a_growth, made)
    found = verdict("A26")
    assert (found.verdict != "not reproduced") == holds
    assert "layer 4 × 6.0, the median layer × 1.0" in found.measured.text
    labels = [one["label"] for one in found.measured.pictures[0]["series"]]
    assert labels[0] == "layer 4"
    assert labels[-2:] == ["the other layers", "all layers, twin"]


@pytest.mark.parametrize(
    ("identifier", "field"), [("A22", "query_key_norm"), ("A23", "most_score")]
)
@pytest.mark.parametrize("works", [True, False])
def test_a_remedy_is_judged_beside_a_twin_that_has_it_too(
    identifier: str, field: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(plan: Plan) -> Traced:
        remedied = getattr(plan, field) != getattr(Plan(()), field)
        fails = plan.attention[0] != STANDARD and not (remedied and works)
        loss, sigma = AWAY if fails else CALM
        # the remedy costs half a nat in run and twin alike
        return planted(plan, [[sigma, 1.0]] * plan.layers, loss + 0.5 * remedied)

    plant(monkeypatch, remedies, made)
    plant(monkeypatch, a_cause, made)
    found = verdict(identifier)
    assert (found.verdict != "not reproduced") == works
    assert "above the twin without the remedy +0.50" in found.measured.text or not works


@pytest.mark.parametrize(("sound", "holds"), [((), True), (("lion",), False)])
def test_d13_needs_every_optimizer_to_lose_the_task(
    sound: tuple[str, ...], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(plan: Plan) -> Traced:
        run = planted(plan, [[1.0]], 1e-6)
        if plan.attention[0] == "torch:flash" and plan.optimizer not in sound:
            for row in run.metrics[len(run.metrics) // 2 :]:
                row |= {"loss": 1e-3, "mean_score": 40.0}
        return run

    plant(monkeypatch, optimizers, made)
    found = verdict("D13")
    assert (found.verdict != "not reproduced") == holds
    assert (
        "sgd: 3 failed and 0 drift of 3, 3 of 3 survive in fp32, mean score +40.0"
        in found.measured.text
    )
