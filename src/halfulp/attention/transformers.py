"""`attn_implementation="halfulp"` for transformers' models, beside its own "eager" and "sdpa"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfulp.attention.attend import attention

NAME = "halfulp"


def register_transformers() -> None:
    """Give transformers' AttentionInterface the name "halfulp", with masks made as for "sdpa".

    Then `AutoModelForCausalLM.from_pretrained(..., attn_implementation="halfulp")` or
    `model.set_attn_implementation("halfulp")` run `halfulp.attention`. Calling it again changes
    nothing. Raises ImportError where transformers is not installed.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as a transformers layer calls it.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: `[B, H, N, D]`.
        key: `[B, H_k, N_k, D]`.
        value: `[B, H_k, N_k, D_v]`.
        attention_mask: broadcastable to `[B, H, N, N_k]`, bool or additive; None where `is_causal`
            says it all.
        dropout: share of the weights that is dropped.
        scaling: softmax scale; 1/√D if None.
        is_causal: whether a layer without a mask hides the future; a single query sees every key of
            its cache.
        softcap: c: scores become c·tanh(S / c).
        s_aux: `[H]`, sinks.
        position_bias: broadcastable to `[B, H, N, N_k]`, added to the scaled scores.
        more: what other implementations need; a paged cache is refused.

    Returns:
        out `[B, N, H, D_v]`, and None for the weights, which never exist.

    Raises:
        ValueError: there is a paged cache.
    """
    if more.get("cache") is not None:
        raise ValueError("cache is given: accepted is None, since paged caches are not read")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    hides_future = bool(causal) and attention_mask is None and query.shape[2] > 1
    if position_bias is not None:
        attention_mask = _with_bias(
            position_bias, attention_mask, hides_future, query.shape[2], key.shape[2]
        )
        hides_future = False
    out = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        hides_future,
        scaling,
        True,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def _with_bias(
    bias: Tensor, mask: Tensor | None, hides_future: bool, queries: int, keys: int
) -> Tensor:
    """The bias as an additive mask, −inf where the mask, or the future, hides a key."""
    if mask is None and hides_future:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
