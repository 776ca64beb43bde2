"""Rounding as it is defined, twice: by a list of all codes, and by exact fractions.

Neither looks at the bits of the number to be rounded, which is what the package does, so a shared
mistake is unlikely. The list decodes every code of a format of up to about 18 bits and finds the
two neighbors by bisection; the fractions take any format and any number, one at a time.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

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
    BlockFormat,
    Format,
    Rounding,
    custom,
)

Float64s = NDArray[np.float64]

DETERMINISTIC: tuple[Rounding, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down")

SMALL_FORMATS = (
    *(OCP_E4M3, OCP_E5M2, IEEE_E4M3, E3M2, E2M3, E2M1),
    *(
        custom(5, 0),
        custom(8, 0),
        custom(4, 0, specials="nan_only"),
        custom(3, 0, specials="none"),
        custom(2, 0),
    ),
    *(custom(5, 0, bias=14), custom(2, 5), custom(3, 4, specials="none"), custom(4, 3, bias=11)),
    *(
        custom(1, 6, specials="none"),
        custom(6, 1),
        custom(2, 2, bias=-5),
        custom(5, 2, specials="nan_only"),
    ),
)
WIDE_FORMATS = (
    *(
        BF16,
        FP16,
        custom(6, 9),
        custom(7, 8, specials="nan_only"),
        custom(10, 5),
        custom(2, 13, bias=3),
    ),
    # Around the largest exponent at which a number can be rounded by adding 1.5 * 2**k to it in
    # float32.
    *(custom(7, 4, bias=17), custom(7, 4, bias=18), custom(7, 4, bias=19)),
)
FORMATS = SMALL_FORMATS + WIDE_FORMATS


def magnitudes(fmt: Format) -> Float64s:
    """Return the value of every non-negative finite code in the order of the codes, and of the code
    after the last.
    """
    reserved = {"ieee": 2**fmt.mantissa_bits, "nan_only": 1, "none": 0}[fmt.specials]
    codes = np.arange(2 ** (fmt.exponent_bits + fmt.mantissa_bits) - reserved + 1, dtype=np.int64)
    exponent_field, fraction = codes >> fmt.mantissa_bits, codes & (2**fmt.mantissa_bits - 1)
    significand = np.where(exponent_field > 0, 2**fmt.mantissa_bits + fraction, fraction)
    exponent = np.maximum(exponent_field, 1) - fmt.bias - fmt.mantissa_bits
    return np.ldexp(significand.astype(np.float64), exponent)


def trying_inputs(fmt: Format, dtype: type[np.floating]) -> Float64s:
    """Return every number of fmt and every midpoint, each with its two neighbors in dtype, and the
    special values.

    For float64 also numbers a hair off each midpoint that float32 would put on it.
    """
    numbers = magnitudes(fmt)
    middles = (numbers[:-1] + numbers[1:]) / 2
    points = np.concatenate([numbers, middles])
    with np.errstate(over="ignore", under="ignore"):
        points = points.astype(dtype)
        special = np.array([0.0, np.inf, np.nan, 1e300, 3e38, 2.0**-126, 1e-45, 5e-324]).astype(
            dtype
        )
        beyond = points[-1:] * np.array([1, 2, 1024], dtype=dtype)
    near = [
        points,
        np.nextafter(points, dtype(np.inf)),
        np.nextafter(points, dtype(0)),
        special,
        beyond,
    ]
    if dtype is np.float64:
        near += [middles * (1 + 2.0**-30), middles * (1 - 2.0**-30)]
    positive = np.unique(np.concatenate(near))
    return np.concatenate([positive, -positive]).astype(np.float64)


def expected(x: Float64s, fmt: Format, rounding: Rounding) -> Float64s:
    """Return x rounded to fmt by bisection in the list of its numbers; float64 holds them and their
    midpoints.
    """
    numbers = magnitudes(fmt)
    last = len(numbers) - 1  # index of the first number that is too large
    magnitude, negative = np.abs(x), np.signbit(x)
    lower = np.searchsorted(numbers, magnitude, side="right") - 1
    lower = np.clip(np.where(np.isnan(x), 0, lower), 0, last)
    upper = np.minimum(lower + 1, last)
    with np.errstate(invalid="ignore"):
        middle = (numbers[lower] + numbers[upper]) / 2
        away = {
            "nearest_even": (magnitude > middle) | ((magnitude == middle) & (lower % 2 == 1)),
            "nearest_away": magnitude >= middle,
            "toward_zero": np.zeros(x.shape, bool),
            "up": ~negative,
            "down": negative,
        }[rounding] & (magnitude != numbers[lower])
    index = np.where(away, upper, lower)
    value = numbers[index]
    if not fmt.subnormals:
        value = np.where(value < numbers[2**fmt.mantissa_bits], 0.0, value)
    stops = {"toward_zero": np.ones(x.shape, bool), "up": negative, "down": ~negative}.get(
        rounding, False
    )
    beyond = {"infinity": np.inf, "saturate": numbers[last - 1], "nan": np.nan}[fmt.overflow]
    value = np.where(index == last, np.where(stops, numbers[last - 1], beyond), value)
    at_infinity = np.inf if fmt.specials == "ieee" else np.nan
    value = np.where(
        np.isinf(x), numbers[last - 1] if fmt.overflow == "saturate" else at_infinity, value
    )
    return np.copysign(np.where(np.isnan(x), np.nan, value), x)


def differing(got: NDArray[np.floating], want: Float64s) -> int:
    """Count the elements that differ in any bit; all NaN are one, the sign of a zero counts."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        want = want.astype(got.dtype)
    same = (got == want) & (np.signbit(got) == np.signbit(want))
    return int(np.sum(~(same | (np.isnan(got) & np.isnan(want)))))


