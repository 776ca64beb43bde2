"""Attention as PyTorch operators: `torch.ops.halfulp.attention_forward` and `attention_backward`, and who runs them."""

from halfulp.kernels.options import KERNEL_RECIPES, Options
from halfulp.ops import transforms as _transforms  # noqa: F401  # registers autocast and vmap
from halfulp.ops.dispatch import BACKENDS, Dispatch, choose, explain
from halfulp.ops.schema import attention_backward, attention_forward

__all__ = [
    "BACKENDS",
    "KERNEL_RECIPES",
    "Dispatch",
    "Options",
    "attention_backward",
    "attention_forward",
    "choose",
    "explain",
]
