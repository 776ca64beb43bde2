"""The function that the project is about: PyTorch's attention with a gradient that stays at the
format's floor.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from halfulp import ops
from halfulp.calls import Call, check
from halfulp.ops import direct
from halfulp.recipes import Recipe, kernel_recipe


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    recipe: Recipe | str = ...,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    causal_offset: int = ...,
    dropout_seed: int | None = ...,
    backend: str | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    recipe: Recipe | str = ...,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    causal_offset: int = ...,
    dropout_seed: int | None = ...,
    backend: str | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe | str = "halfulp",
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
    dropout_seed: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in place of `F.scaled_dot_product_attention`: the same arguments, layouts and
    results.

    Args:
        query: `[..., H, N, D]`, float64, float32, bfloat16 or float16; leading dimensions
            broadcast.
        key: `[..., H_k, N_k, D]`.
        value: `[..., H_k, N_k, D_v]`.
        attn_mask: broadcastable to `[..., H, N, N_k]`: bool (True: may attend), float (added to the
            scaled scores, differentiable; what overflows times log₂ e hides), or one of
            `torch.nn.attention.bias`'s causal ones.
        dropout_p: share of the weights that is dropped; always applied, as there. The mask is a
            function of a seed and of a weight's place, so checkpointing and the backward pass drop
            the same.
        is_causal: query i attends to keys 0..i + causal_offset; not together with `attn_mask`.
        scale: softmax scale; 1/√D if None.
        enable_gqa: let groups of query heads share a key head.
        recipe: the arithmetic: "halfulp", "stock" (FlashAttention-2's), "published" (stock with the
            shift of Qiu & Yao, β = 7) or "exact_delta" (stock with δ = rowsum(dP ∘ P), one more
            pass), each in the format of the inputs; a recipe that is one of these for inputs of
            this dtype, such as "BF16_HALFULP", is taken too.
        return_lse: also return lse `[..., H, N]` (natural logarithm, float32 or float64),
            differentiable.
        window: (left, right): query i attends to keys i + causal_offset − left to i + causal_offset
            + right; −1 is no bound, as in FlashAttention.
        softcap: c > 0: scores become c·tanh(S / c).
        sinks: `[H]`, one more score in every row of a head whose value is 0; differentiable.
        causal_offset: 0 aligns at the top left, as PyTorch does; N_k − N at the bottom right, as
            FlashAttention does. Any integer, as are the window's.
        dropout_seed: which weights dropout drops, modulo 2⁶⁴; None draws it from torch's CPU
            generator. `emulate` and `golden` drop the same with the same seed.
        backend: "cpu", "triton" (GPUs; not run on one yet) or "torch"; None takes the first that
            fits. `explain_dispatch` tells which and why.

    Returns:
        out `[..., H, N, D_v]` in query's dtype (under autocast, in its dtype), contiguous. A row
        that attends to nothing is 0, its lse −inf and its gradients 0.

    Raises:
        ValueError: for what does not fit, or a backend asked for that does not take it; in one
            line.
    """
    done: Tensor | tuple[Tensor, Tensor] | Literal[False] | None
    done = not is_compiling() and direct.attend(
        query, key, value, return_lse, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        window, softcap, sinks, causal_offset, dropout_seed, recipe, backend,
    )  # fmt: skip
    if done is not None and done is not False:
        return done  # type: ignore[no-any-return]
    some = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    options = (*some, window, softcap, sinks, causal_offset, dropout_seed)
    found = _by_operator((query, key, value), options, recipe, backend, done is None)
    return found if return_lse else found[0]


def _by_operator(
    operands: tuple[Tensor, Tensor, Tensor],
    options: tuple[Any, ...],
    recipe: Recipe | str,
    backend: str | None,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """Check a call, compute out and lse, and prepare the next one like it for the short way where
    that may be.
    """
    call = check(*operands, *options)
    name, asked = _named(recipe, backend, call.query.dtype)
    if learns:
        direct.learn(operands, (*options, recipe, backend), call, name, asked)
    out, lse = ops.attend(call, name, asked, mask_gradient=_learns_mask(call))
    assert call.shape is not None
    return out.reshape(call.shape), lse.reshape(call.shape[:-1])


def explain_dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe | str = "halfulp",
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
    dropout_seed: int | None = None,
    backend: str | None = None,
) -> ops.Dispatch:
    """Which kernel `attention` would run with the same arguments, and why not each of the others;
    print it.

    Nothing is computed. Raises ValueError where `attention` would, but for a backend that does not
    take the inputs: then the result's `backend` is None and its text says why.
    """
    call = check(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        window, softcap, sinks, causal_offset, dropout_seed, draw=False,
    )  # fmt: skip
    name, backend = _named(recipe, backend, query.dtype)
    return ops.explain(call, name, backend, mask_gradient=_learns_mask(call))


def _named(recipe: Recipe | str, backend: str | None, dtype: torch.dtype) -> tuple[str, str | None]:
    """The kernels' name of the recipe, and the backend, which must exist."""
    if backend is not None and backend not in ops.BACKENDS:
        raise ValueError(f"backend={backend!r}: accepted are None, {', '.join(ops.BACKENDS)}")
    return kernel_recipe(recipe, dtype), backend


def _learns_mask(call: Call) -> bool:
    mask = call.sees.mask
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()
