"""Attention emulated in any recipe, and the golden value beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfulp import algorithms
from halfulp.algorithms import AttentionResult, Mask, Problem, Saved
from halfulp.attention.operands import check_given, scale_of
from halfulp.recipes import BF16_FLASH2, Observer, Recipe, Step, recipe_named


@overload
def emulate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    recipe: Recipe | str = ...,
    observers: Sequence[Observer] = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def emulate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    recipe: Recipe | str = ...,
    observers: Sequence[Observer] = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def emulate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    recipe: Recipe | str = BF16_FLASH2,
    observers: Sequence[Observer] = (),
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with the arithmetic of `recipe`, forward and backward; arguments as
    `F.scaled_dot_product_attention`.

    Args:
        query: `[B, H, N_q, D]` (or without leading dimensions), float64, float32, bfloat16 or
            float16.
        key: `[B, H_k, N_k, D]`; H_k < H needs `enable_gqa` and must divide H.
        value: `[B, H_k, N_k, D_v]`.
        attn_mask: broadcastable to `[B, H, N_q, N_k]`; bool (True: may attend) or float (added to
            the scaled scores).
        is_causal: query i attends to keys 0..i; not together with `attn_mask`.
        scale: softmax scale; 1/√D if None.
        enable_gqa: let groups of query heads share a key head.
        recipe: a `Recipe` or the name of a built-in one.
        observers: called with (step name, exact, rounded), forward and backward; they must not
            change what they see.
        return_lse: also return lse `[B, H, N_q]` (natural logarithm, the recipe's compute dtype),
            differentiable.

    Returns:
        out `[B, H, N_q, D_v]` in query's dtype, holding values of the recipe's `out` format; a
        fully masked row is 0 and its lse −inf.

    Raises:
        ValueError: for shapes, dtypes or a recipe that do not fit, in one line.
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe={recipe!r}: accepted is a Recipe or the name of a built-in one")
    q, k, v, mask, alpha = _checked(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    out, lse = _Emulated.apply(q, k, v, mask, alpha, recipe, tuple(observers))  # type: ignore[no-untyped-call]
    out, lse = out.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1])
    return (out, lse) if return_lse else out


def golden(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionResult:
    """The fp64 value of attention and, with `grad_out [B, H, N_q, D_v]`, of its gradients, in O(N)
    memory.

    Arguments as `emulate`, with all four dimensions `[B, H, N, D]`; results are float64. It runs
    outside anybody's autocast and records no gradients. Raises ValueError for shapes or dtypes that
    do not fit.
    """
    check_given(query=query, **({} if grad_out is None else {"grad_out": grad_out}))
    if query.ndim != 4:
        raise ValueError(
            f"query of shape {tuple(query.shape)}: accepted are 4 dimensions [B, H, N, D]"
        )
    q, k, v, mask, alpha = _checked(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if grad_out is not None and grad_out.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(
            f"grad_out of shape {tuple(grad_out.shape)}: accepted is out's shape"
            f" {(*q.shape[:3], v.shape[3])}"
        )
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return algorithms.golden(
            q, k, v, grad_out, mask.attn_mask, is_causal=is_causal, scale=alpha
        )


class _Emulated(torch.autograd.Function):
    """Ties the recipe's forward pass to its own backward pass; runs outside anybody's autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        alpha: float,
        recipe: Recipe,
        observers: Any,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            step = Step(recipe, observers)
            problem = Problem.read(q, k, v, mask, alpha, step)
            saved = algorithms.attend(problem, step)
        ctx.save_for_backward(problem.query, problem.key, problem.value, *_tensors(saved))
        ctx.problem = (mask, alpha, problem.groups, recipe)
        ctx.observers, ctx.dtypes = observers, (q.dtype, k.dtype, v.dtype)
        ctx.set_materialize_grads(False)
        return saved.out.to(q.dtype), (saved.lse / problem.unit).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        q, k, v, *rest = ctx.saved_tensors
        problem, saved = Problem(q, k, v, *ctx.problem), Saved(*rest)
        if grad_out is None:
            grad_out = torch.zeros_like(saved.out)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            lse_column = None if grad_lse is None else grad_lse.unsqueeze(-1)
            step = Step(problem.recipe, ctx.observers)
            computed = algorithms.attend_backward(problem, saved, grad_out, lse_column, step)
        dq, dk, dv = (g.to(dtype) for g, dtype in zip(computed, ctx.dtypes, strict=True))
        return dq, dk, dv, None, None, None, None


def _tensors(saved: Saved) -> tuple[Tensor, ...]:
    return (
        saved.out,
        saved.out_for_delta,
        saved.lse,
        saved.row_max,
        saved.row_sum,
        saved.largest_score,
    )


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Mask, float]:
    """Inputs with four dimensions, the mask and the scale; one clear line for what does not fit."""
    check_given(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        shape = tuple(x.shape)
        if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name} of dtype {x.dtype}: accepted are float64, float32, bfloat16 and float16"
            )
        if not 2 <= x.ndim <= 4 or x.ndim != query.ndim:
            raise ValueError(
                f"{name} of shape {shape}: accepted are 2 to 4 dimensions [B, H, N, D], as many as"
                " query's"
            )
        if 0 in shape:
            raise ValueError(f"{name} of shape {shape}: accepted are dimensions of at least 1")
        if x.device != query.device:
            raise ValueError(f"{name} on {x.device}: accepted is query's device, {query.device}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key of head dimension {key.shape[-1]}: accepted is query's, {query.shape[-1]}"
        )
    if value.shape[:-1] != key.shape[:-1]:
        leading = f"accepted are key's leading dimensions {tuple(key.shape[:-1])}"
        raise ValueError(f"value of shape {tuple(value.shape)}: {leading}")
    q, k, v = (x.reshape((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (query, key, value))
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"key of batch {k.shape[0]}: accepted is query's, {q.shape[0]}")
    heads, key_heads = q.shape[1], k.shape[1]
    if heads != key_heads and (not enable_gqa or heads % key_heads):
        accepted = f"accepted are query's {heads}, or a divisor of it with enable_gqa=True"
        raise ValueError(f"key of {key_heads} heads: {accepted}")
    mask = _checked_mask(attn_mask, is_causal, (*q.shape[:3], k.shape[2]))
    return q, k, v, mask, scale_of(scale, query.shape[-1])


def _checked_mask(attn_mask: Tensor | None, is_causal: bool, full: tuple[int, ...]) -> Mask:
    """The mask with at least two dimensions, if it broadcasts to `full`."""
    if attn_mask is None:
        return Mask(is_causal)
    check_given(attn_mask=attn_mask)
    if is_causal:
        raise ValueError("is_causal=True: accepted is False where attn_mask is given")
    if not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise ValueError(
            f"attn_mask of dtype {attn_mask.dtype}: accepted are bool and floating point"
        )
    if attn_mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "attn_mask.requires_grad=True: accepted is False, since no gradient of the mask is"
            " computed"
        )
    shape = tuple(attn_mask.shape)
    if len(shape) > 4 or any(
        m not in (1, n) for m, n in zip(shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"attn_mask of shape {shape}: accepted is what broadcasts to {full}")
    return Mask(is_causal, attn_mask.reshape((1,) * (2 - len(shape)) + shape))
