"""How a kernel is called beside its arguments: what memory its tensors lie in, and how often it and
its backward pass are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

MEMORY = ("contiguous", "transposed", "packed")
"""Of query, key and value `[B, H, N, D]`: dense; a view of `[B, N, H, D]`; a view into wider rows,
with an offset of storage.
"""

APART = "apart"
"""Of query, key and value: every second element of memory is a feature. Many kernels ask for
features side by side, so that audits leave it out.
"""

VALUES = "values-transposed"
"""Value alone a view of `[B, N, H, D]`, query and key dense: kernels that take one's strides for
both are seen. Left out by audits likewise.
"""

GRAD_MEMORY = ("contiguous", "transposed", "expanded")
"""Of dO; expanded: one row for all queries, whose stride is 0, as a sum's gradient has."""

CALLS = ("once", "twice", "backward-twice")
"""Twice: the second call's results count, as of a kernel that keeps buffers or tunes itself in its
first. Backward-twice: those of a second pass through the same graph.
"""

FILLED = "filled"
"""Called once, all memory that torch allocates for it full of NaN before: what is never written
shows, which else holds what an earlier call left there.
"""

PLAIN = "contiguous/contiguous/once"


def parted(manner: str) -> tuple[str, str, str]:
    """Memory, memory of dO, and calls; ValueError for anything else."""
    parts = manner.split("/")
    known = ((*MEMORY, APART, VALUES), GRAD_MEMORY, (*CALLS, FILLED))
    if len(parts) != 3 or any(part not in names for part, names in zip(parts, known, strict=True)):
        raise ValueError(f"manner={manner!r}: accepted is MEMORY/MEMORY OF dO/CALLS")
    return parts[0], parts[1], parts[2]


def memory_of(memory: str, role: str) -> str:
    """In which memory the operand of this role lies where a call's operands lie in `memory`."""
    if memory != VALUES:
        return memory
    return "transposed" if role == "value" else "contiguous"


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Memory that torch allocates is full of NaN, and of the largest integers: what it does where
    algorithms shall be deterministic (`torch.utils.deterministic`).
    """
    before = torch.get_deterministic_debug_mode()
    # the same switch as use_deterministic_algorithms, which imports the whole compiler (1 s)
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def laid_out(x: Tensor, memory: str, rows: int | None = None) -> Tensor:
    """The same elements in memory of their own, differentiable; `rows` is the dimension of tokens,
    which alone can be expanded.
    """
    if memory == "transposed" and x.ndim > 1:
        first = 1 if x.ndim > 3 else 0
        return x.transpose(first, first + 1).contiguous().transpose(first, first + 1)
    if memory == "packed":
        beside = torch.full_like(x[..., :8], 3.0)  # what no kernel may read
        return torch.cat([beside, x, beside], -1)[..., beside.shape[-1] : -beside.shape[-1]]
    if memory == APART:
        return torch.stack([x, torch.full_like(x, 3.0)], -1)[..., 0]
    if memory == "expanded" and rows is not None:
        return x.narrow(rows, 0, 1).contiguous().expand_as(x)
    return x.clone(memory_format=torch.contiguous_format)
