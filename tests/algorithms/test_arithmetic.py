"""Exponentials, sums and products on a CPU: the bits that native/README.md lays down, on every
instruction set.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfulp import native
from halfulp.algorithms import arithmetic
from halfulp.algorithms.matmul import matmul
from halfulp.formats import FP32
from halfulp.recipes import Matmul

ISAS = (-1,) if native.missing() else range(native.ISAS.index(native.best_isa()) + 1)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "BEST_ISA", request.param)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_found", lambda: "taken away by the test")


def any_floats(count: int, seed: int) -> Tensor:
    """Numbers of every exponent, subnormal ones, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45])
    bits = torch.randint(-(2**31), 2**31, (count,), generator=g).to(torch.int32)
    return torch.cat([special, bits.view(torch.float32)])


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("scale", [1.0, 20.0, 110.0])
def test_the_exponential_is_float64s_rounded_once(base2: bool, scale: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.cat([any_floats(40_000, 1), (1.2 - torch.rand(40_000, generator=g) * 2.2) * scale])
    expected = (torch.exp2 if base2 else torch.exp)(x.double()).float()
    assert same(arithmetic.exponential(x, base2), expected)
    for place in (x.clone(), torch.stack([x, x], 1)[:, 0]):  # contiguous, and in strides
        assert arithmetic.exponential(place, base2, out=place) is place
        assert same(place, expected)


def test_torchs_own_exponential_is_another() -> None:
    """What the fixed one is for: torch's is off by an ulp on some numbers, and the comparison sees
    it.
    """
    x = -20 * torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    assert not same(arithmetic.exponential(x, False), torch.exp(x))


def slow_row_sum(row: list[float]) -> float:
    def add(a: float, b: float) -> float:
        return float(
            (torch.tensor(a, dtype=torch.float32) + torch.tensor(b, dtype=torch.float32)).item()
        )

    lanes: list[float] = [*row[:16], *[0.0] * (16 - len(row[:16]))]
    for j in range(16, len(row)):
        lanes[j % 16] = add(lanes[j % 16], row[j])
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [add(a, b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 32, 47, 130])
def test_sums_of_rows(n: int) -> None:
    x = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(n))
    expected = [slow_row_sum(row) for row in x.flatten(0, 1).tolist()]
    assert arithmetic.row_sum(x).flatten().tolist() == expected
    assert torch.equal(arithmetic.row_sum(x.mT.contiguous().mT), arithmetic.row_sum(x))


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 130])
def test_sums_of_rows_in_torch(n: int) -> None:
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(n))
    assert arithmetic.row_sum(x).flatten().tolist() == [slow_row_sum(row) for row in x.tolist()]


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@given(
    st.sampled_from(ISAS),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 70),
    st.integers(0, 300),
    st.integers(0, 140),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(0, 9),
)
def test_products_are_sequential_fused_multiply_adds(
    isa: int, lead: list[int], m: int, k: int, n: int, strides: tuple[bool, bool, bool], seed: int
) -> None:
    """Bit for bit what the emulated order gives, whatever the shapes and strides."""
    g = torch.Generator().manual_seed(seed)
    turn_left, turn_right, shared = strides

    def drawn(*shape: int, turned: bool) -> Tensor:
        x = torch.randn(*(shape[:-2] + shape[:-3:-1] if turned else shape), generator=g)
        return x.mT if turned else x

    left, right = (
        drawn(*lead, m, k, turned=turn_left),
        drawn(*([] if shared else lead), k, n, turned=turn_right),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "BEST_ISA", isa)
        found = matmul(left, right, Matmul(FP32))
        patch.setattr(native, "_found", lambda: "taken away by the test")
        expected = matmul(
            left.expand(*lead, m, k), right.expand(*lead, k, n), Matmul(FP32, "sequential")
        )
    assert torch.equal(found, expected)


def test_a_product_in_another_order_is_seen() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 64, generator=g), torch.randn(64, 40, generator=g)
    spec = Matmul(FP32, "sequential")
    assert not torch.equal(matmul(a.flip(1), b.flip(0), spec), matmul(a, b, spec))
