"""PyTorch's CPU flash attention kernel, step by step."""

from __future__ import annotations

from torch import Tensor

from halfulp.algorithms import flash2
from halfulp.algorithms.backward import backward as tiled_backward
from halfulp.algorithms.problem import Problem, Saved
from halfulp.recipes import Step


def forward(problem: Problem, step: Step) -> Saved:
    """The forward pass."""
    return flash2.forward(problem, step)


def backward(problem: Problem, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass."""
    return tiled_backward(problem, saved, grad_out, grad_lse, step)
