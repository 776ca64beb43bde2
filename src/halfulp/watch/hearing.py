"""What PyTorch's own functions tell of a training that no hook does: the loss that a backward pass
begins at, the gradient norm that clipping computes, and steps that a GradScaler leaves out.

While somebody listens, these functions are replaced by ones that do the same and say so.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer


class Hearer(Protocol):
    """Told in whichever thread it happens; nothing that it is told of may be changed."""

    def heard_backward(self, begun_at: Tensor) -> None:
        """A backward pass begins at this tensor of one number."""
        ...

    def heard_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None:
        """A GradScaler has scaled a loss."""
        ...

    def heard_norm(self, grads: list[Tensor], norm: Tensor) -> None:
        """The norm of these gradients was computed, to clip them."""
        ...

    def heard_scaler(self, scaler: GradScaler, optimizer: Optimizer, skipped: bool) -> None:
        """A GradScaler has let an optimizer step, or has not."""
        ...


_lock = threading.Lock()
_hearers: WeakSet[Any] = WeakSet()
_replaced: list[tuple[Any, str, Any]] = []  # whose, its name, and what it was


def hear(who: Hearer) -> None:
    """Have everything of `Hearer` told until `stop_hearing`; `who` is not kept alive."""
    with _lock:
        _hearers.add(who)
        if _replaced:
            return
        for owner, name, made in (
            (Tensor, "backward", _backward),
            (GradScaler, "scale", _scale),
            (GradScaler, "_maybe_opt_step", _maybe_step),
            (clip_grad, "_get_total_norm", _norm),
        ):
            stock = getattr(owner, name, None)  # some are PyTorch's own affair and may go
            if stock is not None:
                _replaced.append((owner, name, stock))
                setattr(owner, name, made(stock))


def stop_hearing(who: Hearer) -> None:
    """Undo `hear`; nothing if that has been done."""
    with _lock:
        _hearers.discard(who)
        if not _hearers:
            for owner, name, stock in _replaced:
                setattr(owner, name, stock)
            _replaced.clear()


def _backward(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.numel() == 1 and self.is_floating_point():
            for who in list(_hearers):
                who.heard_backward(self)
        return stock(self, *args, **kwargs)

    return backward


def _scale(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = stock(self, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            for who in list(_hearers):
                who.heard_scaled(self, outputs, scaled)
        return scaled

    return scale


def _maybe_step(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def maybe_step(
        self: GradScaler, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        skipped = any(float(found) for found in state["found_inf_per_device"].values())
        result = stock(self, optimizer, state, *args, **kwargs)
        for who in list(_hearers):
            who.heard_scaler(self, optimizer, skipped)
        return result

    return maybe_step


def _norm(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return stock(tensors, norm_type, *args, **kwargs)
        # a list, since a generator can be read only once and is PyTorch's to read
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total = stock(grads, norm_type, *args, **kwargs)
        if float(norm_type) == 2.0 and grads:
            for who in list(_hearers):
                who.heard_norm(grads, total)
        return total

    return norm
