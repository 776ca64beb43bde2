"""FlashAttention-1's forward pass: key blocks outside, query blocks inside, O renormalized in every
step.

Source: Dao et al. 2022, Algorithm 1. It differs from FlashAttention-2 in its roundings alone.
"""

from __future__ import annotations

import torch

from halfulp.algorithms import fused
from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import (
    Kept,
    Problem,
    State,
    divisor_of,
    finish,
    shift_of,
    sink_state,
    start,
)
from halfulp.algorithms.stabilize import row_shift


def forward(problem: Problem) -> Kept:
    """O ← diag(l_new)⁻¹ (diag(l) e^{m − m_new} O + e^{m̃ − m_new} P̃V) tile by tile, m and l kept
    between tiles.
    """
    if fused.refused(problem) is None:
        return finish(problem, fused.forward(problem))
    whole = slice(0, problem.query.shape[2])
    # written to in place, so no two of them may be one
    state = State(*(x.clone() for x in sink_state(problem, whole) or start(problem, whole)))
    for cols in problem.col_tiles():
        for rows in problem.row_tiles():
            if not problem.sees.hides(rows, cols):
                block = State(*(x[:, :, rows] for x in state))
                for old, new in zip(block, _tile(problem, rows, cols, block), strict=True):
                    old.copy_(new)
    return finish(problem, state._replace(out=problem.undropped(state.out)))


def _tile(problem: Problem, rows: slice, cols: slice, state: State) -> State:
    step, (out, m, l, l_exact, before) = problem.step, state
    scores = problem.scores(rows, cols)
    largest = scores.amax(dim=-1, keepdim=True)
    m_tile = step("row_max", row_shift(scores, largest, step))
    weights = step("weights", problem.weights(scores, shift_of(m_tile)))
    operand = problem.weights_operand(weights)
    l_tile, exact_sum = problem.row_sums(weights, operand)
    operand = problem.kept(operand, rows, cols)
    m_new = torch.maximum(m, m_tile)
    shift = shift_of(m_new)
    old_scale, tile_scale = (problem.rescale(x, shift) for x in (m, m_tile))
    # O is kept divided, so it is multiplied by the old l before the new one divides it: a rounding
    # a tile that FlashAttention-2 saves
    l_old = step("rescaled", l * old_scale)
    l_new = step("row_sum", l_old + step("rescaled", l_tile * tile_scale))
    block_out = step("block_out", product(operand, problem.value[:, :, cols], step))
    summed = step(
        "accumulator", step("rescaled", l_old * out) + step("rescaled", tile_scale * block_out)
    )
    new_out = step("renormalized", problem.divided(summed, divisor_of(l_new, m_new)))
    l_exact = l_exact * old_scale + exact_sum * tile_scale
    return State(new_out, m_new, l_new, l_exact, torch.maximum(before, largest))
