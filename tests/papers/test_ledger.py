"""The ledger: whole, judged by its rules and nothing else, and blind to no planted fault."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfulp.cli.entry import main
from halfulp.experiments.failure import CURVES, FailureRun
from halfulp.formats import BF16
from halfulp.papers import ledger
from halfulp.papers.claim import (
    Claim,
    Lab,
    Measured,
    Rule,
    Setup,
    judge_claim,
    mean_of,
    share_of,
    spread,
)
from halfulp.papers.claims import a_rounding, carries, identities, weak_points
from halfulp.papers.claims.optimizers import OTHERS
from halfulp.papers.ledger import CLAIMS, run_claims, selected
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, BF16_PAPER_STABILIZED, Shift

COVERED = [
    *(f"A{i}" for i in range(1, 5)),
    "A5a",
    "A5b",
    *(f"A{i}" for i in range(6, 24)),
    "A25",
    "A26",
    *(f"B{i}" for i in range(1, 8)),
    "B8a",
    "B8b",
    "B8c",
    "B9",
    "B10",
    "B11",
    "C1",
    *(f"D{i}" for i in range(1, 14)),
]
CHEAP = ["A7", "A8", "A13", "A17", "A18", "A25", "C1", "D1", "D2", "D3", "D4", "D6", "D11"]

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
            "seeds": 3,
            "everywhere": 1,
            "guilty layer alone": 1,
            "stable without it": 1,
        },
        [
            {"seeds": 2},
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
        {
            "seeds": 3,
            "all heads failed": 1,
            "outliers": 9,
            "picked in fp32 stable": 1,
            "random in fp32 stable": 0.5,
        },
        [
            {"seeds": 1},
            {"all heads failed": 2 / 3},
            {"outliers": 2},
            {"picked in fp32 stable": 2 / 3},
            {"random in fp32 stable": 1},
        ],
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
            {"lead": 10},
            {"lead": -math.inf},
            {"lead": math.inf, "latest rise": math.inf},
            {"activations": 1.5},
        ],
    ),
    "A26": (
        {"seeds": 3, "layers": 1, "stands out": 3, "grown": 6},
        [{"seeds": 2}, {"layers": 2}, {"stands out": 1.5}, {"grown": 1.5}],
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
        {
            "seeds": 5,
            "least effect": 9,
            "score, mean alone": 0.9,
            "σ, mean alone": 0.8,
            "score, mean removed": 0.1,
            "σ, mean removed": 0.1,
            "score, mean flipped": -1,
            "σ, mean flipped": 0.7,
        },
        [
            {"seeds": 4},
            {"least effect": 4},
            {"score, mean alone": 0.4},
            {"σ, mean alone": 0.4},
            {"score, mean removed": 0.3},
            {"σ, mean removed": 0.3},
            {"score, mean flipped": -0.4},
            {"score, mean flipped": 1},
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
            "constructed, any β failed": 0,
        },
        [
            {"constructed failed": 2 / 3},
            {"constructed, fixed failed": 1 / 3},
            {"constructed, any β failed": 1 / 21},
            {"difference": 1e-9},
            {"largest_weight": 1.0},
            {"authors failed": 0.5},
            {"authors+softmax failed": 1 / 3},
        ],
    ),
    "A21": (
        {
            "seeds": 3,
            "authors failed": 1,
            "authors+Ō fp32 failed": 0,
            "task drifts": 0,
            "constructed failed": 1,
            "constructed, Ō in fp32 survived": 1,
        },
        [
            {"seeds": 2},
            {"authors failed": 2 / 3},
            {"authors+Ō fp32 failed": 1 / 3},
            {"task drifts": 1},
            {"constructed failed": 0.8},
            {"constructed, Ō in fp32 survived": 0.6},
        ],
    ),
    "A22": (
        {"seeds": 5, "failed without": 1, "stable": 1},
        [{"seeds": 2}, {"failed without": 0.8}, {"stable": 0.8}],
    ),
    "A23": (
        {"seeds": 5, "failed without": 1, "stable": 1},
        [{"seeds": 2}, {"failed without": 0.8}, {"stable": 0.8}],
    ),
    "A25": (
        {"sums": 1, "away from zero": 1, "round bit 1": -0.5, "round bit 0": 0.02, "ties, t": 1},
        [
            {"sums": 0},
            {"away from zero": 0.99},
            {"round bit 1": 0.5},
            {"round bit 0": 0.2},
            {"ties, t": 6},
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
        {"seeds": 3, "calls": 48, "expected": 48, "same_bits": 1, "largest": 0.02},
        [{"seeds": 2}, {"calls": 47}, {"same_bits": 0}, {"largest": 0}, {"largest": math.inf}],
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
    "B8a": ({"seeds": 5, "apart, high": 0.04}, [{"seeds": 4}, {"apart, high": 1.1}]),
    "B8b": (
        {"seeds": 5, "steeper": 1e-8, "uneven": 1.2},
        [{"seeds": 4}, {"steeper": -1e-8}, {"uneven": 0.9}],
    ),
    "B8c": (
        {"seeds": 5, "low": 1.7, "least ratio": 2.1, "largest ratio": 4},
        [{"seeds": 3}, {"low": 0.9}, {"least ratio": 1.9}, {"largest ratio": 6}],
    ),
    "B9": (
        {"seeds": 3, "loss left": 0.3, "chance": 1e-9},
        [{"seeds": 1}, {"loss left": 0.6}, {"chance": 0.01}],
    ),
    "B11": (
        {"seeds": 5, "latest rise": 400, "control rises": 0, "there": 2, "before": 1.5},
        [
            {"seeds": 4},
            {"latest rise": math.inf},
            {"control rises": 1},
            {"there": 0.9},
            {"before": 0.9},
        ],
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
    "D3": ({"ones": 1, "ones at 0.5": 0}, [{"ones": 0.5}, {"ones at 0.5": 1}]),
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
    "D13": (
        {"seeds": 3}
        | {f"{name}, {part}": 1 for name in OTHERS for part in ("lost", "sound in fp32")},
        [
            {"seeds": 2},
            {"sgd, lost": 2 / 3},
            {"lion, sound in fp32": 2 / 3},
            {"muon, lost": 0},
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
        + [f"A{i}" for i in range(6, 27)]
        + [f"B{i}" for i in range(1, 8)]
        + ["B8a", "B8b", "B8c", "B9", "B10", "B11", "B12"]
        + ["C1"]
        + [f"D{i}" for i in range(1, 14)]
    )
    assert [c.id for c in CLAIMS] == wanted
    for c in CLAIMS:
        assert c.group == c.id[0]
        assert (c.measure is None) == (c.rule is None)
        assert Lab().command(c.id) == f"halfulp claims {c.id}"


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
    assert found.measured.text
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_same_claim_gives_the_same_figures() -> None:
    first, again = (run_claims(["a17", " D6 "]) for _ in range(2))
    assert [v.claim.id for v in first] == ["A17", "D6"]
    assert [v.measured for v in first] == [v.measured for v in again]


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
        ("A25", carries, "BF16", replace(BF16, rounding="toward_zero")),
        ("A25", carries, "_RESIDUAL", 0.0),
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
    monkeypatch.setattr(ledger, "CLAIMS", (Claim("X1", "", ""),))
    (found,) = run_claims(["X1"])
    plain = found.as_dict()
    assert [plain[x] for x in ("verdict", "measured", "figures", "rule")] == ["not yet", "", {}, ""]
    monkeypatch.setattr(ledger, "CLAIMS", (Claim("X1", "", "", without="needs a GPU"),))
    assert run_claims(["X1"])[0].verdict == "needs a GPU"


@pytest.mark.parametrize("setup", ["whole", "reduced", "altered"])
def test_a_verdict_says_on_what_it_rests(setup: Setup) -> None:
    rule = Rule("x above 1", lambda f: f["x"] > 1)
    small = Claim("X1", "", "", lambda lab: Measured({"x": 2}, ""), rule, setup=setup)
    assert judge_claim(small, Measured({"x": 2}, "")) == HELD[setup]
    assert judge_claim(small, Measured({"x": 0}, "")) == "not reproduced"


def test_what_trains_with_a_coarse_out_is_called_altered() -> None:
    """Not of reduced scale: the paper's arithmetic has seven mantissa bits."""
    altered = {c.id for c in CLAIMS if c.setup == "altered"}
    assert altered == {
        *("A3", "A4", "A5a", "A5b", "A6", "A9", "A10", "A19", "A22", "A23", "A26", "B11")
    }
    unmeasured = {c.id: c.without for c in CLAIMS if c.measure is None}
    assert unmeasured == {"A24": "needs a GPU", "B12": "not yet"}


