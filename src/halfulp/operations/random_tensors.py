"""What the probes of operations are drawn with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfulp.operations.operation_data import Draw, Sizes, Tensors


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=generator)


def with_(draw: Draw, **changes: Callable[[Tensor], Tensor]) -> Draw:
    """The same draw with some of its tensors changed."""

    def changed(sizes: Sizes, generator: torch.Generator) -> Tensors:
        x = draw(sizes, generator)
        return x | {name: change(x[name]) for name, change in changes.items()}

    return changed