def floor_log2(x: Fraction) -> int:
    """Return the exponent of the largest power of two that is not above x > 0."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def round_fraction(x: Fraction, fmt: Format, rounding: Rounding = "nearest_even") -> float:
    """Return x rounded to fmt as a float, where a negative number that becomes zero is -0.0."""
    sign = -1.0 if x < 0 else 1.0
    if x == 0:
        return 0.0
    exponent = max(floor_log2(abs(x)), 1 - fmt.bias)
    spacing = Fraction(2) ** (exponent - fmt.mantissa_bits)
    steps, rest = divmod(abs(x) / spacing, 1)
    # Without a fraction, steps is 1 for every normal number and the code is the exponent field.
    odd = steps % 2 == 1 if fmt.mantissa_bits else steps == 1 and (exponent + fmt.bias) % 2 == 1
    outward = (rounding == "up" and x > 0) or (rounding == "down" and x < 0)
    away = {
        "nearest_even": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and odd),
        "nearest_away": rest >= Fraction(1, 2),
    }.get(rounding, outward and rest > 0)
    value = (steps + away) * spacing
    if not fmt.subnormals and value < Fraction(2) ** (1 - fmt.bias):
        return sign * 0.0
    largest = Fraction(largest_number(fmt))
    if value <= largest:
        return sign * float(value)
    if rounding == "toward_zero" or (rounding in ("up", "down") and not outward):
        return sign * float(largest)
    return sign * {"infinity": np.inf, "saturate": float(largest), "nan": np.nan}[fmt.overflow]


def largest_number(fmt: Format) -> Fraction:
    """Return the value of the last finite code."""
    reserved = {"ieee": 2**fmt.mantissa_bits, "nan_only": 1, "none": 0}[fmt.specials]
    code = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - reserved - 1
    field, fraction = divmod(code, 2**fmt.mantissa_bits)
    return (1 + Fraction(fraction, 2**fmt.mantissa_bits)) * Fraction(2) ** (field - fmt.bias)


def round_blocks_exactly(
    x: NDArray[np.floating], fmt: BlockFormat, rounding: Rounding = "nearest_even"
) -> Float64s:
    """Return x [rows, N] (finite) rounded to a block format, one exact fraction at a time.

    The scales follow the specifications: OCP MX 1.0, section 6.3, and NVFP4's two levels. The
    product of an element and its scales is exact until it is stored, in float32 or float64 as x is.
    """
    tensor_scale = Fraction(1)
    if fmt.tensor_scale:
        largest = Fraction(round_fraction(Fraction(float(np.abs(x).max())), FP32))
        tensor_scale = Fraction(
            round_fraction(
                largest / (largest_number(fmt.scale) * largest_number(fmt.element)), FP32
            )
        )
    out = np.empty(x.shape, np.float64)
    for row, column in np.ndindex(x.shape[0], -(-x.shape[1] // fmt.block_size)):
        block = slice(column * fmt.block_size, (column + 1) * fmt.block_size)
        numbers = [Fraction(float(number)) for number in x[row, block]]
        scale = _block_scale(max(map(abs, numbers)), fmt, tensor_scale)
        for position, number in enumerate(numbers, start=block.start):
            element = round_fraction(number / scale, fmt.element, rounding) if scale else 0.0
            value = Fraction(element) * scale
            stored = round_fraction(value, FP32) if x.dtype == np.float32 else float(value)
            out[row, position] = np.copysign(stored, x[row, position])
    return out


def _block_scale(largest: Fraction, fmt: BlockFormat, tensor_scale: Fraction) -> Fraction:
    if fmt.scale.mantissa_bits == 0:
        exponent = (
            floor_log2(largest) - floor_log2(largest_number(fmt.element)) if largest else -127
        )
        return Fraction(2) ** min(max(exponent, -127), 127)
    if not tensor_scale:
        return Fraction(0)
    ratio = largest / (largest_number(fmt.element) * tensor_scale)
    return Fraction(round_fraction(ratio, fmt.scale)) * tensor_scale
