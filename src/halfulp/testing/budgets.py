"""Inputs and error budgets for tests of attention kernels.

A kernel is held to the error that its own recipe must make: error against the fp64 value, at most a
small factor of what the same recipe emulated makes on the same inputs. No tolerance is tuned by
hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfulp.attention import emulate, golden
from halfulp.audit.inputs import Inputs
from halfulp.calls import Result, check, scale_of
from halfulp.formats import BF16, Format, round_to
from halfulp.recipes import Recipe


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
    **options: Any,
) -> Inputs:
    """Standard normal numbers rounded to `fmt`, so that a kernel which reads `fmt` starts without
    error; `options` are those of `halfulp.attention`, which the call then asks for.
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
    return _called(*(round_to(x, fmt).to(dtype) for x in (q, k, v, do)), **options)


def value_offset(inputs: Inputs, offset: float, *, fmt: Format = BF16) -> Inputs:
    """V with a common offset: δ is then much larger than dP − δ, and so is its rounding error."""
    return replace(inputs, value=round_to(inputs.value + offset, fmt))


def attention_sink(inputs: Inputs, strength: float, *, fmt: Format = BF16) -> Inputs:
    """Key 0 on a direction that all queries share, so that rows give it a score of about `strength`
    above the rest.
    """
    dim = inputs.query.shape[-1]
    query, key = inputs.query.clone(), inputs.key.clone()
    # times α = 1/√d the key's `strength` is the score
    query[..., 0] = dim**0.5
    key[:, :, 0] = 0
    key[:, :, 0, 0] = strength
    return replace(inputs, query=round_to(query, fmt), key=round_to(key, fmt))


def common_key(inputs: Inputs, size: float, *, fmt: Format = BF16) -> Inputs:
    """Keys with a large common component, which softmax cannot see and dQ multiplies by Σ_j
    dS_ij.
    """
    return replace(inputs, key=round_to(inputs.key + size, fmt))


def from_scores(scores: Tensor, value: Tensor, grad_out: Tensor | None = None) -> Inputs:
    """A problem of scale 1 whose scores are `scores [N_q, N_k]`: keys are the unit vectors.

    value is `[N_k, D_v]`; grad_out `[N_q, D_v]` is 1 if None.
    """
    key = torch.eye(scores.shape[1], dtype=scores.dtype)
    do = (
        torch.ones(scores.shape[0], value.shape[1], dtype=value.dtype)
        if grad_out is None
        else grad_out
    )
    return _called(*(x[None, None] for x in (scores, key, value, do)), scale=1.0)


def _called(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, **options: Any) -> Inputs:
    call = check(query, key, value, enable_gqa=True, emulated=True, **options)
    return Inputs(**vars(call), grad_out=grad_out)


def _asked(inputs: Inputs, options: dict[str, Any], *, seeded: bool = True) -> dict[str, Any]:
    """What a call asks for where it is not what everybody does, and what is asked beside it."""
    own = inputs.options(seeded=seeded)
    usual = {"is_causal": False, "scale": scale_of(None, inputs.query.shape[-1])}
    return {name: x for name, x in own.items() if name not in usual or x != usual[name]} | options


def attend(target: Recipe | Callable[..., Any], inputs: Inputs, **options: Any) -> Result:
    """Forward and backward of a recipe or of any `f(query, key, value, ...)`, called with what
    `inputs` asks for, where it is unusual, and with `options`.

    `f` returns out or (out, lse); lse is None where it is not offered, as are gradients of a result
    without graph.
    """
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs.operands)
    if isinstance(target, Recipe):
        asked = _asked(inputs, options)
        result: Any = emulate(q, k, v, recipe=target, return_lse=True, **asked)
    else:
        result = target(q, k, v, **_asked(inputs, options, seeded=False))
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


def budget(inputs: Inputs, recipe: Recipe, **options: Any) -> dict[str, float]:
    """The relative errors that `recipe` must make on these inputs: emulated, against the fp64
    value.
    """
    return errors(attend(recipe, inputs, **options), golden(*inputs, **_asked(inputs, options)))


def assert_within_budget(
    actual: Result,
    inputs: Inputs,
    recipe: Recipe,
    *,
    factor: float = 1.25,
    **options: Any,
) -> None:
    """Raise AssertionError unless every error of `actual` is at most `factor` times what `recipe`
    must make.

    Below 1e-6 an error is accepted in any case: two fp32 computations differ by that in a tensor
    that neither rounds.
    """
    allowed = budget(inputs, recipe, **options)
    for name, error in errors(actual, golden(*inputs, **_asked(inputs, options))).items():
        # not `>`: a NaN must fail
        if not error <= max(factor * allowed[name], 1e-6):
            raise AssertionError(
                f"{name}: relative error {error:.2e}, {recipe.name} makes {allowed[name]:.2e}"
            )
