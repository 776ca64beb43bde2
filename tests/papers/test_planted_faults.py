"""Claims over planted runs: a figure must say what was planted, whatever the sign, the seed or the
control.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from halfulp.papers.claim import Claim, Lab, Measured, judge_claim
from halfulp.papers.claims import (
    a_cause,
    a_growth,
    a_mechanism,
    a_rounding,
    b_deviation,
    b_training,
    weak_points,
)
from halfulp.papers.ledger import selected
from halfulp.papers.runs_a import TASK_STOCK, Plan, Traced
from halfulp.recipes import BF16_FLASH2, FP64
from halfulp.report.ledger_page import counts
from halfulp.report.tables import BADGES

STEPS = range(20)


def claim(identifier: str) -> Claim:
    return selected([identifier])[0]


def verdict(identifier: str, measured: Measured) -> str:
    return judge_claim(claim(identifier), measured)


def planted(
    figures: dict[str, Callable[[int], float]], loss: Sequence[float] = (2.0,) * 20
) -> Traced:
    """A run of one layer and one head, measured every 50 steps from 600 on, as functions of the
    measurement's number say.
    """
    metrics = [{"step": 10 * (i + 1), "loss": x} for i, x in enumerate(loss)]
    measures = [
        {"step": 600 + 50 * i, "measure": {name: [[f(i)]] for name, f in figures.items()}}
        for i in STEPS
    ]
    return Traced(Plan((TASK_STOCK,)).config(), metrics, measures, {})


@pytest.fixture
def mechanism(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Traced], Traced], None]:
    """Put planted runs in the places of the one-layer task's and the byte GPT's."""

    def plant(layers: list[Traced], reader: Traced) -> None:
        built = SimpleNamespace(
            steps=tuple(range(101, 601)),
            first_order=(1.0, 2.0) * 250,
            curvature=(1.0, 2.0) * 250,
        )
        names = ("described", "softmax fix")
        monkeypatch.setattr(a_mechanism, "layer_traces", lambda lab: layers)
        monkeypatch.setattr(a_mechanism, "language", lambda lab, names: {"everywhere": [reader]})
        monkeypatch.setattr(a_mechanism, "constructed", lambda lab: {n: [built] for n in names})
        monkeypatch.setattr(a_mechanism, "constructed_text", lambda lab: "")
        monkeypatch.setattr(a_mechanism, "pictures", MagicMock())

    return plant


def alternating(i: int) -> float:
    return 1.0 if i % 2 else -1.0


def rising(i: int) -> float:
    return 1.0 + i


def test_a10_sees_signs_in_the_byte_gpt_and_in_every_seed(mechanism: Any) -> None:
    up, down = planted({"delta_error": rising}), planted({"delta_error": lambda i: -rising(i)})
    mechanism([up, up], up)
    found = claim("A10").measure(Lab())  # type: ignore[misc]
    assert verdict("A10", found).startswith("reproduced")
    mechanism([up, down], up)
    assert claim("A10").measure(Lab()).figures["least positive"] == 0  # type: ignore[misc]
    mechanism([up, up], planted({"delta_error": alternating}))
    found = claim("A10").measure(Lab())  # type: ignore[misc]
    assert found.figures["language positive"] == 0.5
    assert found.figures["language p"] == 1
    assert verdict("A10", found) == "not reproduced"


def test_signs_are_those_of_the_values() -> None:
    share, p = a_mechanism._signs([1.0, -2.0, 3.0, -4.0, -5.0])
    assert (share, p) == (0.4, pytest.approx(1.0))
    assert a_mechanism._signs([1.0] * 20) == (1.0, pytest.approx(2 * 0.5**20))


def cosines(value: float, control: float) -> dict[str, Callable[[int], float]]:
    names = ("terms_cosine", "terms_step_cosine", "direction_cosine")
    return {n: lambda i: value for n in names} | {f"{n}_shuffled": lambda i: control for n in names}


def test_a9_holds_figures_against_their_controls(mechanism: Any) -> None:
    alike, no_better = planted(cosines(0.5, 0.01)), planted(cosines(0.5, 0.4))
    for layers, reader, held in ((alike, alike, True), (alike, no_better, False)):
        mechanism([layers], reader)
        found = claim("A9").measure(Lab())  # type: ignore[misc]
        assert (verdict("A9", found) != "not reproduced") == held
    assert found.figures["language, terms_cosine_shuffled"] == pytest.approx(0.4)
    assert found.figures["task, terms_cosine"] == pytest.approx(0.5)


def test_d9_takes_shares_of_the_whole_sum(mechanism: Any) -> None:
    figures = {
        "delta_error": lambda i: 2.0 + 0.1 * alternating(i),
        "delta_error_first_order": lambda i: -1.0,
        "delta_error_curvature": lambda i: 1.0 + 0.1 * alternating(i),
    }
    mechanism([planted(figures)], planted(figures))
    found = claim("D9").measure(Lab())  # type: ignore[misc]
    assert found.figures["share"] == pytest.approx(0.5)
    assert found.figures["first order, share"] == pytest.approx(0.5)
    assert verdict("D9", found) == "not reproduced"


def test_a_run_whose_sigma_has_grown_is_not_stable() -> None:
    def run(sigma: float, loss: float) -> Traced:
        return planted({"sigma_query": lambda i: sigma}, (loss,) * 20)

    twin = run(2.0, 2.0)
    runs = [run(2.9, 2.05), run(3.1, 2.05), run(2.0, 2.2)]
    assert a_cause.stable_share(runs, [twin] * 3) == pytest.approx(1 / 3)


def test_a13_needs_the_number_and_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def explained(fraction: str, error: float) -> SimpleNamespace:
        code = SimpleNamespace(sign="1", exponent="10000001", fraction=fraction)
        final = SimpleNamespace(code=code, guard=1, sticky=1)
        values = {"exact": -4.703990459442139, "result": -4.71875, "error": error}
        return SimpleNamespace(final=final, **values)

    for fraction, error, same in (
        ("0010111", -0.014759540557861328, 1),
        ("0010110", -0.014759540557861328, 0),
        ("0010111", -0.0147, 0),
    ):
        monkeypatch.setattr(a_rounding, "explain", lambda *_, f=fraction, e=error: explained(f, e))
        assert claim("A13").measure(Lab()).figures["same"] == same  # type: ignore[misc]


def test_a19_compares_the_queries_of_run_and_twin_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(rms: Callable[[int], float], sigma: float) -> Traced:
        sigmas = dict.fromkeys(("sigma_query", "sigma_query_key"), lambda i: sigma)
        return planted({"query_rms": rms} | sigmas)

    grown, twin = run(lambda i: 1.0 + i, 8.0), run(lambda i: 1.0 + 0.5 * i, 2.0)
    language = {"everywhere": [grown], "nowhere": [twin]}
    curves = dict.fromkeys(("loss", "sigma_key", "sigma_query", "sigma_query_key"), (1.0, 1.0))
    flat = SimpleNamespace(steps=(1, 2), **curves)
    lab = SimpleNamespace(
        trained=lambda names: {name: [flat] for name in names}, full=False, kept={}, command=str
    )
    monkeypatch.setattr(a_growth, "language", lambda lab, names: language)
    monkeypatch.setattr(a_growth, "pictures", MagicMock())
    found = claim("A19").measure(lab)  # type: ignore[misc, arg-type]
    assert found.figures["activations"] == pytest.approx(20 / 10.5)
    assert math.isinf(found.figures["latest rise"])
    assert verdict("A19", found) == "not reproduced"


def test_d3_notices_a_fix_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weak_points, "BF16_PAPER_STABILIZED", BF16_FLASH2)
    found = claim("D3").measure(Lab())  # type: ignore[misc]
    assert found.figures["ones"] == 1
    assert verdict("D3", found) == "not reproduced"


def test_d7_is_measured_against_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe without any rounding has no error: what it is held against has none either."""
    drawn = weak_points.gradient_inputs
    monkeypatch.setattr(
        weak_points, "gradient_inputs", lambda *x: [t.double() for t in drawn(*x, 48, 16)]
    )
    monkeypatch.setattr(weak_points, "floor", lambda fmt: FP64)
    errors = weak_points.gradient_errors("value offset", seeds=2)
    assert errors["floor"].value < 1e-13
    assert errors["stock"].value > 1e-3


