"""What a kernel is asked and what it gives back: the one contract of every backend, torch alone
needed to read it.

A backend is a module with the three functions of `Backend`. What it is asked is a `Call`, of
tensors `[B, H, N, D]` whose key and value may have fewer heads, a divisor of H, and the name of an
arithmetic in `recipes.KERNEL_RECIPES`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from halfulp.calls import Call, Gradients, Saved


class Backend(Protocol):
    """The functions of a module that computes attention."""

    def supports(self, call: Call, recipe: str) -> str | None:
        """None: it runs these; else the reason in words, which `explain_dispatch` shows."""
        ...

    def forward(self, call: Call, recipe: str) -> Saved:
        """O, lse and what the backward pass wants; ValueError where `supports` gives a reason.

        Row statistics are in the backend's own base: 2 in all compiled kernels.
        """
        ...

    def backward(
        self, call: Call, recipe: str, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients from those of out `[B, H, N, D_v]` and of the natural lse `[B, H, N]`.

        `saved` is what this backend's own `forward` gave for the same call and recipe.
        """
        ...
