"""One attention problem as the algorithms see it.

Operands rounded as the recipe reads them, tiles of masked scores, weights, and what the forward
pass keeps for the backward pass: whatever two algorithms would otherwise both have to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.algorithms.arithmetic import (
    LARGEST_UNIT,
    compiled,
    exponential,
    fixed_point,
    logarithm,
    row_sum,
)
from halfulp.algorithms.matmul import product
from halfulp.formats import Format
from halfulp.formats.counter import keep_mask
from halfulp.recipes import Recipe, Step

LOG2_E = math.log2(math.e)
LARGEST_SHIFT = 2.0**100  # stands for −inf where a difference must not be NaN


@dataclass(frozen=True)
class Mask:
    """Which key each query may see. `is_causal` aligns at the top left, as in PyTorch: query i sees
    keys 0..i.
    """

    is_causal: bool = False
    # broadcastable to [B, H, N_q, N_k]; bool (True: may see) or float (added)
    attn_mask: Tensor | None = None
    window: tuple[int, int] | None = None  # keys i − left to i + right; −1: no bound
    offset: int = 0  # added to i: N_k − N_q aligns at the bottom right

    def bounds(self) -> tuple[int | None, int | None]:
        """Return the least and the greatest j − i that may be seen; None: no bound."""
        left, right = (-1, -1) if self.window is None else self.window
        greatest = [self.offset + right] * (right >= 0) + [self.offset] * self.is_causal
        return self.offset - left if left >= 0 else None, min(greatest, default=None)

    def hides(self, rows: slice, cols: slice) -> bool:
        """Whether the whole tile lies above the diagonal, or outside the window."""
        least, greatest = self.bounds()
        above = greatest is not None and cols.start - (rows.stop - 1) > greatest
        return above or (least is not None and cols.stop - 1 - rows.start < least)

    def apply(self, scores: Tensor, rows: slice, cols: slice, unit: float) -> Tensor:
        """`scores [B, H, rows, cols]`, hidden pairs at −inf; an additive mask is first multiplied
        by `unit`.
        """
        if self.attn_mask is not None:
            tile = _tile(self.attn_mask, rows, cols)
            if tile.dtype == torch.bool:
                scores = scores.masked_fill(~tile, -math.inf)
            else:
                scores = scores + tile.to(scores.dtype) * unit
        least, greatest = self.bounds()
        if least is None and greatest is None:
            return scores
        i = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        j = torch.arange(cols.start, cols.stop, device=scores.device)[None, :]
        if greatest is not None and cols.stop - 1 - rows.start > greatest:
            scores = scores.masked_fill(j - i > greatest, -math.inf)
        if least is not None and cols.start - (rows.stop - 1) < least:
            scores = scores.masked_fill(j - i < least, -math.inf)
        return scores


def _tile(mask: Tensor, rows: slice, cols: slice) -> Tensor:
    if mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., cols]


@dataclass(frozen=True)
class Dropout:
    """Which weights are dropped: a matter of the seed and of their place alone."""

    p: float
    seed: int

    @property
    def scale(self) -> float:
        """What makes up for the weights that are gone."""
        return 0.0 if self.p == 1 else 1 / (1 - self.p)

    def keep(self, like: Tensor, rows: slice, cols: slice, queries: int) -> Tensor:
        """Return bool, the shape of the tile `like [B, H, rows, cols]`."""
        heads = torch.arange(like.shape[0] * like.shape[1], device=like.device).view(
            *like.shape[:2], 1
        )
        i = torch.arange(rows.start, rows.stop, device=like.device)
        return keep_mask(
            self.seed,
            self.p,
            heads * queries + i,
            torch.arange(cols.start, cols.stop, device=like.device),
        )


@dataclass(frozen=True)
class Problem:
    """Operands `[B, H, N, D]` in the compute dtype, rounded as read, key and value heads repeated
    to the query's.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    alpha: float  # the softmax scale
    groups: int  # query heads per key head
    recipe: Recipe
    softcap: float = 0.0  # c > 0: scores c·tanh(S / c), before the mask
    # [1, H, 1, 1]: one more score in every row, in the recipe's base, of a value of 0
    sinks: Tensor | None = None
    dropout: Dropout | None = None

    @classmethod
    def read(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        alpha: float,
        step: Step,
        **more: Any,
    ) -> Problem:
        """Round the inputs `[B, H, N, D]` (any float dtype, H a multiple of the key's) as the
        recipe reads them.
        """
        groups = query.shape[1] // max(key.shape[1], 1)
        q, k, v = (
            read_input(name, x, step)
            for name, x in (("query", query), ("key", key), ("value", value))
        )
        if groups != 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return cls(q, k, v, mask, alpha, groups, step.recipe, **more)

    @property
    def unit(self) -> float:
        """Scores of the recipe's base per natural score."""
        return LOG2_E if self.recipe.base == "2" else 1.0

    def row_tiles(self) -> list[slice]:
        """Query blocks."""
        return _tiles(self.query.shape[2], self.recipe.block_query)

    def col_tiles(self) -> list[slice]:
        """Key blocks."""
        return _tiles(self.key.shape[2], self.recipe.block_key)

    def scores(self, rows: slice, cols: slice, step: Step) -> Tensor:
        """Masked scores of one tile `[B, H, rows, cols]`, in the recipe's base."""
        s = step("product", product(self.query[:, :, rows], self.key[:, :, cols].mT, step))
        if self.softcap:
            s = step(
                "scores", torch.tanh(s * (self.alpha / self.softcap)) * (self.softcap * self.unit)
            )
        else:
            s = step("scores", torch.mul(s, self.alpha * self.unit, out=step.scratch(s)))
        return self.mask.apply(s, rows, cols, self.unit)

    def softcap_slope(self, rows: slice, cols: slice, step: Step) -> Tensor:
        """The derivative of the capped scores of one tile by the scores, 1 − tanh²(S / c)."""
        s = product(self.query[:, :, rows], self.key[:, :, cols].mT, step)
        t = torch.tanh(s * (self.alpha / self.softcap))
        return 1 - t * t

    def kept(self, tile: Tensor, rows: slice, cols: slice) -> Tensor:
        """One tile `[B, H, rows, cols]` with what dropout drops at 0, not yet scaled."""
        if self.dropout is None:
            return tile
        return tile.masked_fill(~self.dropout.keep(tile, rows, cols, self.query.shape[2]), 0)

    def weights(self, scores: Tensor, shift: Tensor, step: Step) -> Tensor:
        """exp(S − shift) of one tile, not yet rounded; `scores` may be overwritten."""
        if self.recipe.exponential == "split":
            # S − rint S is exact and the power of two too: the bits before the last factor do not
            # know the shift.
            whole = scores.round().clamp_min(-LARGEST_SHIFT)
            return self.exp(step("shifted_scores", scores - whole)) * self.exp(whole - shift)
        shifted = step("shifted_scores", torch.sub(scores, shift, out=step.scratch(scores)))
        return self.exp(shifted, out=step.scratch(shifted))

    def exp(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The exponential of the recipe's base."""
        return exponential(x, self.recipe.base == "2", out)

    def rescale(self, m: Tensor, shift: Tensor, step: Step) -> Tensor:
        """exp(m − shift): what a sum shifted by m is multiplied by to be shifted by `shift`."""
        return step("rescale", self.exp(step("max_change", m - shift)))

    def log(self, x: Tensor) -> Tensor:
        """The logarithm of the recipe's base."""
        return logarithm(x, self.recipe.base == "2")

    def row_sums(self, weights: Tensor, operand: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """l of one tile as the recipe sums it, and as lse needs it."""
        rounded = self.recipe.row_sum_from == "rounded"
        l = row_sum(operand if rounded else weights)
        exact = row_sum(weights) if rounded and self.recipe.lse_from == "exact" else l
        return step("block_sum", l).clamp_min(self.recipe.row_sum_floor), exact

    def weights_operand(self, weights: Tensor, step: Step) -> Tensor:
        """The weights as they enter a product: pre-scaled, rounded, scaled back."""
        c = self.recipe.weights_scale
        return (
            step("weights_operand", weights) if c == 1 else step("weights_operand", weights * c) / c
        )


class State(NamedTuple):
    """What a forward pass has of its rows after some key blocks, and at last; statistics have a
    last dimension of 1.
    """

    out: Tensor  # Ō; at last O before it is rounded
    row_max: Tensor  # m
    row_sum: Tensor  # l
    exact_row_sum: Tensor  # l of the weights before they are rounded
    largest_score: Tensor


@dataclass(frozen=True)
class Saved:
    """What the forward pass keeps, `[B, H, N, ...]` in the compute dtype; row statistics have a
    last dimension of 1.
    """

    out: Tensor  # [B, H, N, D_v], rounded
    out_for_delta: Tensor  # what δ is computed from: O, O plus its residual, or O before rounding
    lse: Tensor  # in the recipe's base; −inf for a fully masked row
    row_max: Tensor  # m, what the weights of O were shifted by
    row_sum: Tensor
    largest_score: Tensor  # in the recipe's base; m, where m is the maximum and not rounded


def joined(parts: list[State]) -> State:
    """The state of blocks of query rows, one after the other."""
    return State(*(torch.cat(column, dim=2) for column in zip(*parts, strict=True)))


def finish(problem: Problem, state: State, step: Step) -> Saved:
    """Round O, keep its residual if the recipe asks, form lse = m + log l; O and l of a fully
    masked row are 0.
    """
    recipe, exact_out = problem.recipe, state.out
    out = step("out", exact_out)
    for_delta = out
    if recipe.delta_from == "exact_out":
        for_delta = exact_out
    elif recipe.delta_from == "residual":
        for_delta = out + step("residual", _residual(exact_out, out, recipe))
    summed = state.exact_row_sum if recipe.lse_from == "exact" else state.row_sum
    lse = step("lse", state.row_max + step("log_row_sum", problem.log(summed)))
    return Saved(out, for_delta, lse, state.row_max, state.row_sum, state.largest_score)


def _residual(exact: Tensor, out: Tensor, recipe: Recipe) -> Tensor:
    """O before rounding minus O, in `residual_bits` bits, scaled by half an ulp of O."""
    if recipe.residual_bits is None or not isinstance(recipe.out, Format):
        return exact - out
    bits, mantissa_bits = recipe.residual_bits, recipe.out.mantissa_bits
    if compiled(exact, out) and mantissa_bits + bits <= LARGEST_UNIT:
        return fixed_point(exact, out, mantissa_bits, bits, _lowest(recipe.out))
    unit, steps = residual_unit(out, recipe.out, bits), 2.0 ** (bits - 1)
    q = torch.ldexp(exact - out, -unit).round_().clamp_(-steps, steps - 1)
    return torch.ldexp(q, unit)


def _lowest(fmt: Format) -> int:
    """The binade whose unit all smaller O share: below 2⁻¹⁰⁰ the scale would leave fp32."""
    return max(fmt.min_exponent, -101)


def residual_unit(out: Tensor, fmt: Format, bits: int) -> Tensor:
    """The exponent of two, int32 in out's shape, that one step of a residual in `bits` bits stands
    for: ulp · 2^−bits.

    O's binade is told by its exponent alone: a full ulp() costs more than the whole step.
    """
    _, exponent = torch.frexp(out)
    return exponent.clamp_min(_lowest(fmt) + 1) - 1 - fmt.mantissa_bits - bits


def read_input(name: str, x: Tensor, step: Step) -> Tensor:
    """One input in the compute dtype, rounded, with per-tensor scaling around the rounding if the
    recipe has it.
    """
    x = x.to(step.recipe.dtype)
    fmt = getattr(step.recipe, name)
    if (
        step.recipe.input_scaling == "none"
        or not isinstance(fmt, Format)
        or fmt.exponent_bits >= 8
        or x.numel() == 0
    ):
        return step(name, x)
    largest = x.abs().amax()
    scale = torch.where(
        (largest > 0) & largest.isfinite(), largest / fmt.max, torch.ones_like(largest)
    )
    return step(name, x / scale) * scale


def shift_of(row_max: Tensor) -> Tensor:
    """The row maximum as subtracted: 0 for a row with nothing to attend to, so that its weights are
    exp(−inf) = 0.
    """
    return torch.where(row_max == -math.inf, torch.zeros_like(row_max), row_max)


def divisor_of(row_sum: Tensor, row_max: Tensor) -> Tensor:
    """The row sum as divided by: 1 where no key is attended to. A sum that underflowed stays 0:
    NaN, as in a kernel.
    """
    return torch.where(row_max == -math.inf, torch.ones_like(row_sum), row_sum)


def blocks_for_memory(
    memory: int, head_dim: int, *, exchanged: bool = False, square: bool = False
) -> dict[str, int]:
    """Block sizes for `memory` on-chip elements: B_c = ⌈M/4d⌉ key columns, B_r = min(⌈M/4d⌉, d)
    query rows.

    `exchanged` swaps the two; `square` uses the smaller for both. Returns recipe fields, as in
    `recipe.with_(**blocks_for_memory(...))`. Source: Dao et al. 2022, Algorithm 1. Raises
    ValueError below 1.
    """
    for name, value in (("memory", memory), ("head_dim", head_dim)):
        if value < 1:
            raise ValueError(f"{name}={value}: accepted is an integer of at least 1")
    block_key = -(-memory // (4 * head_dim))
    block_query = min(block_key, head_dim)
    if square:
        block_key = block_query
    if exchanged:
        block_key, block_query = block_query, block_key
    return {"block_query": block_query, "block_key": block_key}


def _tiles(n: int, block: int | None) -> list[slice]:
    block = max(n, 1) if block is None else block
    return [slice(i, min(i + block, n)) for i in range(0, n, block)]
