"""Two audits beside each other: what changed is called so, and what did not is not."""

import copy

import pytest
import torch

from halfulp.audit import Shape, against, audit

SHAPES = [Shape(2, 4, 64, 64, 16)]


def naive(query, key, value, *, is_causal=False, scale=None):
    s = query.float() @ key.float().mT * scale
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return (s.softmax(-1).to(query.dtype).float() @ value.float()).to(query.dtype)


def coarse(query, key, value, *, is_causal=False, scale=None):
    s = (query.float() @ key.float().mT * scale).to(query.dtype).float()
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return (s.softmax(-1).to(query.dtype).float() @ value.float()).to(query.dtype)


@pytest.fixture(scope="module")
def reports():
    return {f: audit(f, shapes=SHAPES, explain=False).as_dict() for f in (naive, coarse)}


def test_the_same_audit_twice_is_the_same(reports):
    found = against.compare(reports[naive], reports[naive])
    assert found.change == "same"
    assert found.counted("same") == len(found.pairs) > 100
    assert all(pair.times == 1 for pair in found.pairs)


def test_a_worse_kernel_is_worse_and_the_other_way_round_better(reports):
    worse = against.compare(reports[naive], reports[coarse])
    assert worse.change == "worse"
    assert worse.pairs[0].change == "worse"
    assert worse.pairs[0].at_least > 1
    assert worse.worse[0].startswith(f"{worse.pairs[0].property} on ")
    assert worse.counted("better") == 0
    better = against.compare(reports[coarse], reports[naive])
    assert better.change == "better"
    assert better.counted("better") == worse.counted("worse")
    assert better.pairs[0].times == pytest.approx(1 / worse.pairs[0].times)


def scaled(report, factor, noise=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    changed = copy.deepcopy(report)
    for case in changed["cases"]:
        for row in case["rows"]:
            row["heads"] = [
                x
                * factor
                * float(torch.exp(noise * torch.randn(1, generator=g, dtype=torch.double)))
                for x in row["heads"]
            ]
    return changed


def test_what_is_significant_and_small_is_the_same(reports):
    least = against.LEAST["bfloat16"]
    assert against.compare(reports[naive], scaled(reports[naive], 0.99 * least)).change == "same"
    found = against.compare(reports[naive], scaled(reports[naive], 1.01 * least))
    assert found.counted("worse") == len(found.pairs)


def test_chance_is_called_worse_at_most_as_often_as_said(reports):
    """Noise of 30 % a head, without a trend: hardly any of a hundred comparisons may alarm."""
    alarms = sum(
        against.compare(reports[naive], scaled(reports[naive], 1.0, 0.3, seed)).change != "same"
        for seed in range(60)
    )
    assert alarms <= 3


def test_what_no_figure_shows_is_worse_too(reports):
    now = copy.deepcopy(reports[naive])
    case = {"probe": "gaussian", "shape": "(1, 1, 8, 8)", "seed": 0, "file": None}
    now["findings"].append(
        {"grade": "defect", "kind": "non-finite", "property": "dQ not finite", "case": case,
         "tensor": "grad_query", "figure": "3 elements NaN", "ratio": None}
    )  # fmt: skip
    assert against.compare(reports[naive], now).worse == (
        "dQ not finite on gaussian (1, 1, 8, 8), seed 0: 3 elements NaN",
    )
    assert against.compare(now, now).change == "same"
    now = copy.deepcopy(reports[naive]) | {"verdict": "forward sound", "differentiable": False}
    assert "no gradients" in against.compare(reports[naive], now).worse[0]
    now = copy.deepcopy(reports[naive]) | {"verdict": "incomplete", "reason": "lost"}
    assert against.compare(reports[naive], now).worse == ("it is incomplete now: lost",)


def test_what_cannot_be_paired_is_told(reports):
    now = copy.deepcopy(reports[naive])
    lost = next(case for case in now["cases"] if case["status"] == "ok")
    lost["status"], lost["rows"] = "error", []
    assert against.compare(reports[naive], now).unpaired == (
        f"measured only before: {lost['probe']}",
    )
    with pytest.raises(ValueError, match="share no measured case"):
        against.compare(reports[naive] | {"cases": []}, now)
    with pytest.raises(ValueError, match="float16"):
        against.compare(reports[naive] | {"dtype": "float16"}, now)
    for case in now["cases"]:
        for row in case["rows"]:
            del row["heads"]
    with pytest.raises(ValueError, match="without the figures of its heads"):
        against.compare(now, reports[naive])
