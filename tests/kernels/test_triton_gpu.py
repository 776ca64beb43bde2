"""The Triton kernels on a GPU; every test is skipped without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfulp.calls import Result
from halfulp.kernels import triton_attention as door
from halfulp.ops import tiled
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, Shift
from halfulp.testing import Inputs, assert_within_budget, gaussian, relative_error, value_offset
from tests.kernels.asked import Options

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
RECIPES = {
    "halfulp": BF16_HALFULP,
    "stock": BF16_FLASH2,
    "published": BF16_FLASH2.with_(shift=Shift("stabilized")),
    "exact_delta": BF16_FLASH2.with_(delta_from="probabilities"),
}


def on_gpu(inputs: Inputs, options: Options) -> Result:
    q, k, v, do = (x.to("cuda", torch.bfloat16) for x in inputs)
    saved = door.forward(*options.of(q, k, v))
    grads = door.backward(*options.of(q, k, v), saved, do, None)
    return Result(*(x.cpu() for x in (saved.out, saved.lse, *grads[:3])))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 128, 256])
def test_error_is_the_recipes_own(name: str, causal: bool, dim: int) -> None:
    inputs = value_offset(
        gaussian(0, heads=4, key_heads=2, length=300, key_length=333, dim=dim), 4.0
    )
    actual = on_gpu(inputs, Options(recipe=name, is_causal=causal, scale=dim**-0.5))
    assert_within_budget(actual, inputs, RECIPES[name], is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("name", RECIPES)
def test_runs_repeat_bit_for_bit(name: str) -> None:
    inputs, options = (
        gaussian(1, heads=8, key_heads=2, length=700, dim=64),
        Options(recipe=name, scale=0.125),
    )
    first = on_gpu(inputs, options)
    for _ in range(5):
        for a, b in zip(
            first.given().values(), on_gpu(inputs, options).given().values(), strict=True
        ):
            assert torch.equal(a, b)


DRAW = torch.Generator().manual_seed(3)
VISIBLE = torch.rand(2, 1, 300, 333, generator=DRAW) < 0.8
VISIBLE[:, :, 7] = False
OPTIONS: dict[str, dict[str, Any]] = {
    "boolean": {"attn_mask": VISIBLE},
    "additive": {"attn_mask": torch.randn(1, 4, 1, 333, generator=DRAW)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.randn(4, generator=DRAW)},
    "dropout": {"dropout_p": 0.3, "seed": -5},
    "window": {"window": (100, 20), "causal_offset": 33},
}
OPTIONS["all"] = {name: value for one in OPTIONS.values() for name, value in one.items()} | {
    "is_causal": True
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_options_mean_what_they_mean_in_plain_pytorch(
    name: str, case: str, dtype: torch.dtype
) -> None:
    """In fp32 nothing is rounded, so one weight dropped or hidden elsewhere would be seen."""
    on_device = {
        k: v.to("cuda") if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[case].items()
    }
    options = replace(Options(recipe=name, scale=0.125), **on_device)
    inputs = gaussian(4, batch=2, heads=4, key_heads=2, length=300, key_length=333, dim=64)
    q, k, v, do = (x.to("cuda", dtype) for x in inputs)
    results = []
    for kernel in (door, tiled):
        saved = kernel.forward(q, k, v, options)
        grads = kernel.backward(do, None, q, k, v, saved, options)
        results.append([saved.out, saved.lse, *(x for x in grads[:4] if x is not None)])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual.isfinite(), expected.isfinite())
        assert relative_error(actual, expected) <= (2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_round_to_the_same_weights(causal: bool) -> None:
    from benchmarks.triton_weights import rounded_weights, weights_that_differ

    q, k, _, _ = (
        x.to("cuda", torch.bfloat16) for x in gaussian(2, batch=8, heads=8, length=64, dim=64)
    )
    counts = weights_that_differ(rounded_weights(q, k, scale=0.125, is_causal=causal))
    assert counts["query, key"] <= counts["of"] * 1e-4
    assert max(counts["forward, query"], counts["forward, key"]) <= counts["of"] * 1e-4
