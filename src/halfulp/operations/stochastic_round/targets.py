"""Kernels of stochastic rounding that every machine has."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.formats import round_to
from halfulp.operations.operation_data import BuiltIn


def by_bits(input: Tensor) -> Tensor:
    """16 random bits added below the last bit that is kept, the rest cut off."""
    noise = torch.randint(0, 2**16, input.shape, dtype=torch.int32)
    bits = input.contiguous().view(torch.int32) + noise
    return (bits & -65536).view(torch.float32).bfloat16()


def halfulp(input: Tensor) -> Tensor:
    """halfulp.round_to, its seed drawn from torch's generator."""
    seed = int(torch.randint(2**31, ()))
    return round_to(input, "bf16", rounding="stochastic", seed=seed).bfloat16()


TARGETS = (
    BuiltIn("by_bits", "random bits below the last one kept, the rest cut off", by_bits),
    BuiltIn("halfulp", "halfulp.round_to, stochastic", halfulp),
)
