"""Alikeness of the error's rank-1 terms against loops and decompositions; the control sees nothing
where there is.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfulp.watch import directions
from halfulp.watch.directions import (
    Direction,
    direction_of,
    error_direction,
    rank1_share,
    step_figures,
    unit_matrix,
)
from halfulp.watch.measures import delta_error, exact_call
from halfulp.watch.taps import Call, Observed
from tests.watch.toy import random_call


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def terms_of(call: Call, h: int) -> list[Tensor]:
    """(PK)[T]ᵀ X[T] of every row of every batch entry, one head, written out."""
    exact = exact_call(call)
    assert call.inputs is not None
    return [
        torch.outer(exact.weights[b, h, i] @ call.key[b, h], call.inputs[b, i])
        for b in range(call.query.shape[0])
        for i in range(call.query.shape[2])
    ]


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.mark.parametrize("shape", [{}, {"is_causal": False, "n_k": 4}])
def test_direction_and_cosines_are_those_of_the_loops(shape):
    call = random_call(1, **shape)
    exact = exact_call(call)
    error = delta_error(call, exact)
    found = direction_of(call, exact, error, generator())
    torch.testing.assert_close(found.error, error_direction(call, exact, error))
    for h in range(3):
        terms = terms_of(call, h)
        weighted = [e * term for e, term in zip(error[:, h].flatten(), terms, strict=True)]
        torch.testing.assert_close(found.error[h], sum(weighted[1:], weighted[0]))
        units = torch.stack([term / term.norm() for term in terms])
        torch.testing.assert_close(found.mean_term[h], units.mean(0))
        pairs = [cosine(a, b) for a, b in itertools.combinations(terms, 2)]
        torch.testing.assert_close(float(found.figures["terms_cosine"][h]), sum(pairs) / len(pairs))
        stack = torch.linalg.svdvals(units.flatten(1)).square()
        torch.testing.assert_close(
            float(found.figures["terms_rank1"][h]), float(stack[0] / stack.sum()), rtol=1e-3, atol=0
        )
        own = torch.linalg.svdvals(found.error[h]).square()
        torch.testing.assert_close(
            float(found.figures["direction_rank1"][h]), float(own[0] / own.sum()), rtol=1e-3, atol=0
        )


def test_only_evenly_spread_rows_are_compared_where_there_are_many(monkeypatch):
    monkeypatch.setattr(directions, "MOST_TERMS", 5)
    call = random_call(2)
    exact = exact_call(call)
    found = direction_of(call, exact, delta_error(call, exact), generator())
    terms = terms_of(call, 0)[::3]
    pairs = [cosine(a, b) for a, b in itertools.combinations(terms, 2)]
    assert len(terms) == 4
    torch.testing.assert_close(float(found.figures["terms_cosine"][0]), sum(pairs) / len(pairs))


def planted(common: float, seed: int = 0) -> Observed:
    """A long call whose keys and inputs share `common` times one vector of both signs each."""
    call = random_call(seed, n=128, n_k=128)
    g = generator(seed + 1)
    inputs = torch.randn(2, 128, 24, generator=g, dtype=torch.float64)
    of_key, of_input = (torch.randn(n, generator=g, dtype=torch.float64) for n in (4, 24))
    return replace(
        call,
        key=0.2 * call.key + common * (of_key - of_key.mean()),
        inputs=0.2 * inputs + common * (of_input - of_input.mean()),
    )


def test_a_shared_direction_is_seen_and_its_shuffled_control_is_not():
    """A9: with a common part the cosine is near 1 and the control near 0; without one both are near
    0.
    """
    for common, least, most in ((3.0, 0.9, 1.0), (0.0, -0.05, 0.05)):
        call = planted(common)
        exact = exact_call(call)
        figures = direction_of(call, exact, delta_error(call, exact), generator(1)).figures
        assert ((figures["terms_cosine"] > least) & (figures["terms_cosine"] <= most)).all()
        assert (figures["terms_cosine_shuffled"].abs() < 0.05).all()
        assert (figures["terms_rank1"] >= figures["terms_cosine"]).all()


def test_the_control_keeps_what_a_common_sign_brings():
    """All values above 0: half of the alikeness is a shared sign, and the control owns up to it."""
    call = planted(0.0)
    assert call.inputs is not None
    call = replace(call, key=call.key.abs(), inputs=call.inputs.abs())
    exact = exact_call(call)
    figures = direction_of(call, exact, delta_error(call, exact), generator(1)).figures
    assert (figures["terms_cosine"] > 0.4).all()
    assert ((figures["terms_cosine"] - figures["terms_cosine_shuffled"]).abs() < 0.15).all()


def test_rank1_share():
    g = generator(3)
    column, row = torch.randn(2, 4, 1, generator=g), torch.randn(2, 1, 7, generator=g)
    torch.testing.assert_close(rank1_share(column * row), torch.ones(2).double())
    torch.testing.assert_close(
        rank1_share(torch.eye(4, 7).expand(2, 4, 7) * 1e-30), torch.full((2,), 0.25).double()
    )
    assert rank1_share(torch.zeros(1, 4, 7)).isnan().all()


def test_cosines_with_the_last_steps():
    g = generator(4)
    past = torch.randn(3, 2, 4, 6, generator=g, dtype=torch.float64)
    now = Direction(
        torch.randn(2, 4, 6, generator=g).double(), torch.randn(2, 4, 6, generator=g).double(), {}
    )
    units = torch.stack([unit_matrix(matrix) for matrix in past])
    found = step_figures(now, units, past, generator(5))
    for h in range(2):
        expected = sum(cosine(now.error[h], matrix[h]) for matrix in past) / 3
        torch.testing.assert_close(float(found["direction_cosine"][h]), expected)
        expected = float(sum((now.mean_term[h] * matrix[h]).sum() for matrix in past) / 3)
        torch.testing.assert_close(float(found["terms_step_cosine"][h]), expected)
    none = step_figures(now, None, None, generator(5))
    assert all(figure.isnan().all() for figure in none.values())


def test_a_direction_that_stays_is_seen_and_its_permuted_control_is_not():
    g = generator(6)
    same = torch.randn(1, 16, 40, generator=g, dtype=torch.float64)
    now = Direction(2 * same, same / 50, {})
    past = unit_matrix(same + 0.1 * torch.randn(1, 16, 40, generator=g, dtype=torch.float64))[None]
    found = step_figures(now, past, past, generator(7))
    assert found["direction_cosine"] > 0.98
    assert found["direction_cosine_shuffled"] < 0.15
    fresh = unit_matrix(torch.randn(1, 16, 40, generator=g, dtype=torch.float64))[None]
    assert step_figures(now, fresh, fresh, generator(7))["direction_cosine"].abs() < 0.15


def test_a_head_of_zeros_has_no_direction():
    zeros = Direction(torch.zeros(1, 2, 3).double(), torch.zeros(1, 2, 3).double(), {})
    assert (unit_matrix(zeros.error) == 0).all()
    past = torch.zeros(1, 1, 2, 3)
    assert step_figures(zeros, past, past, generator())["direction_cosine"] == 0
