"""Hooks that serve somebody: on modules, and on all optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class Hook:
    """A hook on a module that serves somebody. A copy of the module serves nobody, and a module
    with a hook can be pickled.
    """

    def __deepcopy__(self, memo: Any) -> Hook:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()


class Idle(Hook):
    """What a hook is in a copy."""

    def __call__(self, *_: Any) -> None:
        """Nothing."""


class Tells(Hook):
    """Tells somebody what a module is given, or gives."""

    def __init__(self, told: Callable[..., None]) -> None:
        self.told = told

    def __call__(self, _module: nn.Module, *given: Any) -> None:
        """Say so."""
        self.told(*given)


def of_optimizers(told: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook on every optimizer that holds the method weakly, so that it keeps no model alive."""
    method = weakref.WeakMethod(told)

    def hook(optimizer: Optimizer, *_: Any) -> None:
        alive = method()
        if alive is not None:
            alive(optimizer)

    return hook
