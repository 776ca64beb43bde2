"""The Triton kernels on a GPU; every test is skipped without one."""

from __future__ import annotations

import pytest
import torch

from halfulp.algorithms import AttentionResult
from halfulp.kernels import triton_attention as door
from halfulp.kernels.options import Options
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, Shift
from halfulp.testing import Inputs, assert_within_budget, gaussian, value_offset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
RECIPES = {
    "halfulp": BF16_HALFULP,
    "stock": BF16_FLASH2,
    "published": BF16_FLASH2.with_(shift=Shift("stabilized")),
    "exact_delta": BF16_FLASH2.with_(delta_from="probabilities"),
}


def on_gpu(inputs: Inputs, options: Options) -> AttentionResult:
    q, k, v, do = (x.to("cuda", torch.bfloat16) for x in inputs)
    saved = door.forward(q, k, v, options)
    grads = door.backward(do, None, q, k, v, saved, options)
    return AttentionResult(*(x.cpu() for x in (saved.out, saved.lse, *grads[:3])))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 128, 256])
def test_error_is_the_recipes_own(name: str, causal: bool, dim: int) -> None:
    inputs = value_offset(gaussian(0, heads=4, key_heads=2, length=300, key_length=333, dim=dim), 4.0)
    actual = on_gpu(inputs, Options(recipe=name, is_causal=causal, scale=dim**-0.5))
    assert_within_budget(actual, inputs, RECIPES[name], is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("name", RECIPES)
def test_runs_repeat_bit_for_bit(name: str) -> None:
    inputs, options = gaussian(1, heads=8, key_heads=2, length=700, dim=64), Options(recipe=name, scale=0.125)
    first = on_gpu(inputs, options)
    for _ in range(5):
        for a, b in zip(vars(first).values(), vars(on_gpu(inputs, options)).values(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_round_to_the_same_weights(causal: bool) -> None:
    from halfulp.kernels.triton_weights import rounded_weights, weights_that_differ

    q, k, _, _ = (x.to("cuda", torch.bfloat16) for x in gaussian(2, batch=8, heads=8, length=64, dim=64))
    counts = weights_that_differ(rounded_weights(q, k, scale=0.125, is_causal=causal))
    assert counts["query, key"] <= counts["of"] * 1e-4
    assert max(counts["forward, query"], counts["forward, key"]) <= counts["of"] * 1e-4
