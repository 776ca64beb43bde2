"""What one attention call of a training step was fed, gave and got back: the raw material of every
measurement.

A tap sits behind the attention function of a layer. It is shown the call and returns out, either as
it came or with another value and the same gradient path. Models put it in place through
`halfulp.training.attention.Attend`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor


class Tap(Protocol):
    """Called in the forward pass of a layer, after its attention function."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        *,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        """Return out `[B, H, N, D_v]`; tensors come with their graph, heads already repeated where
        GQA shares them.
        """
        ...


@dataclass
class Call:
    """One attention call of one layer, detached, with the gradients that the backward pass gave."""

    layer: int
    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, H, N_k, D]
    value: Tensor  # [B, H, N_k, D_v]
    out: Tensor  # [B, H, N, D_v]
    is_causal: bool
    scale: float
    grad_out: Tensor | None = None  # [B, H, N, D_v]
    grad_key: Tensor | None = None  # [B, H, N_k, D], as the attention under test computed it
    inputs: Tensor | None = None  # X [B, N, width]: what W_Q reads
    # broadcasts to [B, H, N, N_k]: bool (True: may attend) or added to the scores
    attn_mask: Tensor | None = None

    def heads(self, start: int, stop: int) -> Call:
        """Return the same call for some of the heads; views, no copies."""
        part: dict[str, Any] = {
            field.name: x[:, start:stop]
            for field in fields(self)
            if isinstance(x := getattr(self, field.name), Tensor)
            and field.name not in ("inputs", "attn_mask")
        }
        if self.attn_mask is not None and self.attn_mask.ndim == 4 and self.attn_mask.shape[1] > 1:
            part["attn_mask"] = self.attn_mask[:, start:stop]
        return replace(self, **part)
