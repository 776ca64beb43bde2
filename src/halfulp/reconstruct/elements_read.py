"""Whether an operand that was read off holds other numbers in place of its own: by the number, or
another feature's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.reconstruct.ranges import ranges

PLACED = 0.9  # the cosine of a feature with the one that it is; and a share of features
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


def exchanged_features(read: Tensor, own: Tensor) -> str:
    """Which features of an operand, `[rows, D]`, stand where others should; empty where few do."""
    alike = (own / own.norm(dim=0)).mT @ (read / read.norm(dim=0).clamp_min(1e-300))
    best, at = alike.max(0)
    moved = (best > PLACED) & (at != torch.arange(len(at)))
    there = (best > PLACED) | (read.norm(dim=0) < (1 - PLACED) * own.norm(dim=0))
    if 2 * int(moved.sum()) < len(at) or float(there.double().mean()) < PLACED:
        return ""
    where = moved.nonzero().flatten()
    told = f"features {ranges(where)} of Q, or of K, are those of {ranges(at[where].sort().values)}"
    return f"{told}: {int(where[0])} is {int(at[where[0]])}"
