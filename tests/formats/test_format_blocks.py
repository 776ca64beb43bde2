"""Block-scaled formats against a slow implementation in exact fractions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from format_oracle import differing, round_blocks_exactly
from hypothesis import given, settings
from hypothesis import strategies as st

from halfulp.formats import (
    E2M1,
    E8M0,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    OCP_E4M3,
    BlockFormat,
    custom,
    round_to,
)

BLOCK_FORMATS = (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, NVFP4)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
EVERY = pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)


def assert_as_defined(x: np.ndarray, fmt: BlockFormat, rounding: str = "nearest_even") -> None:
    got = round_to(torch.from_numpy(x), fmt, rounding=rounding).numpy()
    assert differing(got, round_blocks_exactly(x, fmt, rounding)) == 0


def numbers(seed: int, shape: tuple[int, int], spread: float) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape) * np.exp2(
        spread * generator.standard_normal(shape)
    ).round(3)


@EVERY
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("length", [1, 16, 31, 32, 33, 80])
def test_random_numbers(fmt: BlockFormat, dtype: type[np.floating], length: int) -> None:
    for seed, spread in enumerate((0.0, 2.0, 20.0)):
        assert_as_defined(numbers(seed, (3, length), spread).astype(dtype), fmt)


@EVERY
@pytest.mark.parametrize("rounding", ["nearest_away", "toward_zero", "up", "down"])
def test_every_mode(fmt: BlockFormat, rounding: str) -> None:
    assert_as_defined(numbers(7, (2, 70), 3.0).astype(np.float32), fmt, rounding)


@EVERY
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_both_ends_of_the_range(fmt: BlockFormat, dtype: type[np.floating]) -> None:
    for scale in (2.0**-140, 2.0**-120, 2.0**100, 2.0**124):
        x = numbers(8, (2, 64), 4.0).clip(-8, 8) * scale
        assert_as_defined(x.astype(dtype), fmt)
        assert_as_defined(x.astype(dtype), fmt, "up")
    largest = np.array([[np.finfo(np.float32).max, -1.0, 1e-45, 0.0, -0.0]], dtype=dtype)
    for rounding in ("nearest_even", "up", "down"):
        assert_as_defined(largest, fmt, rounding)


@EVERY
def test_midpoints_and_a_hair_beside_them(fmt: BlockFormat) -> None:
    """Numbers on and beside the midpoints between neighbors, at scales that are not powers of two
    in NVFP4.
    """
    steps = np.arange(1, 4 * 16) / 8.0
    for largest in (6.0, 5.7, 448 * 6.0, 0.1):
        scale = largest / 6.0
        middles = (steps[steps < 6] * scale).astype(np.float32)
        for row in (
            middles,
            np.nextafter(middles, np.float32(0)),
            np.nextafter(middles, np.float32(np.inf)),
        ):
            row = np.concatenate([[np.float32(largest)], row])
            assert_as_defined(row[None], fmt)
            double = row.astype(np.float64)
            assert_as_defined(np.nextafter(double, 0)[None], fmt)
            assert_as_defined(np.nextafter(double, 1e9)[None], fmt)


@settings(max_examples=150)
@given(
    st.sampled_from(BLOCK_FORMATS),
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40),
)
def test_any_float32(fmt: BlockFormat, row: list[float]) -> None:
    assert_as_defined(np.array([row], dtype=np.float32), fmt)


def test_a_quotient_never_lands_where_its_number_is_not() -> None:
    """Rounding x / scale is rounding twice, and safe: beside every midpoint, for scales of every
    kind.
    """
    for largest in np.random.default_rng(0).uniform(1, 2, 60).astype(np.float32).astype(np.float64):
        tensor_scale = np.float64(np.float32(largest) / np.float32(2688.0))
        middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * (448.0 * tensor_scale)
        assert_as_defined(
            np.concatenate([[largest], np.nextafter(middles, 0), middles])[None], NVFP4
        )
        assert_as_defined(
            np.concatenate([[largest], np.nextafter(middles, 9), middles])[None], NVFP4
        )


def test_directed_rounding_sees_numbers_that_vanish_beside_their_scale() -> None:
    x = torch.tensor([16.0, 5e-324, -5e-324, 0.0, -0.0], dtype=torch.float64)
    assert round_to(x, MXFP4, rounding="up").tolist() == [16.0, 2.0, -0.0, 0.0, -0.0]
    assert round_to(x, MXFP4, rounding="down").tolist() == [16.0, 0.0, -2.0, 0.0, -0.0]


@EVERY
def test_zeros_keep_their_sign(fmt: BlockFormat) -> None:
    x = torch.tensor([[0.0, -0.0] * 24])
    y = round_to(x, fmt)
    assert torch.equal(y, x)
    assert torch.equal(y.signbit(), x.signbit())
    x[0, 3] = 1.0  # the other blocks stay zero
    assert_as_defined(x.numpy(), fmt)


@EVERY
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_takes_its_block_along(fmt: BlockFormat, bad: float) -> None:
    x = torch.ones(2, 3 * fmt.block_size)
    x[1, fmt.block_size] = bad
    y = round_to(x, fmt)
    assert y[1, fmt.block_size : 2 * fmt.block_size].isnan().all()
    assert y.isnan().sum() == (y.numel() if fmt.tensor_scale else fmt.block_size)


@EVERY
def test_beyond_the_largest_scale(fmt: BlockFormat) -> None:
    x = np.array([[1e300, -1e40, 3.0]])
    if fmt.tensor_scale:
        assert round_to(torch.from_numpy(x), fmt).isnan().all()  # there is no float32 scale for it
    else:
        assert_as_defined(x, fmt)
        assert round_to(torch.from_numpy(x), fmt)[0, 0] == fmt.element.max * 2.0**127


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_float_scale_without_a_tensor_scale_is_lost_too(bad: float) -> None:
    x = torch.ones(16)
    x[3] = bad
    assert (
        round_to(x, BlockFormat("scaled", E2M1, 8, OCP_E4M3)).isnan().tolist()
        == [True] * 8 + [False] * 8
    )


@EVERY
def test_shapes_and_strides(fmt: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 40, 48, generator=generator)
    kept = x.clone()
    y = round_to(x, fmt)
    assert torch.equal(x, kept)
    assert y.shape == x.shape
    assert torch.equal(round_to(x.mT.contiguous().mT, fmt), y)
    if not fmt.tensor_scale:
        assert torch.equal(round_to(x[1, 2, 7], fmt), y[1, 2, 7])
        assert torch.equal(round_to(x[..., 32:], fmt), y[..., 32:])
    assert round_to(torch.tensor(1.0), fmt).shape == ()
    assert round_to(torch.empty(3, 0), fmt).shape == (3, 0)


def test_more_rows_than_are_worked_on_at_once() -> None:
    x = numbers(5, (18, 1000), 2.0).astype(np.float32)
    for fmt in (MXFP8_E4M3, NVFP4):
        assert_as_defined(x, fmt)


def test_worked_example() -> None:
    """Largest 7: shared exponent floor(log2 7) - 2 = 0; 7 saturates to 6, 2.6 rounds to 3, 0.2 to
    0.
    """
    x = torch.tensor([7.0, 2.6, -0.2, 0.3])
    assert round_to(x, MXFP4).tolist() == [6.0, 3.0, -0.0, 0.5]


def test_other_block_formats() -> None:
    scaled = BlockFormat("e4m3_scaled", E2M1, 8, OCP_E4M3)
    assert_as_defined(numbers(2, (2, 20), 1.0).astype(np.float32), scaled)
    wide = BlockFormat("wide", custom(5, 6, overflow="saturate"), 4, E8M0)
    assert_as_defined(numbers(2, (2, 20), 9.0).astype(np.float32), wide)
    x = torch.from_numpy(numbers(2, (3, 21), 9.0).astype(np.float32))
    whole = replace(wide, block_size=None)
    assert torch.equal(round_to(x, whole), round_to(x, replace(wide, block_size=21)))


def test_planted_faults_are_seen() -> None:
    x = numbers(3, (4, 64), 2.0).astype(np.float32)
    want = round_blocks_exactly(x, MXFP4)
    larger_blocks = BlockFormat("larger", E2M1, 64, E8M0)
    float_scale = BlockFormat("float_scale", E2M1, 32, OCP_E4M3)
    for faulty in (larger_blocks, float_scale, MXFP6_E2M3, NVFP4):
        assert differing(round_to(torch.from_numpy(x), faulty).numpy(), want) > 0
    assert differing(round_to(torch.from_numpy(x), MXFP4, rounding="toward_zero").numpy(), want) > 0


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^block_size=0 is not accepted; accepted: a positive integer, or None"
    ):
        BlockFormat("none", E2M1, 0, E8M0)
    with pytest.raises(ValueError, match=r"^element=e5m2 must saturate"):
        BlockFormat("none", custom(5, 2), 32, E8M0)
