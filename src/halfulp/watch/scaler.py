"""Steps that a GradScaler leaves out: it then calls no optimizer, so no hook of one tells.

While somebody listens, the method in which it decides is replaced by one that says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.amp import GradScaler
from torch.optim import Optimizer

_METHOD = "_maybe_opt_step"
_lock = threading.Lock()
_listeners: WeakKeyDictionary[Any, Callable[[Any, Optimizer], None]] = WeakKeyDictionary()
_stock: Callable[..., Any] | None = None


def hear_skips(who: Any, told: Callable[[Any, Optimizer], None]) -> None:
    """Have `told(who, optimizer)` called for every step left out, until `stop_hearing`; `who` is
    not kept alive.
    """
    global _stock
    with _lock:
        _listeners[who] = told
        if _stock is None and hasattr(GradScaler, _METHOD):
            _stock = getattr(GradScaler, _METHOD)
            setattr(GradScaler, _METHOD, _maybe_step)


def stop_hearing(who: Any) -> None:
    """Undo `hear_skips`; nothing if that has been done."""
    global _stock
    with _lock:
        _listeners.pop(who, None)
        if not _listeners and _stock is not None:
            setattr(GradScaler, _METHOD, _stock)
            _stock = None


def _maybe_step(
    self: GradScaler, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """GradScaler's own decision, and the listeners told where it was against the step."""
    stock = _stock
    assert stock is not None
    skipped = any(float(found) for found in state["found_inf_per_device"].values())
    result = stock(self, optimizer, state, *args, **kwargs)
    if skipped:
        for who, told in list(_listeners.items()):
            told(who, optimizer)
    return result
