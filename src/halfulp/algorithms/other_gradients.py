"""Gradients of what is learned beside query, key and value: sinks, and an additive mask.

Few calls ask for them, so each is a pass of its own over the tiles instead of a branch in the
backward pass.
"""

from __future__ import annotations

from torch import Tensor

from halfulp.algorithms.backward import Delta, Rows, grad_probabilities
from halfulp.algorithms.problem import Kept, Problem, read_input


def grad_sinks(problem: Problem, kept: Kept, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """dL/dsink `[H]`: a sink is a score whose value is 0, so its dS is −p_sink (δ − dLSE), summed
    over all rows.
    """
    sinks = problem.sinks
    assert sinks is not None
    rows_of, _, delta = _state(problem, kept, grad_out, grad_lse)
    p = problem.exp(sinks - rows_of.shift)
    p = p if rows_of.divisor is None else p / rows_of.divisor
    every = delta.rows()
    return -(p * every).sum((0, 2, 3))


def grad_mask(problem: Problem, kept: Kept, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """dL/dmask in the mask's shape: dS before any rounding, summed over the dimensions that the
    mask broadcasts.
    """
    mask = problem.sees.mask
    assert mask is not None
    rows_of, do, delta = _state(problem, kept, grad_out, grad_lse)
    every = delta.rows()
    grad = every.new_zeros((1,) * (4 - mask.ndim) + tuple(mask.shape))
    whole = slice(None)
    for rows in problem.row_tiles():
        for cols in problem.col_tiles():
            if problem.sees.hides(rows, cols):
                continue
            p = rows_of.probabilities(rows, cols)[0]
            ds = p * (grad_probabilities(problem, do, rows, cols) - every[:, :, rows])
            sums = [dim for dim in range(4) if grad.shape[dim] == 1]
            place = [whole, whole, whole if 2 in sums else rows, whole if 3 in sums else cols]
            grad[tuple(place)] += ds.sum(sums, keepdim=True) if sums else ds
    return grad.reshape(mask.shape)


def _state(
    problem: Problem, kept: Kept, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Rows, Tensor, Delta]:
    do = read_input("grad_out", grad_out, problem.step)
    rows_of = Rows(problem, kept)
    return rows_of, do, Delta(rows_of, do, grad_lse)
