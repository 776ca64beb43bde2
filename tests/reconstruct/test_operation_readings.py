"""Causes that are read off: functions of a step, sizes below which terms are lost, options that are
another function of themselves, parts of a result from any index on.
"""

import math

import pytest
import torch

from halfulp.reconstruct.operation_asked import reconstruct_operation
from halfulp.reconstruct.operation_mistakes import fitting


def norm(inverse):
    def kernel(input, normalized_shape, weight, eps):
        x = input.float()
        return (x * inverse(x, eps) * weight.float()).to(input.dtype)

    return kernel


def mean(x):
    return x.square().mean(-1, keepdim=True)


def with_eps_squared(x, eps):
    return torch.rsqrt(mean(x) + eps**2)


def with_eps_in_the_sum(x, eps):
    return torch.rsqrt((x.square().sum(-1, keepdim=True) + eps) / x.shape[1])


def with_gradient_of(exact, made):
    """A result whose gradient is another's."""
    return exact + (made - exact).detach()


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, power, maximum):
        terms = power(x.float() - maximum(x.float()))
        ctx.dtype, ctx.found = x.dtype, terms / terms.sum(-1, keepdim=True)
        return ctx.found.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        terms = grad.float() * ctx.found
        return (terms - ctx.found * terms.sum(-1, keepdim=True)).to(ctx.dtype), None, None


def softmax(power=torch.exp, maximum=lambda x: x.amax(-1, keepdim=True)):
    return lambda input, dim: Softmax.apply(input, power, maximum)


def none_beyond_13(distance):
    return torch.where(distance < -13, 0.0, distance.exp())


def by_a_line(distance):
    logarithm = (distance * math.log2(math.e)).clamp_min(-126)
    whole = logarithm.floor()
    return torch.ldexp(0.9702 * (1 + logarithm - whole), whole.int())


def first_of_the_row(x):
    return x[:, :1]


def half_of_k_in_odd_columns(input, weight):
    x, w, half = input.float(), weight.float(), -(-input.shape[1] // 2)
    even = torch.arange(len(w)) % 2 == 0
    found = x[:, :half] @ w[:, :half].T + x[:, half:] @ w[:, half:].T * even
    return with_gradient_of(x @ w.T, found).to(input.dtype)


def gated(sigmoid):
    def kernel(gate, up):
        g, u = gate.float(), up.float()
        exact = g * torch.sigmoid(g) * u
        return with_gradient_of(exact, g * sigmoid(g) * u).to(gate.dtype)

    return kernel


def times_the_gate(g):
    """Large gates have no result in fp16, and what else their rows give tells nothing."""
    return g * torch.sigmoid(g)


def of_three_pieces(g):
    return (g / 6 + 0.5).clamp(0, 1)


@pytest.mark.parametrize(
    ("op", "kernel", "dtype", "cause", "told"),
    [
        ("rms_norm", norm(with_eps_squared), "float32", "option", "eps is taken squared"),
        ("rms_norm", norm(with_eps_in_the_sum), "float32", "option", "eps is taken 1 / D times"),
        ("softmax", softmax(none_beyond_13), "float32", "limited", "weights is 0 where it is b"),
        ("softmax", softmax(by_a_line), "bfloat16", "term-missing", "function of its mantissa"),
        ("softmax", softmax(maximum=first_of_the_row), "bfloat16", "maximum", "of the first of"),
        ("linear", half_of_k_in_odd_columns, "float16", "term-missing", "where N is odd"),
        (
            "swiglu",
            gated(times_the_gate),
            "float16",
            "term-missing",
            "sigmoid is taken for activated",
        ),
        (
            "swiglu",
            gated(of_three_pieces),
            "bfloat16",
            "term-missing",
            "another function of its value",
        ),
    ],
)
def test_kinds_of_mistakes_are_named(op, kernel, dtype, cause, told):
    found = reconstruct_operation(kernel, op, dtype=dtype).found
    assert (found.cause, told in found.text) == (cause, True), found


def test_a_part_may_begin_at_any_index():
    here = torch.arange(24) >= 20
    assert "from 20 along T on" in [r.text for r in fitting("T", here, ~here)]
    assert "up to 3 along T" in [r.text for r in fitting("T", torch.arange(24) < 4, here)]
