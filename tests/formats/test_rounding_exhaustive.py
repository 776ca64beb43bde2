"""Every number and every midpoint of every format of up to 16 bits, in every mode and under every
policy.
"""

from collections.abc import Callable
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from format_oracle import (
    DETERMINISTIC,
    FORMATS,
    SMALL_FORMATS,
    differing,
    expected,
    magnitudes,
    round_fraction,
    trying_inputs,
)

from halfulp.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    FP16,
    FP32,
    IEEE_E4M3,
    OCP_E4M3,
    OCP_E5M2,
    TF32,
    Format,
    Rounding,
    custom,
    round_to,
)

CONTAINERS = {"float32": np.float32, "float64": np.float64}


def describe(fmt: Format) -> str:
    return f"{fmt.name}-bias{fmt.bias}-{fmt.specials}"


def variants(fmt: Format) -> list[Format]:
    overflows = {
        "ieee": ("infinity", "saturate", "nan"),
        "nan_only": ("saturate", "nan"),
        "none": ("saturate",),
    }
    return [
        fmt.with_(subnormals=s, overflow=o) for s in (True, False) for o in overflows[fmt.specials]
    ]


def rounded(x: np.ndarray, fmt: Format, rounding: Rounding) -> np.ndarray:
    return round_to(torch.from_numpy(x), fmt, rounding=rounding).numpy()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("fmt", FORMATS, ids=describe)
def test_every_number_and_midpoint(fmt: Format, container: str) -> None:
    x = trying_inputs(fmt, CONTAINERS[container])
    given, all_of = x.astype(CONTAINERS[container]), variants(fmt)
    # policies act on what was rounded, alike in both containers: in float64 every one is on once
    for variant in all_of if container == "float32" else {all_of[0], all_of[-1]}:
        for rounding in DETERMINISTIC:
            wrong = differing(rounded(given, variant, rounding), expected(x, variant, rounding))
            assert wrong == 0, f"{variant} {rounding}: {wrong} of {x.size}"


def test_tf32() -> None:
    x = trying_inputs(TF32, np.float32)
    for rounding in DETERMINISTIC:
        assert (
            differing(rounded(x.astype(np.float32), TF32, rounding), expected(x, TF32, rounding))
            == 0
        ), rounding


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=describe)
def test_the_two_oracles_agree(fmt: Format) -> None:
    x = trying_inputs(fmt, np.float32)
    x = x[np.isfinite(x) & (x != 0)][::9]  # one number at a time is slow
    for variant in variants(fmt):
        for rounding in DETERMINISTIC:
            one_by_one = np.array(
                [round_fraction(Fraction(number), variant, rounding) for number in x.tolist()]
            )
            assert differing(one_by_one, expected(x, variant, rounding)) == 0, (variant, rounding)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (BF16, ml_dtypes.bfloat16),
        (FP16, np.float16),
        (OCP_E5M2, ml_dtypes.float8_e5m2),
        (IEEE_E4M3, ml_dtypes.float8_e4m3),
        (OCP_E4M3.with_(overflow="nan"), ml_dtypes.float8_e4m3fn),
        (custom(3, 4), ml_dtypes.float8_e3m4),
        (E3M2, ml_dtypes.float6_e3m2fn),
        (E2M3, ml_dtypes.float6_e2m3fn),
        (E2M1, ml_dtypes.float4_e2m1fn),
    ],
    ids=str,
)
def test_against_ml_dtypes(fmt: Format, dtype: type) -> None:
    x = trying_inputs(fmt, np.float32).astype(np.float32)
    if fmt.specials == "none":
        x = x[~np.isnan(x)]  # ml_dtypes has no code for NaN here and answers -0
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = x.astype(dtype).astype(np.float64)
    assert differing(rounded(x, fmt, "nearest_even"), theirs) == 0


@pytest.mark.parametrize("fmt", [BF16, FP16, OCP_E5M2, OCP_E4M3], ids=str)
def test_against_the_casts_of_torch(fmt: Format) -> None:
    x = torch.from_numpy(trying_inputs(fmt, np.float32).astype(np.float32))
    if fmt is OCP_E4M3:
        x = x[x.abs() <= fmt.max]  # beyond it, torch's answer depends on its version
    assert fmt.torch_dtype is not None
    assert differing(round_to(x, fmt).numpy(), x.to(fmt.torch_dtype).double().numpy()) == 0


@pytest.mark.parametrize(
    ("fmt", "info"),
    [
        (OCP_E4M3, gfloat.formats.format_info_ocp_e4m3),
        (OCP_E5M2, gfloat.formats.format_info_ocp_e5m2),
        (E3M2, gfloat.formats.format_info_ocp_e3m2),
        (E2M3, gfloat.formats.format_info_ocp_e2m3),
        (E2M1, gfloat.formats.format_info_ocp_e2m1),
    ],
    ids=["ocp_e4m3", "ocp_e5m2", "e3m2", "e2m3", "e2m1"],
)
def test_against_gfloat(fmt: Format, info: gfloat.FormatInfo) -> None:
    modes = {
        "nearest_even": gfloat.RoundMode.TiesToEven,
        "nearest_away": gfloat.RoundMode.TiesToAway,
        "toward_zero": gfloat.RoundMode.TowardZero,
        "up": gfloat.RoundMode.TowardPositive,
        "down": gfloat.RoundMode.TowardNegative,
    }
    x = trying_inputs(fmt, np.float64)
    x = x[np.isfinite(x)]
    for rounding in DETERMINISTIC:
        theirs = gfloat.round_ndarray(info, x, modes[rounding], sat=True)
        assert differing(rounded(x, fmt.with_(overflow="saturate"), rounding), theirs) == 0, (
            rounding
        )


