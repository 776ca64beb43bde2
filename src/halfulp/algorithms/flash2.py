"""FlashAttention-2's forward pass: query blocks outside, key blocks inside, one division at the
end.

Sources: Dao 2023, Algorithm 1; Qiu & Yao, Algorithms 1 and 2.
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
    joined,
    shift_of,
    sink_state,
    start,
)
from halfulp.algorithms.stabilize import row_shift


def forward(problem: Problem) -> Kept:
    """Online softmax over key blocks; memory O(N) beside one tile."""
    if fused.refused(problem) is None:
        return finish(problem, fused.forward(problem))
    return finish(problem, joined([_rows(problem, rows) for rows in problem.row_tiles()]))


def _rows(problem: Problem, rows: slice) -> State:
    """The state of one block of query rows after all keys, Ō divided."""
    step, state = problem.step, sink_state(problem, rows)
    for cols in problem.col_tiles():
        if problem.sees.hides(rows, cols):
            continue
        scores = problem.scores(rows, cols)
        largest = scores.amax(dim=-1, keepdim=True)
        # any shift gives the same softmax in exact arithmetic: a recipe chooses by its rounding
        top = row_shift(scores, largest, step)
        m_new = step("row_max", top if state is None else torch.maximum(state.row_max, top))
        shift = shift_of(m_new)
        weights = step("weights", problem.weights(scores, shift))
        operand = problem.weights_operand(weights)
        tile_sum, exact_sum = problem.row_sums(weights, operand)
        # after the row sums: softmax normalizes what dropout then drops from
        operand = problem.kept(operand, rows, cols)
        tile_out = step("block_out", product(operand, problem.value[:, :, cols], step))
        if state is None:
            state = State(
                step("accumulator", tile_out), m_new, step("row_sum", tile_sum), exact_sum, largest
            )
        else:
            accumulator, m, l, l_exact, before = state
            of_out, rescale = problem.rescales(m, shift)
            l = step("row_sum", step("rescaled", l * rescale) + tile_sum)
            accumulator = step("accumulator", step("rescaled", accumulator * of_out) + tile_out)
            state = State(
                accumulator, m_new, l, l_exact * rescale + exact_sum, torch.maximum(before, largest)
            )
    if state is None:  # a window may hide every key
        state = start(problem, rows)
    out = problem.divided(state.out, divisor_of(state.row_sum, state.row_max))
    return state._replace(out=problem.undropped(out))
