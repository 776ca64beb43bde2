"""Whether an operand that was read off holds another number in place of each of its own."""

from __future__ import annotations

import torch
from torch import Tensor

PAIRS = 32  # elements, at least, of which another one has the same number
LEFT = 0.1  # of their squares, that a function of the number may leave


def by_number(read: Tensor, own: Tensor) -> bool:
    """Whether what was read is a function of the operand's own numbers, elements alike read alike:
    another format's bits, codes that stand for others. Of numbers that differ in sign alone it is
    taken to be so but for the sign. Both have one shape.
    """
    value, sign = own.flatten().abs(), own.flatten().sign()
    at, group, counts = torch.unique(value, return_inverse=True, return_counts=True)
    several = (counts > 1)[group]
    if int(several.sum()) < PAIRS:
        return False
    x = read.flatten().double() * sign
    sums = torch.zeros(len(at), dtype=torch.float64).index_add_(0, group, x)
    rest = (x - (sums / counts)[group])[several].square().sum()
    # a mean of n numbers leaves (n − 1) / n of what is no function of them
    rest = rest * several.sum() / (several.sum() - (counts > 1).sum())
    return bool(rest < LEFT * x[several].square().sum())
