"""The ledger: whole, judged by its rules and nothing else, and blind to no planted fault."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from halfulp.experiments.failure import FailureRun
from halfulp.experiments.failure_recipes import RUNGS
from halfulp.papers import ledger
from halfulp.papers.claim import (
    Claim,
    Lab,
    Measured,
    Rule,
    Setup,
    judge_claim,
    mean_of,
    rung_recipe,
)
from halfulp.papers.claims import a_rounding, identities, weak_points
from halfulp.papers.ledger import CLAIMS, run_claims, selected
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, BF16_PAPER_STABILIZED, Shift

COVERED = [
    "A1",
    "A2",
    "A3",
    "A4",
    "A5a",
    "A5b",
    "A6",
    "A7",
    "A8",
    "A9",
    "A10",
    "A11",
    "A12",
    "A13",
    "A14",
    "A15",
    "A16",
    "A17",
    "A18",
    "A19",
    "A20",
    "B1",
    "B2",
    "B3",
    "B4",
    "B5",
    "B6",
    "B7",
    "B8",
    "B9",
    "B10",
    "C1",
    "D1",
    "D2",
    "D3",
    "D4",
    "D5",
    "D6",
    "D7",
    "D8",
    "D9",
    "D10",
    "D11",
    "D12",
]
CHEAP = ["A7", "A8", "A13", "A17", "A18", "C1", "D1", "D2", "D3", "D4", "D6", "D11"]

# For every rule: figures under which it holds, and changes each of which must break it.
PLANTED: dict[str, tuple[dict[str, float], list[dict[str, float]]]] = {
    "A1": (
        {"seeds": 3, "torch:flash failed": 1, "torch:fp32 failed": 0},
        [{"seeds": 2}, {"torch:flash failed": 2 / 3}, {"torch:fp32 failed": 1 / 3}],
    ),
    "A2": (
        {"seeds": 3, "two tiles failed": 1, "block = N failed": 1},
        [{"seeds": 2}, {"two tiles failed": 2 / 3}, {"block = N failed": 2 / 3}],
    ),
    "A3": (
        {
            "everywhere": 1,
            "guilty layer alone": 1,
            "stable without it": 1,
        },
        [
            {"everywhere": 0},
            {"guilty layer alone": 2 / 3},
            {"stable without it": 2 / 3},
        ],
    ),
    "A4": (
        {
            "task, stock failed": 1,
            "task, dP∘P failed": 0,
            "task drifts": 0,
            "language failed": 1,
            "language, δ from dP∘P stable": 1,
        },
        [
            {"task, stock failed": 2 / 3},
            {"task, dP∘P failed": 1 / 3},
            {"task drifts": 1},
            {"language failed": 0},
            {"language, δ from dP∘P stable": 2 / 3},
        ],
    ),
    "A5a": (
        {
            "task, stock failed": 1,
            "task, O = PV in the backward pass failed": 0,
            "task drifts": 0,
            "language failed": 1,
            "language, O = PV in the backward pass stable": 1,
        },
        [
            {"task, stock failed": 2 / 3},
            {"task, O = PV in the backward pass failed": 1 / 3},
            {"task drifts": 1},
            {"language failed": 0},
            {"language, O = PV in the backward pass stable": 2 / 3},
        ],
    ),
    "A5b": (
        {
            "task, stock failed": 1,
            "task, fp32 O for δ failed": 0,
            "task, fp32 O failed": 0,
            "task drifts": 0,
            "language failed": 1,
            "language, fp32 O for δ stable": 1,
            "language, fp32 O stable": 1,
        },
        [
            {"task, stock failed": 2 / 3},
            {"task, fp32 O for δ failed": 1 / 3},
            {"task, fp32 O failed": 1 / 3},
            {"task drifts": 1},
            {"language failed": 0},
            {"language, fp32 O for δ stable": 2 / 3},
            {"language, fp32 O stable": 0},
        ],
    ),
    "A6": (
        {"all heads failed": 1, "outliers": 9, "largest in fp32 stable": 1},
        [{"all heads failed": 0}, {"outliers": 2}, {"largest in fp32 stable": 0}],
    ),
    "A7": (
        {"relative_difference": 1e-15, "gradient_difference": 1e-3},
        [{"relative_difference": 1e-12}, {"gradient_difference": 0.0}],
    ),
    "A8": (
        {"relative_difference": 1e-15, "gradient_difference": 1e-3},
        [{"relative_difference": 1e-12}, {"gradient_difference": 0.0}],
    ),
    "A9": (
        {
            f"{run}, {name}{control}": value
            for run in ("task", "language")
            for name in ("terms_cosine", "terms_step_cosine")
            for control, value in (("", 0.3), ("_shuffled", 0.01))
        },
        [
            {"task, terms_cosine": 0.09},
            {"task, terms_step_cosine_shuffled": 0.1},
            {"language, terms_cosine_shuffled": -0.1},
            {"language, terms_step_cosine": 0.09},
        ],
    ),
    "A10": (
        {
            "least positive": 1.0,
            "largest p": 1e-6,
            "language positive": 1.0,
            "language p": 1e-4,
        },
        [
            {"least positive": 0.9},
            {"largest p": 0.01},
            {"language positive": 0.4},
            {"language p": 0.5},
        ],
    ),
    "A11": (
        {"task": 0.58, "task, t": 20, "constructed": 0.59, "constructed, t": 20},
        [{"task": 0.52}, {"task, t": 3}, {"constructed": 0.5}, {"constructed, t": 4}],
    ),
    "A19": (
        {"lead": 50, "latest rise": 400, "activations": 8},
        [
            {"lead": 30},
            {"lead": -math.inf},
            {"lead": math.inf, "latest rise": math.inf},
            {"activations": 1.5},
        ],
    ),
    "A20": (
        {"least correlation": 0.5, "largest p": 1e-20, "least ratio": 3},
        [{"least correlation": 0.2}, {"largest p": 1e-3}, {"least ratio": 1.5}],
    ),
    "D9": (
        {"share": 0.98, "first order, share": 0.01, "curvature, least t": 100, "positive": 1.0},
        [{"share": 0.8}, {"first order, share": 0.2}, {"curvature, least t": 5}, {"positive": 0.9}],
    ),
    "D10": (
        {"as it is": 14, "mean alone": 14, "mean removed": 1, "mean flipped": -14},
        [
            {"as it is": 4},
            {"mean alone": 4},
            {"mean removed": 4},
            {"mean flipped": -4},
            {"mean flipped": 14},
        ],
    ),
    "D11": (
        {"split": 0, "halfulp": 16, "stock": 1e6, "compared": 4e6},
        [{"split": 1}, {"halfulp": 500}, {"stock": 1e5}],
    ),
    "A12": (
        {"jump": -1e-3, "t": -20, "control": 1e-5},
        [{"t": -3}, {"t": 20}, {"control": -9e-4}, {"control": 9e-4}],
    ),
    "A13": ({"same": 1}, [{"same": 0}]),
    "A14": (
        {"largest_mean": 0.01, "tied_mean": -0.1, "tied_t": -50},
        [{"largest_mean": 0.03}, {"tied_mean": -0.005}, {"tied_t": -2}],
    ),
    "A15": (
        {
            "difference": 1e-15,
            "largest_weight": 0.9,
            "authors failed": 1,
            "authors+softmax failed": 0,
            "constructed failed": 1,
            "constructed, fixed failed": 0,
        },
        [
            {"constructed failed": 2 / 3},
            {"constructed, fixed failed": 1 / 3},
            {"difference": 1e-9},
            {"largest_weight": 1.0},
            {"authors failed": 0.5},
            {"authors+softmax failed": 1 / 3},
        ],
    ),
    "A16": (
        {"fixed": -0.3, "fixed_t": -40, "none": 0.01},
        [{"fixed": 0.05}, {"fixed_t": -3}, {"none": 0.4}],
    ),
    "A17": ({"always": 0.5, "conditional": 0}, [{"always": 0}, {"conditional": 0.1}]),
    "A18": ({"near_one": 1, "zero": 0}, [{"near_one": 0.2}, {"zero": 0.1}]),
    "B1": (
        {"identical": 1, "ulps of out": 0, "bits expected": 1},
        [
            {"identical": 0.999999},
            {"identical": 0.7, "bits expected": 0},
            {"identical": 0.9, "bits expected": 0, "ulps of out": 3},
        ],
    ),
    "B2": ({"falling": 1}, [{"falling": 5 / 6}]),
    "B3": ({"low": 1.5, "high": 20}, [{"low": 0.9}, {"high": 8}]),
    "B4": ({"least": 2}, [{"least": 1.1}]),
    "B5": (
        {"exchanged, bf16 and fp16": 1.8, "square, furthest from 1": 1.1, "larger": 0.5},
        [
            {"exchanged, bf16 and fp16": 1.0},
            {"square, furthest from 1": 1.4},
            {"square, furthest from 1": 0.7},
            {"larger": 1.0},
        ],
    ),
    "B6": (
        {"calls": 48, "expected": 48, "same_bits": 1, "largest": 0.02},
        [{"calls": 47}, {"same_bits": 0}, {"largest": 0}, {"largest": math.inf}],
    ),
    "B7": (
        {
            "seeds": 3,
            "lowest_slope": 1e-8,
            "wasserstein_growth": 9,
            "difference_growth": 9,
            "repeated": 0,
        },
        [
            {"seeds": 2},
            {"lowest_slope": -1e-8},
            {"wasserstein_growth": 0.9},
            {"difference_growth": 0.9},
            {"repeated": 1e-9},
        ],
    ),
    "B8": (
        {
            "seeds": 3,
            "flash": 1,
            "initialization": 2,
            "fp16": 4,
            "uneven_initialization": 0.1,
            "uneven_fp16": 0.2,
            "ratio_low": 1.5,
            "ratio_high": 4,
        },
        [
            {"seeds": 2},
            {"flash": 3},
            {"fp16": 1},
            {"uneven_fp16": 0.05},
            {"ratio_high": 1.9},
            {"ratio_low": 5.1, "ratio_high": 8},
        ],
    ),
    "B9": (
        {"first_loss": 0.8, "last_loss": 0.2, "chance": 1e-9},
        [{"last_loss": 0.5}, {"chance": 0.01}],
    ),
    "B10": ({"low": 1.05}, [{"low": 0.98}, {"low": 1.00015}]),
    "C1": (
        {"fp64_difference": 1e-15, "bf16_flash1": 1e-3, "bf16_flash2": 2e-3},
        [{"fp64_difference": 1e-9}, {"bf16_flash1": 2e-3}],
    ),
    "D1": (
        {"zero": 1, "wrong": 1, "halfulp_right": 1},
        [{"zero": 0.1}, {"wrong": 0.1}, {"halfulp_right": 0.99}],
    ),
    "D2": (
        {"zero": 1, "wrong": 1, "halfulp_right": 1},
        [{"zero": 0.1}, {"wrong": 0.1}, {"halfulp_right": 0.99}],
    ),
    "D3": ({"ones": 1}, [{"ones": 0.5}]),
    "D4": ({"same": 0, "different": 1}, [{"same": 0.1}, {"different": 0.9}]),
    "D5": ({"fp32_limit": 1e-4, "bf16": 0.05}, [{"fp32_limit": 0.02}, {"bf16": 5e-4}]),
    "D6": (
        {"low": -0.5, "high": 0.5, "rounded": 0},
        [{"low": 0.1}, {"high": 0.1}, {"rounded": 0.1}],
    ),
    "D7": ({"both": 1.1, "alone": 3}, [{"both": 1.5}, {"alone": 1.2}]),
    "D8": (
        {
            "seeds": 3,
            "stock failed": 1,
            "stock+softmax failed": 1,
            "authors+softmax failed": 1,
            "halfulp failed": 0,
        },
        [
            {"seeds": 2},
            {"stock failed": 2 / 3},
            {"stock+softmax failed": 0},
            {"authors+softmax failed": 0},
            {"halfulp failed": 1 / 3},
        ],
    ),
    "D12": (
        {"seeds": 3, "torch:flash failed": 1, "torch:math failed": 0},
        [{"seeds": 1}, {"torch:flash failed": 2 / 3}, {"torch:math failed": 1 / 3}],
    ),
}


HELD = {
    "whole": "reproduced",
    "reduced": "reproduced at reduced scale",
    "altered": "reproduced with altered arithmetic",
}


def claim(identifier: str) -> Claim:
    return selected([identifier])[0]


def verdict_of(identifier: str, figures: dict[str, float]) -> str:
    return judge_claim(claim(identifier), Measured(figures, ""))


def test_the_ledger_is_whole_and_in_order() -> None:
    wanted = (
        [f"A{i}" for i in range(1, 5)]
        + ["A5a", "A5b"]
        + [f"A{i}" for i in range(6, 21)]
        + [f"B{i}" for i in range(1, 11)]
        + ["C1"]
        + [f"D{i}" for i in range(1, 13)]
    )
    assert [c.id for c in CLAIMS] == wanted
    for c in CLAIMS:
        assert c.group == c.id[0]
        assert (c.measure is None) == (c.rule is None)
        assert c.command == f"halfulp claims {c.id}"


def test_every_rule_is_planted_with_good_and_bad_figures() -> None:
    assert set(PLANTED) == {c.id for c in CLAIMS if c.rule is not None}
    assert set(COVERED) == set(PLANTED)


@pytest.mark.parametrize("identifier", COVERED)
def test_a_rule_holds_on_good_figures_and_breaks_on_each_bad_one(identifier: str) -> None:
    good, changes = PLANTED[identifier]
    held = HELD[claim(identifier).setup]
    assert verdict_of(identifier, good) == held
    for change in changes:
        assert verdict_of(identifier, good | change) == "not reproduced", change
    for name in good:
        assert verdict_of(identifier, good | {name: math.nan}) == "not reproduced"


@pytest.mark.parametrize("identifier", CHEAP)
def test_what_can_be_shown_on_constructed_rows_is_reproduced(identifier: str) -> None:
    (found,) = run_claims([identifier])
    assert found.verdict == "reproduced", found.measured
    assert found.measured
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_same_claim_gives_the_same_figures() -> None:
    first, again = (run_claims(["a17", " D6 "]) for _ in range(2))
    assert [v.id for v in first] == ["A17", "D6"]
    assert [(v.figures, v.measured) for v in first] == [(v.figures, v.measured) for v in again]


@pytest.mark.parametrize(
    ("identifier", "module", "name", "planted"),
    [
        ("A7", identities, "_probabilities", lambda q, k, is_causal: (q @ k.mT).softmax(-1)),
        ("A8", identities, "_probabilities", lambda q, k, is_causal: (q @ k.mT).softmax(-1)),
        ("A7", identities, "_LOW", identities._HIGH),  # nothing rounded: nothing shown
        ("C1", identities, "FP64_ROUGH", None),
        (
            "A17",
            a_rounding,
            "BF16_PAPER_STABILIZED",
            BF16_PAPER_STABILIZED.with_(row_sum_floor=1e-10),
        ),
        ("D1", weak_points, "BF16_PAPER_STABILIZED", BF16_FLASH2),
        ("D1", weak_points, "BF16_HALFULP", BF16_PAPER_STABILIZED),
        ("D2", weak_points, "BF16_PAPER_STABILIZED", BF16_HALFULP),
        (
            "D3",
            weak_points,
            "BF16_PAPER_STABILIZED",
            BF16_FLASH2.with_(shift=Shift("offset", offset=0.5)),
        ),
        ("D4", weak_points, "BF16_PAPER_STABILIZED", BF16_FLASH2),
        ("D6", weak_points, "BF16_FLASH2", BF16_HALFULP.with_(base="e", shift=BF16_FLASH2.shift)),
    ],
)
def test_a_planted_fault_is_not_reproduced(
    identifier: str, module: object, name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "FP64_ROUGH":
        monkeypatch.setattr(
            module, "_HIGH", identities._HIGH.with_(compute="float32", matmul=BF16_FLASH2.matmul)
        )
    else:
        monkeypatch.setattr(module, name, planted)
    (found,) = run_claims([identifier])
    assert found.verdict == "not reproduced", found.measured


def test_a_kernel_whose_bits_are_not_claimed_may_differ_a_little() -> None:
    assert (
        verdict_of("B1", {"identical": 0.9, "ulps of out": 1, "bits expected": 0}) == "reproduced"
    )


def test_what_nobody_measured_carries_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CLAIMS", (Claim("X1", "A", "", ""),))
    (found,) = run_claims(["X1"])
    assert (found.verdict, found.measured, found.figures, found.rule) == ("not yet", "", {}, "")
    needy = Claim("X1", "A", "", "", without="needs a GPU")
    assert judge_claim(needy, None) == "needs a GPU"


@pytest.mark.parametrize("setup", ["whole", "reduced", "altered"])
def test_a_verdict_says_on_what_it_rests(setup: Setup) -> None:
    rule = Rule("x above 1", lambda f: f["x"] > 1)
    small = Claim("X1", "A", "", "", lambda lab: Measured({"x": 2}, ""), rule, setup=setup)
    assert judge_claim(small, Measured({"x": 2}, "")) == HELD[setup]
    assert judge_claim(small, Measured({"x": 0}, "")) == "not reproduced"


def test_what_trains_with_a_coarse_out_is_called_altered() -> None:
    """Not of reduced scale: the paper's arithmetic has seven mantissa bits."""
    altered = {c.id for c in CLAIMS if c.setup == "altered"}
    assert altered == {"A3", "A4", "A5a", "A5b", "A6", "A9", "A10", "A19"}
    papers = [c.id for c in CLAIMS if c.source == "papers"]
    assert (len(papers), len(CLAIMS) - len(papers)) == (32, 12)


