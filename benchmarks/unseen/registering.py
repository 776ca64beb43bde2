"""How a set of unseen faults of operations is written down: a line a fault, and a line a kernel
that has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.unseen import OperationFault


def registering(
    faults: list[OperationFault], sounds: list[OperationFault]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """`fault` and `sound`, which add to these lists."""

    def fault(op: str, name: str, fn: Any, what: str, where: str, thread: str,
              dtype: str = "bfloat16") -> None:  # fmt: skip
        assert thread
        faults.append(OperationFault(op, name, fn, frozenset(what.split()), tuple(where.split()),
                                     dtype))  # fmt: skip

    def sound(op: str, name: str, fn: Any, dtype: str = "bfloat16") -> None:
        sounds.append(OperationFault(op, name, fn, frozenset(), (), dtype))

    return fault, sound
