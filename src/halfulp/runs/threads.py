"""Experiments run on one thread of torch.

Two reasons: a sum split over threads has other bits than one that is not, and an experiment must
give the same figures on every machine; and on tensors this small a thread pool costs more than it
brings, a great deal more where another process wants the same cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Set torch to one thread inside the block and back to what it was after it."""
    import torch  # the command line speaks of jobs before it needs it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
