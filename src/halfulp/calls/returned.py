"""What comes back of a call: to its caller, and from the two passes of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """What one attention call gives; None where a kernel does not offer it.

    out `[B, H, N, D_v]`, lse `[B, H, N]` (natural logarithm), gradients shaped as their inputs.
    """

    out: Tensor
    lse: Tensor | None = None
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    grad_sinks: Tensor | None = None
    grad_mask: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """What there is, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> Result:
        """Each changed."""
        return Result(**{name: change(x) for name, x in self.given().items()})


class Saved(NamedTuple):
    """What a kernel's forward pass gives; N is the number of queries.

    The residual is that of O in 8 bits, in units of 2⁻⁸ ulp of O; None where the recipe or the
    dtype keeps none.
    """

    out: Tensor  # [B, H, N, D_v], query's dtype, contiguous; 0 in a fully masked row
    residual: Tensor | None  # int8 [B, H, N, D_v]
    # float32 [B, H, N] (float64 for float64 inputs), natural logarithm; −inf in a fully masked row
    lse: Tensor
    # as lse, in the kernel's own base: what scores are shifted by, an integer before it is rounded
    # up
    row_max: Tensor
    row_sum: Tensor  # as lse: what O was divided by
    # lse in the kernel's own base, for a backward pass that wants its very bits
    own_lse: Tensor | None = None


class Gradients(NamedTuple):
    """What a kernel's backward pass gives, in the dtypes of what they are gradients of."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None  # [H], where there are sinks
    # the mask's shape, where asked for; Triton kernels give none
    mask: Tensor | None = None


class _Reached(torch.autograd.Function):
    """A number whose gradients with regard to `outs` are `grads`, the very tensors."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *outs: Tensor) -> Tensor:
        ctx.grads = grads
        return outs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.grads


def gradients_of(
    outs: Sequence[Tensor],
    grads: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    keep_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(outs, leaves, grads, allow_unused=True)`, which given gradients imports
    sympy: half a second in a process that calls once.
    """
    reached = _Reached.apply(tuple(grads), *outs)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(reached, leaves, retain_graph=keep_graph, allow_unused=True)
