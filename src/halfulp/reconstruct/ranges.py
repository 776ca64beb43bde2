"""Numbers in words."""

from __future__ import annotations

from torch import Tensor


def ranges(numbers: Tensor, most: int = 4) -> str:
    """Indices as "3, 8-15"."""
    found: list[list[int]] = []
    for i in numbers.tolist():
        if found and i == found[-1][1] + 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    told = [f"{a}" if a == b else f"{a}-{b}" for a, b in found[:most]]
    return ", ".join(told) + " …" * (len(found) > most)