def planted_run(name: str, seed: int, outcome: str) -> FailureRun:
    curve = (1e-3, 1e-5)
    return FailureRun(name, seed, (1, 2), curve, curve, curve, curve, curve, None, outcome, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(("bad", "verdict"), [(None, "reproduced"), ("halfulp", "not reproduced")])
def test_training_claims_are_judged_from_the_runs_of_the_lab(bad: str | None, verdict: str) -> None:
    lab = Lab()
    for name in ("stock", "stock+softmax", "authors+softmax", "halfulp"):
        for seed in lab.seeds:
            outcome = (
                "survived" if name == "halfulp" and not (name == bad and seed == 1) else "failed"
            )
            lab.runs[name, seed] = planted_run(name, seed, outcome)
    (found,) = run_claims(["D8"], lab=lab)
    assert found.verdict == verdict
    assert ("1 of 3" in found.measured) == (bad is not None)


def test_the_lab_trains_each_attention_once() -> None:
    lab = Lab(workers=1, seeds=(0,), steps=3)
    first = lab.trained(("halfulp", "torch:fp32"))
    runs = dict(lab.runs)
    again = lab.trained(("torch:fp32",))
    assert lab.runs == runs
    assert again["torch:fp32"][0] is first["torch:fp32"][0]
    assert rung_recipe("halfulp") == RUNGS["halfulp"]


def test_progress_rises_to_one() -> None:
    said: list[float] = []
    run_claims(["A7", "C1", "D6", "D11"], progress=lambda fraction, message: said.append(fraction))
    assert said == sorted(said)
    assert said[-1] == pytest.approx(1.0)


def test_an_unknown_claim_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="claim='E1': accepted are A1") as error:
        run_claims(["E1"])
    assert "\n" not in str(error.value)


def test_a_mean_carries_its_error() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 6.0])
    found = mean_of(values)
    assert found.value == 3.0
    assert found.error == pytest.approx(float(values.std()) / 2)
    assert found.t == pytest.approx(found.value / found.error)
    assert re.fullmatch(r"\+3 ± 1 \(n = 4\)", str(found))


def test_the_paper_example_row_is_the_papers() -> None:
    (found,) = run_claims(["A13"])
    assert found.figures["result"] == -4.71875
    assert found.figures["error"] == -0.014759540557861328
