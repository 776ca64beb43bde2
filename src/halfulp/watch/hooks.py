"""The hooks of a watcher: on the model it watches, and on all optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from halfulp.watch.foreign import Hook

if TYPE_CHECKING:
    from halfulp.watch.watcher import Watcher


class Optimizers:
    """A hook on every optimizer: it must not keep the watcher, and with it the model, alive."""

    def __init__(
        self, watcher: weakref.ref[Watcher], told: Callable[[Watcher, Optimizer], None]
    ) -> None:
        self.watcher, self.told = watcher, told

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Tell the watcher, while it lives."""
        watcher = self.watcher()
        if watcher is not None:
            self.told(watcher, optimizer)


class Begins(Hook):
    """The model's hook before its forward pass."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def __call__(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell the watcher."""
        self.watcher.pass_begins(args, kwargs)


class Ends(Hook):
    """The model's hook after its forward pass."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def __call__(self, _model: nn.Module, _args: Any, output: Any) -> None:
        """Tell the watcher."""
        self.watcher.pass_ends(output)
