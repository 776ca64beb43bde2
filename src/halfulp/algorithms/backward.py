"""The tiled backward pass that every algorithm shares: key blocks outside, query blocks inside.

Sources: Dao 2023, Algorithm 2; Qiu & Yao, Algorithm 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfulp.algorithms import fused
from halfulp.algorithms.arithmetic import row_sum
from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import Kept, Problem, divisor_of, read_input, shift_of
from halfulp.recipes import Step


def backward(
    problem: Problem, kept: Kept, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ `[B, H, N_q, D]`, dK `[B, H_k, N_k, D]`, dV `[B, H_k, N_k, D_v]`, rounded, in the compute
    dtype.

    `grad_lse [B, H, N_q, 1]` is the gradient of the natural lse: δ ← δ − dLSE. Gradients of fully
    masked rows are 0.
    """
    step, scale = problem.step, problem.call.scale
    do = read_input("grad_out", grad_out, step)
    rows_of = Rows(problem, kept)
    delta = Delta(rows_of, do, grad_lse)
    if fused.refused(problem) is None:
        dq, dk, dv = fused.backward(problem, *rows_of.statistics(), delta.rows(), do)
    else:
        dq, dk, dv = _tiles(problem, rows_of, delta, do)
    # α on finished sums: N · D products a head, where dS would take N²
    if problem.recipe.gradient_scale_at == "products":
        dq, dk = dq * scale, dk * scale
    dv = problem.undropped(dv)
    # summed before they are rounded: a key head that queries share has one rounding, not one a
    # query head
    dk, dv = sum_groups(dk, problem.groups), sum_groups(dv, problem.groups)
    return step("grad_query", dq), step("grad_key", dk), step("grad_value", dv)


