"""Attention to use, and attention to study: `attention` with the repaired arithmetic, `emulate` with any, `golden`."""

from halfulp.attention.attend import attention, explain_dispatch
from halfulp.attention.emulated import emulate, golden

__all__ = ["attention", "emulate", "explain_dispatch", "golden"]
