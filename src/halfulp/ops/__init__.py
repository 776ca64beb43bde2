"""Attention as PyTorch operators: `torch.ops.halfulp.attention_forward` and `attention_backward`,
and who runs them.
"""

from halfulp.ops import direct, packed
from halfulp.ops.dispatch import BACKENDS, Dispatch, choose, explain
from halfulp.ops.schema import attention_backward, attention_forward
from halfulp.ops.transforms import attend

__all__ = [
    "BACKENDS",
    "Dispatch",
    "attend",
    "attention_backward",
    "attention_forward",
    "choose",
    "direct",
    "explain",
    "packed",
]
