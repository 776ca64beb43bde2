"""Attention, each algorithm written once in plain PyTorch, with every named intermediate passed
through a `Step`.
"""

from halfulp.algorithms.dispatch import ALGORITHMS, attend, attend_backward
from halfulp.algorithms.golden import AttentionResult, golden
from halfulp.algorithms.problem import Mask, Problem, Saved, blocks_for_memory

__all__ = [
    "ALGORITHMS",
    "AttentionResult",
    "Mask",
    "Problem",
    "Saved",
    "attend",
    "attend_backward",
    "blocks_for_memory",
    "golden",
]
