"""A processor for diffusers' `Attention` layers, those of its UNets:
`unet.set_attn_processor(DiffusersProcessor())`.

Its newer transformers choose their attention by another way, which ends in PyTorch's function:
`halfulp.patch()` reaches those, and these too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfulp.attention.attend import attention


class DiffusersProcessor:
    """Attention as diffusers' `AttnProcessor2_0` computes it, around `halfulp.attention`."""

    def __init__(self, *, recipe: str = "halfulp", backend: str | None = None) -> None:
        """`recipe` and `backend` as `halfulp.attention`."""
        self.recipe, self.backend = recipe, backend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """One layer's result in the shape of `hidden_states`.

        Args:
            attn: the layer, with its projections and norms.
            hidden_states: `[B, N, width]` or pictures `[B, width, height, width]`.
            encoder_hidden_states: `[B, N_k, width]` for cross-attention.
            attention_mask: additive, as the layer's `prepare_attention_mask` takes it.
            temb: the time embedding, for layers with a spatial norm.
        """
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        is_picture = hidden_states.ndim == 4
        if is_picture:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        source = hidden_states
        if encoder_hidden_states is not None:
            source = encoder_hidden_states
            source = attn.norm_encoder_hidden_states(source) if attn.norm_cross else source
        out = self._attend(attn, hidden_states, source, attention_mask)
        for layer in attn.to_out:  # a projection, then dropout
            out = layer(out)
        if is_picture:
            out = out.transpose(-1, -2).reshape(residual.shape)
        out = out + residual if attn.residual_connection else out
        result: Tensor = out / attn.rescale_output_factor
        return result

    def _attend(
        self, attn: Any, hidden_states: Tensor, source: Tensor, mask: Tensor | None
    ) -> Tensor:
        """`[B, N, heads · D]`."""
        query, key, value = (
            x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for x in (attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source))
        )
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        if mask is not None:
            batch, length = source.shape[:2]
            mask = attn.prepare_attention_mask(mask, length, batch)
            mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
        out = attention(
            query, key, value, mask, scale=None, recipe=self.recipe, backend=self.backend
        )
        return out.transpose(1, 2).flatten(2).to(query.dtype)
