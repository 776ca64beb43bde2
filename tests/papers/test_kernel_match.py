"""The comparison with the real kernel finds nothing where nothing differs, and names the step where
one does.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halfulp import Recipe, emulate
from halfulp.calls import Result
from halfulp.formats import BF16, FP32
from halfulp.papers.kernel_match import (
    BACKWARD,
    FORWARD,
    Kernel,
    bits_expected,
    compare,
    emulated,
    match_torch_cpu_flash,
    models,
    ulps_apart,
)
from halfulp.recipes import TORCH_CPU_FLASH

LONG = (1, 2, 1024, 64)  # more than one key block, without which half of the steps do nothing


def kernel_of(recipe: Recipe) -> Kernel:
    """Make a kernel that computes as `recipe` says: the emulated one, with a fault where the recipe
    has one.
    """

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, is_causal: bool
    ) -> Result:
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out, lse = emulate(*leaves, is_causal=is_causal, recipe=recipe, return_lse=True)
        return Result(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out))

    return kernel


def test_the_real_kernel_is_matched():
    shapes = ((1, 2, 1024, 64), (2, 2, 333, 80), (2, 4, 77, 32))
    found = match_torch_cpu_flash(shapes, seeds=(0,))
    assert found.calls == 6
    assert [match.tensor for match in found.tensors] == [*FORWARD, *BACKWARD]
    assert found.tensors[0].elements == 2 * sum(b * h * n * d for b, h, n, d in shapes)
    assert found.tensors[1].elements == 2 * sum(b * h * n for b, h, n, _ in shapes)
    if bits_expected():
        assert all(match.identical == match.elements for match in found.tensors)
        assert all(match.largest_ulps == 0 for match in found.tensors)
        assert found.differing_steps == ()
    else:
        assert all(match.fraction > 0.4 for match in found.tensors if match.tensor != "lse")


# the others have another exponential
RECIPES = [model for model in models() if model.recipe != TORCH_CPU_FLASH]


COSTS = {
    "block_key": {"out": 0.72},
    "weights_operand": {"out": 0.60},
    "row_sum": {"out": 0.988},
    "grad_accumulator": {"grad_query": 0.74, "grad_key": 0.59, "grad_value": 0.59},
}
"""Shares of a tensor's bits that a wrong step is known to leave."""


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("model", RECIPES, ids=lambda model: model.step)
def test_the_step_that_differs_is_named_and_costs_the_bits_it_is_known_to_cost(model):
    found = match_torch_cpu_flash((LONG,), (False,), (3,), kernel=kernel_of(model.recipe))
    best = found.differing_steps[0]
    assert (best.step, best.model, best.mean) == (model.step, model.model, 1.0)
    shares = {tensor.tensor: tensor.fraction for tensor in found.tensors}
    for name, share in COSTS.get(model.step, {}).items():
        assert abs(shares[name] - share) < 0.03, name


def test_another_exponential_is_named():
    # FlashAttention-2 in the same blocks differs in the exponential and, in the last bits of l, in
    # the order of sums.
    recipe = TORCH_CPU_FLASH.with_(algorithm="flash2")
    found = match_torch_cpu_flash((LONG,), (False,), (4,), kernel=kernel_of(recipe))
    assert found.differing_steps[0].step == "weights"
    assert found.differing_steps[0].identical["out"] > 0.99


def test_ulps_count_in_the_larger_value():
    def apart(a: float, b: float) -> float:
        return float(ulps_apart(torch.tensor([a]), torch.tensor([b]), BF16))

    assert apart(1.0, 1.0078125) == apart(-1.0078125, -1.0) == 1
    assert apart(0.99609375, 1.0) == 0.5
    assert apart(0.0, -0.0) == apart(math.inf, math.inf) == apart(math.nan, math.nan) == 0
    assert apart(1.0, -1.0) == 256
    assert apart(1.0, math.inf) == apart(-math.inf, math.inf) == apart(math.nan, 1.0) == math.inf
    assert float(ulps_apart(torch.tensor([1.0]), torch.tensor([1 + 2**-23]), FP32)) == 1


def test_one_changed_element_is_counted():
    inputs = [
        torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i in range(4)
    ]
    ours = emulated(*inputs, True)
    changed = ours.grad_key.clone()
    changed[0, 1, 3, 2] = torch.nextafter(
        changed[0, 1, 3, 2], torch.tensor(math.inf, dtype=torch.bfloat16)
    )
    theirs = Result(ours.out, ours.lse, ours.grad_query, changed, ours.grad_value)
    found = {
        match.tensor: (match.elements - match.identical, match.largest_ulps)
        for match in compare(theirs, ours)
    }
    assert found.pop("grad_key") in ((1, 1.0), (1, 0.5))
    assert set(found.values()) == {(0, 0.0)}


@pytest.mark.parametrize("name", ["shapes", "causal", "seeds"])
def test_nothing_to_compare_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}=\(\): accepted is at least one$"):
        match_torch_cpu_flash(**{name: ()})
