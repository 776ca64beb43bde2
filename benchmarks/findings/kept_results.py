"""Gradients of PyTorch's functions that are taken from what the forward pass rounded.

Autograd keeps a function's result where the derivative can be written in it, and in 16 bits what it
keeps is rounded: exp(x − logsumexp(x)), 1 − tanh², 1 + expm1. Each function here is differentiated
in 16 bits and in fp64, on the same numbers and with the same gradient of its result; beside it
stands the same function on those numbers in fp32, its gradient rounded once. The gradient's error
is relative, over all elements.

`python -m benchmarks.findings --only kept_results`. Run as a script it prints the smallest inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

COARSE = 5.0  # so many times the error of fp32 rounded once are told


class Case(NamedTuple):
    """A function, and how the numbers that it is given are drawn."""

    function: Callable[[Tensor], Tensor]
    draw: Callable[[torch.Generator], Tensor]


def _normal(*shape: int, mean: float = 0.0) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(shape, generator=g) + mean


def between(low: float, high: float, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: low + (high - low) * torch.rand(shape or (4096,), generator=g)


def _norm(p: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.linalg.vector_norm(x, p, -1)


def _entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits, validate_args=False).entropy()


ROWS = _normal(64, 256)
HIGH_ROWS, LOW_ROWS = _normal(64, 256, mean=20), _normal(64, 256, mean=-200)
LINE = _normal(4096)
CASES = {
    "logsumexp, N(0, 1)": Case(lambda x: x.logsumexp(-1), ROWS),
    "logsumexp, N(20, 1)": Case(lambda x: x.logsumexp(-1), HIGH_ROWS),
    "logsumexp, N(-200, 1)": Case(lambda x: x.logsumexp(-1), LOW_ROWS),
    "logcumsumexp, N(0, 1)": Case(lambda x: x.logcumsumexp(-1), ROWS),
    "logcumsumexp, N(-200, 1)": Case(lambda x: x.logcumsumexp(-1), LOW_ROWS),
    "logaddexp, N(-200, 1)": Case(
        lambda x: torch.logaddexp(*x.unbind()), _normal(2, 4096, mean=-200)
    ),
    "Categorical.entropy, N(0, 1)": Case(_entropy, ROWS),
    "Categorical.entropy, N(20, 1)": Case(_entropy, HIGH_ROWS),
    "softmax, N(0, 1)": Case(lambda x: x.softmax(-1), ROWS),
    "log_softmax, N(0, 1)": Case(lambda x: x.log_softmax(-1), ROWS),
    "sigmoid, N(0, 1)": Case(torch.sigmoid, LINE),
    "sigmoid, 3 to 5": Case(torch.sigmoid, between(3, 5)),
    "sigmoid, 5 to 8": Case(torch.sigmoid, between(5, 8)),
    "logsigmoid, -8 to 8": Case(functional.logsigmoid, between(-8, 8)),
    "softplus, -8 to 8": Case(functional.softplus, between(-8, 8)),
    "tanh, N(0, 1)": Case(torch.tanh, LINE),
    "tanh, 2 to 3": Case(torch.tanh, between(2, 3)),
    "tanh, 3 to 5": Case(torch.tanh, between(3, 5)),
    "exp, N(0, 1)": Case(torch.exp, LINE),
    "expm1, -8 to -4": Case(torch.expm1, between(-8, -4)),
    "elu, -8 to -4": Case(functional.elu, between(-8, -4)),
    "elu in place, -4 to -2": Case(lambda x: functional.elu_(x.clone()), between(-4, -2)),
    "elu in place, -8 to -4": Case(lambda x: functional.elu_(x.clone()), between(-8, -4)),
    "selu in place, -8 to -4": Case(lambda x: functional.selu_(x.clone()), between(-8, -4)),
    "celu in place, -8 to -4": Case(lambda x: functional.celu_(x.clone()), between(-8, -4)),
    "sqrt, 0.1 to 9": Case(torch.sqrt, between(0.1, 9)),
    "rsqrt, 0.1 to 9": Case(torch.rsqrt, between(0.1, 9)),
    "reciprocal, 0.1 to 9": Case(torch.reciprocal, between(0.1, 9)),
    "tan, -1.5 to 1.5": Case(torch.tan, between(-1.5, 1.5)),
    "2 ** x, N(0, 1)": Case(torch.exp2, LINE),
    "vector_norm, N(0, 1)": Case(_norm(2), ROWS),
    "vector_norm with ord=3, N(0, 1)": Case(_norm(3), ROWS),
    "vector_norm with ord=10, N(0, 1)": Case(_norm(10), ROWS),
    "normalize, N(0, 1)": Case(lambda x: functional.normalize(x, dim=-1), ROWS),
    "renorm, N(0, 1)": Case(lambda x: torch.renorm(x, 2, 0, 1.0), ROWS),
    "cumprod, 0.9 to 1.1": Case(lambda x: x.cumprod(-1), between(0.9, 1.1, 64, 256)),
    "prod, 0.9 to 1.1": Case(lambda x: x.prod(-1), between(0.9, 1.1, 64, 256)),
    "std, N(0, 1)": Case(lambda x: x.std(-1), ROWS),
    "std, N(20, 1)": Case(lambda x: x.std(-1), HIGH_ROWS),
    "var, N(20, 1)": Case(lambda x: x.var(-1), HIGH_ROWS),
    "group_norm, N(8, 1)": Case(
        lambda x: functional.group_norm(x, 4, x.new_ones(32), x.new_zeros(32)),
        _normal(8, 32, 64, mean=8),
    ),
}
SMALLEST: dict[str, tuple[Callable[[Tensor], Tensor], list[float], torch.dtype]] = {
    "logsumexp": (lambda x: x.logsumexp(-1), [-200.0, -200.0], torch.bfloat16),
    "logsumexp at 20": (lambda x: x.logsumexp(-1), [20.0, 20.0], torch.bfloat16),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), [-200.0, -200.0], torch.bfloat16),
    "sigmoid": (torch.sigmoid, [6.25], torch.bfloat16),
    "tanh": (torch.tanh, [3.5], torch.bfloat16),
    "expm1": (torch.expm1, [-6.25], torch.bfloat16),
    "elu in place": (lambda x: functional.elu_(x.clone()), [-6.25], torch.bfloat16),
    "var": (lambda x: x.var(-1), [20.0, 20.125], torch.bfloat16),
    "vector_norm with ord=3": (_norm(3), [300.0, 300.0], torch.float16),
    "vector_norm with ord=4": (_norm(4), [0.01], torch.float16),
}


def verdict(case: Case, dtype: str, seed: int) -> dict[str, Any]:
    """What `benchmarks.findings` keeps of one case: "coarse" from COARSE times fp32's error on."""
    function, draw = case
    kept = getattr(torch, dtype)
    x = draw(torch.Generator().manual_seed(seed)).to(kept)
    exact = gradient(function, x.double(), kept, seed)
    off, least = (
        ((found.to(kept).double() - exact).norm() / exact.norm()).item()
        for found in (gradient(function, each, kept, seed) for each in (x, x.float()))
    )
    told = "not finite" if not off < float("inf") else "coarse" if off > COARSE * least else "near"
    times = f"{off / least:.{0 if off > 9.5 * least else 1}f}"
    figure = f"gradient {off:.1e} off, {times} × fp32 rounded once ({least:.1e})"
    return {"verdict": told, "reason": figure}


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, kept: torch.dtype, seed: int) -> Any:
    """With respect to x; the result's own gradient is drawn in `kept` whatever x is."""
    x = x.clone().requires_grad_()
    result = function(x)
    drawn = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed + 1000))
    (found,) = torch.autograd.grad(result, x, drawn.to(kept).to(result.dtype))
    return found


def main() -> None:
    """Print the smallest inputs, each with its gradient as it is and as it should be."""
    for name, (function, numbers, dtype) in SMALLEST.items():
        x = torch.tensor(numbers, dtype=dtype, requires_grad=True)
        wide = x.detach().double().requires_grad_()
        (found,) = torch.autograd.grad(function(x).sum(), x)
        (exact,) = torch.autograd.grad(function(wide).sum(), wide)
        listed = [[f"{g:.4g}" for g in each.tolist()] for each in (found, exact)]
        said = (", ".join(each) for each in listed)
        print("{}({}, {}): gradient {} where {} is right".format(name, numbers, dtype, *said))


if __name__ == "__main__":
    main()
