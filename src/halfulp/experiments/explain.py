"""One rounding, bit by bit: what a sum, a product or a dot product becomes in a low-precision
format, and why.

A biased rounding error is hard to believe in until one has seen the bits: two negative numbers add
up, the significand overflows by one place, the bit shifted out is a one, something small stands
behind it, and the result moves away from zero. Everything here is computed in exact fractions and
shares no code with `formats.round_to`, so that each can be held against the other.

Source of the worked example: Qiu & Yao (arXiv 2510.04212), section 3.3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

from halfulp.experiments.explain_text import render
from halfulp.formats import FP32, FP64, Format

Operation: TypeAlias = Literal["sum", "product", "dot"]

EXAMPLE = (-2.4071154594421387, -2.296875)
"""The worked example: its sum is −4.703990459442139, which bf16 makes −4.71875."""


@dataclass(frozen=True)
class Code:
    """A value as its format stores it."""

    value: float
    format: str
    sign: str  # one bit
    exponent: str  # the exponent field
    fraction: str  # the stored fraction, without the leading one


@dataclass(frozen=True)
class Decision:
    """One rounding: what was to be stored, between which neighbors it lies, and which was taken for
    what reason.
    """

    exact: Fraction
    format: str
    significand: str  # bits that are kept, as "1.0010110"; in a subnormal they begin with "0."
    dropped: str  # bits that are not kept; "…" stands for more than are shown
    power: int  # the value is ± significand · 2**power
    guard: int  # the first bit that is dropped
    round: int  # the second
    sticky: int  # 1 if any bit behind them is not zero
    ulp: float  # spacing of the format's numbers here
    below: float  # largest number of the format that is not above the exact value
    above: float  # smallest that is not below it
    reason: str  # the decision in words
    result: float
    code: Code
    error: float  # result − exact

    @property
    def exact_result(self) -> bool:
        """Whether nothing was lost."""
        return math.isfinite(self.result) and Fraction(self.result) == self.exact


@dataclass(frozen=True)
class RunningStep:
    """One addition to a running sum, rounded to the accumulator's format."""

    label: str
    term: Fraction  # what is added
    # places the leading bit moved left of the larger of the two; negative where they cancel
    carry: int
    decision: Decision


