"""Sweep figures against a direct computation, and the effects that must show at any size."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest
import torch

from halfulp.experiments.sweep import (
    FAMILIES,
    FORMATS,
    Setting,
    SweepResult,
    baseline,
    draw_inputs,
    factor_of,
    sweep_block,
    sweep_length,
    sweep_order,
    sweep_precision,
)
from halfulp.formats import BF16, FP16, FP32, FP64, TF32, round_to
from halfulp.runs.results import Figure, Series, Table

SMALL = Setting(length=96, head_dim=16, memory=1024, seeds=3)


@pytest.fixture(scope="module")
def precision() -> SweepResult:
    return sweep_precision(SMALL)


def direct(fmt_bits: torch.dtype, family: str) -> list[float]:
    """max |out − golden| per seed in bf16 by torch's own bf16 tensors, without any of the package's
    algorithms.
    """
    query, key, value = (x.to(fmt_bits) for x in draw_inputs(SMALL))
    exact = (query.double() @ key.double().mT * 16**-0.5).softmax(-1) @ value.double()
    if family == "baseline":
        scores = ((query.float() @ key.float().mT).to(fmt_bits).float() * 16**-0.5).to(fmt_bits)
        weights = scores.float().softmax(-1).to(fmt_bits)
    else:
        weights = (query.float() @ key.float().mT * 16**-0.5).softmax(-1)
    out = (weights.float() @ value.float()).to(fmt_bits)
    return (out.double() - exact).abs().amax((1, 2, 3)).tolist()


def test_the_baseline_is_torchs_own_bf16_arithmetic(precision: SweepResult) -> None:
    (found,) = precision.select(format="bf16", family="baseline", against="golden")
    assert found.max == pytest.approx(direct(torch.bfloat16, "baseline"), rel=1e-3)


def test_statistics_are_those_of_the_absolute_difference() -> None:
    from halfulp import emulate, golden

    setting = Setting(length=40, head_dim=8, memory=256, seeds=2)
    found = sweep_precision(setting, formats=(BF16,), families=("flash1 uniform",))
    query, key, value = (round_to(x, BF16) for x in draw_inputs(setting))
    recipe = FAMILIES["flash1 uniform"](BF16).with_(block_query=8, block_key=8)
    out = emulate(query, key, value, recipe=recipe)
    for against, other in (
        ("golden", golden(query, key, value).out),
        ("baseline", emulate(query, key, value, recipe=baseline(BF16))),
    ):
        (point,) = found.select(family="flash1 uniform", against=against)
        assert (point.block_query, point.block_key) == (8, 8)
        for seed in range(2):
            size = (out[seed] - other[seed]).abs()
            assert point.max[seed] == size.max().item()
            assert point.mean[seed] == pytest.approx(size.mean().item(), rel=1e-12)
            assert point.std[seed] == pytest.approx(size.std(correction=0).item(), rel=1e-12)


def test_deviation_falls_with_the_mantissa(precision: SweepResult) -> None:
    for family in ("flash2 stock", "flash1 uniform"):
        for against in ("baseline", "golden"):
            medians = [
                statistics.median(
                    precision.select(format=fmt.name, family=family, against=against)[0].max
                )
                for fmt in FORMATS
            ]
            assert all(a > 10 * b for a, b in pairwise(medians[1:]))
            assert medians[0] > 4 * medians[1]


def test_formats_keep_their_precision(precision: SweepResult) -> None:
    """fp64 is held in float64: its error is nowhere near fp32's."""
    (exact,) = precision.select(format="fp64", family="flash2 stock", against="golden")
    assert max(exact.max) < 1e-14
    assert {baseline(fmt).compute for fmt in (BF16, TF32, FP32)} == {"float32"}
    assert baseline(FP64).compute == "float64"


def test_rounding_everything_deviates_more_than_stock(precision: SweepResult) -> None:
    (base,) = precision.select(format="bf16", family="baseline", against="golden")
    stock, uniform = (
        factor_of(precision.select(format="bf16", family=family, against="golden")[0], base)
        for family in ("flash2 stock", "flash1 uniform")
    )
    assert stock is not None
    assert uniform is not None
    assert stock < 1.5 < uniform


def test_length_is_swept_at_fixed_blocks() -> None:
    found = sweep_length(SMALL, lengths=(32, 128), families=("flash1 uniform",))
    points = found.select(family="flash1 uniform", against="baseline")
    assert [(p.x, p.block_key) for p in points] == [(32, 16), (128, 16)]
    assert statistics.median(points[1].mean) > statistics.median(points[0].mean)
    assert [figure.series[0].x for figure in found.figures] == [(32, 128)] * 3


def test_blocks_follow_the_memory_and_larger_ones_deviate_less() -> None:
    found = sweep_block(SMALL, memories=(256, 4096), formats=(BF16,))
    small, large = found.select(family="flash1 uniform", against="baseline")
    assert [(p.block_query, p.block_key, p.x) for p in (small, large)] == [
        (4, 4, 16),
        (16, 64, 1024),
    ]
    assert statistics.median(large.max) < statistics.median(small.max)


def test_orders_change_the_blocks_as_named() -> None:
    found = sweep_order(SMALL, memories=(4096,), formats=(FP16,))
    blocks = {p.family: (p.block_query, p.block_key) for p in found.select(against="baseline")}
    assert blocks == {
        "flash1 uniform": (16, 64),
        "flash1 uniform, exchanged": (64, 16),
        "flash1 uniform, square": (32, 32),
        "flash1 uniform, square, B_c kept": (64, 64),
    }
    areas = {p.x for p in found.select(against="baseline")}
    assert areas == {1024, 4096}


def test_inputs_are_seeded_one_by_one() -> None:
    few, many = draw_inputs(SMALL), draw_inputs(Setting(**{**SMALL.__dict__, "seeds": 5}))
    for a, b in zip(few, many, strict=True):
        assert torch.equal(a, b[:3])
        assert 0 <= a.min() <= a.max() < 1
    normal = draw_inputs(Setting(length=96, head_dim=16, seeds=2, inputs="normal"))
    assert normal[0].min() < -1


def test_results_turn_into_json(precision: SweepResult) -> None:
    plain = json.loads(json.dumps(precision.as_dict(), allow_nan=False))
    figure = plain["figures"][1]
    assert set(figure) == {
        "title",
        "x_label",
        "y_label",
        "x_log",
        "y_log",
        "series",
        "caption",
        "command",
    }
    assert figure["series"][0]["x"] == ["bf16", "fp16", "fp32", "fp64"]
    assert set(figure["series"][0]) == {"label", "x", "y", "low", "high", "style"}
    assert "--length 96" in figure["command"]


@pytest.mark.parametrize("change", [{"length": 0}, {"seeds": 0}, {"inputs": "gamma"}])
def test_bad_settings_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        Setting(**change)  # type: ignore[arg-type]


def test_plain_data_holds_its_shape() -> None:
    with pytest.raises(ValueError, match="high of 1 values"):
        Series("a", (1, 2), (1.0, 2.0), high=(1.0,))
    with pytest.raises(ValueError, match="row of 1 cells"):
        Table("t", ("a", "b"), (("x",),), "", "")
    broken = Figure("t", "x", "y", (Series("a", (1,), (math.nan,)),), "", "").as_dict()
    assert broken["series"][0]["y"] == [None]
