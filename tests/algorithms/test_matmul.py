"""Matrix products against exact fractions, one rounding at a time, and what a coarse running sum
does.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from halfulp import emulate
from halfulp.algorithms.matmul import matmul, product
from halfulp.formats import BF16, FP16, FP32, FP64, OCP_E5M2, TF32, Format, round_to
from halfulp.native import missing
from halfulp.recipes import FP32 as FP32_RECIPE
from halfulp.recipes import Matmul, Step
from halfulp.testing import gaussian


def nearest_even(x: Fraction, fmt: Format) -> Fraction:
    """The nearest number of `fmt` (no overflow), ties to the even significand; in exact
    arithmetic.
    """
    if x == 0:
        return x
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    spacing = Fraction(2) ** (max(exponent, fmt.min_exponent) - fmt.mantissa_bits)
    return round(x / spacing) * spacing  # Fraction rounds half to even


def slow(a: Tensor, b: Tensor, spec: Matmul) -> Tensor:
    """One element and one addition at a time, in fractions."""
    width = 1 if spec.order == "sequential" else spec.block
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            terms = [
                Fraction(x) * Fraction(y)
                for x, y in zip(a[i].tolist(), b[:, j].tolist(), strict=True)
            ]
            total = Fraction(0)
            for k in range(0, len(terms), width):
                total = nearest_even(total + sum(terms[k : k + width]), spec.accumulate)
            out[i, j] = float(total)
    return out.to(a.dtype)


def operands(fmt: Format, seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """`[5, 37]` and `[37, 4]` with magnitudes over several binades."""
    g = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(s, generator=g) * torch.exp2(spread * torch.randn(s, generator=g))
        for s in ((5, 37), (37, 4))
    )
    return round_to(a, fmt), round_to(b, fmt)


@pytest.mark.parametrize("accumulate", [FP32, BF16, FP16, TF32, OCP_E5M2], ids=str)
@pytest.mark.parametrize("order", ["sequential", "blocked"])
@pytest.mark.parametrize("block", [1, 5, 16, 100])
def test_emulated_orders_bit_for_bit(accumulate: Format, order: str, block: int) -> None:
    for seed, spread in ((0, 0.0), (1, 3.0)):
        a, b = operands(BF16, seed, spread)
        spec = Matmul(accumulate, order, block)
        assert torch.equal(matmul(a, b, spec), slow(a, b, spec))


def test_the_order_of_terms_is_seen() -> None:
    """A planted fault: the same terms from the other end give other bits, and the slow loop
    notices.
    """
    a, b = operands(BF16, 2)
    spec = Matmul(BF16, "sequential")
    assert not torch.equal(matmul(a.flip(1), b.flip(0), spec), slow(a, b, spec))


def test_fp32_operands_sequentially_as_a_fused_multiply_add() -> None:
    a, b = operands(FP32, 3)
    spec = Matmul(FP32, "sequential")
    assert torch.equal(matmul(a, b, spec), slow(a, b, spec))


def test_batches_are_summed_alike() -> None:
    (a0, b0), (a1, b1) = operands(BF16, 0), operands(BF16, 1)
    spec = Matmul(BF16, "blocked", 8)
    both = matmul(torch.stack([a0, a1]), torch.stack([b0, b1]), spec)
    assert torch.equal(both, torch.stack([slow(a0, b0, spec), slow(a1, b1, spec)]))


@pytest.mark.parametrize(
    ("accumulate", "stuck_at"), [(BF16, 256.0), (FP16, 2048.0), (OCP_E5M2, 8.0)], ids=str
)
def test_a_coarse_running_sum_stagnates(accumulate: Format, stuck_at: float) -> None:
    """One more 1 is half an ulp of the sum and a tie, which goes to the even sum: from there on
    nothing is added.
    """
    ones = torch.ones(1, 4096)
    assert matmul(ones, ones.T, Matmul(accumulate, "sequential")).item() == stuck_at
    assert matmul(ones, ones.T, Matmul(FP32, "sequential")).item() == 4096
    assert matmul(ones, ones.T, Matmul(accumulate, "blocked", 4096)).item() == 4096


def test_native_orders() -> None:
    a, b = operands(FP32, 4)
    expected = a @ b if missing() else matmul(a, b, Matmul(FP32, "sequential"))
    assert torch.equal(matmul(a, b, Matmul(FP32)), expected)
    assert torch.equal(matmul(a, b, Matmul(FP64)), (a.double() @ b.double()).float())
    assert torch.equal(matmul(a.double(), b.double(), Matmul(FP64)), a.double() @ b.double())
    with pytest.raises(ValueError, match=r"left of dtype torch\.float64: accepted is float32"):
        matmul(a.double(), b.double(), Matmul(FP32))


@pytest.mark.parametrize(
    "spec",
    [Matmul(FP32), Matmul(FP64), Matmul(BF16, "sequential"), Matmul(FP16, "blocked", 5)],
    ids=lambda s: s.order,
)
def test_product_is_matmul_with_the_recipes_spec(spec: Matmul) -> None:
    a, b = operands(FP32, 5)
    assert torch.equal(product(a, b, Step(FP32_RECIPE.with_(matmul=spec))), matmul(a, b, spec))


def test_stochastic_accumulation_repeats_by_seed_and_is_free_of_stagnation() -> None:
    ones = torch.ones(64, 1024)
    spec = Matmul(BF16.with_(rounding="stochastic"), "sequential")
    one = matmul(ones, ones[:1].T, spec, seed=1)
    assert torch.equal(one, matmul(ones, ones[:1].T, spec, seed=1))
    assert not torch.equal(one, matmul(ones, ones[:1].T, spec, seed=2))
    # The sum is a walk without drift; its variance is at most Σ ulp²/4 = 1024.
    assert abs(one.mean().item() - 1024) < 4 * (1024 / 64) ** 0.5


def test_every_product_of_a_call_draws_anew() -> None:
    """dK of two equal heads would otherwise carry the same noise as dV, and every tile the same as
    the first.
    """
    step = Step(FP32_RECIPE.with_(matmul=Matmul(BF16.with_(rounding="stochastic"), "sequential")))
    a, b = operands(BF16, 6)
    assert not torch.equal(product(a, b, step), product(a, b, step))


def test_accumulation_reaches_the_whole_algorithm() -> None:
    q, k, v, _ = gaussian(1, heads=1, length=64, dim=16)
    exact = emulate(q, k, v, recipe=FP32_RECIPE)
    for accumulate, least, most in ((FP32, 0.0, 1e-6), (BF16, 3e-3, 3e-2)):
        recipe = FP32_RECIPE.with_(matmul=Matmul(accumulate, "sequential"))
        error = ((emulate(q, k, v, recipe=recipe) - exact).norm() / exact.norm()).item()
        assert least <= error <= most
