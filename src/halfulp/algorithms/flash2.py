"""FlashAttention-2's forward pass (Dao 2023; Qiu & Yao, Algorithms 1 and 2): query blocks outside, key blocks inside, one division at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.algorithms.matmul import matmul
from halfulp.algorithms.problem import Problem, Saved, divisor_of, finish, shift_of
from halfulp.algorithms.stabilize import row_shift
from halfulp.recipes import Step


def forward(problem: Problem, step: Step) -> Saved:
    """Online softmax over key blocks; memory O(N) beside one tile."""
    parts = [_rows(problem, rows, step) for rows in problem.row_tiles()]
    out, m, l, l_exact = (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
    return finish(problem, out, m, l, l_exact, step)


def _rows(problem: Problem, rows: slice, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    recipe = problem.recipe
    m = l = l_exact = accumulator = None
    for cols in problem.col_tiles():
        if problem.mask.hides(rows, cols):
            continue
        scores = problem.scores(rows, cols, step)
        top = row_shift(scores, recipe.shift)
        m_new = step("row_max", top if m is None else torch.maximum(m, top))
        shift = shift_of(m_new)
        weights = step("weights", problem.exp(step("shifted_scores", scores - shift)))
        operand = problem.weights_operand(weights, step)
        exact_sum = (operand if recipe.row_sum_from == "rounded" and recipe.lse_from == "row_sum" else weights).sum(-1, keepdim=True)
        tile_sum = operand.sum(-1, keepdim=True) if recipe.row_sum_from == "rounded" else exact_sum
        tile_sum = step("block_sum", tile_sum).clamp_min(recipe.row_sum_floor)
        tile_out = step("block_out", matmul(operand, problem.value[:, :, cols], recipe.matmul))
        if m is None or l is None or l_exact is None or accumulator is None:
            l, l_exact, accumulator = step("row_sum", tile_sum), exact_sum, step("accumulator", tile_out)
        else:
            rescale = step("rescale", problem.exp(m - shift))
            l = step("row_sum", step("rescaled", l * rescale) + tile_sum)
            l_exact = l_exact * rescale + exact_sum
            accumulator = step("accumulator", step("rescaled", accumulator * rescale) + tile_out)
        m = m_new
    assert m is not None and l is not None and l_exact is not None and accumulator is not None
    return accumulator / divisor_of(l), m, l, l_exact
