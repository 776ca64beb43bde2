"""One attention problem as the algorithms see it.

Operands rounded as the recipe reads them, tiles of masked scores, weights, and what the forward
pass keeps for the backward pass: whatever two algorithms would otherwise both have to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.algorithms.arithmetic import (
    LARGEST_UNIT,
    compiled,
    exponential,
    fixed_point,
    logarithm,
    polynomial_exponential,
    row_sum,
)
from halfulp.algorithms.matmul import product
from halfulp.calls import Call, Sees
from halfulp.formats import Format
from halfulp.recipes import Recipe, Step

LOG2_E = math.log2(math.e)
LARGEST_SHIFT = 2.0**100  # stands for −inf where a difference must not be NaN


@dataclass(frozen=True)
class Problem:
    """A call and the step that rounds it."""

    # operands in the compute dtype, rounded as read, key and value heads repeated to the query's
    call: Call
    step: Step
    groups: int  # query heads per key head of the call as it was asked

    @classmethod
    def read(cls, call: Call, step: Step) -> Problem:
        """Round the operands (any float dtype) as the recipe reads them."""
        groups = call.groups
        q, k, v = (
            read_input(name, x, step)
            for name, x in (("query", call.query), ("key", call.key), ("value", call.value))
        )
        if groups != 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return cls(replace(call, query=q, key=k, value=v), step, groups)

    @property
    def recipe(self) -> Recipe:
        """What the step rounds to."""
        return self.step.recipe

    @property
    def query(self) -> Tensor:
        """`[B, H, N, D]`."""
        return self.call.query

    @property
    def key(self) -> Tensor:
        """`[B, H, N_k, D]`."""
        return self.call.key

    @property
    def value(self) -> Tensor:
        """`[B, H, N_k, D_v]`."""
        return self.call.value

    @property
    def sees(self) -> Sees:
        """Which keys each query sees."""
        return self.call.sees

    @property
    def sinks(self) -> Tensor | None:
        """`[1, H, 1, 1]`: one more score in every row, in the recipe's base, of a value of 0."""
        sinks = self.call.sinks
        return None if sinks is None else sinks.to(self.recipe.dtype).view(1, -1, 1, 1) * self.unit

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

    def scores(self, rows: slice, cols: slice) -> Tensor:
        """Masked scores of one tile `[B, H, rows, cols]`, in the recipe's base."""
        step, cap = self.step, self.call.softcap
        query, key, into = self.query[:, :, rows], self.key[:, :, cols], self.recipe.scale_into
        # α and log₂ e in one factor, as in kernels that exponentiate in base 2: one rounding of a
        # score, or of an operand
        factor = self.call.scale * (1.0 if cap else self.unit)
        if into == "query":
            query, factor = step("scaled_operand", query * factor), 1.0
        elif into == "key":
            key, factor = step("scaled_operand", key * factor), 1.0
        s = step("product", product(query, key.mT, step))
        if cap:
            s = step("scores", torch.tanh(s * (factor / cap)) * (cap * self.unit))
        else:
            s = step("scores", torch.mul(s, factor, out=step.scratch(s)))
        return self.sees.apply(s, rows, cols, self.unit)

    def softcap_slope(self, rows: slice, cols: slice) -> Tensor:
        """The derivative of the capped scores of one tile by the scores, 1 − tanh²(S / c)."""
        # made again tile by tile: a tanh that was kept would take N² numbers
        s = product(self.query[:, :, rows], self.key[:, :, cols].mT, self.step)
        t = torch.tanh(s * (self.call.scale / self.call.softcap))
        return 1 - t * t

    def kept(self, tile: Tensor, rows: slice, cols: slice) -> Tensor:
        """One tile `[B, H, rows, cols]` with what dropout drops at 0, not yet scaled."""
        if self.call.dropout is None:
            return tile
        batch, heads, queries = self.query.shape[:3]
        numbers = torch.arange(batch * heads, device=tile.device).view(batch, heads)
        return tile.masked_fill(~self.call.dropout.keep(numbers, rows, cols, queries), 0)

    def undropped(self, summed: Tensor) -> Tensor:
        """A sum over weights that dropout left, made up for those that are gone."""
        return summed if self.call.dropout is None else summed * self.call.dropout.scale

    def weights(self, scores: Tensor, shift: Tensor) -> Tensor:
        """exp(S − shift) of one tile, not yet rounded; `scores` may be overwritten."""
        step = self.step
        if self.recipe.exponential == "split":
            # S − rint S is exact and the power of two too: the bits before the last factor do not
            # know the shift.
            whole = scores.round().clamp_min(-LARGEST_SHIFT)
            return self.exp(step("shifted_scores", scores - whole)) * self.exp(whole - shift)
        shifted = step("shifted_scores", torch.sub(scores, shift, out=step.scratch(scores)))
        return self.exp(shifted, out=step.scratch(shifted))

    def exp(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The exponential of the recipe's base."""
        base2, degree = self.recipe.base == "2", self.recipe.exp_degree
        if degree is not None:
            return polynomial_exponential(x, base2, degree)
        return exponential(x, base2, out)

    def rescale(self, m: Tensor, shift: Tensor) -> Tensor:
        """exp(m − shift): what a sum shifted by m is multiplied by to be shifted by `shift`."""
        step = self.step
        return step("rescale", self.exp(step("max_change", m - shift)))

    def rescales(self, m: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The same as Ō takes it, and as l does: both the rounded one, or one of them."""
        rescale, of = self.rescale(m, shift), self.recipe.rescale_of
        exact = rescale if of == "both" else self.exp(m - shift)
        return exact if of == "row_sum" else rescale, exact if of == "out" else rescale

    def log(self, x: Tensor) -> Tensor:
        """The logarithm of the recipe's base."""
        return logarithm(x, self.recipe.base == "2")

    def divided(self, x: Tensor, row_sum: Tensor) -> Tensor:
        """x over l, or times a rounded 1/l."""
        if self.recipe.division == "multiply":
            return x * self.step("reciprocal", 1 / row_sum)
        return x / row_sum

    def row_sums(self, weights: Tensor, operand: Tensor) -> tuple[Tensor, Tensor]:
        """l of one tile as the recipe sums it, and as lse needs it."""
        # O over the sum of the rounded weights that it is made of: their common error cancels. lse
        # shall be of the exact weights all the same
        rounded = self.recipe.row_sum_from == "rounded"
        l = row_sum(operand if rounded else weights)
        exact = row_sum(weights) if rounded and self.recipe.lse_from == "exact" else l
        return self.step("block_sum", l).clamp_min(self.recipe.row_sum_floor), exact

    def weights_operand(self, weights: Tensor) -> Tensor:
        """The weights as they enter a product: pre-scaled, rounded, scaled back."""
        # a pre-scale keeps small weights from underflowing in a narrow format: without one a
        # diffuse row loses its mass from the numerator only (flashinfer PR 5020)
        step, c = self.step, self.recipe.weights_scale
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
class Kept:
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


def sink_state(problem: Problem, rows: slice) -> State | None:
    """The state of a block of query rows after a sink alone: its weight counts in the row sum and
    its value is 0; None where there are none.

    The weight enters no product, so it is not rounded as the others are.
    """
    sinks = problem.sinks
    if sinks is None:
        return None
    # an integer shift stays one from the first: all later rescales are then exact powers of two
    m = problem.step("row_max", sinks.ceil() if problem.recipe.shift.kind == "integer" else sinks)
    return start(problem, rows, m, problem.exp(sinks - shift_of(m)), sinks)


def start(
    problem: Problem,
    rows: slice,
    m: Tensor | float = -math.inf,
    l: Tensor | float = 0.0,
    largest: Tensor | float = -math.inf,
) -> State:
    """The state of a block of query rows before any key."""
    batch, heads = problem.query.shape[:2]
    count = rows.stop - rows.start
    row_max, row_sum, top = (
        problem.query.new_zeros(batch, heads, count, 1) + x for x in (m, l, largest)
    )
    out = problem.query.new_zeros(batch, heads, count, problem.value.shape[3])
    return State(out, row_max, row_sum, row_sum, top)


def finish(problem: Problem, state: State) -> Kept:
    """Round O, keep its residual if the recipe asks, form lse = m + log l; O and l of a fully
    masked row are 0.
    """
    recipe, step, exact_out = problem.recipe, problem.step, state.out
    out = step("out", exact_out)
    # the rounding of O inside δ is what the failure of training comes from (Qiu & Yao, 3.2)
    for_delta = out
    if recipe.delta_from == "exact_out":
        for_delta = exact_out
    elif recipe.delta_from == "residual":
        for_delta = out + step("residual", _residual(exact_out, out, recipe))
    summed = state.exact_row_sum if recipe.lse_from == "exact" else state.row_sum
    # by way of m: e^lse itself leaves fp32 from a score of 88.7 on
    lse = step("lse", state.row_max + step("log_row_sum", problem.log(summed)))
    return Kept(out, for_delta, lse, state.row_max, state.row_sum, state.largest_score)


def _residual(exact: Tensor, out: Tensor, recipe: Recipe) -> Tensor:
    """O before rounding minus O, in `residual_bits` bits, scaled by half an ulp of O."""
    if recipe.residual_bits is None or not isinstance(recipe.out, Format):
        return exact - out
    # 8 bits are the limit only where one token holds all but 2e-4 of the mass: there dQ errs by 13
    # to 15 × the floor, with a bf16 residual by 1.2 to 1.8 (docs/log.md)
    bits, mantissa_bits = recipe.residual_bits, recipe.out.mantissa_bits
    if compiled(exact, out) and mantissa_bits + bits <= LARGEST_UNIT:
        return fixed_point(exact, out, mantissa_bits, bits, _lowest(recipe.out))
    unit, steps = residual_unit(out, recipe.out, bits), 2.0 ** (bits - 1)
    # half an ulp is 2^(bits − 1) steps, one more than a signed integer of so many bits can say
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
    # formats of 8 exponent bits have fp32's range, and need no scale; fp16 and fp8 do
    largest = x.abs().amax()
    # a tensor of zeros, or with infinities, has no scale that maps its largest to the format's
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


def blocks_for_memory(memory: int, head_dim: int, *, exchanged: bool = False) -> dict[str, int]:
    """Block sizes for `memory` on-chip elements: B_c = ⌈M/4d⌉ key columns, B_r = min(⌈M/4d⌉, d)
    query rows.

    `exchanged` swaps the two. Returns recipe fields, as in
    `recipe.with_(**blocks_for_memory(...))`. Source: Dao et al. 2022, Algorithm 1. Raises
    ValueError below 1.
    """
    for name, value in (("memory", memory), ("head_dim", head_dim)):
        if value < 1:
            raise ValueError(f"{name}={value}: accepted is an integer of at least 1")
    block_key = -(-memory // (4 * head_dim))
    block_query = min(block_key, head_dim)
    if exchanged:
        block_key, block_query = block_query, block_key
    return {"block_query": block_query, "block_key": block_key}


def _tiles(n: int, block: int | None) -> list[slice]:
    block = max(n, 1) if block is None else block
    return [slice(i, min(i + block, n)) for i in range(0, n, block)]
