"""Which kernel runs: the first that fits where none is asked for, and the one that is asked for or
an error.

Kernels are imported when a call could use them. Every one that does not fit says why in words, and
those words are what `explain` shows and what an error repeats.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import cast

from halfulp.calls import Call
from halfulp.kernels.options import Backend
from halfulp.ops import tiled

BACKENDS = ("cpu", "triton", "torch")
_MODULES = {"cpu": "halfulp.kernels.cpu", "triton": "halfulp.kernels.triton_attention"}
_said = set[str]()


class _LastRun(threading.local):
    """Which backend this thread was last given, for those who count what ran."""

    name: str | None = None


last_run = _LastRun()


@dataclass(frozen=True)
class Dispatch:
    """Which backend runs a call, and what speaks against each of the others; printed, it is a
    paragraph.
    """

    backend: str | None  # None: the one that was asked for does not take the call
    asked: str | None
    reasons: dict[str, str]  # candidate → why it is chosen, or why not

    def __str__(self) -> str:
        if self.backend is None:
            head = f"no kernel runs: backend={self.asked!r} does not take these inputs"
        else:
            head = f"{self.backend} runs{', as asked for' if self.asked else ''}"
        return "\n".join([head, *(f"  {name}: {reason}" for name, reason in self.reasons.items())])


def choose(call: Call, recipe: str, backend: str | None, *, mask_gradient: bool = False) -> Backend:
    """The module that runs the call.

    Raises:
        ValueError: the backend asked for does not exist or does not take these inputs. Nothing else
            is run instead.
    """
    if backend is not None:
        reason = why_not(backend, call, recipe, mask_gradient=mask_gradient)
        if reason is not None:
            others = [name for name in BACKENDS if name != backend]
            raise ValueError(
                f"backend={backend!r}: {reason}; accepted are None, {', '.join(map(repr, others))}"
            )
        last_run.name = backend
        return _module(backend)
    for name in _candidates(call):
        if why_not(name, call, recipe, mask_gradient=mask_gradient) is None:
            last_run.name = name
            return _module(name)
        _say_once(name)
    raise AssertionError("the last candidate takes every call")


def explain(
    call: Call, recipe: str, backend: str | None, *, mask_gradient: bool = False
) -> Dispatch:
    """What `choose` would do with the same arguments, and why; raises ValueError for an unknown
    backend only.
    """
    _check_name(backend)
    why = {name: why_not(name, call, recipe, mask_gradient=mask_gradient) for name in BACKENDS}
    wanted = (backend,) if backend is not None else _candidates(call)
    chosen = next((name for name in wanted if why[name] is None), None)
    reasons = {}
    for name, reason in why.items():
        if name == chosen:
            reasons[name] = "runs: " + (
                "asked for" if backend else "the first that takes these inputs"
            )
        elif reason is None:
            reasons[name] = "would take these inputs"
        else:
            reasons[name] = f"not: {reason}"
    return Dispatch(chosen, backend, reasons)


def why_not(name: str, call: Call, recipe: str, *, mask_gradient: bool = False) -> str | None:
    """Why a backend does not take a call, in words; None if it does."""
    _check_name(name)
    # asked before anything is imported: it is what remains where all else is missing
    if name == "torch":
        return None
    if mask_gradient and name == "triton":
        return "it gives no gradient of attn_mask"
    if 0 in (*call.query.shape, *call.key.shape, *call.value.shape):
        return "a tensor is empty"
    try:
        module = _module(name)
    except ImportError as error:
        return f"it is not part of this installation ({error})"
    return module.supports(call, recipe)


def _candidates(call: Call) -> tuple[str, ...]:
    return ("cpu", "torch") if call.query.device.type == "cpu" else ("triton", "torch")


@cache
def _module(name: str) -> Backend:
    return tiled if name == "torch" else cast("Backend", importlib.import_module(_MODULES[name]))


def _check_name(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend={name!r}: accepted are None, {', '.join(map(repr, BACKENDS))}")


def missing(name: str) -> str | None:
    """Why a kernel cannot run on this machine whatever the inputs, such as a library that was never
    built.
    """
    try:
        module = _module(name)
    except ImportError as error:
        return f"it is not part of this installation ({error})"
    told = getattr(module, "missing", None)
    return None if told is None else told()


def _say_once(name: str) -> None:
    """Say that plain PyTorch stands in for a kernel that is missing, once a process and kernel."""
    if name in _said:
        return
    _said.add(name)
    reason = missing(name)
    if reason is not None:
        warnings.warn(
            f"halfulp.attention runs in plain PyTorch, which is slower: the kernel {name!r} is"
            f" missing: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
