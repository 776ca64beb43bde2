"""Which models can be watched, and by whom they are."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from halfulp.watch.watcher import Watcher

_WATCHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def take_model(model: nn.Module, watcher: Watcher) -> None:
    """Take a model for a watcher; raises ValueError if one is watching it, or a part of it, or
    what it is part of: calls are shown to one alone.
    """
    mine = set(model.modules())
    for other, found in list(_WATCHED.items()):
        before = found()
        if before is not None and before._handles and not mine.isdisjoint(other.modules()):
            raise ValueError(
                f"model={type(model).__name__} is being watched already: accepted is one watcher a"
                " model; close the other with watcher.close()"
            )
    _WATCHED[model] = weakref.ref(watcher)


def check_model(model: nn.Module, eager: bool) -> None:
    """Raise ValueError for a model whose attention cannot be tapped."""
    name = f"model={type(model).__name__}"
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name}: accepted is an nn.Module")
    if isinstance(model, torch.jit.ScriptModule | nn.DataParallel):
        raise ValueError(
            f"{name}: accepted is a model that runs in Python, by itself or in"
            " DistributedDataParallel"
        )
    if model._compiled_call_impl is not None:
        raise ValueError(
            f"{name} is compiled in place: accepted is torch.compile(model), with eager=True"
        )
    if eager:
        return
    for module in model.modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(
                f"{name} is compiled, and its graph cannot be tapped: accepted is eager=True, which"
                " runs the measured steps without the compiler, or a model that is not compiled"
            )


def give_back(model: nn.Module) -> None:
    """Undo `take_model`."""
    _WATCHED.pop(model, None)


def captured() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
