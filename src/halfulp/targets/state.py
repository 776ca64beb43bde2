"""What a kernel may leave changed in the process that calls it, noticed and put back.

A kernel that turns a switch of torch makes every later one another kernel: an audit of what was not
named. So each call ends as it began, and the report says what had to be put back.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import math
import operator
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils import _python_dispatch

from halfulp.runs.threads import as_outside


@dataclass(frozen=True)
class Setting:
    """One thing that a process has, as a value that can be compared."""

    what: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


@contextlib.contextmanager
def as_before(device: torch.device, *, grad: bool) -> Iterator[list[str]]:
    """Put back what the block changes; what that was is in the list when the block is left.

    The block runs outside anybody's autocast and inference mode, in grad mode as asked, and on the
    threads that the caller of an audit has.
    """
    changed: list[str] = []
    off = torch.autocast(device.type, enabled=False)
    # in this order
    with as_outside(), torch.inference_mode(False), torch.set_grad_enabled(grad), off:
        # looking at all of this takes 0.7 ms a call (docs/log.md), so that every call can have it
        settings = [*SETTINGS, *_of_device(device)]
        before = [setting.read() for setting in settings]
        functions = [(owner, vars(owner).copy()) for owner in _OWNERS]
        try:
            yield changed
        finally:
            if torch.is_inference_mode_enabled():
                changed.append("inference mode")
            for setting, value in zip(settings, before, strict=True):
                if setting.read() != value:
                    changed.append(setting.what)
                    setting.write(value)
            changed += _put_back(functions)


def _put_back(functions: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    """Undo what was put in the place of functions; new names are none, since modules load late."""

    def is_wrapper(now: Any, function: Any) -> bool:
        """Whether torch.compile, which does so when it is first loaded, has wrapped a function."""
        inside = getattr(now, "__wrapped__", None) is function
        # inside torch's own files alone: somebody else's wrapper may change what the function does
        own = getattr(getattr(now, "__code__", None), "co_filename", "")
        return bool(inside and own.startswith(torch.__path__[0]))

    replaced = []
    for owner, before in functions:
        now = vars(owner)
        # thousands of names after every call, nearly always the same objects
        if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
            continue
        for name, function in before.items():
            current = now.get(name)
            if current is function or not callable(function):
                continue
            if not is_wrapper(current, function):
                replaced.append(f"{owner.__name__}.{name}")
                setattr(owner, name, function)
    return replaced


_OWNERS = (builtins, math, torch, torch.nn.functional, torch.Tensor)
"""Whose functions are looked at."""


def _random() -> tuple[Any, ...]:
    return random.getstate()


def _torch_random() -> bytes:
    # settings are compared by !=, which of two tensors is a tensor
    return torch.get_rng_state().numpy().tobytes()


def _set_torch_random(state: bytes) -> None:
    torch.set_rng_state(_state_tensor(state))


def _state_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _numpy_random() -> tuple[Any, ...]:
    numpy = sys.modules["numpy"]  # torch has loaded it
    # equality of bytes is one answer, an array's is one an element
    kind, keys, *rest = numpy.random.get_state()
    return (kind, keys.tobytes(), *rest)


def _set_numpy_random(state: tuple[Any, ...]) -> None:
    numpy = sys.modules["numpy"]
    kind, keys, *rest = state
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


def _flushes() -> bool:
    # torch can set this and not read it: half the smallest normal number tells
    smallest = torch.finfo(torch.float64).tiny
    return smallest / 2 == 0.0


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _modes() -> list[Any]:
    return [*_function_modes(), *_python_dispatch._get_current_dispatch_mode_stack()]


def _function_modes() -> list[Any]:
    return _get_current_function_mode_stack()  # type: ignore[no-untyped-call,no-any-return]


def _set_modes(before: list[Any]) -> None:
    """Leave modes that were entered; one that was left cannot be entered again for its owner."""
    while (stack := _function_modes()) and stack[-1] not in before:
        _pop_mode()  # type: ignore[no-untyped-call]
    while (inner := _python_dispatch._get_current_dispatch_mode_stack()) and (
        inner[-1] not in before
    ):
        _python_dispatch._pop_mode()


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return ""


def _set_folder(before: str) -> None:
    with contextlib.suppress(OSError):
        os.chdir(before)


def _set_path(before: tuple[str, ...]) -> None:
    # in place, since others hold this very list
    sys.path[:] = before


def _set_streams(before: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = before


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _set_autocast(before: tuple[bool, ...]) -> None:
    for kind, on in zip(("cpu", "cuda"), before, strict=True):
        torch.set_autocast_enabled(kind, on)


def _set_collecting(before: bool) -> None:
    (gc.enable if before else gc.disable)()


def _flag(owner: Any, name: str) -> Setting:
    """An attribute that is a switch; one that this build of torch cannot read is left alone."""

    def read() -> Any:
        try:
            return getattr(owner, name)
        except (AttributeError, RuntimeError):
            return None

    where = owner.__name__ if hasattr(owner, "__name__") else f"torch.backends {name}"
    return Setting(f"{where}.{name}", read, partial(setattr, owner, name))


def _backend(name: str) -> Setting:
    read = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
    return Setting(
        f"the {name} backend of attention", read, getattr(torch.backends.cuda, f"enable_{name}_sdp")
    )


SETTINGS: tuple[Setting, ...] = (
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("the default device", _default_device, torch.set_default_device),
    Setting("the modes that torch is in", _modes, _set_modes),
    Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting(
        "float32 precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    Setting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    Setting("autocast", _autocast, _set_autocast),
    Setting("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    Setting("denormal numbers", _flushes, torch.set_flush_denormal),
    *(_backend(name) for name in ("flash", "mem_efficient", "math", "cudnn")),
    Setting("oneDNN", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    Setting(
        "nn.MultiheadAttention's fast path",
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    Setting("torch's random numbers", _torch_random, _set_torch_random),
    Setting("Python's random numbers", _random, random.setstate),
    Setting("numpy's random numbers", _numpy_random, _set_numpy_random),
    Setting("the working folder", _folder, _set_folder),
    Setting("sys.path", lambda: tuple(sys.path), _set_path),
    Setting("sys.stdout", lambda: (sys.stdout, sys.stderr), _set_streams),
    Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("garbage collection", gc.isenabled, _set_collecting),
)
"""In the order in which they are put back: a default device is a mode too."""


def _of_device(device: torch.device) -> tuple[Setting, ...]:
    if device.type != "cuda":
        return ()

    def read() -> bytes:
        return torch.cuda.get_rng_state(device).numpy().tobytes()

    def write(state: bytes) -> None:
        torch.cuda.set_rng_state(_state_tensor(state), device)

    return (Setting("the GPU's random numbers", read, write),)
