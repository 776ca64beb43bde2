"""The native tile loops against the same recipes step by step, and against plain torch: every bit
of every result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfulp import emulate, native
from halfulp.algorithms import Problem, fused
from halfulp.calls import Call, Dropout
from halfulp.formats import BF16, FP16, FP32, MXFP8_E4M3, OCP_E4M3, custom
from halfulp.recipes import BF16_FLASH2, BF16_HALFULP, STEPS, Matmul, Recipe, Shift, Step
from halfulp.recipes.named import RECIPES, flash2, uniform

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

ISAS = (-1,) if native.missing() else range(min(native.ISAS.index(native.best_isa()) + 1, 3))
RESULTS = ("out", "lse", "grad_query", "grad_key", "grad_value")
VARIANTS = {name: recipe for name, recipe in RECIPES.items() if recipe.compute == "float32"}
VARIANTS.pop("TORCH_CPU_FLASH")  # loops of its own
VARIANTS |= {
    "split": BF16_HALFULP.with_(exponential="split"),
    "summed delta": BF16_FLASH2.with_(delta_from="probabilities", block_key=24),
    "exact out": BF16_FLASH2.with_(delta_from="exact_out"),
    "recomputed out": BF16_FLASH2.with_(delta_from="recomputed"),
    "offset": BF16_FLASH2.with_(shift=Shift("offset", offset=1.5)),
    "published": BF16_FLASH2.with_(shift=Shift("stabilized", beta=7.0)),
    "always shifted": uniform(
        BF16, shift=Shift("stabilized", beta=3.0, unconditional=True, tie_tolerance=0.1)
    ),
    "odd blocks": uniform(FP16, block_query=17, block_key=23),
    "odd blocks, flash1": uniform(FP16, "flash1", block_query=17, block_key=23),
    "odd blocks, standard": uniform(FP16, "standard", block_query=17),
    "whole": BF16_FLASH2.with_(block_query=None, block_key=None),
    "toward zero": uniform(BF16.with_(rounding="toward_zero")),
    "scaled weights": flash2(OCP_E4M3, weights_scale=256.0, block_key=32),
    "coarse": uniform(custom(3, 4), block_key=32),
}
MASKS = ("none", "causal", "bool", "additive")


def drawn(seed: int, b: int, h: int, n: int, nk: int, d: int, dv: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, h, n, d), (b, h, nk, d), (b, h, nk, dv), (b, h, n, dv))
    query, key, value, grad_out = (torch.randn(shape, generator=g) for shape in shapes)
    return [query, key, value + 2, grad_out]


def masked(kind: str, n: int, nk: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(n)
    if kind == "bool":
        return {"attn_mask": torch.rand(n, nk, generator=g) > 0.3}
    return (
        {"attn_mask": torch.randn(1, nk, generator=g)}
        if kind == "additive"
        else {"is_causal": kind == "causal"}
    )


def run(
    x: list[Tensor], recipe: Recipe, *, step_by_step: bool = False, **options: Any
) -> dict[str, Tensor]:
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    observers = ((lambda *_: None),) if step_by_step else ()
    out, lse = emulate(*leaves, recipe=recipe, return_lse=True, observers=observers, **options)
    gradients = torch.autograd.grad((out, lse), leaves, (x[3], 0.1 * torch.ones_like(lse)))
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *gradients), strict=True))


@contextmanager
def without_library() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_found", lambda: "taken away by the test")
        yield


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in RESULTS:
        equal = (a[name] == b[name]) | (a[name].isnan() & b[name].isnan())
        assert equal.all(), f"{name}: {int((~equal).sum())} of {equal.numel()} differ"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_bits_of_the_step_by_step_loops(name: str, mask: str) -> None:
    for shape in ((1, 2, 40, 33, 20, 72), (1, 1, 150, 140, 16, 16)):
        x, options = drawn(0, *shape), masked(mask, *shape[2:4])
        assert_same(
            run(x, VARIANTS[name], **options), run(x, VARIANTS[name], step_by_step=True, **options)
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bits_of_plain_torch(name: str) -> None:
    """A recipe with a stated order of products means the same where there is no library."""
    recipe = VARIANTS[name].with_(matmul=Matmul(FP32, "sequential"))
    x = drawn(1, 1, 2, 30, 40, 16, 8)
    found = run(x, recipe, is_causal=True)
    with without_library():
        assert_same(found, run(x, recipe, is_causal=True))


FORMATS = st.builds(
    lambda e, m, rounding, subnormals: custom(e, m, rounding=rounding, subnormals=subnormals),
    st.integers(2, 8),
    st.integers(0, 12),
    st.sampled_from(["nearest_even", "nearest_even", "nearest_away", "toward_zero", "up", "down"]),
    st.booleans(),
)
RECIPE = st.builds(
    lambda steps, structure: Recipe("drawn", **structure, **steps),
    st.dictionaries(st.sampled_from(sorted(STEPS)), FORMATS, max_size=6),
    st.fixed_dictionaries(
        {
            "algorithm": st.sampled_from(["flash2", "flash2", "flash1", "standard"]),
            "block_query": st.sampled_from([None, 1, 7, 16, 128]),
            "block_key": st.sampled_from([None, 1, 7, 16, 128]),
            "backward_weights": st.sampled_from(["lse", "maximum", "rounded"]),
            "divisor_from": st.sampled_from(["row_sum", "lse", "balanced"]),
            "grad_value_from": st.sampled_from(["probabilities", "lse"]),
            "delta_from": st.sampled_from(
                ["out", "residual", "exact_out", "recomputed", "probabilities"]
            ),
            "gradient_scale_at": st.sampled_from(["products", "scores", "probabilities"]),
            "weights_scale": st.sampled_from([1.0, 3.0]),
            "row_sum_floor": st.sampled_from([0.0, 0.5]),
            "lse_from": st.sampled_from(["row_sum", "exact"]),
            "base": st.sampled_from(["e", "2"]),
        }
    ),
)


@settings(max_examples=60)
@given(
    RECIPE,
    st.sampled_from(ISAS),
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 20), st.integers(1, 20)),
    st.sampled_from(MASKS),
    st.integers(0, 99),
)
def test_any_recipe(
    recipe: Recipe, isa: int, sizes: tuple[int, int, int, int], mask: str, seed: int
) -> None:
    x, options = drawn(seed, 1, 2, *sizes), masked(mask, *sizes[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "BEST_ISA", isa)
        assert_same(run(x, recipe, **options), run(x, recipe, step_by_step=True, **options))


@pytest.mark.parametrize("shape", [(1, 1, 300, 300, 64, 64), (2, 3, 200, 90, 64, 72)])
def test_threads_do_not_matter(shape: tuple[int, ...]) -> None:
    """Few heads are cut into spans of rows and of columns, many are not."""
    x, recipe = drawn(2, *shape), BF16_HALFULP.with_(block_query=32, block_key=32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(run(x, recipe, is_causal=True))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.parametrize("step", ["weights_operand", "grad_scores", "probabilities_operand"])
def test_one_rounding_left_out_is_seen(step: str) -> None:
    x, recipe = drawn(3, 1, 2, 40, 40, 16, 16), BF16_FLASH2
    left_out = run(x, recipe.with_(**{step: FP32}))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(left_out, run(x, recipe, step_by_step=True))


STOCHASTIC = BF16.with_(rounding="stochastic")
REFUSED = {
    "products in blocks": BF16_FLASH2.with_(matmul=Matmul(FP32, "blocked", 8)),
    "products not summed in fp32": BF16_FLASH2.with_(matmul=Matmul(BF16, "sequential")),
    "weights_operand in bf16": BF16_FLASH2.with_(weights_operand=STOCHASTIC),
    "scores in mxfp8_e4m3": BF16_FLASH2.with_(scores=MXFP8_E4M3),
    "not float32 on a CPU": RECIPES["BF16_FLOOR"],
}


def problem_of(recipe: Recipe, observers: Sequence[Any] = (), **more: Any) -> Problem:
    q, k, v, _ = drawn(4, 1, 2, 8, 8, 32, 32)
    return Problem.read(Call(q, k, v, scale=0.1, **more), Step(recipe, observers))


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_library_does_not_take_stays_with_torch(reason: str) -> None:
    assert fused.refused(problem_of(REFUSED[reason])) == reason


def test_options_observers_and_a_missing_library_too() -> None:
    options: tuple[dict[str, Any], ...] = (
        {"softcap": 3.0},
        {"dropout": Dropout(0.5, 1)},
        {"sinks": torch.zeros(2)},
    )
    for option in options:
        assert fused.refused(problem_of(BF16_FLASH2, **option)) == "softcap, sinks or dropout"
    assert fused.refused(problem_of(BF16_FLASH2, [lambda *_: None])) == "observers"
    problem = problem_of(BF16_FLASH2)
    assert fused.refused(problem) is None
    with without_library():
        assert fused.refused(problem) == "taken away by the test"
