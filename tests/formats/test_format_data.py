"""What a format says of itself: its numbers, its names, and what it refuses."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from format_oracle import FORMATS as LISTED
from format_oracle import magnitudes

from halfulp.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    FP64,
    IEEE_E4M3,
    MXFP4,
    NVFP4,
    OCP_E4M3,
    OCP_E5M2,
    TF32,
    BlockFormat,
    Format,
    custom,
    dtype_named,
    parse_format,
)
from halfulp.formats.names import ELSEWHERE


@pytest.mark.parametrize(
    "fmt", [*LISTED, TF32], ids=lambda fmt: f"{fmt.name}-{fmt.specials}-{fmt.bias}"
)
def test_properties_are_those_of_the_list_of_codes(fmt: Format) -> None:
    numbers = magnitudes(fmt)
    finite = numbers[:-1]
    assert fmt.max == finite[-1]
    assert fmt.min_normal == finite[2**fmt.mantissa_bits]
    assert fmt.min_subnormal == finite[1]
    assert fmt.min_exponent == np.log2(fmt.min_normal)
    assert fmt.max_exponent == np.floor(np.log2(fmt.max))
    assert fmt.unit_roundoff == 2.0 ** -(fmt.mantissa_bits + 1)
    assert fmt.significand_bits == fmt.mantissa_bits + 1
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (FP64, np.float64),
        (FP32, np.float32),
        (BF16, ml_dtypes.bfloat16),
        (FP16, np.float16),
        (OCP_E4M3, ml_dtypes.float8_e4m3fn),
        (OCP_E5M2, ml_dtypes.float8_e5m2),
        (IEEE_E4M3, ml_dtypes.float8_e4m3),
        (E3M2, ml_dtypes.float6_e3m2fn),
        (E2M3, ml_dtypes.float6_e2m3fn),
        (E2M1, ml_dtypes.float4_e2m1fn),
    ],
    ids=str,
)
def test_properties_against_ml_dtypes(fmt: Format, dtype: type) -> None:
    info = ml_dtypes.finfo(dtype)
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert 2 * fmt.unit_roundoff == float(info.eps)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)


def test_figures_of_the_specifications() -> None:
    assert (OCP_E4M3.max, OCP_E5M2.max, IEEE_E4M3.max) == (448.0, 57344.0, 240.0)
    assert (E3M2.max, E2M3.max, E2M1.max) == (28.0, 7.5, 6.0)
    assert (E8M0.max, TF32.bits) == (2.0**127, 19)
    assert BF16.max == torch.finfo(torch.bfloat16).max


def test_torch_dtypes() -> None:
    found = {
        fmt.name: fmt.torch_dtype for fmt in FORMATS if isinstance(fmt, Format) and fmt.torch_dtype
    }
    assert found == {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "ocp_e4m3": torch.float8_e4m3fn,
        "ocp_e5m2": torch.float8_e5m2,
    }
    assert custom(5, 10).torch_dtype is torch.float16  # its values count, not its name
    assert FP16.with_(subnormals=False).torch_dtype is None
    assert FP16.with_(bias=14).torch_dtype is None


def test_holds() -> None:
    for fmt in (FP64, FP32, custom(11, 52), custom(9, 30)):
        assert fmt.holds(torch.float32)
    assert FP64.holds(torch.float64)
    assert not FP32.holds(torch.float64)
    assert not TF32.holds(torch.float32)
    assert TF32.holds(torch.bfloat16)
    assert TF32.holds(torch.float16)
    assert not BF16.holds(torch.float16)
    assert FP16.holds(torch.float8_e5m2)
    assert FP16.holds(torch.float8_e4m3fn)
    assert not FP64.holds(torch.int32)
    assert not custom(8, 23, bias=120).holds(torch.float32)  # its smallest number is too large
    assert not custom(8, 30, bias=130).holds(torch.float32)  # its largest number is too small
    # Values that would move although all finite ones are there.
    assert not FP32.with_(overflow="saturate").holds(torch.float32)  # infinities
    assert not FP32.with_(subnormals=False).holds(torch.float32)
    assert not custom(9, 30, specials="nan_only").holds(torch.float32)
    assert not NVFP4.holds(torch.float32)


def test_parse_format() -> None:
    for fmt in FORMATS:
        assert parse_format(fmt.name.upper()) is fmt
    assert parse_format(" bf16 ") is BF16
    assert parse_format("mxfp4") is MXFP4
    assert parse_format("e5m10") == custom(5, 10)
    assert parse_format("E5M0").mantissa_bits == 0
    assert parse_format("e2m1") is E2M1  # the built-in one, which has no infinity
    assert len({fmt.name for fmt in FORMATS}) == len(FORMATS)
    assert all(parse_format(name).name == name for names in ELSEWHERE.values() for name in names)


@pytest.mark.parametrize(
    "name",
    ["", "fp17", "e5", "m3", "e5m", "e4m3", "e12m3", "e5m99", "e0m3", "e1m2"],
)
def test_parse_format_refuses_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"accepted(:| are) ") as refused:
        parse_format(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("torch.float16", "fp16"),
        ("BFloat16", "bf16"),
        ("float", "fp32"),
        ("half", "fp16"),
        ("f64", "fp64"),
        ("e4m3fn", "ocp_e4m3"),
        ("float8_e4m3fn", "ocp_e4m3"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e5m2, "ocp_e5m2"),
    ],
)
def test_a_format_goes_by_what_the_field_calls_it(name: str | torch.dtype, ours: str) -> None:
    assert parse_format(name).name == ours


@pytest.mark.parametrize("name", ["fp4", "float8", "mxfp8"])
def test_a_name_that_several_formats_have_is_answered_with_all(name: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean '\w+'( or '\w+')+\?$"):
        parse_format(name)


def test_a_dtype_is_found_by_any_of_its_names() -> None:
    audited, short = ("bfloat16", "float16", "float32"), ("bf16", "fp16", "fp32")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, *names in zip(dtypes, audited, short, strict=True):
        for given in (dtype, str(dtype), *names, names[0].upper()):
            assert [dtype_named(given, known) for known in (audited, short)] == names
    for unknown in (torch.int8, "fp15", None, 16):
        with pytest.raises(ValueError, match=r"^into=.*: accepted are bf16, fp16, fp32"):
            dtype_named(unknown, short, "into")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"exponent_bits": 12},
            "exponent_bits=12 is not accepted; accepted: an integer from 1 to 11",
        ),
        (
            {"exponent_bits": True},
            "exponent_bits=True is not accepted; accepted: an integer from 1 to 11",
        ),
        (
            {"mantissa_bits": 2.5},
            "mantissa_bits=2.5 is not accepted; accepted: an integer from 0 to 52",
        ),
        (
            {"mantissa_bits": -1},
            "mantissa_bits=-1 is not accepted; accepted: an integer from 0 to 52",
        ),
        (
            {"specials": "inf"},
            "specials='inf' is not accepted; accepted: one of ieee, nan_only, none",
        ),
        (
            {"rounding": "even"},
            "rounding='even' is not accepted; accepted: one of nearest_even, nearest_away, ",
        ),
        (
            {"overflow": "inf"},
            (
                "overflow='inf' is not accepted; accepted: one of infinity, saturate, nan where"
                " specials"
            ),
        ),
        (
            {"specials": "none"},
            "overflow='infinity' is not accepted; accepted: one of saturate where specials is none",
        ),
        (
            {"exponent_bits": 1},
            "exponent_bits=1 leaves no normal number where specials is ieee; accepted: more",
        ),
        ({"bias": 2000}, "bias=2000 leaves the range of float64; accepted: "),
        (
            {"exponent_bits": 11, "specials": "nan_only", "overflow": "nan"},
            "exponent_bits=11 has more range than float64",
        ),
        ({"width": 3}, "field='width' is not accepted; accepted: one of name, exponent_bits, "),
    ],
)
def test_with_refuses_in_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)) as refused:
        FP16.with_(**fields)
    assert "\n" not in str(refused.value)


def test_with_keeps_what_it_is_not_given() -> None:
    flushed = FP16.with_(subnormals=False)
    assert (flushed.name, flushed.bias, flushed.subnormals) == ("fp16", 15, False)
    assert FP16.subnormals
    wider = FP16.with_(exponent_bits=6)
    assert (wider.name, wider.bias) == ("e6m10", 31)
    assert FP16.with_(bias=14).with_(exponent_bits=6).bias == 14
    assert FP16.with_(mantissa_bits=3, name="short").name == "short"
    assert FP16.with_() == FP16
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP16.bias = 3  # type: ignore[misc]


def test_custom_takes_the_policy_that_its_specials_allow() -> None:
    assert custom(4, 3).overflow == "infinity"
    assert custom(4, 3, specials="nan_only").overflow == "nan"
    assert custom(4, 3, specials="none").overflow == "saturate"
    assert custom(4, 3, specials="nan_only", overflow="saturate", name="x") == dataclasses.replace(
        OCP_E4M3, name="x"
    )
    assert custom(5, 0, bias=3, rounding="up").rounding == "up"


def test_formats_are_keys_and_print_as_their_names() -> None:
    assert len({*FORMATS, *FORMATS}) == len(FORMATS)
    assert [str(fmt) for fmt in FORMATS] == [fmt.name for fmt in FORMATS]
    assert sum(isinstance(fmt, BlockFormat) for fmt in FORMATS) == 6
    assert MXFP4.bits == 4


def test_a_format_shows_itself_shortly() -> None:
    assert [repr(fmt) for fmt in (FP64, BF16)] == ["FP64", "BF16"]
    assert repr(custom(5, 9)) == "Format('e5m9', 5, 9)"
    own = custom(5, 9, name="mine", bias=3, rounding="up")
    assert repr(own) == "Format('mine', 5, 9, bias=3, rounding='up')"
    assert eval(repr(own)) == own
