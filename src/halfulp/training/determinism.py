"""Kernels whose sums have a fixed order, so that a run on a GPU repeats bit for bit as one on a CPU
does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# cuBLAS reads it when it starts; a fixed size makes it deterministic
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Ask torch for deterministic kernels on CUDA inside the block; one that has none raises
    RuntimeError.

    On a CPU torch's kernels are deterministic for one number of threads, and nothing is changed.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
