"""Which keys each query of a call sees: where causal, window, offset and mask meet, once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sees:
    """Query i sees key j unless something here hides it; PyTorch's words, and FlashAttention's."""

    causal: bool = False  # j ≤ i + offset
    # (left, right): i + offset − left ≤ j ≤ i + offset + right; −1: no bound
    window: tuple[int, int] | None = None
    offset: int = 0  # 0 aligns at the top left, as PyTorch; N_k − N at the bottom right
    # broadcasts to [B, H, N, N_k]; bool (True: may see) or float (added to the scaled scores)
    mask: Tensor | None = None

    @property
    def added(self) -> Tensor | None:
        """The mask that is added to scores; None where there is none, or it hides."""
        return None if self.mask is None or self.mask.dtype == torch.bool else self.mask

    def bounds(self, queries: int, keys: int) -> tuple[int | None, int | None]:
        """Return the least and the greatest j − i that is seen among so many; None: no bound.

        Whatever was asked for, what is returned lies between −queries and keys, where it means the
        same: kernels add it to indices of 32 bits.
        """
        left, right = (-1, -1) if self.window is None else self.window
        if self.causal:
            right = 0 if right < 0 else min(right, 0)
        least = self.offset - left if left >= 0 else None
        greatest = self.offset + right if right >= 0 else None
        return (
            None if least is None else max(-queries, min(least, keys)),
            None if greatest is None else max(-queries, min(greatest, keys)),
        )

    def within(self, queries: int, keys: int) -> Sees:
        """The same for a call of these lengths, in numbers no greater than they are.

        An offset or a window may be any integer; the operators of PyTorch take 64 bits.
        """
        least, greatest = self.bounds(queries, keys)
        if least is None:
            causal, offset = greatest is not None, greatest or 0
            return replace(self, causal=causal, window=None, offset=offset)
        right = -1 if greatest is None else greatest - least
        return replace(self, causal=False, window=(0, right), offset=least)

    def hides(self, rows: slice, cols: slice) -> bool:
        """Whether the whole tile lies above the diagonal, or outside the window."""
        least, greatest = self.bounds(rows.stop, cols.stop)
        above = greatest is not None and cols.start - (rows.stop - 1) > greatest
        return above or (least is not None and cols.stop - 1 - rows.start < least)

    def apply(self, scores: Tensor, rows: slice, cols: slice, unit: float) -> Tensor:
        """`scores [..., rows, cols]`, hidden pairs at −inf; an additive mask is first multiplied by
        `unit`, the scores' units per natural one.
        """
        if self.mask is not None:
            tile = self.tile(rows, cols)
            if tile.dtype == torch.bool:
                scores = scores.masked_fill(~tile, -math.inf)
            else:
                scores = scores + tile.to(scores.dtype) * unit
        least, greatest = self.bounds(rows.stop, cols.stop)
        if least is None and greatest is None:
            return scores
        i = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        j = torch.arange(cols.start, cols.stop, device=scores.device)[None, :]
        # most tiles lie whole inside the bounds, and need no comparison
        if greatest is not None and cols.stop - 1 - rows.start > greatest:
            scores = scores.masked_fill(j > i + greatest, -math.inf)
        if least is not None and cols.start - (rows.stop - 1) < least:
            scores = scores.masked_fill(j < i + least, -math.inf)
        return scores

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """The mask's part of a tile, with two dimensions or more, some of them 1."""
        assert self.mask is not None
        mask = self.mask[(None,) * (2 - self.mask.ndim)] if self.mask.ndim < 2 else self.mask
        if mask.shape[-2] != 1:
            mask = mask[..., rows, :]
        return mask if mask.shape[-1] == 1 else mask[..., cols]

    def pairs(self, queries: int, keys: int) -> int:
        """How many pairs of a head lie within the bounds, the mask not looked at."""
        least, greatest = self.bounds(queries, keys)
        i = torch.arange(queries)
        first = 0 if least is None else (i + least).clamp_min(0)
        after = torch.full_like(i, keys) if greatest is None else (i + greatest + 1).clamp_max(keys)
        return int((after - first).clamp_min(0).sum())

    def visible(self, rows: Tensor, queries: int, keys: int) -> Tensor:
        """Which keys, or with what added, each of some rows sees: `[1 or B, 1 or H, rows, N_k]`."""
        least, greatest = self.bounds(queries, keys)
        i, j = rows[:, None], torch.arange(keys, device=rows.device)
        seen = torch.ones(1, 1, len(rows), keys, dtype=torch.bool, device=rows.device)
        if least is not None:
            seen = seen & (j >= i + least)
        if greatest is not None:
            seen = seen & (j <= i + greatest)
        if self.mask is None:
            return seen
        mask = self.mask[(None,) * (4 - self.mask.ndim)]
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask.expand(-1, -1, len(rows), -1)
        return (
            mask & seen if mask.dtype == torch.bool else torch.where(seen, mask.double(), -math.inf)
        )

    def of_entries(self, entries: slice) -> Sees:
        """What some of the batch entries see; a view."""
        mask = self.mask
        if mask is None or mask.ndim < 4 or mask.shape[0] == 1:
            return self
        return replace(self, mask=mask[entries])

    def of_heads(self, heads: slice) -> Sees:
        """What some of the heads see; a view."""
        mask = self.mask
        if mask is None or mask.ndim < 3 or mask.shape[-3] == 1:
            return self
        return replace(self, mask=mask[..., heads, :, :])


EVERYTHING = Sees()
"""Every query sees every key."""
