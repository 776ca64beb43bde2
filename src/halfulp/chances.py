"""The tails that tests of significance ask for: Student's t, the fair binomial, and the beta
distribution behind Clopper and Pearson's bound.

All three are the regularized incomplete beta function or its inverse: scipy's values, without its
143 MB in everybody's training environment.
"""

import math
from collections.abc import Callable
from functools import lru_cache


@lru_cache(maxsize=4096)
def student_beyond(level: float, degrees: int) -> float:
    """The t that a Student variable of `degrees` ≥ 1 exceeds with probability `level`."""
    if not 0 < level < 1:
        return math.copysign(math.inf, 0.5 - level) if level in (0, 1) else math.nan
    if level > 0.5:
        return -student_beyond(1 - level, degrees)

    def excess(t: float) -> float:
        whole = degrees + t * t
        return _beta_below(degrees / whole, t * t / whole, degrees / 2, 0.5) / 2 - level

    high = 1.0
    while excess(high) > 0:
        high *= 2
    return _falling_root(excess, high / 2 if high > 1 else 0.0, high)


def beta_quantile(chance: float, a: float, b: float) -> float:
    """The x that a Beta(a, b) variable (a, b > 0) is below with probability `chance`."""
    return _falling_root(lambda x: chance - _beta_below(x, 1 - x, a, b), 0.0, 1.0)


def binomial_at_most(count: int, tries: int) -> float:
    """P(X ≤ count) of X ~ Binomial(tries, ½)."""
    # the sum of binomial terms is I_½(n − k, k + 1)
    return 1.0 if count >= tries else _beta_below(0.5, 0.5, tries - count, count + 1)


def _beta_below(x: float, rest: float, a: float, b: float) -> float:
    """I_x(a, b), where `rest` is 1 − x as exactly as the caller knows it."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges on the other side of the mean
        return 1 - _beta_below(rest, x, b, a)
    size = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(size + a * math.log(x) + b * math.log(rest)) / a
    # the continued fraction of DLMF 8.17.22 by Lentz's method
    upper, lower, value = 1.0, 0.0, 1.0
    for step in range(1, 10_000):
        m = step // 2
        top = m * (b - m) if step % 2 == 0 else -(a + m) * (a + b + m)
        term = top * x / ((a + step - 1) * (a + step))
        lower = 1 / (1 + term * lower)
        upper = 1 + term / upper
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return front / value


def _falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Bisect to the last bit: function(low) > 0 ≥ function(high)."""
    while low < (middle := (low + high) / 2) < high:
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return high


def student_tail(t: float, degrees: int) -> float:
    """The probability that a Student variable of `degrees` ≥ 1 exceeds t."""
    if math.isnan(t):
        return math.nan
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    whole = degrees + t * t
    # both arguments from t: where it is small, 1 − x would cancel
    beyond = _beta_below(degrees / whole, t * t / whole, degrees / 2, 0.5) / 2
    return beyond if t >= 0 else 1 - beyond