def test_the_readme_counts_the_claims_as_the_code_does() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"the papers' (\d+) claims and (\d+) of our own", readme)
    papers = sum(c.source == "papers" for c in CLAIMS)
    assert tuple(map(int, said)) == (papers, len(CLAIMS) - papers)


def test_every_estimate_is_shown_with_its_interval_and_sample(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["claims", "D1", "A13", "--html", str(page), "--json", str(tmp_path / "x")]) == 0
    text = page.read_text(encoding="utf-8")
    assert "rows, zero 1 [0.98, 1] (n = 192)" in text
    assert "one sum, bit by bit" in text
    exact, rows = json.loads((tmp_path / "x").read_text(encoding="utf-8"))
    assert exact["intervals"] == {}
    assert rows["intervals"]["rows, wrong"]["count"] == 192
    assert rows["intervals"]["rows, wrong"]["high"] == 1


def test_a_measurement_without_interval_or_reason_is_our_own_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = Claim("X1", "", "", lambda lab: Measured({"x": 2}, ""), Rule("", lambda f: True))
    monkeypatch.setattr(ledger, "CLAIMS", (bare,))
    with pytest.raises(AssertionError, match="X1"):
        run_claims(["X1"])


def test_intervals_are_students_and_clopper_and_pearsons() -> None:
    found = share_of(3, 3)
    assert (found.value, found.high, found.count) == (1, 1, 3)
    assert found.low == pytest.approx(0.025 ** (1 / 3))  # p³ = 0.025
    mean = spread(mean_of(torch.tensor([1.0, 2.0, 3.0])))
    assert mean.high - mean.value == pytest.approx(4.3026527 / math.sqrt(3))


