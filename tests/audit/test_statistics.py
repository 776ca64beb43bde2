"""The tests behind the verdict: their false-alarm rate under the null, their power, and the two
growth exponents on known sequences.
"""

import math

import pytest
import torch

from halfulp.audit.figures import Figure, Lean
from halfulp.audit.statistics import (
    drift_exponent,
    error_ratio,
    estimate,
    excess_lean,
    growth_exponent,
)


def figure(error: torch.Tensor, slack: float = 1e-9) -> Figure:
    zero = torch.zeros_like(error)
    return Figure(
        "O error", "out", error, torch.full_like(error, slack), zero, zero, torch.ones_like(error)
    )


def test_one_sided_bound_covers_at_its_level():
    generator = torch.Generator().manual_seed(0)
    level, trials = 0.05, 4000
    draws = torch.randn(trials, 16, generator=generator, dtype=torch.float64)
    missed = sum(estimate(row, level).lower > 0 for row in draws)
    # 4000 trials at 5 %: 200 expected, standard deviation 14.
    assert abs(missed - trials * level) < 5 * math.sqrt(trials * level * (1 - level))


def test_equal_errors_raise_no_alarm_and_a_larger_one_does():
    generator = torch.Generator().manual_seed(1)
    a, b = (1 + 0.05 * torch.randn(16, generator=generator, dtype=torch.float64) for _ in range(2))
    same = error_ratio(figure(a), figure(b), 1e-5, through_delta=True)
    assert same.lower < 1 < same.upper
    assert same.samples == 16
    assert error_ratio(figure(1.6 * a), figure(b), 1e-5, through_delta=True).lower > 1.25


def test_dust_is_not_compared_with_zero():
    dust, zero = torch.full((8,), 1e-12, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    assert (
        error_ratio(
            figure(dust, slack=1e-9), figure(zero, slack=1e-9), 1e-5, through_delta=True
        ).upper
        < 1.01
    )


def test_a_lean_is_seen_beside_a_reference_on_the_same_inputs():
    generator = torch.Generator().manual_seed(2)
    common = torch.randn(16, generator=generator, dtype=torch.float64)
    jitter = 0.01 * torch.randn(16, generator=generator, dtype=torch.float64)
    excess = excess_lean(Lean("out", common - 0.7 + jitter), Lean("out", common), 1e-5)
    assert excess.upper < -0.6
    assert excess.reach == pytest.approx(min(abs(excess.lower), abs(excess.upper)))
    assert excess_lean(Lean("out", common + jitter), Lean("out", common), 1e-5).reach < 0.02


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="2 or more"):
        estimate(torch.ones(1), 0.01)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_growth_exponent(power):
    lengths = [256, 512, 1024, 4096]
    assert growth_exponent(lengths, [3e-3 * n**power for n in lengths]) == pytest.approx(power)


def test_drift_tells_a_random_walk_from_a_lean():
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(2000, 1024, generator=generator)
    assert drift_exponent(noise) == pytest.approx(0.5, abs=0.03)
    assert drift_exponent(noise + 1.0) > 0.9


def test_a_reference_is_not_held_below_what_correct_rounding_may_make():
    error, exact, allowed = (torch.full((8,), x, dtype=torch.float64) for x in (1e-3, 0.0, 1e-3))
    zero = torch.zeros(8, dtype=torch.float64)
    reference = Figure("dQ error", "grad_query", exact, zero + 1e-9, zero, zero, zero + 1)
    through = Figure("dQ error", "grad_query", error, zero + 1e-9, zero, allowed, zero + 1)
    assert error_ratio(through, reference, 1e-5, through_delta=True).mean == pytest.approx(1)
    assert error_ratio(through, reference, 1e-5, through_delta=False).lower > 1e5
    own = Figure("dQ error", "grad_query", error, zero + 1e-9, allowed, zero, zero + 1)
    assert error_ratio(own, reference, 1e-5, through_delta=False).mean == pytest.approx(1)