@dataclass(frozen=True)
class Explanation:
    """A sum, product or dot product with every rounding on its way to the result."""

    operation: Operation
    format: str
    accumulate: str  # the format in which the running sum, or the product, is held
    rounding: str
    operands: tuple[Code, ...]
    exact: Fraction  # of the whole operation, without any rounding
    steps: tuple[RunningStep, ...]  # each rounded to `accumulate`
    final: Decision  # the last running value put into `format`
    single: float  # what one rounding of the exact value would give
    result: float
    error: float  # result − exact

    @property
    def steps_matter(self) -> bool:
        """Whether the roundings on the way changed the result."""
        return not (
            self.single == self.result or (math.isnan(self.single) and math.isnan(self.result))
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; fractions become strings "numerator/denominator"."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain | {"steps_matter": self.steps_matter}

    def text(self) -> str:
        """Return the explanation as lines of at most 100 columns for a terminal."""
        return render(self)


def explain(
    values: Sequence[float | str],
    fmt: Format,
    operation: Operation = "sum",
    *,
    accumulate: Format | None = None,
) -> Explanation:
    """Return what `operation` on `values` gives in `fmt`, rounding by rounding.

    Args:
        values: finite numbers, or their decimal text (read as float64). For "dot", the left vector
            followed by the right one, so an even number of them. They are taken as they are and not
            rounded to `fmt` first.
        fmt: the format of the result; its own rounding and overflow policy decide.
        operation: "sum" x1 + x2 + …, "product" x1 · x2 · …, or "dot" x1·y1 + x2·y2 + … with exact
            products.
        accumulate: the format of the running value; float32, or `fmt` where that is wider, or
            float64 for one number alone, which is then rounded once.

    Raises:
        ValueError: a value is not finite, there are too few or an odd number of them for "dot", the
            operation is unknown, or a format is block-scaled or rounds stochastically.
    """
    if operation not in get_args(Operation):
        raise ValueError(f"operation={operation!r}: accepted are {', '.join(get_args(Operation))}")
    _check_format("fmt", fmt)
    if accumulate is None and len(values) == 1:
        accumulate = FP64
    if accumulate is None:
        accumulate = fmt if fmt.mantissa_bits > FP32.mantissa_bits else FP32
    _check_format("accumulate", accumulate)
    numbers = [_number(value) for value in values]
    if not numbers or (operation == "dot" and len(numbers) % 2):
        need = (
            "an even number, left vector then right vector"
            if operation == "dot"
            else "at least one"
        )
        raise ValueError(f"values of length {len(numbers)}: accepted for {operation!r} is {need}")
    terms = _terms(numbers, operation)
    exact, steps, running = _accumulate(terms, operation, accumulate)
    final = decide(running, fmt)
    return Explanation(
        operation=operation,
        format=fmt.name,
        accumulate=accumulate.name,
        rounding=fmt.rounding,
        operands=tuple(_operand(number) for number in numbers),
        exact=exact,
        steps=steps,
        final=final,
        single=decide(exact, fmt).result,
        result=final.result,
        error=_error(final.result, exact),
    )


def decide(exact: Fraction, fmt: Format) -> Decision:
    """Return the rounding of an exact value to a scalar format, with the reason; a zero is +0.

    Raises:
        ValueError: `fmt` rounds stochastically or is block-scaled.
    """
    _check_format("fmt", fmt)
    # in fractions, so that the rounding which is explained is the only one
    negative, size = exact < 0, abs(exact)
    power = max(_exponent(size), fmt.min_exponent) if size else fmt.min_exponent
    # below the smallest normal number the spacing stays that of its binade
    spacing = Fraction(2) ** (power - fmt.mantissa_bits)
    count, rest = divmod(size, spacing)
    distance = rest / spacing  # of one spacing, 0 up to 1
    up, reason = _direction(distance, count, negative, power, fmt)
    magnitude, over = _bounded((count + up) * spacing, negative, fmt)
    result = -magnitude if negative else magnitude
    nearer, farther = count * spacing, (count + (distance > 0)) * spacing
    below, above = (-farther, -nearer) if negative else (nearer, farther)
    significand, dropped = _split_bits(count, distance, fmt)
    return Decision(
        exact=exact,
        format=fmt.name,
        significand=significand,
        dropped=dropped,
        power=power,
        # behind the last bit kept: a half, a quarter, and whether there is anything more
        guard=int(distance >= Fraction(1, 2)),
        round=int(distance % Fraction(1, 2) >= Fraction(1, 4)),
        sticky=int(distance % Fraction(1, 4) > 0),
        ulp=float(spacing),
        below=_as_float(below),
        above=_as_float(above),
        reason=over or reason,
        result=result,
        code=encode(result, fmt),
        error=_error(result, exact),
    )


def encode(value: float, fmt: Format) -> Code:
    """Return the code of a value that `fmt` holds; infinity and NaN where it has them.

    Raises:
        ValueError: the format does not hold the value.
    """
    sign = "1" if math.copysign(1.0, value) < 0 else "0"
    if not math.isfinite(value):
        fraction = ("0" if math.isinf(value) else "1") * fmt.mantissa_bits
        return Code(value, fmt.name, sign, "1" * fmt.exponent_bits, fraction)
    size = abs(Fraction(value))
    power = max(_exponent(size), fmt.min_exponent) if size else fmt.min_exponent
    count = size / Fraction(2) ** (power - fmt.mantissa_bits)
    if count.denominator != 1 or size > Fraction(fmt.max):
        raise ValueError(f"value={value!r}: accepted is a number that {fmt.name} holds")
    hidden = 2**fmt.mantissa_bits
    normal = count >= hidden
    exponent = format(power + fmt.bias if normal else 0, f"0{fmt.exponent_bits}b")
    fraction = format(int(count) % hidden, f"0{fmt.mantissa_bits}b") if fmt.mantissa_bits else ""
    return Code(value, fmt.name, sign, exponent, fraction)


def _check_format(argument: str, fmt: Format) -> None:
    if not isinstance(fmt, Format):
        raise ValueError(
            f"{argument}={fmt}: accepted is a scalar format, for a block's scale depends on the"
            " neighbors"
        )
    if fmt.rounding == "stochastic":
        raise ValueError(
            f"{argument}.rounding='stochastic': accepted is a rounding that depends on the value"
            " alone"
        )


def _number(value: float | str) -> Fraction:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"values={value!r}: accepted are finite numbers")
    return Fraction(number)


def _operand(number: Fraction) -> Code:
    """The value in float32 if that holds it, and in float64 otherwise."""
    value = float(number)
    return encode(value, FP32 if decide(number, FP32).exact_result else FP64)


def _terms(numbers: list[Fraction], operation: Operation) -> list[tuple[str, Fraction]]:
    if operation != "dot":
        return [(f"x{i}", number) for i, number in enumerate(numbers, 1)]
    half = len(numbers) // 2
    pairs = zip(numbers[:half], numbers[half:], strict=True)
    return [(f"x{i}·y{i}", left * right) for i, (left, right) in enumerate(pairs, 1)]


