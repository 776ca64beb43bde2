"""What workloads have in common of which the configuration decides everything."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from halfulp.interpose import Swap


class Configured:
    """A workload that brings no optimizer of its own and computes as its plan of attention says."""

    parts = None
    swaps: tuple[Swap, ...] = ()

    def computing(self) -> AbstractContextManager[Any]:
        """Nothing around losses and gradients."""
        return nullcontext()