def test_b4_takes_the_least_of_all_families(monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(lab: Lab, inputs: str) -> Any:
        def select(family: str, against: str) -> list[SimpleNamespace]:
            assert against == "baseline"
            still = family == "flash2 stock" and inputs == "normal"
            return [
                SimpleNamespace(max=(x,), mean=(x,), std=(1.0 if still else x,)) for x in (1.0, 3.0)
            ]

        return SimpleNamespace(select=select, figures=())

    monkeypatch.setattr(b_deviation, "_lengths", sweep)
    found = claim("B4").measure(Lab())  # type: ignore[misc]
    assert found.figures["least"] == 1
    assert verdict("B4", found) == "not reproduced"


def test_b7_takes_the_repeated_run_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def drift(last: float) -> SimpleNamespace:
        return SimpleNamespace(slope=1.0, wasserstein=(1.0, 2.0), max_difference=(0.5, last))

    line = SimpleNamespace(name=b_training.FLASH, steps=9, wasserstein=1.0, max_difference=1.0)
    line.slope = 1.0
    compared = SimpleNamespace(
        of=lambda name: [drift(0.75 if name == b_training.REPEATED else 9.0)] * 3,
        summary=[line],
        figures=[],
    )
    monkeypatch.setattr(b_training, "_drift", lambda lab: SimpleNamespace(compared=compared))
    found = claim("B7").measure(Lab())  # type: ignore[misc]
    assert found.figures["repeated"] == 0.75
    assert verdict("B7", found) == "not reproduced"


def test_the_ledgers_line_keeps_the_papers_claims_apart() -> None:
    verdicts = [
        {"verdict": "reproduced", "source": "papers"},
        {"verdict": "not reproduced", "source": "papers"},
        {"verdict": "reproduced", "source": "halfulp"},
    ]
    assert counts(verdicts) == (
        "of the papers' 2 claims 1 reproduced, 1 not reproduced; of halfulp's own 1 claim 1"
        " reproduced"
    )


def test_only_what_the_papers_arithmetic_shows_has_the_good_sign() -> None:
    good = {word for word, (tone, _) in BADGES.items() if tone == "good" and "reprod" in word}
    assert good == {"reproduced", "reproduced at reduced scale"}
