"""FlashAttention-2's forward pass: query blocks outside, key blocks inside, one division at the
end.

Sources: Dao 2023, Algorithm 1; Qiu & Yao, Algorithms 1 and 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfulp.algorithms import fused
from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import Problem, Saved, State, divisor_of, finish, joined, shift_of
from halfulp.algorithms.stabilize import row_shift
from halfulp.recipes import Step


def forward(problem: Problem, step: Step) -> Saved:
    """Online softmax over key blocks; memory O(N) beside one tile."""
    if fused.refused(problem, step) is None:
        return finish(problem, fused.forward(problem), step)
    parts = [_rows(problem, rows, step) for rows in problem.row_tiles()]
    return finish(problem, joined(parts), step)


def _rows(problem: Problem, rows: slice, step: Step) -> State:
    """The state of one block of query rows after all keys, Ō divided."""
    state = _sink_state(problem, rows, step)
    for cols in problem.col_tiles():
        if problem.mask.hides(rows, cols):
            continue
        scores = problem.scores(rows, cols, step)
        largest = scores.amax(dim=-1, keepdim=True)
        top = row_shift(scores, largest, step)
        m_new = step("row_max", top if state is None else torch.maximum(state.row_max, top))
        shift = shift_of(m_new)
        weights = step("weights", problem.weights(scores, shift, step))
        operand = problem.weights_operand(weights, step)
        tile_sum, exact_sum = problem.row_sums(weights, operand, step)
        operand = problem.kept(operand, rows, cols)
        tile_out = step("block_out", product(operand, problem.value[:, :, cols], step))
        if state is None:
            state = State(
                step("accumulator", tile_out), m_new, step("row_sum", tile_sum), exact_sum, largest
            )
        else:
            accumulator, m, l, l_exact, before = state
            rescale = problem.rescale(m, shift, step)
            l = step("row_sum", step("rescaled", l * rescale) + tile_sum)
            accumulator = step("accumulator", step("rescaled", accumulator * rescale) + tile_out)
            state = State(
                accumulator, m_new, l, l_exact * rescale + exact_sum, torch.maximum(before, largest)
            )
    if state is None:  # a window may hide every key
        state = _start(problem, rows, -math.inf, 0.0, -math.inf)
    out = state.out / divisor_of(state.row_sum, state.row_max)
    return state._replace(out=out if problem.dropout is None else out * problem.dropout.scale)


def _sink_state(problem: Problem, rows: slice, step: Step) -> State | None:
    """The state after a sink alone: its weight counts in the row sum and its value is 0; None where
    there are none.

    The weight enters no product, so it is not rounded as the others are.
    """
    if problem.sinks is None:
        return None
    m = step(
        "row_max", problem.sinks.ceil() if problem.recipe.shift.kind == "integer" else problem.sinks
    )
    l = problem.exp(problem.sinks - shift_of(m))
    return _start(problem, rows, m, l, problem.sinks)


def _start(
    problem: Problem, rows: slice, m: Tensor | float, l: Tensor | float, largest: Tensor | float
) -> State:
    batch, heads = problem.query.shape[:2]
    count = rows.stop - rows.start
    row_max, row_sum, top = (
        problem.query.new_zeros(batch, heads, count, 1) + x for x in (m, l, largest)
    )
    out = problem.query.new_zeros(batch, heads, count, problem.value.shape[3])
    return State(out, row_max, row_sum, row_sum, top)