def planted_run(name: str, seed: int, outcome: str) -> FailureRun:
    curve = (1e-3, 1e-5)
    curves = (curve,) * len(CURVES)
    return FailureRun(name, seed, (1, 2), *curves, None, outcome, "")  # type: ignore[arg-type]


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
    assert ("1 of 3" in found.measured.text) == (bad is not None)


def test_the_lab_trains_each_attention_once() -> None:
    lab = Lab(workers=1, seeds=(0,), steps=3)
    first = lab.trained(("halfulp", "torch:fp32"))
    runs = dict(lab.runs)
    again = lab.trained(("torch:fp32",))
    assert lab.runs == runs
    assert again["torch:fp32"][0] is first["torch:fp32"][0]


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
    assert found.measured.figures["result"] == -4.71875
    assert found.measured.figures["error"] == -0.014759540557861328


def test_the_document_of_the_ledger_has_the_codes_claims_rules_and_histories() -> None:
    """docs/ledger.md, which benchmarks/ledger_table.py writes; its verdicts are a run's."""
    text = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([A-D]\d+[a-z]?) \| (.*) \|$", text, re.MULTILINE))
    assert list(rows) == [c.id for c in CLAIMS]
    for c in CLAIMS:
        cells = re.split(r"(?<!\\) \| ", rows[c.id])
        assert cells[:2] == [x.replace("|", "\\|") for x in (c.statement, c.paper)]
        assert cells[2] in (*HELD.values(), "not reproduced", "needs a GPU", "not yet")
        assert (c.rule is None) or f"- **{c.id}**: {c.rule.text}. " in text
        assert c.history[1:] in text
    papers = sum(c.source == "papers" for c in CLAIMS)
    assert f"Of the papers' {papers} claims" in text
    assert f"of halfulp's own {len(CLAIMS) - papers} claims" in text
