"""Attention, each algorithm written once in plain PyTorch, with every named intermediate passed
through a `Step`.
"""

from halfulp.algorithms.golden import golden
from halfulp.algorithms.of_recipe import ALGORITHMS, attend, attend_backward
from halfulp.algorithms.problem import Kept, Problem, blocks_for_memory

__all__ = [
    "ALGORITHMS",
    "Kept",
    "Problem",
    "attend",
    "attend_backward",
    "blocks_for_memory",
    "golden",
]
