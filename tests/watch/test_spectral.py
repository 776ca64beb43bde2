"""Power iteration against the singular value decomposition, its stopping rule, and warm starts."""

import pytest
import torch

from halfulp.watch import spectral
from halfulp.watch.spectral import TOLERANCE, head_sigmas, power_iteration


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(heads: int, dim: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(heads, dim, width, generator=generator(seed))


def top(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix.double())[..., 0]


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "width"), [(4, 4, 16, 64), (6, 2, 8, 48), (1, 1, 32, 32)]
)
def test_sigmas_are_those_of_the_decomposition(heads, key_heads, dim, width):
    query, key = weights(heads, dim, width, 1), weights(key_heads, dim, width, 2)
    found = head_sigmas(query, key, 0.3, None, generator())
    shared = key.repeat_interleave(heads // key_heads, 0)
    full = 0.3 * query.double().mT @ shared.double()
    for sigma, matrix in ((found.query, query), (found.key, key), (found.query_key, full)):
        torch.testing.assert_close(sigma, top(matrix), rtol=TOLERANCE / 2, atol=0)
        assert (sigma <= top(matrix) * (1 + 1e-12)).all(), (
            "a Rayleigh quotient never exceeds the largest eigenvalue"
        )


def test_the_stopping_rule_holds_and_more_iterations_bring_more_digits():
    matrix = weights(3, 24, 60)
    gram = (matrix @ matrix.mT).double()
    start = torch.randn(3, 24, generator=generator(1), dtype=torch.float64)
    for tolerance in (1e-2, 1e-4, 1e-8):
        found = power_iteration(
            lambda y: (gram @ y[..., None])[..., 0], start, tolerance=tolerance, most=5000
        )
        rest = (gram @ found.vector[..., None])[..., 0] - found.value[:, None] * found.vector
        torch.testing.assert_close(found.residual, rest.norm(dim=-1) / found.value)
        assert (found.residual <= tolerance).all()
        torch.testing.assert_close(
            found.value, torch.linalg.eigvalsh(gram)[:, -1], rtol=tolerance, atol=0
        )
    stopped = power_iteration(
        lambda y: (gram @ y[..., None])[..., 0], start, tolerance=1e-8, most=2
    )
    assert stopped.iterations == 2
    assert (stopped.residual > 1e-8).all(), "what was not reached must show"


def test_a_warm_start_is_quick_and_still_finds_a_direction_that_overtakes(monkeypatch):
    basis = torch.linalg.qr(weights(1, 8, 8, 3).double())[0]
    before = basis * torch.tensor([3.0, 1, 1, 1, 1, 1, 1, 1]).double()[:, None]
    after = basis * torch.tensor([3.0, 5, 1, 1, 1, 1, 1, 1]).double()[:, None]
    warm = head_sigmas(before, before, 1.0, None, generator()).vectors
    torch.testing.assert_close(
        head_sigmas(after, after, 1.0, warm, generator(1)).query, torch.tensor([5.0]).double()
    )
    exact = torch.zeros(1, 8, dtype=torch.float64)
    exact[0, 0] = 1
    monkeypatch.setattr(spectral, "_FRESH", 0.0)
    stuck = head_sigmas(after, after, 1.0, (exact, exact, exact), generator(1)).query
    torch.testing.assert_close(
        stuck, torch.tensor([3.0]).double(), msg="the random part is what the test above needs"
    )


def test_zero_and_broken_weights_neither_fail_nor_hide():
    query = weights(3, 4, 6)
    query[1], query[2, 0, 0] = 0, torch.nan
    found = head_sigmas(query, weights(3, 4, 6, 1), 1.0, None, generator())
    assert found.query[1] == 0
    assert found.query_key[1] == 0
    assert found.query[2].isnan()
    torch.testing.assert_close(found.query[0], top(query[0]), rtol=TOLERANCE, atol=0)
