"""Attention emulated in any recipe, and the golden value beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfulp import algorithms
from halfulp.algorithms import Kept, Problem
from halfulp.algorithms.other_gradients import grad_mask, grad_sinks
from halfulp.calls import TENSORS, Call, Flat, Result, check, check_given
from halfulp.recipes import BF16_FLASH2, Observer, Recipe, Step, recipe_for


@overload
def emulate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    causal_offset: int = ...,
    dropout_seed: int | None = ...,
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
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    causal_offset: int = ...,
    dropout_seed: int | None = ...,
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
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
    dropout_seed: int | None = None,
    recipe: Recipe | str = BF16_FLASH2,
    observers: Sequence[Observer] = (),
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with the arithmetic of `recipe`, forward and backward; what is asked is asked as of
    `halfulp.attention`.

    Args:
        query: `[..., H, N, D]`, float64, float32, bfloat16 or float16.
        key: `[..., H_k, N_k, D]`; H_k < H needs `enable_gqa` and must divide H, or be 1.
        value: `[..., H_k, N_k, D_v]`.
        attn_mask: as `attention`, and so all to `dropout_seed`; differentiable.
        dropout_p: share of the weights that is dropped.
        is_causal: query i attends to keys 0..i + causal_offset; not together with `attn_mask`.
        scale: softmax scale; 1/√D if None.
        enable_gqa: let groups of query heads share a key head.
        window: (left, right); −1 is no bound.
        softcap: c > 0: scores become c·tanh(S / c).
        sinks: `[H]`; differentiable.
        causal_offset: 0 aligns at the top left, N_k − N at the bottom right.
        dropout_seed: which weights are dropped; None draws it as `attention` does.
        recipe: a `Recipe` or a name: of a built-in one, or "halfulp", "stock", "exact_delta" and
            "published", which mean what `attention` computes for inputs of query's dtype.
        observers: called with (step name, exact, rounded), forward and backward; they must not
            change what they see.
        return_lse: also return lse `[..., H, N]` (natural logarithm, the recipe's compute dtype),
            differentiable.

    Returns:
        out `[..., H, N, D_v]` in query's dtype, holding values of the recipe's `out` format; a
        fully masked row is 0 and its lse −inf.

    Raises:
        ValueError: for shapes, dtypes, options or a recipe that do not fit, in one line.
    """
    call = check(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        window, softcap, sinks, causal_offset, dropout_seed, emulated=True,
    )  # fmt: skip
    recipe = recipe_for(recipe, query.dtype)
    out, lse = _Emulated.apply(*call.flat(), recipe, tuple(observers))  # type: ignore[no-untyped-call]
    assert call.shape is not None
    out, lse = out.reshape(call.shape), lse.reshape(call.shape[:-1])
    return (out, lse) if return_lse else out


def golden(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
    dropout_seed: int | None = None,
) -> Result:
    """The fp64 value of attention and, with `grad_out [B, H, N, D_v]`, of the gradients of all its
    inputs, in O(N) memory.

    Arguments as `emulate`, with all four dimensions `[B, H, N, D]` and one batch size; results are
    float64. It runs outside anybody's autocast and records no gradients. Raises ValueError for
    shapes, dtypes or options that do not fit.
    """
    check_given(query=query, **({} if grad_out is None else {"grad_out": grad_out}))
    if query.ndim != 4:
        raise ValueError(
            f"query of shape {tuple(query.shape)}: accepted are 4 dimensions [B, H, N, D]"
        )
    call = check(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        window, softcap, sinks, causal_offset, dropout_seed, emulated=True,
    )  # fmt: skip
    for name, x, read in (("query", query, call.query), ("key", key, call.key),
                          ("value", value, call.value)):  # fmt: skip
        if x.shape != read.shape:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)}: accepted is {tuple(read.shape)}, since the"
                " gradients of what is broadcast are not summed"
            )
    out_shape = (*query.shape[:3], value.shape[3])
    if grad_out is not None and grad_out.shape != out_shape:
        raise ValueError(
            f"grad_out of shape {tuple(grad_out.shape)}: accepted is out's shape {out_shape}"
        )
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return algorithms.golden(call, grad_out)


class _Emulated(torch.autograd.Function):
    """Ties the recipe's forward pass to its own backward pass; runs outside anybody's autocast."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *arguments, recipe, observers = given
        flat = Flat(*arguments)
        with torch.autocast(flat.query.device.type, enabled=False):
            problem = Problem.read(Call.of_flat(flat), Step(recipe, observers))
            kept = algorithms.attend(problem)
        # rounded as the forward pass read them, so that the backward pass reads the same
        read = flat._replace(query=problem.query, key=problem.key, value=problem.value)
        ctx.save_for_backward(*read.tensors, *vars(kept).values())
        ctx.numbers, ctx.groups, ctx.how = flat.numbers, problem.groups, (recipe, observers)
        ctx.dtypes = {n: x.dtype for n, x in flat._asdict().items() if isinstance(x, Tensor)}
        # or a loss without lse would give zeros for it, and the backward pass would compute with
        # them
        ctx.set_materialize_grads(False)
        return kept.out.to(flat.query.dtype), (kept.lse / problem.unit).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        flat = Flat(*ctx.saved_tensors[:TENSORS], *ctx.numbers)
        problem = Problem(Call.of_flat(flat), Step(*ctx.how), ctx.groups)
        kept = Kept(*ctx.saved_tensors[TENSORS:])
        if grad_out is None:
            grad_out = torch.zeros_like(kept.out)
        d_lse = None if grad_lse is None else grad_lse.unsqueeze(-1)
        needed = dict(zip(Flat._fields, ctx.needs_input_grad, strict=False))
        found: dict[str, Tensor] = {}
        with torch.no_grad(), torch.autocast(flat.query.device.type, enabled=False):
            computed = algorithms.attend_backward(problem, kept, grad_out, d_lse)
            found |= zip(("query", "key", "value"), computed, strict=True)
            # after the others, which are what a kernel computes: no step of theirs counts these
            if needed["sinks"]:
                found["sinks"] = grad_sinks(problem, kept, grad_out, d_lse)
            if needed["attn_mask"]:
                found["attn_mask"] = grad_mask(problem, kept, grad_out, d_lse)
        every = {name: found[name].to(ctx.dtypes[name]) for name in found}
        return *(every.get(name) for name in Flat._fields), None, None
