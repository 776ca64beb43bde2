"""FlashAttention-2's forward pass: query blocks outside, key blocks inside, one division at the end.

Sources: Dao 2023, Algorithm 1; Qiu & Yao, Algorithms 1 and 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import Problem, Saved, divisor_of, finish, shift_of
from halfulp.algorithms.stabilize import row_shift
from halfulp.recipes import Step


def forward(problem: Problem, step: Step) -> Saved:
    """Online softmax over key blocks; memory O(N) beside one tile."""
    parts = [_rows(problem, rows, step) for rows in problem.row_tiles()]
    out, m, l, l_exact = (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
    return finish(problem, out, m, l, l_exact, step)


def _rows(problem: Problem, rows: slice, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O before rounding, m, l, and l from the exact weights of one block of query rows."""
    state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
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
        tile_out = step("block_out", product(operand, problem.value[:, :, cols], step))
        if state is None:
            state = (step("accumulator", tile_out), m_new, step("row_sum", tile_sum), exact_sum)
        else:
            accumulator, m, l, l_exact = state
            rescale = problem.rescale(m, shift, step)
            l = step("row_sum", step("rescaled", l * rescale) + tile_sum)
            accumulator = step("accumulator", step("rescaled", accumulator * rescale) + tile_out)
            state = (accumulator, m_new, l, l_exact * rescale + exact_sum)
    assert state is not None  # the first key block is never hidden
    return state[0] / divisor_of(state[2], state[1]), *state[1:]
