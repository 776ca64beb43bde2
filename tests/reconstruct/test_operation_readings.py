"""Causes that are read off: functions of a step, sizes below which terms are lost, options that are
another function of themselves, parts of a result from any index on.
"""

import math

import pytest
import torch
from torch.nn import functional

from halfulp.operations import drawn_calls, operation_named
from halfulp.reconstruct.operation_asked import reconstruct_operation
from halfulp.reconstruct.operation_mistakes import fitting
from halfulp.reconstruct.operation_numbers import meant


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


def tail_without_its_sign(gate, up, *, approximate="none"):
    g, u = gate.float(), up.float()
    exact = functional.gelu(g, approximate=approximate) * u
    below = g * (1 + torch.erf(g.abs() * 0.5**0.5)) / 2 * u
    return with_gradient_of(exact, below if approximate == "none" else exact).to(gate.dtype)


def adamw(mean=None, second=None, correction=None):
    """`mean` is what the rate multiplies, of (m, g, β₁, 1 − β₁ᵗ)."""

    def kernel(param, grad, exp_avg, exp_avg_sq, *, step, lr, beta1, beta2, eps, weight_decay):
        g, one, two = grad.float(), 1 - beta1**step, 1 - beta2**step
        m, v = beta1 * exp_avg + (1 - beta1) * g, beta2 * exp_avg_sq + (1 - beta2) * g * g
        moved = mean(m, g, beta1, one) if mean else m / one
        size = (second(v, exp_avg_sq) if second else v) / (
            correction(one, two) if correction else two
        )
        return param * (1 - lr * weight_decay) - lr * moved / (size.sqrt() + eps), m, v

    return kernel


def ahead(m, g, beta1, one):
    return (beta1 * m + (1 - beta1) * g) / one


def first_twice(input, dim):
    return (input.float().sum(0) + input[0].float()).to(input.dtype)


def four_of_a_kind(input, weight, padding_idx):
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w[input]

        @staticmethod
        def backward(ctx, grad):
            found, seen = torch.zeros(weight.shape), torch.zeros(len(weight))
            for row, x in zip(input.tolist(), grad.float(), strict=True):
                seen[row] += 1
                found[row] += x * (seen[row] <= 4)
            if padding_idx is not None:
                found[padding_idx] = 0
            return found.to(grad.dtype)

    return Rows.apply(weight)


def smoothed_by_the_label(input, target, *, ignore_index, reduction, label_smoothing,
                          lse_square_scale):  # fmt: skip
    """The uniform part of a smoothed label has no gradient."""
    seen, logs = target != ignore_index, input.float().log_softmax(-1)
    own = -logs.gather(1, torch.where(seen, target, 0)[:, None])[:, 0]
    loss = (1 - label_smoothing) * own - label_smoothing * logs.detach().mean(-1)
    loss = torch.where(seen, loss + lse_square_scale * input.float().logsumexp(-1) ** 2, 0.0)
    total = loss.sum() / (seen.sum() if reduction == "mean" else 1)
    return loss if reduction == "none" else total


@pytest.mark.thorough(keep=2)
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
        ("geglu", tail_without_its_sign, "float16", "term-missing", "sign, only where approximate"),
        ("adamw_step", adamw(mean=ahead), "float32", "term-missing", "as NAdam has it"),
        ("adamw_step", adamw(second=torch.maximum), "float32", "limited", "as AMSGrad has it"),
        ("adamw_step", adamw(correction=lambda a, b: a), "float32", "option", "beta1 stands in"),
        ("sum", first_twice, "bfloat16", "factor", "counts twice at the first along T"),
        ("embedding", four_of_a_kind, "float32", "term-missing", "all but the first 4"),
        ("cross_entropy", smoothed_by_the_label, "float32", "term-missing", "no uniform part"),
    ],
)
def test_kinds_of_mistakes_are_named(op, kernel, dtype, cause, told):
    found = reconstruct_operation(kernel, op, dtype=dtype).found
    assert (found.cause, told in found.text) == (cause, True), found


def test_a_part_may_begin_at_any_index():
    here = torch.arange(24) >= 20
    assert "from 20 along T on" in [r.text for r in fitting("T", here, ~here)]
    assert "up to 3 along T" in [r.text for r in fitting("T", torch.arange(24) < 4, here)]


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_made_of_a_size_and_the_one_before_has_a_meaning(size):
    linear, generator = operation_named("linear"), torch.Generator().manual_seed(0)
    sizes = linear.sizes[0].with_(calls=1, N=size)
    numbers = meant(drawn_calls(linear, linear.probes[0].name, sizes, "float32", generator))
    assert numbers["(N − 1) / N"] == (size - 1) / size
    assert numbers["N / (N − 1)"] == size / (size - 1)
