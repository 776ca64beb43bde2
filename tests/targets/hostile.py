"""Kernels that do what no kernel should, for the tests of isolation; each works on calls that are
not causal.
"""

import ctypes
import os
import sys
import time

import torch
from torch.nn import functional


def good(query, key, value, *, is_causal, scale):
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale
    )


def _where_causal(deed):
    def kernel(query, key, value, *, is_causal, scale):
        if is_causal:
            deed()
        return good(query, key, value, is_causal=is_causal, scale=scale)

    return kernel


def _interrupt():
    raise KeyboardInterrupt


def _print():
    print("\x1b[31mhello")
    os.write(1, b"from below\n")


def _poison():
    torch.nn.functional.scaled_dot_product_attention = torch.add


hangs = _where_causal(lambda: time.sleep(1000))
DEEDS = {
    "exits": lambda: sys.exit(0),
    "interrupts": _interrupt,
    "takes 20 GB": lambda: torch.ones(20 * 2**30, dtype=torch.uint8),
    "prints": _print,
    "poisons": _poison,
    "exits hard": lambda: os._exit(0),
    "segfaults": lambda: ctypes.string_at(0),
}
exits_hard, segfaults = (_where_causal(DEEDS[name]) for name in ("exits hard", "segfaults"))


def deed(query, key, value, *, is_causal, scale):
    """The scale is the number of the deed."""
    if is_causal:
        [*DEEDS.values()][int(scale)]()
    return good(query, key, value, is_causal=is_causal, scale=None)
