"""`torch.ops.halfulp.attention_forward` and `attention_backward`: attention as PyTorch's own
machinery sees it.

Schema, shapes without data, autograd, autocast and vmap, so that compiling, checkpointing and
distributed training treat it like a built-in operator. Arguments are checked above, in
`halfulp.calls`; here they are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.calls import TENSORS, Call, Flat, Saved
from halfulp.ops.dispatch import choose
from halfulp.recipes import recipe_of

Backward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
LN_2 = 0.6931471805599453
ONCE = "halfulp.attention is differentiable once, as PyTorch's flash kernels are"


class Passed(NamedTuple):
    """What the forward operator gives and the backward operator takes: `Saved`, with empty tensors
    for None.
    """

    out: Tensor
    lse: Tensor
    residual: Tensor
    row_max: Tensor
    row_sum: Tensor
    own_lse: Tensor  # in the base of the kernel that ran, which is the one that reads it


# out and lse; counted here, since the compiler of PyTorch 2.8 cannot search a tuple of names
_DIFFERENTIABLE = Passed._fields.index("residual")


class How(NamedTuple):
    """What computes a call: the operators' arguments after those of the call."""

    recipe: str
    backend: str | None
    mask_gradient: bool


_CALL = len(Flat._fields)


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
    """Return `Passed`. `seed` is an int64 scalar on the CPU where there is dropout."""
    call = Call.of_flat(
        Flat(
            query, key, value, attn_mask, sinks, seed,
            is_causal, scale, window, softcap, dropout_p, causal_offset,
        )
    )  # fmt: skip
    kernel = choose(call, recipe, backend, mask_gradient=mask_gradient)
    saved = kernel.forward(call, recipe)
    residual, own_lse = saved.residual, saved.own_lse
    if residual is None:
        # operators return tensors alone: an empty one says that there is none
        residual = query.new_empty(*query.shape[:3], 0, dtype=torch.int8)
    if own_lse is None:
        # no two results of an operator may share memory
        own_lse = saved.lse.clone()
    return saved.out, saved.lse, residual, saved.row_max, saved.row_sum, own_lse


@torch.library.custom_op("halfulp::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    own_lse: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, sinks and attn_mask; empty where there is none, or none was
    asked for.
    """
    call = Call.of_flat(
        Flat(
            query, key, value, attn_mask, sinks, seed,
            is_causal, scale, window, softcap, dropout_p, causal_offset,
        )
    )  # fmt: skip
    kernel = choose(call, recipe, backend, mask_gradient=mask_gradient)
    saved = Saved(out, residual if residual.shape[3] else None, lse, row_max, row_sum, own_lse)
    more = {"mask_gradient": True} if mask_gradient else {}  # Triton has none
    grads = kernel.backward(call, recipe, saved, grad_out, grad_lse, **more)
    none = query.new_empty(0)
    of_sinks = none if grads.sinks is None else grads.sinks
    # a clone, since no two results of an operator may share memory
    of_mask = none.clone() if grads.mask is None else grads.mask
    return grads.query, grads.key, grads.value, of_sinks, of_mask


@attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    meant = recipe_of(How(*(query, key, value, *rest)[_CALL:]).recipe, query.dtype)
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    residual = value.shape[3] if meant.delta_from == "residual" else 0
    lse, row_max, row_sum, own_lse = (query.new_empty(rows, dtype=meant.dtype) for _ in range(4))
    of_residual = query.new_empty(*rows, residual, dtype=torch.int8)
    return tuple(Passed(out, lse, of_residual, row_max, row_sum, own_lse))


@attention_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, *rest: Any) -> Backward:  # noqa: ARG001
    given = rest[len(Passed._fields) :]
    flat, how = Flat(*given[:_CALL]), How(*given[_CALL:])
    dq, dk, dv = (x.new_empty(x.shape) for x in (flat.query, flat.key, flat.value))
    none, sinks, mask = flat.query.new_empty(0), flat.sinks, flat.attn_mask
    of_sinks = none if sinks is None else sinks.new_empty(sinks.shape)
    if mask is None or not how.mask_gradient:
        return dq, dk, dv, of_sinks, none.clone()
    return dq, dk, dv, of_sinks, mask.new_empty(mask.shape)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep for `gradients` what it needs of `attention_forward`'s inputs and outputs."""
    passed = Passed(*output)
    ctx.mark_non_differentiable(*output[_DIFFERENTIABLE:])
    # or a loss without lse would give it zeros, and the backward pass would read them
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*passed, *inputs[:TENSORS])
    ctx.numbers = inputs[TENSORS:]


def gradients(
    ctx: Any, *grads: Tensor | None, operator: Callable[..., Backward] = attention_backward
) -> tuple[Tensor | None, ...]:
    """The gradients of `attention_forward`'s inputs; None where there is none."""
    grad_out, grad_lse = grads[:2]
    given = dict.fromkeys((*Flat._fields, *How._fields))
    if grad_out is None and grad_lse is None:
        return tuple(given.values())
    if grad_out is None:
        grad_out = torch.zeros_like(Passed(*ctx.saved_tensors[: len(Passed._fields)]).out)
    found = operator(grad_out, grad_lse, *ctx.saved_tensors, *ctx.numbers)
    needed = dict(zip(given, ctx.needs_input_grad, strict=True))
    for name, grad in zip(("query", "key", "value", "sinks", "attn_mask"), found, strict=True):
        given[name] = grad if needed[name] else None
    return tuple(given.values())


attention_forward.register_autograd(gradients, setup_context=keep)


@attention_backward.register_autograd
def _(ctx: Any, *grads: Tensor | None) -> Any:
    raise NotImplementedError(ONCE)
