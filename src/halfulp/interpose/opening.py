"""`interpose`: every torch operation of a model is seen where it is called, and may be put into
another arithmetic.

A `TorchFunctionMode` stands in Python above autograd and autocast. There `F.linear` is one
operation with the operands that the model handed over; one floor below (a `TorchDispatchMode`) it
is casts, views and `mm`, its backward pass has lost the module, and what replaces it would need a
derivative of its own. What never becomes a torch function in Python is not seen: compiled code,
TorchScript, PyTorch's fused encoder path; `Interposed.unseen` names the modules.
"""

from __future__ import annotations

import fnmatch
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from halfulp.complaints import meant
from halfulp.formats import Format
from halfulp.interpose import another, kinds
from halfulp.interpose.operation import Operation, leaves, mapped, writes
from halfulp.interpose.standing import Standing, in_backward
from halfulp.interpose.whole import reach

Observe = Callable[[Operation, Any], None]
"""Shown an operation and its result, in the thread that calls it; must change neither."""

_NOT_BY_PATH = ("other", "custom", "dropout", "layout")


@dataclass(frozen=True)
class Swap:
    """Which operations get another arithmetic, and which.

    Attributes:
        into: as `another.arithmetic`: "fp32", "fp64", a format's name (results and gradients are
            rounded to it), a kernel or recipe of the kinds, or a function of the `Operation`.
        kinds: of `interpose.KINDS`; none: every kind but "other" and "custom".
        paths: globs of module paths; a path stands for all that is below it. "(model)" is what the
            model's own forward calls, "" what is called outside of it, such as the loss.
        names: of torch functions, such as "rsqrt"; none: every one.
        orders: which of a module's calls of one name in a pass, from 0; none: every one.
        places: as `Operation.place`; none: every one. With places, every kind is chosen.
    """

    into: str | Format | another.Into
    kinds: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("*",)
    names: tuple[str, ...] = ()
    orders: tuple[int, ...] = ()
    places: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in kinds.KINDS:
                accepted = f"accepted are {', '.join(kinds.KINDS)}{meant(kind, kinds.KINDS)}"
                raise ValueError(f"kinds={kind!r}: {accepted}")
        _ = self.run  # so that a name that nothing has is told here

    @cached_property
    def run(self) -> another.Into:
        """What runs in the operation's place."""
        return another.arithmetic(self.into, self.kinds)

    def chooses(self, operation: Operation) -> bool:
        """Whether this operation is among them."""
        if self.places:
            return operation.place in self.places
        named = operation.kind in self.kinds if self.kinds else operation.kind not in _NOT_BY_PATH
        return (
            named
            and (not self.names or operation.name in self.names)
            and (not self.orders or operation.order in self.orders)
            and any(_covers(glob, operation.path) for glob in self.paths)
        )


def _covers(glob: str, path: str) -> bool:
    if glob == "*" or fnmatch.fnmatchcase(path, glob):
        return True
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), glob) for n in range(1, len(parts)))


@dataclass
class Interposed:
    """What an open `interpose` has seen so far."""

    unseen: dict[str, str]  # module path: why its operations are not seen one by one
    classes: dict[str, str]  # module path: the name of its class
    chosen: list[int] = field(default_factory=list)  # by swap: operations that it was put in for
    # operation: why a wider dtype was refused, so that it ran as it is
    refused: dict[str, str] = field(default_factory=dict)

    def check(self, swaps: Sequence[Swap]) -> None:
        """Raise ValueError for a swap that no operation was chosen for."""
        for swap, count in zip(swaps, self.chosen, strict=True):
            if not count:
                raise ValueError(
                    f"{swap} chooses no operation of this model{self.hidden}; accepted are kinds,"
                    " names and paths that `interpose(model, observe=print)` shows"
                )

    @property
    def hidden(self) -> str:
        """What is not seen, as the end of a complaint."""
        return "".join(f"; not seen: {path}, {why}" for path, why in self.unseen.items())


