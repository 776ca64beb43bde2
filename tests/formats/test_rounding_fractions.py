"""Any format of up to 11 exponent and 52 fraction bits, on numbers drawn to be hard, against exact
fractions.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from format_oracle import differing, floor_log2, round_fraction
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfulp.formats import FP32, FP64, Format, Rounding, custom, round_to

MODES = st.sampled_from(["nearest_even", "nearest_away", "toward_zero", "up", "down"])
OVERFLOWS = {
    "ieee": ["infinity", "saturate", "nan"],
    "nan_only": ["saturate", "nan"],
    "none": ["saturate"],
}


@st.composite
def formats(draw: st.DrawFn, most_exponent_bits: int = 11, most_mantissa_bits: int = 52) -> Format:
    specials = draw(st.sampled_from(["ieee", "nan_only", "none"]))
    least = 1 if specials == "none" else 2
    most_exponent_bits = min(most_exponent_bits, 11 if specials == "ieee" else 10)
    plain = custom(
        draw(st.integers(least, most_exponent_bits)),
        draw(st.integers(0, most_mantissa_bits)),
        specials=specials,
    )
    # As far as float64 reaches: from a largest exponent of 1023 to a smallest of -1022.
    bias = draw(
        st.integers(
            max(plain.bias + plain.max_exponent - 1023, plain.bias - 200),
            min(1023, plain.bias + 200),
        )
    )
    overflow = draw(st.sampled_from(OVERFLOWS[specials]))
    return plain.with_(bias=bias, overflow=overflow, subnormals=draw(st.booleans()))


@st.composite
def hard_numbers(draw: st.DrawFn, fmt: Format) -> float:
    """Draw a number of the format, or a midpoint, or something a hair beside either."""
    exponent = draw(st.integers(fmt.min_exponent - 2, fmt.max_exponent + 1))
    spacing_exponent = max(exponent, fmt.min_exponent) - fmt.mantissa_bits
    steps = draw(st.integers(0, 2 ** (fmt.mantissa_bits + 1)))
    number = Fraction(2 * steps + draw(st.integers(0, 1)), 2) * Fraction(2) ** spacing_exponent
    if number >= Fraction(2) ** 1024:
        return float("inf")
    near = float(number)
    near = draw(
        st.sampled_from(
            [near, np.nextafter(near, np.inf), np.nextafter(near, 0.0), near * (1 + 2.0**-31)]
        )
    )
    return float(draw(st.sampled_from([near, -near])))


def several(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(numbers, min_size=6, max_size=6)


def check(numbers: list[float], fmt: Format, rounding: Rounding, dtype: torch.dtype) -> None:
    tensor = torch.tensor([s * x for x in numbers for s in (1, -1)], dtype=torch.float64).to(dtype)
    got = round_to(tensor, fmt, rounding=rounding).numpy()
    for number, value in zip(tensor.tolist(), got, strict=True):
        if not np.isfinite(number):
            continue  # the lists of test_rounding_exhaustive hold the infinities and NaN
        want = round_fraction(Fraction(number), fmt, rounding) if number else number
        want = np.copysign(want, number)
        assert differing(np.array([value]), np.array([want])) == 0, (number, value, want)


# most of an example's time is drawing its format, so several numbers are rounded to each
@settings(max_examples=300)
@given(st.data())
def test_any_format_in_float64(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    check(data.draw(several(hard_numbers(fmt))), fmt, data.draw(MODES), torch.float64)


@settings(max_examples=300)
@given(st.data())
def test_any_format_in_float32(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    check(data.draw(several(hard_numbers(fmt))), fmt, data.draw(MODES), torch.float32)


@settings(max_examples=100)
@given(st.data())
def test_formats_that_float32_holds(data: st.DataObject) -> None:
    fmt = data.draw(formats(8, 23))
    check(data.draw(several(st.floats(width=32))), fmt, data.draw(MODES), torch.float32)


@settings(max_examples=200)
@given(formats(), st.floats(), MODES)
@example(custom(11, 52).with_(overflow="nan"), float(np.nextafter(np.inf, 0)), "up")
@example(custom(4, 51), 1 + 2.0**-52, "nearest_even")
@example(custom(4, 51), 1 + 3 * 2.0**-52, "nearest_even")
@example(custom(4, 50), 1 + 2.0**-51, "nearest_even")
@example(custom(2, 2, bias=-5), 5e-324, "up")
@example(FP32, 1 + 2.0**-24 + 2.0**-52, "nearest_even")
@example(FP64.with_(subnormals=False), 5e-324, "nearest_even")
def test_any_float64(fmt: Format, x: float, rounding: Rounding) -> None:
    check([x], fmt, rounding, torch.float64)


@pytest.mark.parametrize("exponent_bits", range(2, 9))
def test_every_precision_at_its_midpoints(exponent_bits: int) -> None:
    for mantissa_bits in range(24):
        fmt = custom(exponent_bits, mantissa_bits)
        one = 2.0**fmt.min_exponent
        x = torch.tensor(
            [one * (1 + (2 * k + 1) * 2.0 ** -(mantissa_bits + 1)) for k in range(4)],
            dtype=torch.float64,
        )
        x = torch.cat(
            [x, x.nextafter(torch.tensor(9.0).double()), x.nextafter(torch.tensor(0.0).double())]
        )
        want = np.array([round_fraction(Fraction(number), fmt) for number in x.tolist()])
        assert differing(round_to(x, fmt).numpy(), want) == 0
        single = x.float()
        want = np.array([round_fraction(Fraction(number), fmt) for number in single.tolist()])
        assert differing(round_to(single, fmt).numpy(), want) == 0


def test_floor_log2_is_exact() -> None:
    for exponent in (-1074, -127, -1, 0, 1, 52, 1023):
        power = Fraction(2) ** exponent
        assert floor_log2(power) == exponent
        assert floor_log2(power * (1 - Fraction(1, 2**60))) == exponent - 1
