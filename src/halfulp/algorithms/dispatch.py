"""Which algorithm a recipe names: the one place where forward and backward passes are chosen."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from halfulp.algorithms import flash1, flash2, standard, torch_cpu
from halfulp.algorithms.backward import backward
from halfulp.algorithms.problem import Problem, Saved
from halfulp.recipes import Step

ALGORITHMS: dict[str, Callable[[Problem, Step], Saved]] = {
    "standard": standard.forward,
    "flash1": flash1.forward,
    "flash2": flash2.forward,
    "torch_cpu": torch_cpu.forward,
}


def attend(problem: Problem, step: Step) -> Saved:
    """The forward pass of the recipe's algorithm."""
    return ALGORITHMS[problem.recipe.algorithm](problem, step)


def attend_backward(
    problem: Problem, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of the recipe's algorithm; see `backward.backward`."""
    if problem.recipe.algorithm == "torch_cpu":
        return torch_cpu.backward(problem, saved, grad_out, grad_lse, step)
    return backward(problem, saved, grad_out, grad_lse, step)