@contextmanager
def interpose(
    model: nn.Module,
    observe: Observe | None = None,
    *,
    before: Callable[[Operation], None] | None = None,
    swaps: Sequence[Swap] = (),
) -> Iterator[Interposed]:
    """See every torch operation of a model in this thread, and put some into another arithmetic.

    With neither observers nor swaps, and with observers that look at detached values, no bit
    changes. Gradients are seen with `result.register_hook` in `observe`. A checkpoint's
    recomputation is seen again (`Operation.recomputed`) and swapped as the first time. Casts, views
    and what the optimizer does: casts are operations of kind "cast", views and the optimizer are
    not seen.

    Args:
        model: its modules carry hooks meanwhile, and give operations their paths.
        observe: shown every operation after it ran, outermost swap included.
        before: shown every operation before it runs (an operation that writes in place destroys
            its operand).
        swaps: the first that chooses an operation runs in its place. An operation that writes into
            an operand is left as it is.

    Yields:
        what was seen: `unseen`, `chosen`, `refused`.

    Raises:
        ValueError: a name in a swap is not known.
    """
    mode = _Mode(model, observe, before, tuple(swaps))
    _hold()
    wholes: list[Callable[[], None]] = []
    try:
        if any(getattr(swap.run, "takes_whole", False) for swap in swaps):
            wholes.extend(reach(model, _whole))
        with mode:
            yield mode.seen
    finally:
        while wholes:
            wholes.pop()()
        mode.standing.close()
        _release()


