"""transformers' attention functions, called as its layers call them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halfulp.targets.flash_attention import no_flash_attn, same_lengths
from halfulp.targets.flex import for_flex, no_gradients
from halfulp.targets.target import BOTH, Target, UnsupportedError, installed, many_graphs

TRANSFORMERS = {
    "sdpa": "transformers' call of scaled_dot_product_attention",
    "eager": (
        "transformers' eager attention, as Llama has it: softmax in fp32, weights in the input's"
        " dtype"
    ),
    "flex_attention": "transformers' call of FlexAttention",
    "flash_attention_2": "transformers' call of flash_attn",
}


def transformers_target(name: str) -> Target:
    """A function of transformers' AttentionInterface, by its name in a config's
    `attn_implementation`, or "eager".
    """
    missing = None if installed("transformers") else "transformers is not installed"
    if missing is None and name.startswith("flash_attention"):
        missing = no_flash_attn()
    # flex_attention: its compiled kernel with a tensor as the mask crashes the process on a CPU
    # (transformers 5.23).
    masks = not name.startswith("flash_attention") and name != "flex_attention"

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return _transformers(name, query, key, value, **options)

    unseen = {
        "eager": "it is written out in matrix products, which are no call of a function",
        "flex_attention": "its masks and changes of scores are code, which no figure can be"
        " computed from",
    }
    description = TRANSFORMERS.get(name, f"transformers' attention function {name!r}")
    return Target(
        f"transformers:{name}",
        call,
        BOTH if masks else frozenset({"enable_gqa"}),
        description,
        missing,
        forward_only=no_gradients() if name == "flex_attention" else None,
        unseen=unseen.get(name),
    )


def _transformers(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """An attention function as a transformers layer calls it: with a module that names it, masks
    `[B, 1, N_q, N_k]`.
    """
    function = _transformers_function(name)
    same_lengths(query, key, is_causal)
    mask: Any = attn_mask
    if is_causal and name == "eager":  # its models always make the mask
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
    if mask is not None:
        mask = mask.expand(
            query.shape[0], mask.shape[1] if mask.ndim == 4 else 1, query.shape[2], key.shape[2]
        )
        if mask.dtype == torch.bool and name == "eager":
            # As transformers writes a mask: the dtype's lowest number, not −inf.
            lowest = torch.finfo(query.dtype).min
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
                ~mask, lowest
            )
    if name == "flex_attention":
        query, key, value, mask = for_flex(query, key, value, is_causal)
    # of a layer, what these functions read and no more: building one would take a whole model
    module = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1] if enable_gqa else 1,
        is_causal=is_causal,
        training=False,
        config=SimpleNamespace(_attn_implementation=name),
        layer_idx=0,
    )
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    with many_graphs():
        returned = function(
            module, query, key, value, mask, scaling=scaling, dropout=0.0, is_causal=is_causal
        )
    out: Tensor = returned[0]
    return out.transpose(1, 2)


def _transformers_function(name: str) -> Callable[..., Any]:
    if name == "eager":
        from transformers.models.llama.modeling_llama import eager_attention_forward

        return eager_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_ATTENTION_FUNCTIONS:
        known = ", ".join(ALL_ATTENTION_FUNCTIONS.keys())
        raise UnsupportedError(
            f"transformers has no attention function {name!r}: it has eager, {known}"
        )
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
