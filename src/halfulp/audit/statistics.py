"""Tests with stated uncertainty: is a target's error larger than a reference's, does it lean, how
does it grow.

Samples are heads, which are drawn independently. Every test is one-sided, by Student's t, at a
level divided by the number of tests made (Bonferroni), so the chance that a kernel as good as its
reference raises any alarm at all stays below the family's level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.audit.figures import Figure, Lean
from halfulp.chances import student_beyond


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with one-sided bounds at the corrected level."""

    mean: float
    standard_error: float
    lower: float
    upper: float
    samples: int

    @property
    def reach(self) -> float:
        """How far the whole interval lies from 0; 0 where it holds 0."""
        return min(abs(self.lower), abs(self.upper)) if self.lower * self.upper > 0 else 0.0


def estimate(samples: Tensor, level: float) -> Estimate:
    """Mean of `samples [S]` (S ≥ 2) with bounds that each hold with probability 1 − level; raises
    ValueError for fewer samples.
    """
    n = samples.numel()
    if n < 2:
        raise ValueError(
            f"samples of {n} head(s): accepted are 2 or more, a standard error needs them"
        )
    values = samples.tolist()  # of a dozen numbers, where torch takes ten times as long
    mean = sum(values) / n
    error = math.sqrt(sum((x - mean) * (x - mean) for x in values) / ((n - 1) * n))
    # Student's t: a default case has 16 heads, whose standard error is itself uncertain
    reach = student_beyond(level, n - 1) * error
    return Estimate(mean, error, mean - reach, mean + reach, n)


def error_ratio(
    target: Figure, reference: Figure, level: float, *, through_delta: bool
) -> Estimate:
    """Geometric mean over heads of (target's error + slack) / (reference's error + slack), with
    bounds.

    The reference's error is taken as at least what correct rounding of the result itself may make
    and, with `through_delta`, what rounding O may make: a reference that happens to be exact on
    some input is no standard.
    """
    e = estimate(log_ratios(target, reference, through_delta=through_delta), level)
    return Estimate(
        math.exp(e.mean),
        e.standard_error * math.exp(e.mean),
        _exp(e.lower),
        _exp(e.upper),
        e.samples,
    )


def log_ratios(target: Figure, reference: Figure, *, through_delta: bool) -> Tensor:
    """Per head `[S]`, the logarithm of what `error_ratio` takes the mean of."""
    least = (
        (target.own.square() + target.through_delta.square()).sqrt()
        if through_delta
        else target.own
    )
    # without this a reference that is exact by luck would make a defect of correct rounding
    allowed = torch.maximum(reference.error, least)
    return ((target.error + target.slack) / (allowed + target.slack)).log()


def _exp(x: float) -> float:
    # math.exp raises from 709.8 on, where few samples give a bound without limit
    return math.exp(min(x, 700.0))


def excess_lean(target: Lean, reference: Lean, level: float) -> Estimate:
    """Mean over heads of how much more the target leans than the reference on the same inputs, in
    unit roundoffs, with two-sided bounds.
    """
    # head by head: what both share on these inputs, such as ties, leaves the variance
    return estimate(target.lean - reference.lean, level / 2)


def growth_exponent(lengths: list[int], errors: list[float]) -> float:
    """p of error ∝ Nᵖ by least squares in logarithms; 0 is no growth, 0.5 is √N, 1 is N. Needs two
    or more lengths.
    """
    x = torch.tensor(lengths, dtype=torch.float64).log()
    # an error of exactly 0 has no logarithm
    y = torch.tensor(errors, dtype=torch.float64).clamp_min(1e-300).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def drift_exponent(difference: Tensor) -> float:
    """How the summed signed error grows with the number of terms n: p of RMS |Σ_n| ∝ nᵖ; 0.5 is a
    random walk, 1 is drift.

    `difference [S, n]` holds one sequence of signed errors a sample.
    """
    sums = difference.double().cumsum(-1).square().mean(0).sqrt()
    n = difference.shape[-1]
    # powers of two, which a fit in logarithms weighs alike; few terms say nothing of growth
    lengths = [k for k in (2**i for i in range(3, 30)) if k <= n]
    return growth_exponent(lengths, [float(sums[k - 1]) for k in lengths])
