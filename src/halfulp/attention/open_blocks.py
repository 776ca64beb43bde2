"""The `with halfulp.patch():` blocks that are open, which of them a call belongs to, and what each
has caught.

A block belongs to the context that entered it, a thread or an asyncio task, and to nothing else: it
is asked whether it is still open, so that one that is closed late, out of order or in another
thread leaves nothing behind.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from halfulp import ops
from halfulp.recipes import kernel_recipe

# Frames between whoever calls attention and its count.
_BETWEEN = (__file__.rpartition("/")[0], f"{torch.__path__[0]}/_dynamo")


@dataclass(frozen=True, order=True)
class Call:
    """Where attention was called, by which function, and what ran it."""

    site: str  # "path/file.py:12 in forward"
    function: str  # "scaled_dot_product_attention", "flash_attn_func", …
    backend: str  # "cpu", "triton", "torch"; "stock" where halfulp could not take the call,
    # "refused" where it raised


class Patched:
    """What a block of `halfulp.patch()` caught, filled while it is open; print it.

    Calls inside of compiled code run without Python and are not counted.
    """

    def __init__(self, recipe: str, backend: str | None, strict: bool) -> None:
        self.recipe, self.backend, self.strict = recipe, backend, strict
        self.open = True
        self.compiled = False  # whether compiled code was traced, or may have run, under it
        self._seen: Counter[tuple[str, int, str, str, str]] = Counter()
        self._said: set[str] = set()
        self._lock = threading.Lock()

    @property
    def calls(self) -> dict[Call, int]:
        """How often attention was called, by call site, function and backend."""
        with self._lock:
            seen = dict(self._seen)
        return {
            Call(f"{file}:{line} in {where}", function, backend): count
            for (file, line, where, function, backend), count in sorted(seen.items())
        }

    def __str__(self) -> str:
        calls = self.calls
        caught = sum(n for call, n in calls.items() if call.backend not in ("stock", "refused"))
        head = f"halfulp.patch(): {caught} of {sum(calls.values())} attention calls ran halfulp's"
        more = ", and compiled code, which is not counted" if self.compiled else ""
        lines = [f"  {n} × {c.function} by {c.backend} at {c.site}" for c, n in calls.items()]
        return "\n".join([head + more, *lines])

    def ran(self, function: str, backend: str) -> None:
        """Count a call of the frame outside of PyTorch's stand-ins."""
        key = (*_site(), function, backend)
        with self._lock:
            self._seen[key] += 1

    def as_stock(self, function: str, why: str) -> None:
        """Count a call that the stock function takes; warn once for each reason.

        Raises:
            ValueError: the block is strict.
        """
        file, line, where = _site()
        said = f"{function} at {file}:{line} in {where} ran as stock inside halfulp.patch(): {why}"
        if self.strict:
            raise ValueError(said.replace("ran as stock inside", "past strict"))
        self.ran(function, "stock")
        if why not in self._said:
            self._said.add(why)
            warnings.warn(said, RuntimeWarning, stacklevel=4)

    def caught_nothing(self) -> bool:
        """Whether no call at all was seen."""
        return not self._seen and not self.compiled


_stack: ContextVar[tuple[Patched, ...]] = ContextVar("halfulp_patch", default=())
_lock = threading.Lock()
_open: list[Patched] = []  # of all contexts, in the order they entered
newest: tuple[str, str | None] | None = None  # of `_open`, as compiled code can watch it
_traced: set[tuple[str, str | None]] = set()  # choices that compiled code was made for


def enter(block: Patched) -> bool:
    """Open a block here; tell whether it is the only one."""
    with _lock:
        _open.append(block)
        _renew()
        first = len(_open) == 1
    # those that were closed in another thread or task are still on this context's stack
    _stack.set((*_still_open(), block))
    block.compiled = (block.recipe, block.backend) in _traced
    return first


def leave(block: Patched) -> bool:
    """Close a block, wherever it was entered; tell whether it was the last."""
    with _lock:
        block.open = False
        _open.remove(block)
        _renew()
        last = not _open
    _stack.set(_still_open())
    return last


def current() -> Patched | None:
    """The innermost open block of this context; in a thread of the backward pass, the one that was
    entered last anywhere.
    """
    for block in reversed(_stack.get()):
        if block.open:
            return block
    # autograd's own threads inherit no context; that a backward pass runs is all that they tell
    if _open and torch._C._current_graph_task_id() != -1:
        with _lock:
            return _open[-1] if _open else None
    return None


@contextmanager
def pinned(block: Patched) -> Iterator[None]:
    """Have a block's choice once more here, whether it is open or not."""
    again = Patched(block.recipe, block.backend, block.strict)
    # one count: what is recomputed is told with the block that it belongs to
    again._seen, again._said, again._lock = block._seen, block._said, block._lock
    token = _stack.set((*_stack.get(), again))
    try:
        yield
    finally:
        again.open = False
        _stack.reset(token)


def choice(newest: tuple[str, str | None] | None) -> tuple[str, str | None] | None:  # noqa: ARG001
    """Recipe and backend of `current`, for compiled code, which is traced again when `newest` is
    another.
    """
    block = current()
    if block is None:
        return None
    block.compiled = True
    _traced.add((block.recipe, block.backend))
    return block.recipe, block.backend


def compiled_past(newest: tuple[str, str | None] | None, function: str) -> None:  # noqa: ARG001
    """Say, where code is compiled, that a function in it runs as stock."""
    block = current()
    if block is not None:
        block.as_stock(function, "it is compiled as a part of other code")


# What torch.compiler.assume_constant_result does, which would import the compiler: a compiled
# function keeps the choice that it was traced under for as long as what it watches is the same, the
# patched function and `newest`.
for _asked in (choice, compiled_past):
    setattr(_asked, "_dynamo_marked_constant", True)  # noqa: B010  # mypy knows no such attribute


class _Excused(threading.local):
    """Whether stock attention runs beside halfulp's, for weights that are shown."""

    on = False


excused = _Excused()


def check(recipe: str, backend: str | None) -> None:
    """Raise ValueError for a recipe or a backend that does not exist."""
    kernel_recipe(recipe)
    if backend is not None and backend not in ops.BACKENDS:
        raise ValueError(f"backend={backend!r}: accepted are None, {', '.join(ops.BACKENDS)}")


def _still_open() -> tuple[Patched, ...]:
    return tuple(block for block in _stack.get() if block.open)


def _renew() -> None:
    global newest
    newest = (_open[-1].recipe, _open[-1].backend) if _open else None


def _site() -> tuple[str, int, str]:
    """File, line and function of whoever called."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
