"""What the zoo of operations is made with: kernels with a backward pass by hand, so that either
pass can have a fault of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OperationKernel:
    """A kernel of the zoo: faulty, or written differently and sound."""

    op: str
    name: str
    fn: Callable[..., Any]
    faulty: bool = True


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *tensors):
        ctx.backward_pass = backward
        out, ctx.saved = forward(*tensors)
        return out

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.backward_pass(ctx.saved, *grads)


def by_hand(
    forward: Callable[..., Any],
    backward: Callable[..., tuple[Tensor | None, ...]],
    *tensors: Tensor,
) -> Any:
    """forward(*tensors) -> (out, saved); backward(saved, grad_out) -> a gradient a tensor."""
    return _ByHand.apply(forward, backward, *tensors)


def low(x: Tensor) -> Tensor:
    """Rounded to bf16 and back."""
    return x.bfloat16().float()


def cut(x: Tensor) -> Tensor:
    """fp32 cut to bf16 toward zero."""
    return (x.float().contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()


def summed_low(x: Tensor, dim: int = 0) -> Tensor:
    """A sum whose running value is bf16."""
    total = torch.zeros_like(x.select(dim, 0))
    for part in x.unbind(dim):
        total = low(total + part)
    return total
