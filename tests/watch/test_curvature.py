"""The split of e into a first-order part and curvature, on a loss whose Hessian in O is known."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfulp.attention import golden
from halfulp.training.attention import Attend, AttentionPlan
from halfulp.watch.curvature import FullPrecision
from halfulp.watch.monitor import Monitor


class Quadratic(nn.Module):
    """One layer with loss Σ ½ oᵀ A o + g·o over rows o of O: dO = A o + g, and the Hessian in O is
    A.
    """

    def __init__(self, own) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.attend = Attend(0, 2, AttentionPlan.of("own"), {"own": own})
        self.weights = nn.Parameter(torch.randn(3, 2, 4, 6, generator=g).double())
        root = torch.randn(4, 4, generator=g).double()
        self.hessian, self.slope = root @ root.mT, torch.randn(3, 2, 5, 4, generator=g).double()

    def head_weights(self) -> tuple[Tensor, Tensor]:
        return self.weights[0], self.weights[1]

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x[:, None] @ w.mT for w in self.weights)
        out = self.attend(query, key, value, is_causal=True)
        return (0.5 * (out @ self.hessian * out) + self.slope * out).sum()


def parts(error_of, scale: float = 1.0):
    """e and its parts by the monitor, and e, dO(O_hp) · err and errᵀ A err by hand, `[H]` each."""
    kept: list[Tensor] = []

    def erring(query, key, value, *, is_causal, scale):
        exact = golden(
            query.detach(), key.detach(), value.detach(), is_causal=is_causal, scale=scale
        ).out
        path = functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale
        )
        if len(kept) < 2:
            kept[:] = [exact, error_of(model.slope + exact @ model.hessian)]
        return path + (exact + kept[1] - path).detach()

    model = Quadratic(erring)
    x = scale * torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1)).double()
    measured = Monitor(model, 1).measure(1, lambda: model(x))
    exact, error = kept
    first = ((exact @ model.hessian + model.slope) * error).sum((0, 2, 3))
    second = (error @ model.hessian * error).sum((0, 2, 3))
    names = ("delta_error", "delta_error_first_order", "delta_error_curvature")
    return [torch.tensor(measured[name][0]) for name in names], [first + second, first, second]


def test_both_parts_are_what_the_hessian_says():
    noise = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(2)).double()
    found, expected = parts(lambda grad: 0.01 * noise)
    for part, by_hand in zip(found, expected, strict=True):
        torch.testing.assert_close(part.double(), by_hand, rtol=1e-6, atol=1e-9)
    assert (found[2] > 0).all()


def test_rounding_that_leans_shows_in_the_first_order_part_and_curvature_does_not():
    """An error planted along ±dO makes e positive or negative at first order; its curvature is
    positive both times.
    """
    for sign in (1.0, -1.0):
        found, expected = parts(lambda grad, sign=sign: sign * 1e-4 * grad)
        for part, by_hand in zip(found, expected, strict=True):
            torch.testing.assert_close(part.double(), by_hand, rtol=1e-6, atol=1e-12)
        assert (sign * found[0] > 0).all()
        assert (sign * found[1] > 0).all()
        assert (found[2] > 0).all()


def test_no_error_has_no_parts():
    found, _ = parts(torch.zeros_like)
    assert all((part.abs() < 1e-12).all() for part in found)


def test_autocast_is_off_inside_whatever_the_code_says():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(x, w).dtype == torch.bfloat16
        with FullPrecision("cpu"):
            assert functional.linear(x, w).dtype == torch.float32
    with FullPrecision("cpu"), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(x @ w.mT, functional.linear(x, w))