def test_float64_to_float32() -> None:
    generator = np.random.default_rng(0)
    middles = generator.standard_normal(1 << 16).astype(np.float32).astype(np.float64)
    middles += np.spacing(middles.astype(np.float32)).astype(np.float64) / 2
    x = np.concatenate(
        [
            middles,
            np.nextafter(middles, np.inf),
            np.nextafter(middles, -np.inf),
            [1e300, -1e-46, 1e-45],
        ]
    )
    with np.errstate(over="ignore"):
        want = x.astype(np.float32).astype(np.float64)
    assert differing(rounded(x, FP32, "nearest_even"), want) == 0
    # The general way and the native cast are the same function.
    assert (
        differing(
            rounded(x, FP32.with_(overflow="nan"), "nearest_even"),
            np.where(np.isinf(want), np.nan, want),
        )
        == 0
    )


@pytest.mark.parametrize("fmt", [BF16, FP16, OCP_E5M2], ids=str)
def test_native_and_general_way_on_random_bits(fmt: Format) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = expected(x.astype(np.float64), fmt, "nearest_even")
    assert differing(rounded(x, fmt, "nearest_even"), want) == 0
    assert (
        differing(rounded(x, fmt.with_(overflow="nan"), "nearest_even"), _inf_to_nan(x, want)) == 0
    )


def _inf_to_nan(x: np.ndarray, rounded_x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(rounded_x) & np.isfinite(x), np.nan, rounded_x)


def truncated(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & -65536).view(torch.float32)


def half_up(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x8000) & -65536).view(torch.float32)


def flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < BF16.min_normal, x * 0.0, x.bfloat16().float())


def scaled_integer(x: torch.Tensor) -> torch.Tensor:
    return (x * 2.0**9).round() / 2.0**9


def ceiling_of_nothing(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e5m2).float() + 0.0


@pytest.mark.parametrize(
    ("fmt", "faulty", "dtype"),
    [
        (BF16, truncated, np.float32),
        (BF16, half_up, np.float32),
        (BF16, flushed, np.float32),
        (BF16, lambda x: x.float().bfloat16().double(), np.float64),
        (FP16, lambda x: x.float().half().double(), np.float64),
        (OCP_E4M3, lambda x: x.half().float().to(torch.float8_e4m3fn).float(), np.float32),
        (OCP_E4M3, lambda x: x.to(torch.float8_e4m3fn).double(), np.float64),
        (OCP_E4M3, lambda x: round_to(x, OCP_E4M3.with_(overflow="nan")), np.float32),
        (IEEE_E4M3, lambda x: round_to(x, OCP_E4M3), np.float32),
        (OCP_E4M3, scaled_integer, np.float32),
        (OCP_E5M2, ceiling_of_nothing, np.float32),
        (E2M1, lambda x: round_to(x, E2M1, rounding="nearest_away"), np.float32),
        (custom(5, 0), lambda x: round_to(x, custom(5, 0), rounding="nearest_away"), np.float32),
    ],
    ids=[
        *(
            "truncation",
            "half_up",
            "subnormals_flushed",
            "double_rounding_bf16",
            "double_rounding_fp16",
        ),
        *(
            "double_rounding_through_fp16",
            "double_rounding_in_torch",
            "overflow_policy",
            "wrong_top_codes",
        ),
        *("fixed_point", "sign_of_zero", "ties_away", "ties_away_without_fraction"),
    ],
)
def test_planted_faults_are_seen(
    fmt: Format, faulty: Callable[[torch.Tensor], torch.Tensor], dtype: type[np.floating]
) -> None:
    x = trying_inputs(fmt, dtype)
    x = x[~np.isnan(x)]
    given = torch.from_numpy(x.astype(dtype))
    assert differing(faulty(given).numpy(), expected(x, fmt, "nearest_even")) > 0
    assert differing(round_to(given, fmt).numpy(), expected(x, fmt, "nearest_even")) == 0


def test_the_list_of_codes_is_that_of_the_dtypes() -> None:
    for fmt in (BF16, FP16, OCP_E4M3, OCP_E5M2):
        assert fmt.torch_dtype is not None
        integer = torch.int8 if fmt.bits == 8 else torch.int16
        numbers = magnitudes(fmt)[:-1]
        codes = torch.arange(len(numbers)).to(integer).view(fmt.torch_dtype)
        assert np.array_equal(codes.double().numpy(), numbers)
