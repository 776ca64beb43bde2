"""Which weights dropout drops: a matter of a seed and of their place, so that every kernel, every
emulation and both passes drop the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.formats.counter import keep_mask


@dataclass(frozen=True)
class Dropout:
    """Dropout with probability p of weight (i, j) of head h of entry b, by `formats.counter`'s mask
    at row (b·H + h)·N + i and column j.
    """

    p: float
    # an int64 scalar on the CPU in a call that PyTorch may trace, a number in kernels
    seed: int | Tensor

    @property
    def number(self) -> int:
        """The seed as a number."""
        return int(self.seed)

    @property
    def scale(self) -> float:
        """What makes up for the weights that are gone."""
        return 0.0 if self.p == 1 else 1 / (1 - self.p)

    def keep(self, heads: Tensor, rows: slice, cols: slice, queries: int) -> Tensor:
        """Return bool `[*heads.shape, rows, cols]` for heads of number b·H + h, int64, and N
        `queries`.
        """
        i = torch.arange(rows.start, rows.stop, device=heads.device)
        j = torch.arange(cols.start, cols.stop, device=heads.device)
        return keep_mask(self.number, self.p, heads[..., None] * queries + i, j)


def draw_seed() -> Tensor:
    """A seed from torch's CPU generator: an int64 scalar on the CPU, whatever the device.

    A kernel is handed the number. Drawn before the operator, a checkpoint draws it again.
    """
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
