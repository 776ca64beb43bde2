"""In-model comparison: it sees every call, measures what it says, and leaves the run's bits
alone.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from halfulp.attention import golden
from halfulp.calls import Call, Sees
from halfulp.papers.in_model import ATTENTIONS, Comparing, compare_in_model, same_bits
from halfulp.papers.model_speed import EAGER, Speed, eager, measure_speed
from halfulp.runs.threads import one_thread
from halfulp.training.attention import AttentionPlan, attention_function
from halfulp.training.checkpoint import model_tensors
from halfulp.training.config import Language, LayerTask, Optimizer, Pictures, RunConfig
from halfulp.training.loop import train

PICTURES = RunConfig(
    Pictures(layers=1, heads=2, width=16, size=8, patch=4, count=4, data="shapes", name_length=12),
    AttentionPlan.of("torch:flash"),
    Optimizer(learning_rate=1e-3),
    steps=4,
    batch=2,
    autocast="bf16",
)
LANGUAGE = dataclasses.replace(
    PICTURES, workload=Language(layers=2, heads=2, width=16, context=12), steps=3
)
LAYER = RunConfig(
    LayerTask(batch=2, tokens=8, width=8, constant=2), AttentionPlan.of("torch:flash"), steps=3
)


@pytest.mark.parametrize(("config", "layers"), [(PICTURES, 2), (LANGUAGE, 2), (LAYER, 1)])
def test_every_call_is_compared_and_the_run_keeps_its_bits(config: RunConfig, layers: int) -> None:
    found = compare_in_model(config)
    assert found.calls == layers * config.steps
    assert {(x.step, x.layer) for x in found.deviations} == {
        (step, layer) for step in range(1, config.steps + 1) for layer in range(layers)
    }
    with one_thread():
        plain = train(dataclasses.replace(config, metrics_every=1))
    assert found.loss == plain.curve("loss")
    assert same_bits(model_tensors(plain.workload.model), found.weights)


def test_a_run_whose_bits_were_changed_is_told_from_one_that_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Comparing.__call__

    def meddling(self: Comparing, *args: object, **options: object) -> Tensor:
        return plain(self, *args, **options) * (1 + 2**-7)  # type: ignore[arg-type]

    honest = compare_in_model(PICTURES)
    monkeypatch.setattr(Comparing, "__call__", meddling)
    assert not same_bits(compare_in_model(PICTURES).weights, honest.weights)


def test_only_every_so_manyth_step_is_looked_at() -> None:
    found = compare_in_model(PICTURES, 3)
    assert sorted({x.step for x in found.deviations}) == [1, 4]
    assert found.calls == 4


def test_deviations_are_those_of_a_slow_computation() -> None:
    tap = Comparing(
        {name: attention_function(choice) for name, choice in ATTENTIONS.items()}, step=9
    )
    query, key, value = torch.randn(3, 2, 3, 40, 8, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(2, 3, 40, 8)
    assert tap(5, Call(query, key, value, Sees(True), 0.3), out) is out
    q, k, v = (x.bfloat16() for x in (query, key, value))
    outs = {
        name: attention_function(choice)(q, k, v, is_causal=True, scale=0.3).double()
        for name, choice in ATTENTIONS.items()
    }
    outs["fp64"] = golden(q, k, v, is_causal=True, scale=0.3).out
    assert len(tap.found) == 5
    for one in tap.found:
        apart = [
            abs(a - b)
            for a, b in zip(outs[one.version].flatten(), outs[one.against].flatten(), strict=True)
        ]
        mean = sum(map(float, apart)) / len(apart)
        spread = (sum((float(x) - mean) ** 2 for x in apart) / (len(apart) - 1)) ** 0.5
        assert (one.step, one.layer) == (9, 5)
        assert one.largest == float(max(apart))
        assert one.mean == pytest.approx(mean, rel=1e-12)
        assert one.deviation == pytest.approx(spread, rel=1e-12)
        assert one.largest > 0


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """An attention that is off by an eighth in one head of long sequences alone."""
    module = ModuleType("planted_attention")

    def off(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        out = attention_function("torch:math")(
            query, key, value, is_causal=is_causal, scale=scale
        ).clone()
        if key.shape[2] > 4:
            out[:, 1] += 0.125
        return out

    module.off = off  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_attention", module)
    return "planted_attention:off"


def test_a_planted_deviation_is_found_in_its_layer_and_nothing_elsewhere(planted: str) -> None:
    found = compare_in_model(
        PICTURES, attentions={"baseline": "torch:math", "off": planted, "same": "torch:math"}
    )
    for one in found.deviations:
        if one.against == "baseline":
            # names are longer than 4 symbols, pictures have 4 patches
            off = one.version == "off" and one.layer == 1
            assert one.largest == pytest.approx(0.125 if off else 0, rel=0.1)
            assert one.mean == pytest.approx(0.0625 if off else 0, rel=0.1)
    assert found.mean_ratio("same") == {0: 1.0, 1: 1.0}
    assert found.mean_ratio("off")[1] > 10
    names, pictures = found.figure("off", "baseline").series
    assert names.y == (0.0,) * 4 or pictures.y == (0.0,) * 4


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted are 'baseline' and another version"):
        compare_in_model(PICTURES, attentions={"baseline": "torch:math"})
    with pytest.raises(ValueError, match="every=0"):
        compare_in_model(PICTURES, 0)
    with pytest.raises(ValueError, match="attention='nonsense'"):
        compare_in_model(PICTURES, attentions={"baseline": "torch:math", "x": "nonsense"})


# --- speed of the whole model


def test_the_speed_up_is_the_median_over_pairs_and_its_interval_counts_pairs() -> None:
    speed = Speed("x", 8, tuple(float(n) for n in range(1, 22)), (1.0,) * 21)
    assert speed.speed_up == 11
    assert speed.quartiles == (6, 16)
    low, high = speed.interval
    # the classical order statistics of a median of 21: the 6th from either end (coverage 97 %)
    assert (low, high) == (6, 16)
    slow_minute = Speed("x", 8, (1.0, 1.0, 50.0, 50.0, 50.0), (2.0, 2.0, 100.0, 100.0, 100.0))
    assert slow_minute.speed_up == 0.5  # pairs, not medians of either side


def test_both_attentions_are_timed_equally_often_on_one_batch() -> None:
    calls = {"a": 0, "b": 0}

    def counting(name: str) -> str:
        def attend(
            query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
        ) -> Tensor:
            calls[name] += 1
            return eager(query, key, value, is_causal=is_causal, scale=scale)

        module = ModuleType(f"counting_{name}")
        module.attend = attend  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        return f"counting_{name}:attend"

    try:
        found = measure_speed("x", LANGUAGE, 3, baseline=counting("a"), flash=counting("b"))
    finally:
        for name in ("a", "b"):
            sys.modules.pop(f"counting_{name}", None)
    assert calls["a"] == calls["b"] == 2 * (3 + 2)  # layers × (pairs + warm-up)
    assert len(found.baseline) == len(found.flash) == 3
    assert found.tokens == 12
    with pytest.raises(ValueError, match="pairs=1"):
        measure_speed("x", LANGUAGE, 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_plain_attention_is_attention(is_causal: bool) -> None:
    query, key, value = torch.randn(
        3, 1, 2, 10, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    out = eager(query, key, value, is_causal=is_causal, scale=0.4)
    torch.testing.assert_close(out, golden(query, key, value, is_causal=is_causal, scale=0.4).out)
    assert (
        attention_function(EAGER)(query, key, value, is_causal=is_causal, scale=0.4).shape
        == out.shape
    )