class _Mode(TorchFunctionMode):
    def __init__(
        self,
        model: nn.Module,
        observe: Observe | None,
        before: Callable[[Operation], None] | None,
        swaps: tuple[Swap, ...],
    ) -> None:
        super().__init__()
        self.standing = Standing(model, self._hide)
        self.seen = Interposed(self.standing.unseen, self.standing.classes, [0] * len(swaps))
        self._observe, self._before, self._swaps = observe, before, swaps
        self._names: dict[Any, str] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = kinds.name_of(func)
        if not name:
            asks = self._swaps and func == _DTYPE and another.is_wide(args[0])
            if asks and (self.standing.stack or not in_backward()):  # the model does, not autograd
                return another.stand_in(args[0])
            return func(*args, **kwargs)
        if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
            return func(*args, **kwargs)
        if name in ("backward", "grad"):
            return _backward(self, func, args, kwargs)
        stack = self.standing.stack
        if not stack and (_optimizing or in_backward()):
            return func(*args, **kwargs)
        kind = kinds.kind_of(name, stack[-1][1] if stack else None, kinds.caller())
        if kind in ("layout", "dropout"):
            return self._moved(kind, func, args, kwargs) if self._swaps else func(*args, **kwargs)
        return self.called(self.operation(kind, name, func, args, kwargs))

    def operation(self, kind: str, name: str, function: Any, args: Any, kwargs: Any) -> Operation:
        """A call of a function where this thread stands."""
        stack, standing = self.standing.stack, self.standing
        path = stack[-1][0] if stack else ""
        order = standing.next_order(path, name)
        return Operation(kind, name, path, order, function, args, kwargs, standing.recomputes)

    def called(self, operation: Operation) -> Any:
        """Run an operation, or what stands for it."""
        if self._before is not None:
            self._before(operation)
        # what is written into an operand has the operand's dtype, whatever computed it
        swap = None if not self._swaps or operation.in_place else self._chosen(operation)
        if swap is not None and getattr(swap.run, "takes_wide", False):
            found = swap.run(operation)
            self.seen.refused |= getattr(swap.run, "refused", {})
        else:
            if self._swaps:
                operation = self._narrowed(operation)
            found = operation.run() if swap is None else swap.run(operation)
        if self._observe is not None and any(x.is_floating_point() for x in leaves(found)):
            self._observe(operation, found)
        return found

    def whole(
        self,
        kind: str,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What is written out by hand, run in one piece if a swap takes it so."""
        operation = self.operation(kind, name, function, args, kwargs)
        swap = next((one for one in self._swaps if one.chooses(operation)), None)
        if swap is None or not getattr(swap.run, "takes_whole", False):
            return function(*args, **kwargs)
        with self.shut():
            return self.called(operation)

    def _chosen(self, operation: Operation) -> Swap | None:
        if not operation.tensors():
            return None
        for i, swap in enumerate(self._swaps):
            if swap.chooses(operation):
                self.seen.chosen[i] += 1
                return swap
        return None

    def _narrowed(self, operation: Operation) -> Operation:
        """The operation as the model means it: wide operands rounded, unless written into."""
        if not any(map(another.is_wide, leaves((operation.args, operation.kwargs)))):
            return operation
        plain = operation.changed(another.expected_by_model)
        if operation.in_place:
            return replace(plain, args=(*operation.args[:1], *plain.args[1:]))
        return plain

    def _moved(
        self, kind: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What only moves numbers leaves wide ones wide, if all are."""
        floats = [x for x in leaves((args, kwargs)) if x.is_floating_point() and x.numel()]
        wide = [x for x in floats if another.is_wide(x)]
        if not wide:
            return func(*args, **kwargs)
        dtypes = {(x.dtype, another.stand_in(x)) for x in floats}
        if writes(func, kwargs):
            return func(*args, **kwargs)
        if kind == "dropout" or len(dtypes) > 1:
            args, kwargs = mapped((args, kwargs), another.expected_by_model)
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        for x in leaves(found):
            if x.dtype == wide[0].dtype:
                another.tag(x, another.stand_in(wide[0]))
        return found

    def rounded(self, tree: Any) -> Any:
        """Results or arguments as the model means them."""
        with self.shut():
            return mapped(tree, another.expected_by_model)

    @contextmanager
    def shut(self) -> Iterator[None]:
        """See nothing of this thread meanwhile."""
        self._hide(True)
        try:
            yield
        finally:
            self._hide(False)

    def _hide(self, now: bool) -> None:
        # a fused path is not taken, and a compiler traces again, where a mode is open
        if now:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            self.__enter__()  # type: ignore[no-untyped-call]


_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_lock = threading.Lock()
_open = 0
_undo: list[Callable[[], None]] = []
_optimizing: list[bool] = []  # while an optimizer makes a step
# Tensor.backward is a torch function itself, and torch shuts the mode around what handles one: a
# checkpoint would be recomputed unseen, and with the model's own arithmetic
_popped = threading.local()  # the mode that handles a backward pass


def _current() -> _Mode | None:
    from torch.overrides import _get_current_function_mode

    found = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return found if isinstance(found, _Mode) else None


def _whole() -> Callable[..., Any] | None:
    mode = _current()
    return None if mode is None or torch.compiler.is_compiling() else mode.whole


def _hold() -> None:
    global _open
    with _lock:
        _open += 1
        _optimizing.clear()
        # the first of those that are open, in any thread, patches torch, and the last one undoes it
        if _open == 1:
            _reach_functions()
            _reach_backward()


def _release() -> None:
    global _open
    with _lock:
        _open -= 1
        while not _open and _undo:
            _undo.pop()()


def _backward(
    mode: _Mode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    before = _popped.__dict__.get("mode")
    _popped.mode = mode
    try:
        return func(*args, **kwargs)
    finally:
        _popped.mode = before


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    # not getattr, which would bind a classmethod to its class
    stock = vars(owner)[name]
    setattr(owner, name, make(stock))
    _undo.append(lambda: setattr(owner, name, stock))


def _reach_functions() -> None:
    """Custom autograd Functions are operations too, seen from outside; checkpoints are not."""
    checkpoint = torch.utils.checkpoint

    def make(stock: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            run = stock.__get__(None, cls)
            mode = _current()
            if mode is None or torch.compiler.is_compiling():
                return run(*args, **kwargs)
            if cls is checkpoint.CheckpointFunction:
                # it takes and gives tensors without what Python noted on them
                again = mode.standing.again(args[0])
                return run(lambda *x: mode.rounded(again(*x)), *mode.rounded(args[1:]), **kwargs)
            stack = mode.standing.stack
            outside = not stack and (_optimizing or in_backward())
            if outside or cls.__module__ == checkpoint.__name__:
                return run(*args, **kwargs)
            kind = "attention" if "attention" in cls.__name__.lower() else "custom"
            operation = mode.operation(kind, cls.__name__, run, args, kwargs)
            with mode.shut():
                return mode.called(operation)

        return classmethod(apply)

    _replace(torch.autograd.Function, "apply", make)


def _reach_backward() -> None:
    """A backward pass runs with the mode open, so that checkpoints are recomputed as they were."""

    def engine(stock: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            mode = _popped.__dict__.get("mode") if _current() is None else None
            if mode is None:
                return stock(*args, **kwargs)
            with mode:
                return stock(*args, **kwargs)

        return run

    def generator(stock: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            mode = _current()
            if mode is None:
                return stock(function, *args, **kwargs)
            dtypes = [another.stand_in(x) for x in leaves((args, kwargs))]

            def noted(*given: Any, **named: Any) -> Any:  # saved tensors come back without notes
                for x, dtype in zip(leaves((given, named)), dtypes, strict=True):
                    another.tag(x, dtype)
                return function(*given, **named)

            return stock(mode.standing.again(noted), *args, **kwargs)

        return run

    _replace(sys.modules["torch.autograd"], "_engine_run_backward", engine)
    _replace(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", generator)
    hooks = (
        register_optimizer_step_pre_hook(lambda *_: _optimizing.append(True)),
        register_optimizer_step_post_hook(lambda *_: _optimizing.clear()),
    )
    _undo.extend(hook.remove for hook in hooks)
