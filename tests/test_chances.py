"""Tails against scipy's, over the whole range that tests of significance ask for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from halfulp.chances import beta_quantile, binomial_at_most, student_beyond, student_tail

LEVELS = st.floats(-30, -0.302).map(lambda x: 10**x)


@given(LEVELS | st.floats(0.5, 0.999), st.integers(1, 5000))
def test_students_t(level, degrees):
    """Held to the tail itself: scipy 1.11 inverts it to nine digits only."""
    assert stats.t.sf(student_beyond(level, degrees), degrees) == pytest.approx(level, rel=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 5000))
def test_students_tail(t, degrees):
    assert student_tail(t, degrees) == pytest.approx(stats.t.sf(t, degrees), rel=1e-9)


def test_the_ends_of_students_t():
    assert student_beyond(0.0, 3) == math.inf
    assert student_beyond(1.0, 3) == -math.inf
    assert math.isnan(student_beyond(math.nan, 3))
    assert math.isnan(student_beyond(1.5, 3))
    assert student_tail(math.inf, 3) == 0
    assert student_tail(-math.inf, 3) == 1
    assert math.isnan(student_tail(math.nan, 3))


@given(st.floats(1e-12, 1 - 1e-9), st.integers(1, 300), st.integers(1, 300))
def test_beta(chance, a, b):
    assert beta_quantile(chance, a, b) == pytest.approx(stats.beta.ppf(chance, a, b), rel=1e-9)


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_binomial(count, more):
    tries = count + more
    expected = special.bdtr(float(count), tries, 0.5)
    assert binomial_at_most(count, tries) == pytest.approx(expected, rel=1e-9)
