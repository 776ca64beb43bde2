"""The bit-by-bit explanation against the paper's example, `round_to` on whole formats, and torch's
own bits.
"""

from __future__ import annotations

import json
import math
import struct
from fractions import Fraction
from itertools import pairwise, product
from typing import get_args

import pytest
import torch

from halfulp.experiments.explain import EXAMPLE, Explanation, decide, encode, explain
from halfulp.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    FP16,
    FP32,
    FP64,
    IEEE_E4M3,
    MXFP8_E4M3,
    OCP_E4M3,
    OCP_E5M2,
    Format,
    Rounding,
    custom,
    round_to,
)

SMALL = (
    E2M1,
    E2M3,
    E3M2,
    IEEE_E4M3,
    OCP_E4M3,
    OCP_E4M3.with_(overflow="nan"),
    OCP_E5M2,
    custom(4, 0),
    E3M2.with_(subnormals=False),
    custom(3, 2),
)
DIRECTIONS = [mode for mode in get_args(Rounding) if mode != "stochastic"]


def numbers(fmt: Format) -> list[float]:
    """Every finite number of a small format, both signs."""
    hidden = 2**fmt.mantissa_bits
    positive = [count * fmt.min_subnormal for count in range(hidden)]
    for power in range(fmt.min_exponent, fmt.max_exponent + 1):
        positive += [(1 + f / hidden) * 2.0**power for f in range(hidden)]
    kept = [
        x for x in positive if x <= fmt.max and (fmt.subnormals or x == 0 or x >= fmt.min_normal)
    ]
    return [sign * x for x in kept for sign in (1.0, -1.0)]


def probes(fmt: Format) -> list[float]:
    """Every number, every midpoint, a hair beside both, and what lies beyond the largest."""
    found = sorted(set(numbers(fmt)))
    middles = [(a + b) / 2 for a, b in pairwise(found)]
    exact = found + middles
    beside = [x * (1 + side * 2.0**-40) for x in exact for side in (-1, 1)]
    return (
        exact
        + beside
        + [sign * fmt.max * factor for factor in (1.01, 1.2, 2.0, 2.5, 64.0) for sign in (1, -1)]
    )


def same(found: float, wanted: float) -> bool:
    return found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_the_worked_example_is_the_papers_bit_for_bit() -> None:
    found = explain(EXAMPLE, BF16)
    assert [code.value for code in found.operands] == [-2.4071154594421387, -2.296875]
    assert found.operands[0].fraction == "00110100000111000101110"
    assert found.operands[1].exponent == "10000000"
    assert found.exact == Fraction(-2.4071154594421387) + Fraction(-2.296875)
    (step,) = found.steps
    assert step.decision.result == -4.703990459442139
    assert step.decision.exact_result
    assert step.carry == 1
    assert "the sum carries" in found.text()
    assert (step.decision.code.exponent, step.decision.code.fraction) == (
        "10000001",
        "00101101000011100010111",
    )
    final = found.final
    assert (final.significand, final.dropped, final.power) == ("1.0010110", "1000011100010111", 2)
    assert (final.guard, final.round, final.sticky) == (1, 0, 1)
    assert (final.below, final.above, final.ulp) == (-4.71875, -4.6875, 2.0**-5)
    assert found.result == -4.71875
    assert found.error == -0.014759540557861328
    assert (final.code.sign, final.code.exponent, final.code.fraction) == (
        "1",
        "10000001",
        "0010111",
    )


@pytest.mark.parametrize(
    "fmt", SMALL, ids=lambda fmt: f"{fmt.name}-{fmt.overflow}-{fmt.subnormals}"
)
@pytest.mark.parametrize("rounding", DIRECTIONS)
def test_decisions_agree_with_round_to_on_every_number_and_midpoint(
    fmt: Format, rounding: Rounding
) -> None:
    values = probes(fmt)
    wanted = round_to(torch.tensor(values, dtype=torch.float64), fmt, rounding=rounding).tolist()
    ours = fmt.with_(rounding=rounding)
    wrong = [
        x
        for x, w in zip(values, wanted, strict=True)
        if not same(decide(Fraction(x), ours).result, w)
    ]
    assert wrong == []


