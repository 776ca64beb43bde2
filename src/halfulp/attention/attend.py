"""The function that the project is about: PyTorch's attention with a gradient that stays at the
format's floor.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from halfulp import ops
from halfulp.attention.operands import (
    Operands,
    causal,
    check_numbers,
    check_sinks,
    check_tensors,
    operands,
    scale_of,
)


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
    recipe: str = ...,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    causal_offset: int = ...,
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
    recipe: str = ...,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    causal_offset: int = ...,
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
    recipe: str = "halfulp",
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
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
            function of a seed from torch's CPU generator, so checkpointing and the backward pass
            drop the same.
        is_causal: query i attends to keys 0..i + causal_offset; not together with `attn_mask`.
        scale: softmax scale; 1/√D if None.
        enable_gqa: let groups of query heads share a key head.
        recipe: the arithmetic: "halfulp", "stock" (FlashAttention-2's), "published" (stock with the
            shift of Qiu & Yao, β = 7) or "exact_delta" (stock with δ = rowsum(dP ∘ P), one more
            pass).
        return_lse: also return lse `[..., H, N]` (natural logarithm, float32 or float64),
            differentiable.
        window: (left, right): query i attends to keys i + causal_offset − left to i + causal_offset
            + right; −1 is no bound, as in FlashAttention.
        softcap: c > 0: scores become c·tanh(S / c).
        sinks: `[H]`, one more score in every row of a head whose value is 0; differentiable.
        causal_offset: 0 aligns at the top left, as PyTorch does; N_k − N at the bottom right, as
            FlashAttention does.
        backend: "cpu", "triton" or "torch"; None takes the first that fits. `explain_dispatch`
            tells which and why.

    Returns:
        out `[..., H, N, D_v]` in query's dtype (under autocast, in its dtype), contiguous. A row
        that attends to nothing is 0, its lse −inf and its gradients 0.

    Raises:
        ValueError: for what does not fit, or a backend asked for that does not take it; in one
            line.
    """
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given, arguments = _arguments(*call, recipe, window, softcap, sinks, causal_offset, backend)
    out, lse = ops.attend(*arguments)
    out = out.reshape(given.shape)
    return (out, lse.reshape(given.shape[:-1])) if return_lse else out


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
    recipe: str = "halfulp",
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
    backend: str | None = None,
) -> ops.Dispatch:
    """Which kernel `attention` would run with the same arguments, and why not each of the others;
    print it.

    Nothing is computed. Raises ValueError where `attention` would, but for a backend that does not
    take the inputs: then the result's `backend` is None and its text says why.
    """
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given, arguments = _arguments(
        *call, recipe, window, softcap, sinks, causal_offset, backend, draw=False
    )
    options = ops.Options(
        recipe=recipe,
        is_causal=arguments[6],
        scale=arguments[7],
        attn_mask=given.attn_mask,
        window=window,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        causal_offset=arguments[11],
    )
    return ops.explain(
        given.query, given.key, given.value, options, backend, mask_gradient=arguments[14]
    )


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    recipe: str,
    window: tuple[int, int] | None,
    softcap: float,
    sinks: Tensor | None,
    causal_offset: int,
    backend: str | None,
    *,
    draw: bool = True,
) -> tuple[Operands, tuple[Any, ...]]:
    """The operands in the kernels' form, and the operator's arguments."""
    if recipe not in ops.KERNEL_RECIPES:
        raise ValueError(f"recipe={recipe!r}: accepted are {', '.join(ops.KERNEL_RECIPES)}")
    if backend is not None and backend not in ops.BACKENDS:
        raise ValueError(f"backend={backend!r}: accepted are None, {', '.join(ops.BACKENDS)}")
    check_tensors(query, key, value)
    check_numbers(dropout_p, is_causal, window, softcap, causal_offset)
    diagonal = causal(attn_mask, is_causal, (query.shape[-2], key.shape[-2]), causal_offset)
    given = operands(query, key, value, diagonal.attn_mask, enable_gqa)
    check_sinks(sinks, given.query)
    # On the CPU whatever the device: a kernel is handed the number. Drawn here, so that a
    # checkpoint draws it again.
    draws = draw and dropout_p > 0
    seed = (
        torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu") if draws else None
    )
    mask = given.attn_mask
    learned = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    return given, (
        given.query,
        given.key,
        given.value,
        mask,
        sinks,
        seed,
        diagonal.is_causal,
        scale_of(scale, query.shape[-1]),
        window,
        float(softcap),
        float(dropout_p),
        diagonal.offset,
        recipe,
        backend,
        learned,
    )
