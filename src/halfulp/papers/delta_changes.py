"""Attention whose δ is what its recipe computes, but for one chosen change of its error e = δ_lp −
δ_hp.

The error is split into its mean over all rows of a call and what is left, and each can be kept,
taken away or turned around: twins that differ in nothing else tell what drives a run. The change
enters where a kernel takes the gradient of lse: δ ← δ − dLSE, so the backward pass is the recipe's
own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfulp.attention import emulate
from halfulp.formats import FP64, round_to
from halfulp.recipes import Recipe
from halfulp.training.attention import AttentionFunction

Change = Callable[[Tensor], Tensor]
"""Of e `[B, H, N]`: what the backward pass is to have in its place."""


def as_it_is(error: Tensor) -> Tensor:
    """No change."""
    return error


def mean_alone(error: Tensor) -> Tensor:
    """Its mean over all rows of the call, in every row."""
    return error.mean().expand_as(error)


def mean_removed(error: Tensor) -> Tensor:
    """What is left without the mean."""
    return error - error.mean()


def mean_flipped(error: Tensor) -> Tensor:
    """The mean of the other sign, the rest as it is."""
    return error - 2 * error.mean()


def removed(error: Tensor) -> Tensor:
    """Nothing: δ from O before it was rounded."""
    return torch.zeros_like(error)


CHANGES: dict[str, Change] = {
    "as it is": as_it_is,
    "mean alone": mean_alone,
    "mean removed": mean_removed,
    "mean flipped": mean_flipped,
    "removed": removed,
}
"""Of e in every call."""


def changed_attention(recipe: Recipe, change: Change) -> AttentionFunction:
    """Return attention in `recipe` whose error of δ is `change(e)`; e is that of O's last rounding.

    Args:
        recipe: takes δ from the rounded O.
        change: one of `CHANGES`, or any function of e that keeps its shape.

    Raises:
        ValueError: the recipe's δ comes from elsewhere.
    """
    if recipe.delta_from != "out":
        raise ValueError(f"recipe with delta_from={recipe.delta_from!r}: accepted is 'out'")
    # the same forward pass but for the last rounding of O, from which e comes
    return partial(_attend, recipe, recipe.with_(out=FP64), change)


def _attend(
    recipe: Recipe,
    before: Recipe,
    change: Change,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> Tensor:
    out, lse = emulate(query, key, value, recipe=recipe, return_lse=True, **options)
    with torch.no_grad():
        exact = emulate(query, key, value, recipe=before, **options)
    changed: Tensor = _Changed.apply(out, lse, exact, recipe, change)  # type: ignore[no-untyped-call]
    return changed


class _Changed(torch.autograd.Function):
    """Hands out on as it is and gives lse the gradient e − change(e), so that δ_lp becomes δ_hp +
    change(e).
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, exact: Tensor, recipe: Recipe, change: Change
    ) -> Tensor:
        del lse  # taken for its gradient alone, by which δ is changed
        ctx.save_for_backward(out, exact)
        ctx.recipe, ctx.change = recipe, change
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        out, exact = ctx.saved_tensors
        error = (round_to(grad_out, ctx.recipe.grad_out) * (out - exact)).sum(-1)
        # δ ← δ − dLSE: δ_hp + e − (e − change(e))
        return grad_out, error - ctx.change(error), None, None, None