@pytest.mark.parametrize("operation", ["sum", "product"])
def test_every_pair_of_a_small_format(operation: str) -> None:
    values = numbers(E3M2)
    pairs = list(product(values, repeat=2))
    left, right = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    exact = left + right if operation == "sum" else left * right
    wanted = round_to(exact, E3M2).tolist()
    found = [explain(pair, E3M2, operation).result for pair in pairs]  # type: ignore[arg-type]
    assert found == wanted


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32])
def test_random_values_agree_with_round_to(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    mantissa = torch.rand(400, generator=generator, dtype=torch.float64) + 1
    power = torch.randint(-160, 140, (400,), generator=generator)
    values = torch.ldexp(mantissa, power)
    wanted = round_to(values, fmt).tolist()
    assert [decide(Fraction(x), fmt).result for x in values.tolist()] == wanted


def test_codes_are_the_bits_that_torch_stores() -> None:
    bits = torch.arange(0, 2**16, 37, dtype=torch.int32).to(torch.int16)
    for dtype, fmt in ((torch.bfloat16, BF16), (torch.float16, FP16)):
        for stored, value in zip(bits.tolist(), bits.view(dtype).double().tolist(), strict=True):
            if math.isnan(value):
                continue
            code = encode(value, fmt)
            assert code.sign + code.exponent + code.fraction == format(stored & 0xFFFF, "016b")
    code = encode(-0.1, FP64)
    assert (
        int(code.sign + code.exponent + code.fraction, 2)
        == struct.unpack(">Q", struct.pack(">d", -0.1))[0]
    )


def test_neighbors_enclose_the_value_and_lie_one_ulp_apart() -> None:
    for x in probes(E3M2):
        found = decide(Fraction(x), E3M2)
        assert found.below <= x <= found.above
        assert found.above - found.below == (0.0 if found.below == x == found.above else found.ulp)


def test_a_rounding_on_the_way_that_changes_the_result_is_said() -> None:
    # 1 + 2**-8 is a tie in bf16; the last term breaks it, and is lost when the sum passes through
    # fp32.
    once = explain([1 + 2**-8, 2.0**-40], BF16, accumulate=FP64)
    twice = explain([1 + 2**-8, 2.0**-40], BF16)
    assert (once.result, once.steps_matter) == (1 + 2**-7, False)
    assert (twice.result, twice.steps_matter) == (1.0, True)
    assert "rounding the exact value once" in twice.text()
    assert "tie" in twice.final.reason


def test_a_dot_product_is_accumulated_step_by_step() -> None:
    left, right = [1.5, -2.25, 3.0, 0.1], [0.1, 0.2, 0.3, 7.0]
    found = explain([*left, *right], BF16, "dot", accumulate=BF16)
    running = torch.zeros((), dtype=torch.float64)
    for a, b, step in zip(left, right, found.steps, strict=True):
        assert step.term == Fraction(a) * Fraction(b)
        exact = Fraction(running.item()) + step.term
        running = round_to(torch.tensor(float(exact), dtype=torch.float64), BF16)
        assert step.decision.result == running.item()
    assert found.result == running.item()
    assert found.exact == sum(Fraction(a) * Fraction(b) for a, b in zip(left, right, strict=True))
    assert found.error == float(Fraction(found.result) - found.exact)


def test_cancelling_bits_are_counted() -> None:
    (step,) = explain([1.0 + 2**-7, -1.0], BF16).steps
    assert step.carry == -7
    assert "leading 7 bits cancel" in explain([1.0 + 2**-7, -1.0], BF16).text()
    assert explain([1.5, 1.5], BF16, "product").steps[0].carry == 0


def test_operands_that_float32_cannot_hold_are_shown_in_float64() -> None:
    assert [code.format for code in explain([0.1, 0.5], BF16).operands] == ["fp64", "fp32"]
    assert explain(["0.1", "0.5"], BF16) == explain([0.1, 0.5], BF16)


@pytest.mark.parametrize(
    "found",
    [
        explain(EXAMPLE, BF16),
        explain([0.1, 0.2, 0.3], FP64),
        explain([1.5, -2.25, 3.0, 0.1, 0.2, 0.3], OCP_E4M3, "dot"),
        explain([1e30, 1e30], BF16, "product", accumulate=FP64),
        explain([1e-300, 1e-10], E2M1, "product", accumulate=FP64),
        explain([1.0, -1.0], FP16),
    ],
    ids=lambda found: f"{found.operation}-{found.format}",
)
def test_text_fits_a_terminal_and_json_is_plain(found: Explanation) -> None:
    lines = found.text().splitlines()
    assert max(map(len, lines)) <= 100
    assert any(repr(found.result) in line for line in lines)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["format"] == found.format


@pytest.mark.parametrize(
    ("values", "fmt", "operation", "words"),
    [
        ([], BF16, "sum", "values of length 0"),
        ([1.0, 2.0, 3.0], BF16, "dot", "an even number"),
        ([1.0, math.inf], BF16, "sum", "finite numbers"),
        (["one", 2.0], BF16, "sum", "values='one'"),
        ([1.0, 2.0], BF16, "difference", "operation='difference'"),
        ([1.0, 2.0], MXFP8_E4M3, "sum", "scalar format"),
        ([1.0, 2.0], BF16.with_(rounding="stochastic"), "sum", "stochastic"),
        ([3e38, 3e38], BF16, "sum", "overflows"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    values: list[float], fmt: Format, operation: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        explain(values, fmt, operation)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
