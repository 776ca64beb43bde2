"""Standard attention: whole rows, normalized before the product with V (`softmax(α QKᵀ) V`)."""

from __future__ import annotations

from halfulp.algorithms import fused
from halfulp.algorithms.arithmetic import row_sum
from halfulp.algorithms.matmul import product
from halfulp.algorithms.problem import Problem, Saved, State, divisor_of, finish, joined, shift_of
from halfulp.algorithms.stabilize import row_shift
from halfulp.recipes import Step


def forward(problem: Problem, step: Step) -> Saved:
    """One pass over blocks of query rows, all keys at once; memory O(block_query · N)."""
    if fused.refused(problem, step) is None:
        return finish(problem, fused.forward(problem), step)
    parts: list[State] = []
    cols = slice(0, problem.key.shape[2])
    for rows in problem.row_tiles():
        scores = problem.scores(rows, cols, step)
        largest = scores.amax(dim=-1, keepdim=True)
        m = step("row_max", row_shift(scores, largest, step))
        weights = step("weights", problem.weights(scores, shift_of(m), step))
        l = step(
            "row_sum", step("block_sum", row_sum(weights)).clamp_min(problem.recipe.row_sum_floor)
        )
        operand = problem.weights_operand(weights / divisor_of(l, m), step)
        out = step("accumulator", step("block_out", product(operand, problem.value, step)))
        parts.append(State(out, m, l, l, largest))
    return finish(problem, joined(parts), step)
