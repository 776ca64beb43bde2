"""What makes the same configuration give the same bits: kernels whose sums have a fixed order, and
the global generators of torch, Python and numpy, which every step begins at a seed of its own.

So what attention draws is a function of seed, step and process, as the order of the data is: a
checkpoint holds no generator's state, a run that is resumed, replayed or measured in between draws
the same numbers, and the caller finds the generators as they were. Not covered: a generator that an
attention function made for itself, other threads that draw from the global ones, and another number
of threads or processes, machine, or version of torch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from halfulp.recipes import hash_seed

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


@contextmanager
def own_generators(device: torch.device) -> Iterator[None]:
    """Give the block the global generators, and put them back to where they were after it."""
    # the legacy generator is numpy's global one, which a user's attention may draw from
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


def seed_generators(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Put the global generators to where this step of this process begins."""
    start = hash_seed(seed, f"step {step}", rank)
    random.seed(start)
    np.random.seed(start)  # noqa: NPY002
    # not torch.manual_seed: it seeds every CUDA device, and the caller gets back this one's alone
    torch.default_generator.manual_seed(start)
    if device.type == "cuda":
        torch.cuda.manual_seed(start)
