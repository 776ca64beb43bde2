"""Inputs and error budgets for tests of attention kernels.

A kernel is held to the error that its own recipe must make: error against the fp64 value, at most a
small factor of what the same recipe emulated makes on the same inputs. No tolerance is tuned by
hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.attention import emulate, golden
from halfulp.calls import Result
from halfulp.formats import BF16, Format, round_to
from halfulp.recipes import Recipe


class Inputs(NamedTuple):
    """One attention problem `[B, H, N, D]` and the gradient that reaches its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor


def gaussian(
    seed: int = 0,
    *,
    batch: int = 1,
    heads: int = 2,
    key_heads: int | None = None,
    length: int = 128,
    key_length: int | None = None,
    dim: int = 64,
    value_dim: int | None = None,
    fmt: Format = BF16,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Standard normal numbers rounded to `fmt`, so that a kernel which reads `fmt` starts without
    error.
    """
    generator = torch.Generator().manual_seed(seed)
    key_heads = heads if key_heads is None else key_heads
    key_length = length if key_length is None else key_length
    value_dim = dim if value_dim is None else value_dim
    shapes = (
        (heads, length, dim),
        (key_heads, key_length, dim),
        (key_heads, key_length, value_dim),
    )
    q, k, v, do = (
        torch.randn(batch, *s, generator=generator) for s in (*shapes, (heads, length, value_dim))
    )
    return Inputs(*(round_to(x, fmt).to(dtype) for x in (q, k, v, do)))


def value_offset(inputs: Inputs, offset: float, *, fmt: Format = BF16) -> Inputs:
    """V with a common offset: δ is then much larger than dP − δ, and so is its rounding error."""
    return inputs._replace(value=round_to(inputs.value + offset, fmt))


def attention_sink(inputs: Inputs, strength: float, *, fmt: Format = BF16) -> Inputs:
    """Key 0 on a direction that all queries share, so that rows give it a score of about `strength`
    above the rest.
    """
    dim = inputs.query.shape[-1]
    query, key = inputs.query.clone(), inputs.key.clone()
    query[..., 0] = dim**0.5
    key[:, :, 0] = 0
    key[:, :, 0, 0] = strength
    return inputs._replace(query=round_to(query, fmt), key=round_to(key, fmt))


def common_key(inputs: Inputs, size: float, *, fmt: Format = BF16) -> Inputs:
    """Keys with a large common component, which softmax cannot see and dQ multiplies by Σ_j
    dS_ij.
    """
    return inputs._replace(key=round_to(inputs.key + size, fmt))


def from_scores(scores: Tensor, value: Tensor, grad_out: Tensor | None = None) -> Inputs:
    """A problem whose scores are `scores [N_q, N_k]` when called with scale=1: keys are the unit
    vectors.

    value is `[N_k, D_v]`; grad_out `[N_q, D_v]` is 1 if None.
    """
    key = torch.eye(scores.shape[1], dtype=scores.dtype)
    do = (
        torch.ones(scores.shape[0], value.shape[1], dtype=value.dtype)
        if grad_out is None
        else grad_out
    )
    return Inputs(*(x[None, None] for x in (scores, key, value, do)))


def attend(
    target: Recipe | Callable[..., Any], inputs: Inputs, *args: Any, **kwargs: Any
) -> Result:
    """Forward and backward of a recipe or of any `f(query, key, value, ...)`; arguments after
    `inputs` are passed on.

    `f` returns out or (out, lse); lse is None where it is not offered, as are gradients of a result
    without graph.
    """
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    if isinstance(target, Recipe):
        result: Any = emulate(q, k, v, *args, recipe=target, return_lse=True, **kwargs)
    else:
        result = target(q, k, v, *args, **kwargs)
    out, lse = (result[0], result[1].detach()) if isinstance(result, tuple) else (result, None)
    if out.requires_grad:
        out.backward(inputs.grad_out.to(out.dtype))
    return Result(out.detach(), lse, q.grad, k.grad, v.grad)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in fp64, over the elements where `expected` is finite; 0
    where both are 0.
    """
    finite = expected.isfinite()
    exact = expected[finite].double()
    size, error = float(exact.norm()), float((actual[finite].double() - exact).norm())
    return error / size if size else error


def errors(actual: Result, expected: Result) -> dict[str, float]:
    """The relative error of every tensor that both offer, by its name in `Result`."""
    found = actual.given()
    return {
        name: relative_error(found[name], e)
        for name, e in expected.given().items()
        if name in found
    }


def budget(inputs: Inputs, recipe: Recipe, *args: Any, **kwargs: Any) -> dict[str, float]:
    """The relative errors that `recipe` must make on these inputs: emulated, against the fp64
    value.
    """
    return errors(attend(recipe, inputs, *args, **kwargs), golden(*inputs, *args, **kwargs))


def assert_within_budget(
    actual: Result,
    inputs: Inputs,
    recipe: Recipe,
    *args: Any,
    factor: float = 1.25,
    **kwargs: Any,
) -> None:
    """Raise AssertionError unless every error of `actual` is at most `factor` times what `recipe`
    must make.

    Below 1e-6 an error is accepted in any case: two fp32 computations differ by that in a tensor
    that neither rounds.
    """
    allowed = budget(inputs, recipe, *args, **kwargs)
    for name, error in errors(actual, golden(*inputs, *args, **kwargs)).items():
        if not error <= max(factor * allowed[name], 1e-6):
            raise AssertionError(
                f"{name}: relative error {error:.2e}, {recipe.name} makes {allowed[name]:.2e}"
            )
