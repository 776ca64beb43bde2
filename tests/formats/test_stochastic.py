"""Stochastic rounding: unbiased, repeatable, and the same in pieces."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from halfulp.formats import (
    BF16,
    E2M1,
    FP16,
    FP32,
    MXFP4,
    OCP_E4M3,
    Format,
    counter,
    custom,
    round_to,
)

COUNT = 1 << 18
CPU = torch.device("cpu")


def uniform(seed: int, offset: int, count: int) -> Tensor:
    return counter.uniform(seed, offset, counter.counters(count, CPU))


def stochastic(x: Tensor, fmt: Format, seed: int = 0, offset: int = 0) -> Tensor:
    return round_to(x, fmt, rounding="stochastic", seed=seed, offset=offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("fmt", [BF16, FP16, OCP_E4M3, E2M1, custom(5, 0)], ids=str)
def test_goes_up_as_often_as_the_distance_says(fmt: Format, dtype: torch.dtype) -> None:
    spacing = 2.0**-fmt.mantissa_bits
    for seed, fraction in enumerate((0.5, 0.25, 0.9, 1 / 64, 1 / 3)):
        for lower in (1.0, -1.0, 0.0):
            unit = spacing if lower else fmt.min_subnormal
            x = torch.tensor(lower + math.copysign(fraction * unit, lower), dtype=dtype)
            exact = float((x.double() - lower) / unit)
            y = stochastic(x.expand(COUNT), fmt, seed)
            steps = (y.double() - lower) / unit
            assert set(steps.unique().tolist()) == {0.0, math.copysign(1.0, exact)}
            standard_error = math.sqrt(abs(exact) * (1 - abs(exact)) / COUNT)
            assert abs(steps.mean().item() - exact) < 5 * standard_error


def test_unbiased_on_random_numbers() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    for fmt in (BF16, OCP_E4M3):
        for rounded, biased in (
            (stochastic(x, fmt, 5), False),
            (round_to(x, fmt, rounding="down"), True),
        ):
            error = (rounded - x).double()
            t = error.mean() / (error.std() / math.sqrt(x.numel()))
            assert (t.abs() > 5) == biased


def test_a_number_of_the_format_never_moves() -> None:
    x = round_to(torch.randn(4096, generator=torch.Generator().manual_seed(1)), OCP_E4M3)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 448.0, -448.0, 2.0**-9])])
    for seed in range(20):
        assert torch.equal(stochastic(x, OCP_E4M3, seed).view(torch.int32), x.view(torch.int32))


def test_special_values_and_signs() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -1e-30, 1e-30])
    y = stochastic(x, BF16.with_(exponent_bits=5))
    assert y[0] == torch.inf
    assert y[1] == -torch.inf
    assert y[2].isnan()
    assert y.signbit().tolist()[3:] == [True, False]


def test_overflow_is_decided_like_any_other_step() -> None:
    halfway = torch.full((COUNT,), FP16.max + 16.0)  # the next number would be max + 32
    y = stochastic(halfway, FP16, 3)
    assert set(y.unique().tolist()) == {FP16.max, torch.inf}
    assert abs(y.isinf().double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


def test_the_same_in_pieces_and_in_any_order() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(2))
    whole = stochastic(x, BF16, 11)
    assert torch.equal(whole, stochastic(x, BF16, 11))
    bounds = [0, 1, 7, 32_768, 32_769, 70_000, 100_000]
    spans = list(pairwise(bounds))
    pieces = {a: stochastic(x[a:b], BF16, 11, offset=a) for a, b in reversed(spans)}
    assert torch.equal(whole, torch.cat([pieces[a] for a in bounds[:-1]]))
    assert torch.equal(whole, stochastic(torch.stack([x, x], 1)[:, 0], BF16, 11))  # strided
    assert torch.equal(
        whole.view(100, 1000), stochastic(x.view(100, 1000).mT.contiguous().mT, BF16, 11)
    )
    assert torch.equal(whole, stochastic(x.double(), BF16, 11).float())


def test_seeds_and_positions_do_not_lean_on_each_other() -> None:
    streams = torch.stack([uniform(seed, 0, COUNT) for seed in (0, 1, 2, 2**40, -1, 2**64 - 2)])
    pairs = torch.corrcoef(torch.cat([streams, streams[:1].roll(1, 1), streams[:1].roll(2, 1)]))
    off_diagonal = pairs - torch.eye(len(pairs))
    assert off_diagonal.abs().max() < 5 / math.sqrt(COUNT)
    assert torch.equal(uniform(7, 1000, 50), uniform(7, 0, 1050)[1000:])
    assert torch.equal(uniform(7, 2**64 + 3, 50), uniform(7, 3, 50))
    # a seed that is one step of the sequence must not start one step on
    step = uniform(0x9E37_79B9_7F4A_7C15, 0, 50)
    assert not torch.equal(step, uniform(0, 1, 50))


def test_uniform_fills_its_range() -> None:
    u = uniform(3, 0, 1 << 20)
    assert u.min() >= 0
    assert u.max() < 1
    bins = torch.histc(u.float(), 1024, 0.0, 1.0)
    expected = len(u) / 1024
    chi_square = ((bins - expected) ** 2 / expected).sum()
    assert abs(chi_square - 1023) < 5 * math.sqrt(2 * 1023)
    last_bits = (u * 2**53).long() & 0xFF
    assert abs(last_bits.double().mean().item() - 127.5) < 5 * 74 / math.sqrt(len(u))


def test_blocks_take_their_elements_random_numbers_by_position() -> None:
    x = torch.rand(3, 40, generator=torch.Generator().manual_seed(4)) * 8 - 4
    x[:, ::32] = 4.0  # so that every scale is 1, and neighbors are at most 1 apart
    whole = round_to(x, MXFP4, rounding="stochastic", seed=9)
    rows = [
        round_to(x[row], MXFP4, rounding="stochastic", seed=9, offset=40 * row) for row in range(3)
    ]
    assert torch.equal(whole, torch.stack(rows))
    long = torch.randn(40, 1000, generator=torch.Generator().manual_seed(5))
    parts = [
        round_to(long[row], MXFP4, rounding="stochastic", offset=1000 * row) for row in range(40)
    ]
    assert torch.equal(round_to(long, MXFP4, rounding="stochastic"), torch.stack(parts))
    mean = sum(round_to(x, MXFP4, rounding="stochastic", seed=seed) for seed in range(2000)) / 2000
    assert (mean - x).abs().max() < 5 * 0.5 / math.sqrt(2000)


def test_only_float32_and_narrower_is_decided() -> None:
    x = torch.tensor([1.1])
    assert stochastic(x, FP32) is x
