"""Work of ours runs on one thread of torch.

Two reasons: a sum split over threads has other bits than one that is not, and an experiment must
give the same figures on every machine; and on tensors this small a thread pool costs more than it
brings, a great deal more where another process wants the same cores (an audit that takes 11 s on
one thread took 7 min on four, beside two other programs on four cores).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OUTSIDE: ContextVar[int | None] = ContextVar("threads outside", default=None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Set torch to one thread inside the block and back to what it was after it."""
    with _threads(1):
        yield


@contextmanager
def own_thread() -> Iterator[None]:
    """As `one_thread`, but for what `as_outside` calls: a kernel is judged as it runs."""
    import torch

    # inside of another block the count is that of one thread already: the outermost knows
    outside = _OUTSIDE.set(_OUTSIDE.get() or torch.get_num_threads())
    try:
        with one_thread():
            yield
    finally:
        _OUTSIDE.reset(outside)


@contextmanager
def as_outside() -> Iterator[None]:
    """As many threads as there were outside of `own_thread`."""
    with _threads(threads_outside()):
        yield


def threads_outside() -> int:
    """How many threads of torch there are outside of `own_thread`, or here where we are not."""
    import torch

    return _OUTSIDE.get() or torch.get_num_threads()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch  # the command line speaks of jobs before it needs it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
