"""`torch.ops.halfulp.attention_forward` and `attention_backward`: attention as PyTorch's own
machinery sees it.

Schema, shapes without data, autograd, autocast and vmap, so that compiling, checkpointing and
distributed training treat it like a built-in operator. Arguments are checked above, in
`halfulp.attention`; here they are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfulp.kernels.options import Options, Saved
from halfulp.ops import tiled
from halfulp.ops.dispatch import choose

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
LOG2_E = 1.4426950408889634
ONCE = "halfulp.attention is differentiable once, as PyTorch's flash kernels are"


@torch.library.custom_op("halfulp::attention_forward", mutates_args=())
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    scale: float,
    window: Sequence[int] | None,
    softcap: float,
    dropout_p: float,
    causal_offset: int,
    recipe: str,
    backend: str | None,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, residual, row_max, row_sum, own_lse) of `kernels.options.Saved`; what is
    None there is empty.

    `seed` is an int64 scalar on the CPU where there is dropout.
    """
    options = _options(
        attn_mask, sinks, seed, is_causal, scale, window, softcap, dropout_p, causal_offset, recipe
    )
    kernel = choose(query, key, value, options, backend, mask_gradient=mask_gradient)
    saved: Saved = kernel.forward(query, key, value, options)
    batch, heads, count = query.shape[:3]
    residual, own_lse = saved.residual, saved.own_lse
    if residual is None:
        residual = query.new_empty(batch, heads, count, 0, dtype=torch.int8)
    if tiled.recipe_of(recipe, query.dtype).base != "2":
        own_lse = saved.lse.new_empty(batch, heads, 0)
    elif own_lse is None:
        own_lse = saved.lse * LOG2_E
    return saved.out, saved.lse, residual, saved.row_max, saved.row_sum, own_lse


@torch.library.custom_op("halfulp::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    own_lse: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    scale: float,
    window: Sequence[int] | None,
    softcap: float,
    dropout_p: float,
    causal_offset: int,
    recipe: str,
    backend: str | None,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, sinks and attn_mask; empty where there is none, or none was
    asked for.
    """
    options = _options(
        attn_mask, sinks, seed, is_causal, scale, window, softcap, dropout_p, causal_offset, recipe
    )
    kernel = choose(query, key, value, options, backend, mask_gradient=mask_gradient)
    saved = Saved(
        out,
        residual if residual.shape[3] else None,
        lse,
        row_max,
        row_sum,
        own_lse if own_lse.shape[2] else None,
    )
    more = {"mask_gradient": mask_gradient} if kernel is tiled else {}
    grads = kernel.backward(grad_out, grad_lse, query, key, value, saved, options, **more)
    none = query.new_empty(0)
    of_sinks = none if grads.sinks is None else grads.sinks
    return (
        grads.query,
        grads.key,
        grads.value,
        of_sinks,
        none.clone() if grads.attn_mask is None else grads.attn_mask,
    )


def _options(
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    scale: float,
    window: Sequence[int] | None,
    softcap: float,
    dropout_p: float,
    causal_offset: int,
    recipe: str,
) -> Options:
    bounds = None if window is None else (window[0], window[1])
    number = 0 if seed is None else int(seed)
    return Options(
        recipe,
        is_causal,
        scale,
        attn_mask,
        bounds,
        softcap,
        sinks,
        dropout_p,
        number,
        causal_offset,
    )


def _fake_forward(query: Tensor, value: Tensor, recipe: str) -> Forward:
    meant = tiled.recipe_of(recipe, query.dtype)
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    residual = value.shape[3] if meant.delta_from == "residual" else 0
    lse, row_max, row_sum = (query.new_empty(rows, dtype=meant.dtype) for _ in range(3))
    own_lse = query.new_empty(*rows[:2], rows[2] if meant.base == "2" else 0, dtype=meant.dtype)
    return out, lse, query.new_empty(*rows, residual, dtype=torch.int8), row_max, row_sum, own_lse


@attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Forward:  # noqa: ARG001
    return _fake_forward(query, value, rest[9])


@attention_backward.register_fake
def _(
    grad_out: Tensor,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> Backward:
    attn_mask, sinks, mask_gradient = rest[6], rest[7], rest[17]
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    of_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    of_mask = (
        attn_mask.new_empty(attn_mask.shape)
        if mask_gradient and attn_mask is not None
        else query.new_empty(0)
    )
    return dq, dk, dv, of_sinks, of_mask


def keep(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    """Keep for `gradients` what it needs of `attention_forward`'s inputs and outputs."""
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]


def gradients(
    ctx: Any, *grads: Tensor | None, operator: Callable[..., Backward] = attention_backward
) -> tuple[Tensor | None, ...]:
    """The gradients of `attention_forward`'s inputs; None where there is none."""
    grad_out, grad_lse = grads[:2]
    query, key, value, attn_mask, sinks, seed, *output = ctx.saved_tensors
    nothing: list[Tensor | None] = [None] * (6 + len(ctx.options))
    if grad_out is None and grad_lse is None:
        return tuple(nothing)
    if grad_out is None:
        grad_out = torch.zeros_like(output[0])
    dq, dk, dv, of_sinks, of_mask = operator(
        grad_out, grad_lse, query, key, value, *output, attn_mask, sinks, seed, *ctx.options
    )
    needs = ctx.needs_input_grad
    nothing[:3] = [g if need else None for g, need in zip((dq, dk, dv), needs[:3], strict=True)]
    nothing[3] = of_mask if needs[3] else None
    nothing[4] = of_sinks if needs[4] else None
    return tuple(nothing)


attention_forward.register_autograd(gradients, setup_context=keep)


@attention_backward.register_autograd
def _(ctx: Any, *grads: Tensor | None) -> Any:
    raise NotImplementedError(ONCE)