def _accumulate(
    terms: list[tuple[str, Fraction]], operation: Operation, fmt: Format
) -> tuple[Fraction, tuple[RunningStep, ...], Fraction]:
    """The exact total, every rounding of the running value, and what the running value is at the
    end.
    """
    combine = Fraction.__mul__ if operation == "product" else Fraction.__add__
    symbol = "·" if operation == "product" else "+"
    first = 0 if operation == "dot" else 1
    # a dot product is added to 0, so that its first product is rounded as well
    label, running = ("0", Fraction(0)) if operation == "dot" else terms[0]
    exact = running
    steps: list[RunningStep] = []
    for name, term in terms[first:]:
        exact = combine(exact, term)
        label = f"{label} {symbol} {name}" if not steps else f"({len(steps)}) {symbol} {name}"
        decision = decide(combine(running, term), fmt)
        steps.append(RunningStep(label, term, _carry(running, term, decision, operation), decision))
        if not math.isfinite(decision.result):
            raise ValueError(
                f"accumulate={fmt.name}: the running value overflows at {label}; accepted is a"
                " wider format"
            )
        running = Fraction(decision.result)
    return exact, tuple(steps), running


def _carry(running: Fraction, term: Fraction, decision: Decision, operation: Operation) -> int:
    """How far the leading bit of an addition's result lies left of that of its larger part."""
    larger, size = max(abs(running), abs(term)), abs(decision.exact)
    return 0 if operation == "product" or not size else _exponent(size) - _exponent(larger)


def _direction(
    distance: Fraction, count: int, negative: bool, power: int, fmt: Format
) -> tuple[bool, str]:
    """Whether the magnitude goes up to the farther neighbor, and why."""
    if distance == 0:
        return False, "exact: every dropped bit is zero"
    away = "down, away from zero" if negative else "up, away from zero"
    toward = "up, toward zero" if negative else "down, toward zero"
    if fmt.rounding == "toward_zero":
        return False, f"rounding toward zero drops the bits: {toward}"
    if fmt.rounding in ("up", "down"):
        farther = (fmt.rounding == "up") != negative
        return (
            farther,
            f"rounding {fmt.rounding} whatever the dropped bits: {away if farther else toward}",
        )
    half = Fraction(1, 2)
    if distance > half:
        return (
            True,
            f"guard bit 1 and a bit behind it is 1: more than half an ulp is dropped, so {away}",
        )
    if distance < half:
        return False, f"guard bit 0: less than half an ulp is dropped, so {toward}"
    if fmt.rounding == "nearest_away":
        return True, f"guard bit 1 and nothing behind it: a tie, which goes {away}"
    odd = bool(count % 2)
    if fmt.mantissa_bits == 0:  # the code is the exponent field alone, so that its parity decides
        odd = bool((power + fmt.bias) % 2) if count else False
    which = "odd" if odd else "even"
    return (
        odd,
        (
            f"guard bit 1 and nothing behind it: a tie; the last kept bit is {which}, so"
            f" {away if odd else toward}"
        ),
    )


def _bounded(magnitude: Fraction, negative: bool, fmt: Format) -> tuple[float, str]:
    """The magnitude with the format's policies at both ends of its range, and what they did."""
    if not fmt.subnormals and 0 < magnitude < Fraction(fmt.min_normal):
        return 0.0, f"smaller than the smallest normal number {fmt.min_normal:g}: flushed to zero"
    if magnitude <= Fraction(fmt.max):
        return float(magnitude), ""
    past = f"beyond the largest number {fmt.max:g}"
    stops = fmt.rounding == "toward_zero" or fmt.rounding == ("up" if negative else "down")
    if stops or fmt.overflow == "saturate":
        return fmt.max, f"{past}: {'rounding toward zero stops there' if stops else 'saturates'}"
    return (
        (math.inf, f"{past}: infinity")
        if fmt.overflow == "infinity"
        else (math.nan, f"{past}: NaN")
    )


def _split_bits(count: int, distance: Fraction, fmt: Format, shown: int = 32) -> tuple[str, str]:
    """The kept significand with its point, and up to `shown` dropped bits."""
    digits = format(int(count), f"0{fmt.significand_bits}b")
    kept = (
        f"{digits[: -fmt.mantissa_bits]}.{digits[-fmt.mantissa_bits :]}"
        if fmt.mantissa_bits
        else digits
    )
    scaled = distance * 2**shown
    dropped = format(int(scaled), f"0{shown}b")
    if scaled.denominator != 1:
        return kept, dropped + "…"
    return kept, dropped.rstrip("0")


def _exponent(size: Fraction) -> int:
    """floor(log2 size), exactly."""
    # numerator / denominator lies between 2^(power − 1) and 2^(power + 1)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    return power if Fraction(2) ** power <= size else power - 1


def _as_float(x: Fraction) -> float:
    """The neighbor as a float; beyond float64 it is infinite."""
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _error(result: float, exact: Fraction) -> float:
    return float(Fraction(result) - exact) if math.isfinite(result) else result


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
