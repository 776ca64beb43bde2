"""Which algorithm a recipe names: the one place where forward and backward passes are chosen."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from halfulp.algorithms import flash1, flash2, standard, torch_cpu
from halfulp.algorithms.backward import backward
from halfulp.algorithms.problem import Kept, Problem

ALGORITHMS: dict[str, Callable[[Problem], Kept]] = {
    "standard": standard.forward,
    "flash1": flash1.forward,
    "flash2": flash2.forward,
    "torch_cpu": torch_cpu.forward,
}


def attend(problem: Problem) -> Kept:
    """The forward pass of the recipe's algorithm."""
    return ALGORITHMS[problem.recipe.algorithm](problem)


def attend_backward(
    problem: Problem, kept: Kept, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of the recipe's algorithm; see `backward.backward`."""
    if problem.recipe.algorithm == "torch_cpu":
        return torch_cpu.backward(problem, kept, grad_out, grad_lse)
    return backward(problem, kept, grad_out, grad_lse)
