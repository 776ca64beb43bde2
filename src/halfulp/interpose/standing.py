"""Which module a torch operation stands in: hooks on every module keep the path, the recomputation
of a checkpoint included, and say which modules hide their operations.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ITSELF = "(model)"
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
Level = tuple[str, nn.Module, bool]  # path, module, whether it hides its operations
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def module_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module by its path, without what DDP, FSDP, compile and checkpoint wrappers add."""
    for path, module in model.named_modules():
        kept, parent = [], model
        for part in path.split(".") if path else []:
            if not (part in _WRAPPERS and _wraps(parent)):
                kept.append(part)
            parent = getattr(parent, part)
        yield ".".join(kept) or ITSELF, module


def _wraps(module: nn.Module) -> bool:
    """Whether a module is of a class of PyTorch's; FSDP2 makes classes of its own out of them."""
    bases = (base for base in type(module).__mro__ if base is not nn.Module)
    return any(base.__module__.startswith("torch.") for base in bases)


def hides(module: nn.Module) -> str:
    """Why the operations of a module are not torch functions that Python calls; "" if they are."""
    kind = type(module).__name__
    if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled (torch.compile)"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript"
    if kind == "DataParallel":
        return "DataParallel runs it in other threads"
    return ""


def fused(module: nn.Module) -> str:
    """Why this call of a module may run in one piece of C++; "" if it does not."""
    fast = isinstance(module, _FUSED) and not module.training
    if not fast or not torch.backends.mha.get_fastpath_enabled():
        return ""
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return ""
    return (
        "it may take PyTorch's fused encoder path"
        " (torch.backends.mha.set_fastpath_enabled(False) keeps it from that)"
    )


class Standing:
    """Where each thread is in a model.

    Args:
        model: whose modules get hooks until `close`.
        hidden: called with True before, and with False after a module that hides its operations.
    """

    def __init__(self, model: nn.Module, hidden: Callable[[bool], None]) -> None:
        self.unseen: dict[str, str] = {}
        self.classes: dict[str, str] = {}
        self._hidden = hidden
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []
        inside: set[int] = set()
        for path, module in module_names(model):
            if id(module) in inside:
                continue
            self.classes.setdefault(path, type(module).__name__)
            if why := hides(module):
                self.unseen[path] = why
                inside.update(map(id, module.modules()))
            self._hook(path, module, why)

    def close(self) -> None:
        """Take the hooks out."""
        while self._undo:
            self._undo.pop()()

    @property
    def stack(self) -> list[Level]:
        """The modules that this thread is in, the innermost last."""
        found: list[Level] = self._local.__dict__.setdefault("stack", [])
        return found

    def next_order(self, path: str, name: str) -> int:
        """How many operations of that name this module has called in this pass before."""
        counts = self._counts
        counts[path, name] += 1
        return counts[path, name] - 1

    @property
    def _counts(self) -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = self._local.__dict__.setdefault("counts", Counter())
        return found

    @property
    def recomputes(self) -> bool:
        """Whether this thread runs a checkpoint's forward pass again."""
        return bool(self._local.__dict__.get("again", False))

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a checkpoint runs again in the backward pass, standing where it stands now."""
        # copies: when it is run again the pass has gone on
        stack, counts = list(self.stack), Counter(self._counts)

        def rerun(*args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                return function(*args, **kwargs)
            with self._placed(stack, counts):
                return function(*args, **kwargs)

        return rerun

    @contextmanager
    def _placed(self, stack: list[Level], counts: Counter[tuple[str, str]]) -> Iterator[None]:
        here = self._local.__dict__
        before = {name: here.get(name) for name in ("stack", "counts", "again")}
        here.update(stack=list(stack), counts=Counter(counts), again=True)
        try:
            yield
        finally:
            here.clear()
            here.update({name: value for name, value in before.items() if value is not None})

    def _hook(self, path: str, module: nn.Module, why: str) -> None:
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is not None:  # such a module calls no hooks but those it was compiled with

            def quietly(*args: Any, **kwargs: Any) -> Any:
                self._hidden(True)
                try:
                    return compiled(*args, **kwargs)
                finally:
                    self._hidden(False)

            module._compiled_call_impl = quietly
            self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))
            return

        def enter(module: nn.Module, _args: Any) -> None:
            # a new pass of the model; what a checkpoint makes again keeps the numbers that it had
            if not self.stack and not in_backward():
                self._counts.clear()
            # nn.MultiheadAttention in a fused encoder layer, say, which has shut the mode already
            already = any(hidden for _, _, hidden in self.stack)
            now = "" if already else why or fused(module)
            if now:
                self.unseen[path] = now
            self.stack.append((path, module, bool(now)))
            if now:
                self._hidden(True)

        def leave(module: nn.Module, _args: Any, _result: Any) -> None:
            # nothing was entered where a hook before ours has failed
            entered = bool(self.stack) and self.stack[-1][1] is module
            if entered and self.stack.pop()[2]:
                self._hidden(False)

        first = module.register_forward_pre_hook(enter, prepend=True)
        # always_call: also where the forward pass raises, or the module would stay on the stack
        last = module.register_forward_hook(leave, always_call=True)
        self._undo += [first.remove, last.remove]


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