def _tiles(
    problem: Problem, rows_of: Rows, delta: Delta, do: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV summed tile by tile."""
    step = problem.step
    # dK and dV of a block are whole after its inner loop, dQ gathers over the outer one: the order
    # in which each gradient is summed is a part of what is emulated
    dq = torch.zeros_like(problem.query)
    dk, dv = torch.zeros_like(problem.key), torch.zeros_like(problem.value)
    for cols in problem.col_tiles():
        for rows in problem.row_tiles():
            if problem.sees.hides(rows, cols):
                continue
            # two: dV may take unrounded weights over l where dS takes the rounded ones of O
            p, p_for_value = rows_of.probabilities(rows, cols)
            operand, do_i = step("probabilities_operand", p_for_value), do[:, :, rows]
            # what was dropped is 0 here as it was in O; what is left is scaled up once, on the
            # finished dV
            operand = problem.kept(operand, rows, cols)
            _add(dv[:, :, cols], product(operand.mT, do_i, step), step)
            dp = grad_probabilities(problem, do, rows, cols)
            slope = problem.softcap_slope(rows, cols) if problem.call.softcap else None
            ds = _grad_scores(problem, p, dp, delta.tile(rows, dp, p), slope)
            _add(dq[:, :, rows], product(ds, problem.key[:, :, cols], step), step)
            _add(dk[:, :, cols], product(ds.mT, problem.query[:, :, rows], step), step)
    return dq, dk, dv


def grad_probabilities(problem: Problem, do: Tensor, rows: slice, cols: slice) -> Tensor:
    """dP of one tile `[B, H, rows, cols]`, dropout undone."""
    step = problem.step
    dp = step("grad_probabilities", product(do[:, :, rows], problem.value[:, :, cols].mT, step))
    return problem.undropped(problem.kept(dp, rows, cols))


def _grad_scores(
    problem: Problem, p: Tensor, dp: Tensor, delta: Tensor, slope: Tensor | None
) -> Tensor:
    """dS of one tile `[B, H, rows, cols]` as it enters dQ and dK, with α where the recipe puts
    it.
    """
    step, scale, where = problem.step, problem.call.scale, problem.recipe.gradient_scale_at
    if where == "probabilities":
        p = step("scaled_probabilities", p * scale)
    # here δ's error shows: with values that share an offset, or under a sink, dP and δ agree in
    # their leading digits, and what is left is small beside that error
    centered = step("grad_centered", torch.sub(dp, delta, out=step.scratch(dp)))
    centered = centered if slope is None else centered * slope
    ds = step("grad_scores", torch.mul(centered, p, out=step.scratch(centered)))
    return step("scaled_grad_scores", ds * scale) if where == "scores" else ds


def balance(largest: Tensor, row_sum: Tensor, rounded_row_sum: Tensor) -> Tensor:
    """What to divide dS's rounded weights by, from a row's largest weight w, l and l̂: l + a (l̂ −
    l), a ≤ (l − w) / w.

    An integer shift leaves the largest weight rounded, by ε, alike in all rows that share it. To
    first order its dS is then off by (1 − 2p) ε over l̂, where p = w / l, and by (1 − p) ε over l;
    over this by 0 if p ≥ 1/2. Where several weights are the largest a = 1, and their common error
    cancels as it does over l̂.
    """
    # measured: over l̂ alone dQ leans by −0.72 of its roundoffs, over l alone dK by +0.86 on tied
    # weights; over this they lean by −0.03 and −0.01 (docs/log.md)
    share = (row_sum / largest - 1).clamp(0, 1)
    balanced = row_sum + share * (rounded_row_sum - row_sum)
    return torch.where(largest == 0, rounded_row_sum, balanced)  # nothing to attend to


class Rows:
    """The forward pass's weights, recomputed tile by tile as the recipe says."""

    def __init__(self, problem: Problem, kept: Kept) -> None:
        self.problem, self.kept = problem, kept
        recipe = problem.recipe
        self.divisor: Tensor | None = None
        # exp(S − lse) is P at once, as in FlashAttention-2's Algorithm 2: nothing to divide by
        if recipe.backward_weights == "lse":
            self.shift = shift_of(kept.lse)
        elif (
            recipe.backward_weights == "rounded"
            and recipe.shift.kind == "integer"
            and recipe.lse_from == "row_sum"
        ):
            # lse alone tells the weights: whatever the integer shift, they are the same up to an
            # exact power of two.
            self.shift = shift_of(kept.lse.ceil())
            self.divisor = self._row_sum(kept.lse)
        else:
            self.shift, self.divisor = (
                shift_of(kept.row_max),
                divisor_of(kept.row_sum, kept.row_max),
            )
        if recipe.divisor_from == "lse" and self.divisor is not None:
            self.divisor = self._row_sum(kept.lse)
        elif recipe.divisor_from == "balanced" and self.divisor is not None:
            largest = problem.exp(kept.largest_score - self.shift)
            self.divisor = balance(largest, self._row_sum(kept.lse), self.divisor)
        separate = recipe.grad_value_from == "lse" and self.divisor is not None
        self.value_divisor = self._row_sum(kept.lse) if separate else None

    def probabilities(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """P of one tile `[B, H, rows, cols]` as dS takes it, and as dV does before its rounding."""
        problem, step = self.problem, self.problem.step
        exact = problem.weights(problem.scores(rows, cols), self.shift[:, :, rows])
        if self.divisor is None:
            p = step("probabilities", exact)
            return p, p
        weights = step("weights", exact)
        # the very weights that O was summed from: only then does a row of dS sum to 0 but for fp32
        if problem.recipe.backward_weights == "rounded":
            weights = problem.weights_operand(weights)
        if self.value_divisor is None:
            p = step(
                "probabilities",
                torch.div(weights, self.divisor[:, :, rows], out=step.scratch(weights)),
            )
            return p, p
        p = step("probabilities", weights / self.divisor[:, :, rows])
        return p, torch.div(exact, self.value_divisor[:, :, rows], out=step.scratch(exact))

    def statistics(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What `probabilities` reads a row, `[B, H, N_q, 1]`: shift, divisor, and that of
        dV's P.
        """
        return self.shift, self.divisor, self.value_divisor

    def _row_sum(self, lse: Tensor) -> Tensor:
        """l under this shift, from lse; 1 where no key is attended to."""
        return torch.where(lse == -math.inf, 1.0, self.problem.exp(lse - self.shift))


class Delta:
    """δ − dLSE, row by row: δ is rowsum(dO ∘ O); or rowsum(dP ∘ P) or rowsum(dO ∘ P V) with the
    backward pass's own P, at the cost of one more pass over the tiles.
    """

    def __init__(self, rows_of: Rows, do: Tensor, grad_lse: Tensor | None) -> None:
        problem, kept = rows_of.problem, rows_of.kept
        self.step, self.rows_of, self.do, self.grad_lse = problem.step, rows_of, do, grad_lse
        self.delta: Tensor | None = None
        # ∂lse/∂S is P, so dS = P (dP − δ + dLSE): lse's gradient needs no pass of its own
        if grad_lse is not None:
            # A fully masked row's lse is constant, and the gradient that reaches it may be infinite
            # or NaN.
            self.grad_lse = torch.where(kept.lse == -math.inf, 0.0, grad_lse.to(do.dtype))
        # rowsum(dP ∘ P) in exact arithmetic alone: every row is off by dO · (O's rounding error)
        if problem.recipe.delta_from != "probabilities":
            out = kept.out_for_delta
            if problem.recipe.delta_from == "recomputed":
                out = self._recomputed()
            self.delta = self.step("delta", row_sum(self.step("delta_products", do * out)))
        elif len(problem.row_tiles()) > 1 or len(problem.col_tiles()) > 1:
            self.delta = self.step("delta", self._summed())

    def tile(self, rows: slice, dp: Tensor, p: Tensor) -> Tensor:
        """δ − dLSE `[B, H, rows, 1]`; where one tile is the whole problem, δ is summed from what is
        at hand.
        """
        if self.delta is None:
            delta = self.step("delta", row_sum(self.step("delta_products", dp * p)))
        else:
            delta = self.delta[:, :, rows]
        return delta if self.grad_lse is None else delta - self.grad_lse[:, :, rows]

    def rows(self) -> Tensor:
        """δ − dLSE of every row `[B, H, N_q, 1]`."""
        if self.delta is None:
            self.delta = self.step("delta", self._summed())
        return self.delta if self.grad_lse is None else self.delta - self.grad_lse

    def _recomputed(self) -> Tensor:
        """O = P V `[B, H, N_q, D_v]` of the P that dS takes, in the compute dtype (Qiu & Yao, 3.2).
        It sums to 1 as that P does, not as the forward pass's did.
        """
        problem = self.rows_of.problem
        out = problem.value.new_zeros(*problem.query.shape[:3], problem.value.shape[3])
        for rows in problem.row_tiles():
            for cols in problem.col_tiles():
                if not problem.sees.hides(rows, cols):
                    p = problem.kept(self.rows_of.probabilities(rows, cols)[0], rows, cols)
                    out[:, :, rows] += product(p, problem.value[:, :, cols], self.step)
        return problem.undropped(out)

    def _summed(self) -> Tensor:
        rows_of, step = self.rows_of, self.step
        problem = rows_of.problem
        if fused.refused(problem) is None:
            return fused.summed_delta(problem, *rows_of.statistics(), self.do)
        delta = torch.zeros_like(rows_of.kept.lse)
        for rows in problem.row_tiles():
            for cols in problem.col_tiles():
                if not problem.sees.hides(rows, cols):
                    dp = grad_probabilities(problem, self.do, rows, cols)
                    # with the P of this pass, so that Σ_j dS_ij is 0 but for the last roundings
                    terms = step("delta_products", dp * rows_of.probabilities(rows, cols)[0])
                    delta[:, :, rows] += row_sum(terms)
        return delta


def _add(total: Tensor, block: Tensor, step: Step) -> None:
    """Add one tile's contribution to a running gradient, in place."""
    block = step("grad_block", block)
    # in place where nobody rounds or watches the sum: no second matrix for every tile
    if step.rounds("grad_accumulator") or step.observers:
        total.copy_(step("grad_accumulator", total + block))
    else:
        total.add_(block)


def sum_groups(grad: Tensor, groups: int) -> Tensor:
    """`[B, H, ...]` summed over the `groups` heads that share a key head: `[B, H_k, ...]`."""
    batch, heads, *rest = grad.shape
    return grad if groups == 1 else grad.reshape(batch, heads // groups, groups, *rest).sum(2)
