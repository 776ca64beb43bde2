"""FlashAttention-2's forward pass: query blocks outside, key blocks inside, one division at the end.

Sources: Dao 2023, Algorithm 1; Qiu & Yao, Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from halfulp.algorithms import fused
from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import Problem, Saved, divisor_of, finish, shift_of
from halfulp.algorithms.stabilize import row_shift
from halfulp.recipes import Step

_State: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Ō, m, l, and l from the exact weights, of one block of query rows."""


def forward(problem: Problem, step: Step) -> Saved:
    """Online softmax over key blocks; memory O(N) beside one tile."""
    if fused.refused(problem, step) is None:
        return finish(problem, *fused.forward(problem), step)
    parts = [_rows(problem, rows, step) for rows in problem.row_tiles()]
    out, m, l, l_exact = (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
    return finish(problem, out, m, l, l_exact, step)


def _rows(problem: Problem, rows: slice, step: Step) -> _State:
    """O before rounding, m, l, and l from the exact weights of one block of query rows."""
    state = _sink_state(problem, rows, step)
    for cols in problem.col_tiles():
        if problem.mask.hides(rows, cols):
            continue
        scores = problem.scores(rows, cols, step)
        top = row_shift(scores, step)
        m_new = step("row_max", top if state is None else torch.maximum(state[1], top))
        shift = shift_of(m_new)
        weights = step("weights", problem.weights(scores, shift, step))
        operand = problem.weights_operand(weights, step)
        tile_sum, exact_sum = problem.row_sums(weights, operand, step)
        operand = problem.kept(operand, rows, cols)
        tile_out = step("block_out", product(operand, problem.value[:, :, cols], step))
        if state is None:
            state = (step("accumulator", tile_out), m_new, step("row_sum", tile_sum), exact_sum)
        else:
            accumulator, m, l, l_exact = state
            rescale = problem.rescale(m, shift, step)
            l = step("row_sum", step("rescaled", l * rescale) + tile_sum)
            accumulator = step("accumulator", step("rescaled", accumulator * rescale) + tile_out)
            state = (accumulator, m_new, l, l_exact * rescale + exact_sum)
    if state is None:  # a window may hide every key
        state = _start(problem, rows, -math.inf, 0.0)
    out = state[0] / divisor_of(state[2], state[1])
    return out if problem.dropout is None else out * problem.dropout.scale, *state[1:]


def _sink_state(problem: Problem, rows: slice, step: Step) -> _State | None:
    """The state after a sink alone: its weight counts in the row sum and its value is 0; None where there are none.

    The weight enters no product, so it is not rounded as the others are.
    """
    if problem.sinks is None:
        return None
    m = step("row_max", problem.sinks.ceil() if problem.recipe.shift.kind == "integer" else problem.sinks)
    l = problem.exp(problem.sinks - shift_of(m))
    return _start(problem, rows, m, l)


def _start(problem: Problem, rows: slice, m: Tensor | float, l: Tensor | float) -> _State:
    batch, heads = problem.query.shape[:2]
    count = rows.stop - rows.start
    row_max, row_sum = (problem.query.new_zeros(batch, heads, count, 1) + x for x in (m, l))
    out = problem.query.new_zeros(batch, heads, count, problem.value.shape[3])
    return out, row_max, row_sum, row_sum
