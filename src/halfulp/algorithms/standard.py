"""Standard attention: whole rows, normalized before the product with V (`softmax(α QKᵀ) V`)."""

from __future__ import annotations

import torch

from halfulp.algorithms import fused
from halfulp.algorithms.arithmetic import row_sum
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
)
from halfulp.algorithms.stabilize import row_shift


def forward(problem: Problem) -> Kept:
    """One pass over blocks of query rows, all keys at once; memory O(block_query · N)."""
    if fused.refused(problem) is None:
        return finish(problem, fused.forward(problem))
    return finish(problem, joined([_rows(problem, rows) for rows in problem.row_tiles()]))


def _rows(problem: Problem, rows: slice) -> State:
    """The state of one block of query rows."""
    step, sink, cols = problem.step, sink_state(problem, rows), slice(0, problem.key.shape[2])
    scores = problem.scores(rows, cols)
    largest = scores.amax(dim=-1, keepdim=True)
    top = row_shift(scores, largest, step)
    m = step("row_max", top if sink is None else torch.maximum(sink.row_max, top))
    weights = step("weights", problem.weights(scores, shift_of(m)))
    # of unrounded weights: here it is P that is rounded for the product, after the division
    l = step("block_sum", row_sum(weights)).clamp_min(problem.recipe.row_sum_floor)
    if sink is not None:
        l = l + sink.row_sum * problem.rescale(sink.row_max, shift_of(m))
        largest = torch.maximum(largest, sink.largest_score)
    l = step("row_sum", l)
    operand = problem.kept(
        problem.weights_operand(problem.divided(weights, divisor_of(l, m))), rows, cols
    )
    out = step("accumulator", step("block_out", product(operand, problem.value, step)))
    return State(problem.undropped(out), m, l, l, largest)
