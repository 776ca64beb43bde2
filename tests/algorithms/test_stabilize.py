"""The published stabilized softmax on constructed rows: what it promises (A15-A18) and where it
breaks (D1-D6).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halfulp import emulate, golden
from halfulp.algorithms.stabilize import row_shift
from halfulp.recipes import (
    BF16_AUTHORS,
    BF16_AUTHORS_STABILIZED,
    BF16_FLASH2,
    BF16_HALFULP,
    BF16_PAPER_STABILIZED,
    BF16_STANDARD,
    FP32,
    FP64,
    Recipe,
    Shift,
    Step,
)
from halfulp.testing import Inputs, from_scores

PAPER = Shift("stabilized", beta=7.0)


def shifted(scores: Tensor, shift: Shift) -> Tensor:
    """What fp32 scores are shifted by."""
    base = "2" if shift.kind == "integer" else "e"
    return row_shift(
        scores, scores.amax(-1, keepdim=True), Step(FP32.with_(shift=shift, base=base))
    )


def row(*scores: float) -> Inputs:
    """One query with these scores and values 1, 2, 3, …"""
    s = torch.tensor([scores])
    return from_scores(s, torch.arange(1.0, len(scores) + 1)[:, None])


def run(recipe: Recipe, inputs: Inputs) -> tuple[Tensor, float]:
    """O `[N_q, D_v]` and the largest rounded weight of the forward pass."""
    largest = 0.0

    def watch(name: str, _: Tensor, rounded: Tensor) -> None:
        nonlocal largest
        if name == "weights_operand":
            largest = max(largest, rounded.max().item())

    return emulate(*inputs.operands, scale=1.0, recipe=recipe, observers=[watch])[0, 0], largest


@pytest.mark.parametrize("beta", [2.0, 7.0, 8.0])
@pytest.mark.parametrize("top", [-6.0, -0.5, 0.25, 3.0, 12.0])
@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "standard"])
def test_a15_the_same_function_with_every_weight_below_one(
    top: float, beta: float, algorithm: str
) -> None:
    inputs = row(top, top, top - 1, top - 3).map(Tensor.double)
    recipe = FP64.with_(algorithm=algorithm, shift=Shift("stabilized", beta=beta))
    out, largest = run(recipe, inputs)
    assert (out - golden(*inputs.operands, scale=1.0).out[0, 0]).abs().max() <= 1e-12
    assert largest < 1 if algorithm != "standard" else largest < 0.5  # standard: the operand is P
    assert run(FP64, inputs)[1] == 1


def test_rows_are_shifted_as_printed() -> None:
    scores = torch.tensor(
        [[3.0, 3.0, 1.0], [3.0, 2.9995, 1.0], [-2.0, -2.0, -4.0], [0.0, 0.0, -1.0], [5.0, 1.0, 1.0]]
    )
    exact = shifted(scores, PAPER)[:, 0]
    assert exact.tolist() == [21.0, 3.0, 0.0, 0.0, 5.0]
    tolerant = shifted(scores, Shift("stabilized", beta=2.0, gamma=0.5, tie_tolerance=1e-3))[:, 0]
    assert tolerant.tolist() == [6.0, 6.0, -1.0, 0.0, 5.0]
    assert shifted(scores, Shift("offset", offset=0.5))[:, 0].tolist() == [3.5, 3.5, -1.5, 0.5, 5.5]
    assert shifted(scores - 0.5, Shift("integer"))[:, 0].tolist() == [3.0, 3.0, -2.0, 0.0, 5.0]
    everywhere = shifted(scores, Shift("stabilized", beta=2.0, unconditional=True))[:, 0]
    assert everywhere.tolist() == [6.0, 6.0, 0.0, 0.0, 10.0]


def test_rows_without_a_visible_key_are_not_shifted() -> None:
    scores = torch.full((1, 4), -math.inf)
    for shift in (Shift(), PAPER, Shift("integer"), Shift("offset", offset=2.0)):
        assert shifted(scores, shift).item() == -math.inf


def tied_rows(seed: int, gap: float = 9.5) -> Inputs:
    """300 rows with two equal maxima between 1 and 8 and 30 keys about `gap` below; 512 features, V
    from −4 to −1.
    """
    g = torch.Generator().manual_seed(seed)
    top = 1 + 7 * torch.rand(300, 1, generator=g)
    scores = (top - gap - torch.rand(300, 32, generator=g)).bfloat16().float()
    scores[:, :2] = top.bfloat16().float()
    return from_scores(scores, -(1 + 3 * torch.rand(32, 512, generator=g)).bfloat16().float())


def bias(recipe: Recipe, inputs: Inputs) -> tuple[float, float]:
    """Mean signed error of O in |O|·2⁻⁸ and its standard error; features are the independent
    draws.
    """
    exact = golden(*inputs.operands, scale=1.0).out[0, 0]
    out = emulate(*inputs.operands, scale=1.0, recipe=recipe.with_(block_query=None))[0, 0]
    by_feature = ((out.double() - exact) / exact.abs() * 256).mean(0)
    return by_feature.mean().item(), by_feature.std().item() / len(by_feature) ** 0.5


def test_two_tied_maxima_and_values_of_one_sign_lean() -> None:
    """Coarse recipes lose the tail of l or round P up to 1/2; kernels that keep fp32 sums do not
    lean.
    """
    inputs = tied_rows(0)
    for recipe in (BF16_AUTHORS, BF16_STANDARD):
        mean, error = bias(recipe, inputs)
        assert -0.5 < mean < -0.15
        assert mean < -10 * error
    for recipe in (BF16_FLASH2, BF16_HALFULP):
        mean, error = bias(recipe, inputs)
        assert abs(mean) < 4 * error


@pytest.mark.parametrize("offset", [1.0, 2.0])
def test_a16_a_fixed_offset_leans_as_the_rounding_of_one_number(offset: float) -> None:
    """Every row's top weight is exp(−c), rounded by the same amount; the dynamic shift spreads it
    over the rows.
    """
    inputs = tied_rows(1)
    weight = torch.tensor(-offset).exp()
    predicted = -256 * ((weight.bfloat16().float() - weight) / weight).item()  # O is negative
    weights_alone = BF16_FLASH2.with_(out=FP64.out)
    mean, _ = bias(weights_alone.with_(shift=Shift("offset", offset=offset)), inputs)
    assert abs(predicted) > 0.4
    assert mean == pytest.approx(predicted, abs=0.01)
    dynamic, _ = bias(weights_alone.with_(shift=Shift("stabilized", beta=2.0)), inputs)
    assert abs(dynamic) < 0.1 * abs(mean)


def test_d6_the_shift_leans_row_by_row_unless_l_is_rounded_too() -> None:
    """V = 1: the signed error of a row depends on its maximum; l from the rounded weights has
    none.
    """
    tops = torch.linspace(1, 8, 200)[:, None].bfloat16().float()
    scores = torch.cat([tops, tops, tops - 30], 1)
    inputs = from_scores(scores, torch.ones(3, 1))
    published = BF16_FLASH2.with_(shift=Shift("stabilized", beta=2.0), out=FP64.out)
    error = 256 * (run(published, inputs)[0] - 1)
    assert error.max() > 0.3
    assert error.min() < -0.3
    consistent = run(published.with_(row_sum_from="rounded"), inputs)[0]
    assert (consistent - 1).abs().max() <= 1e-6


def test_a17_shifting_single_maxima_underflows() -> None:
    inputs = row(200.0, 10.0, 0.0)
    unconditional = BF16_FLASH2.with_(shift=Shift("stabilized", beta=2.0, unconditional=True))
    assert run(unconditional, inputs)[0].isnan().all()
    assert run(unconditional.with_(shift=Shift("stabilized", beta=2.0)), inputs)[0].item() == 1


def test_a18_a_factor_near_one_rounds_back_to_one() -> None:
    inputs = row(-0.5, -0.5, -3.0)
    near_one = BF16_PAPER_STABILIZED.with_(shift=Shift("stabilized", gamma=0.998))
    assert run(near_one, inputs)[1] == 1
    assert run(near_one.with_(shift=Shift("stabilized", gamma=0.0)), inputs)[1] < 0.62


@pytest.mark.parametrize("top", [-200.0, 50.0], ids=["D1: deeply negative", "D2: large, beta 7"])
def test_d1_d2_a_repeated_maximum_underflows(top: float) -> None:
    inputs = row(top, top, top - 2)
    exact = golden(*inputs.operands, scale=1.0).out[0, 0]
    assert run(BF16_PAPER_STABILIZED, inputs)[0].isnan().all()
    assert run(BF16_FLASH2.with_(shift=PAPER), inputs)[0].isnan().all()  # the fix in a stock kernel
    # the official code's l ≥ 1e-10: 0 for 1.6
    floored = run(BF16_AUTHORS_STABILIZED.with_(shift=PAPER), inputs)[0]
    assert floored.item() == 0
    for recipe in (BF16_FLASH2, BF16_HALFULP, BF16_AUTHORS):
        assert run(recipe, inputs)[0].item() == pytest.approx(exact.item(), rel=2**-7)


def test_the_nan_of_an_underflow_stays_in_its_row() -> None:
    scores = torch.tensor([[-200.0, -200.0, -202.0], [1.0, 2.0, 3.0]])
    out, _ = run(BF16_PAPER_STABILIZED, from_scores(scores, torch.ones(3, 2)))
    assert out.isnan().all(1).tolist() == [True, False]


def test_d3_a_repeated_maximum_of_zero_keeps_its_ones() -> None:
    assert run(BF16_PAPER_STABILIZED, row(0.0, 0.0, -3.0))[1] == 1
    assert run(BF16_PAPER_STABILIZED, row(0.5, 0.5, -3.0))[1] < 0.1


def test_d4_equal_maxima_in_two_tiles_are_not_seen() -> None:
    inputs = row(3.0, 1.0, 3.0, 1.0)
    assert run(BF16_PAPER_STABILIZED.with_(block_key=2), inputs)[1] == 1
    assert run(BF16_PAPER_STABILIZED.with_(block_key=4), inputs)[1] < 1e-3


def test_d5_ties_are_as_common_as_the_scores_are_coarse() -> None:
    """Rows of 256 Gaussian scores: bf16 scores tie in a few percent of the rows, fp32 scores almost
    never.
    """
    scores = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0))
    inert = shifted(scores, PAPER) == scores.amax(-1, keepdim=True)
    coarse = scores.bfloat16().float()
    active = shifted(coarse, PAPER) != coarse.amax(-1, keepdim=True)
    assert inert.all()
    assert 0.01 < active.float().mean() < 0.2
