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

from halfulp.calls import Call


class Tap(Protocol):
    """Called in the forward pass of a layer, after its attention function."""

    def __call__(self, layer: int, call: Call, out: Tensor) -> Tensor:
        """Return out `[B, H, N, D_v]`; tensors come with their graph, heads already repeated where
        GQA shares them.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Observed(Call):
    """A call of one layer that has run, as many key heads as query heads, detached, with the
    gradients that the backward pass gave.
    """

    out: Tensor  # [B, H, N, D_v]
    grad_out: Tensor | None = None  # [B, H, N, D_v]
    grad_key: Tensor | None = None  # [B, H, N_k, D], as the attention under test computed it
    inputs: Tensor | None = None  # X [B, N, width]: what W_Q reads

    def heads(self, start: int, stop: int) -> Observed:
        """Return the same call for some of the heads; views, no copies."""
        part: dict[str, Any] = {
            field.name: x[:, start:stop]
            for field in fields(self)
            if isinstance(x := getattr(self, field.name), Tensor) and field.name != "inputs"
        }
        return replace(self, **part, sees=self.sees.of_heads(slice(start, stop)))
