"""FlashAttention-1's forward pass: key blocks outside, query blocks inside, O renormalized in every
step.

Source: Dao et al. 2022, Algorithm 1. It differs from FlashAttention-2 in its roundings alone.
"""

from __future__ import annotations

import math

import torch

from halfulp.algorithms import fused
from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import Problem, Saved, State, divisor_of, finish, shift_of
from halfulp.algorithms.stabilize import row_shift
from halfulp.recipes import Step


def forward(problem: Problem, step: Step) -> Saved:
    """O ← diag(l_new)⁻¹ (diag(l) e^{m − m_new} O + e^{m̃ − m_new} P̃V) tile by tile, m and l kept
    between tiles.
    """
    if fused.refused(problem, step) is None:
        return finish(problem, fused.forward(problem), step)
    rows_shape = (*problem.query.shape[:3], 1)
    m = problem.query.new_full(rows_shape, -math.inf)
    l = problem.query.new_zeros(rows_shape)
    out = problem.query.new_zeros(*rows_shape[:3], problem.value.shape[3])
    state = State(out, m, l, l.clone(), m.clone())
    for cols in problem.col_tiles():
        for rows in problem.row_tiles():
            if not problem.mask.hides(rows, cols):
                block = State(*(x[:, :, rows] for x in state))
                for old, new in zip(block, _tile(problem, rows, cols, block, step), strict=True):
                    old.copy_(new)
    return finish(problem, state, step)


def _tile(problem: Problem, rows: slice, cols: slice, state: State, step: Step) -> State:
    out, m, l, l_exact, before = state
    scores = problem.scores(rows, cols, step)
    largest = scores.amax(dim=-1, keepdim=True)
    m_tile = step("row_max", row_shift(scores, largest, step))
    weights = step("weights", problem.weights(scores, shift_of(m_tile), step))
    operand = problem.weights_operand(weights, step)
    l_tile, exact_sum = problem.row_sums(weights, operand, step)
    m_new = torch.maximum(m, m_tile)
    shift = shift_of(m_new)
    old_scale, tile_scale = (problem.rescale(x, shift, step) for x in (m, m_tile))
    l_old = step("rescaled", l * old_scale)
    l_new = step("row_sum", l_old + step("rescaled", l_tile * tile_scale))
    block_out = step("block_out", product(operand, problem.value[:, :, cols], step))
    summed = step(
        "accumulator", step("rescaled", l_old * out) + step("rescaled", tile_scale * block_out)
    )
    new_out = step("renormalized", summed / divisor_of(l_new, m_new))
    l_exact = l_exact * old_scale + exact_sum * tile_scale
    return State(new_out, m_new, l_new, l_exact, torch.maximum(before, largest))
