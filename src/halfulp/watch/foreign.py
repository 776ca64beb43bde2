"""Taps on a model that is not halfulp's own: what its attention was fed, gave and got back in one
training pass.

Hooks on the modules say which of them calls attention. The calls themselves run as they would have:
the taps put views in place of query, key and value, so that what comes back through them is the
gradient of this call alone, and look at gradients without changing them. A call is handed over as
soon as its last gradient is there, in the backward pass, and forgotten: what is held of the others
are views of what autograd holds anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.interpose import ITSELF, module_names
from halfulp.watch.backward_graph import BackwardGraph
from halfulp.watch.functions import Asked, Form, Listener, close_taps, listen, open_taps

_OPERANDS = ("query", "key", "value")
UNANSWERED = "no gradient came back to it"
NAMED_SO = "named like attention, but no call of a known attention function was seen in it"


@dataclass
class Foreign:
    """One attention call of one layer."""

    layer: str  # the path of the module that called; a second call in a pass adds " (2)"
    asked: Asked
    entries: int = 0  # batch entries that are measured
    head_dim: int = 0
    # query, key, value, out `[E, H, N, D]`, and grad_ of each
    tensors: dict[str, Tensor] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()  # gradients that come
    cast: torch.dtype | None = None  # what autocast rounds the operands to
    unseen: str = ""  # why it is not measured
    taken: bool = False


Key = tuple[str, int]
Function = Callable[..., Any]


class Taps:
    """Taps on one training pass of a model, from `open` in its forward pass to `close`.

    Args:
        model: whose attention calls are meant.
        functions: attention functions of its own, called like `F.scaled_dot_product_attention`.
        entries: batch entries to keep of a query and key `[B, H, N, D]`.
        take: called in the backward pass with a call whose gradients are complete; may set
            `unseen`.
    """

    def __init__(
        self,
        model: nn.Module,
        functions: Sequence[Function],
        entries: Callable[[Tensor, Tensor], int],
        take: Callable[[Foreign], None],
    ) -> None:
        self.model, self.functions, self.entries, self.take = model, functions, entries, take
        self.calls: dict[Key, Foreign] = {}
        # whose operands, or all, come when a checkpoint is recomputed
        self._later: dict[Key, Foreign] = {}
        self._counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._handles: list[Any] = []
        self._listening = False
        self._before: Listener | None = None
        self._resting = False
        self._graph = BackwardGraph()
        self._ran: set[str] = set()  # modules named like attention that ran

    @property
    def suspects(self) -> dict[str, str]:
        """Modules that look like attention, and why."""
        return self._graph.found

    @property
    def complete(self) -> bool:
        """Whether every call that can be has been handed over, and one at least."""
        waiting = [call for call in self.calls.values() if not call.unseen]
        return bool(waiting) and all(call.taken for call in waiting)

    def open(self, given: Any, *, leaves: bool = True) -> None:
        """Listen to every module of the model; called when its forward pass begins on what is
        given, at whose end it `leaves` by itself.
        """
        self._graph.known(given)
        open_taps(self, self.functions)
        for name, module in module_names(self.model):
            if module is not self.model:
                self._handles += _hooks(
                    module, _Ear(self, name, "attention" in type(module).__name__.lower())
                )
        self._before, self._listening = listen(_Ear(self, ITSELF, False)), True
        if leaves:
            self._handles.append(self.model.register_forward_hook(_Leaves(self), always_call=True))

    def leave(self) -> None:
        """Stop listening outside the model's modules: its forward pass is over."""
        if self._listening:
            listen(self._before)
            self._listening = False
            self._graph.forget()

    def reached(self, name: str, values: Any) -> None:
        """Values were made in the module of this name, as far as nobody inside of it made them."""
        again = torch._C._current_graph_task_id() != -1 and _keeping() == "recomputed"
        if not self._resting and not again:
            self._graph.reached(name, values)

    def rest(self) -> None:
        """Tap no other pass, and wait for the gradients of this one."""
        self._resting = True
        for call in self._later.values():
            call.unseen = "another pass began before it was recomputed"
        self._later.clear()

    def close(self) -> None:
        """Take everything away; calls that are not complete say so."""
        self.leave()
        self._resting = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        close_taps(self)
        self._graph.forget()
        for call in self.calls.values():
            if not call.taken and not call.unseen:
                call.unseen = UNANSWERED
            call.tensors.clear()
        self._suspect_by_name()

    def _suspect_by_name(self) -> None:
        """Modules called attention that ran, and in which, or around which, nothing was seen; of
        those inside each other the innermost.
        """
        seen = {name for name, _ in self.calls} | set(self.suspects)
        for name in sorted(self._ran):
            answered = any(_inside(other, name) or _inside(name, other) for other in seen)
            if not answered and not any(
                _inside(other, name) for other in self._ran if other != name
            ):
                self.suspects[name] = NAMED_SO

    def _call(
        self,
        name: str,
        form: Form,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run an attention function that the module of this name called."""
        self.reached(name, (args, kwargs))
        result = self._seen_call(name, form, function, args, kwargs)
        if not self._resting:
            self._graph.known(result)
        return result

    def _seen_call(
        self,
        name: str,
        form: Form,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        again = torch._C._current_graph_task_id() != -1
        if self._resting:
            return function(*args, **kwargs)
        key = (name, self._counts[again][name])
        self._counts[again][name] += 1
        if again:
            return self._recomputed(key, form, function, args, kwargs)
        call = self._asked(
            f"{name} ({key[1] + 1})" if key[1] else name, form, form.arguments(args, kwargs)
        )
        self.calls[key] = call
        if call.unseen:
            return function(*args, **kwargs)
        keeping = _keeping()
        if not torch.is_grad_enabled():  # a reentrant checkpoint, or a part that is not trained
            self._later[key] = call
            return function(*args, **kwargs)
        if keeping == "recomputed":
            self._later[key] = call
        return self._run(call, form, function, args, kwargs, keeping)

    def _recomputed(
        self,
        key: Key,
        form: Form,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run it in the recomputation of a checkpoint, which the backward pass makes."""
        call = self._later.pop(key, None)
        if call is not None and (key[0], 1) in self.calls:
            # which of them cannot be told
            call.unseen = "called more than once in a pass, and recomputed"
        if call is None or call.unseen:
            return function(*args, **kwargs)
        if not call.expected:  # the first pass was made without gradients
            return self._run(call, form, function, args, kwargs, "")
        self._keep(
            call,
            form,
            dict(zip(_OPERANDS, _three(form, form.arguments(args, kwargs)), strict=True)),
        )
        return function(*args, **kwargs)

    def _run(
        self,
        call: Foreign,
        form: Form,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keeping: str,
    ) -> Any:
        """Run a call on views of its operands, and look at what comes back."""
        operands = _three(form, form.arguments(args, kwargs))
        views = [x.view_as(x) if x.requires_grad else x for x in operands]
        others = {name: x for name, x in kwargs.items() if name not in form.names[:3]}
        by_name = {
            name: x
            for i, (name, x) in enumerate(zip(form.names, views, strict=False))
            if i >= len(args)
        }
        result = function(*views[: len(args)], *args[3:], **by_name, **others)
        out = result[0] if isinstance(result, tuple) else result
        if not out.requires_grad:
            call.unseen = "it has no gradient"
            return result
        if keeping == "recomputed":  # the operands come again; out need not
            self._keep(call, form, {"out": out}, copy=True)
        else:
            self._keep(
                call,
                form,
                dict(zip((*_OPERANDS, "out"), (*views, out), strict=True)),
                copy=keeping == "packed",
            )
        given = {
            f"grad_{name}": x for name, x in zip((*_OPERANDS, "out"), (*views, out), strict=True)
        }
        call.expected = frozenset(name for name, x in given.items() if x.requires_grad)
        for name in call.expected:
            given[name].register_hook(partial(self._came, call, form, name))
        return result

    def _came(self, call: Foreign, form: Form, name: str, grad: Tensor) -> None:
        """A gradient of a call: it must not be changed, and nothing may fail here."""
        if call.unseen or call.taken:
            return
        try:
            self._keep(call, form, {name: grad}, copy=True)
            if call.expected <= set(call.tensors):
                call.taken = True
                if "query" in call.tensors:
                    self.take(call)
                else:
                    call.unseen = "its checkpoint was not recomputed by a module"
        except Exception as error:  # a lack of memory, first of all
            call.unseen = _said(error)
        if call.unseen or call.taken:
            call.tensors.clear()

    def _asked(self, name: str, form: Form, given: Mapping[str, Any]) -> Foreign:
        """What a call asks for, and whether it can be measured; the function itself judges wrong
        arguments.
        """
        try:
            return self._read(name, form, given)
        except Exception as error:
            return Foreign(name, Asked(1.0), unseen=_said(error))

    def _read(self, name: str, form: Form, given: Mapping[str, Any]) -> Foreign:
        if form.unread:
            return Foreign(name, Asked(1.0), unseen=form.unread)
        query, key, value = _three(form, given)
        if torch._C._are_functorch_transforms_active():
            return Foreign(name, Asked(1.0), unseen="it runs inside a transform of torch.func")
        for x in (query, key, value):
            if type(x) not in (Tensor, nn.Parameter) or x.is_nested or x.layout != torch.strided:
                return Foreign(name, Asked(1.0), unseen="its operands are not plain dense tensors")
        if form.heads == -2:
            query, key, value = (x.transpose(-3, -2) for x in (query, key, value))
        asked = form.read(given, query, key)
        call = Foreign(name, asked, unseen=asked.unseen or _misfit(asked, query, key, value))
        device = query.device.type
        if form.casts and torch.is_autocast_enabled(device) and query.dtype != torch.float64:
            call.cast = torch.get_autocast_dtype(device)
        if not call.unseen:
            call.entries = self.entries(_four(query), _four(key))
            sees = asked.sees.of_entries(slice(call.entries))
            call.asked = replace(asked, sees=sees)
            call.head_dim = query.shape[-1]
        return call

    def _keep(
        self, call: Foreign, form: Form, tensors: Mapping[str, Tensor], *, copy: bool = False
    ) -> None:
        """Keep the measured batch entries as `[E, H, N, D]`, detached: views of what autograd
        keeps, or copies.
        """
        for name, x in tensors.items():
            kept = _four(x.detach().transpose(-3, -2) if form.heads == -2 else x.detach())[
                : call.entries
            ]
            call.tensors[name] = kept.clone() if copy else kept


def _inside(path: str, other: str) -> bool:
    """Whether a module is another one or lies in it."""
    return f"{path}.".startswith(f"{other}.")


class _Ear:
    """Listens in one module."""

    def __init__(self, taps: Taps, name: str, named_so: bool) -> None:
        self.taps, self.name, self.named_so = taps, name, named_so

    def __call__(
        self,
        form: Form,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return self.taps._call(self.name, form, function, args, kwargs)


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


class _Listens(Hook):
    """Has a module's attention calls shown to its own listener while its forward pass runs; before
    it, or after it.
    """

    def __init__(self, ear: _Ear, before: list[Listener | None]) -> None:
        self.ear, self.before = ear, before  # a stack: a module may run inside itself

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, *out: Any) -> None:
        taps = self.ear.taps
        if not out:
            outer = listen(self.ear)
            self.before.append(outer)
            if isinstance(outer, _Ear) and outer.taps is taps:
                taps.reached(outer.name, (args, kwargs))
            if self.ear.named_so:
                taps._ran.add(self.ear.name)
        elif self.before:
            taps.reached(self.ear.name, out)
            listen(self.before.pop())


class _Leaves(Hook):
    """The model's forward pass is over."""

    def __init__(self, taps: Taps) -> None:
        self.taps = taps

    def __call__(self, _module: nn.Module, _args: Any, out: Any) -> None:
        self.taps.reached(ITSELF, out)
        self.taps.leave()


def _hooks(module: nn.Module, ear: _Ear) -> list[Any]:
    hook = _Listens(ear, [])
    return [
        module.register_forward_pre_hook(hook, with_kwargs=True),
        module.register_forward_hook(hook, with_kwargs=True, always_call=True),
    ]


def _said(error: Exception) -> str:
    """An error in a line."""
    line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return line if len(line) <= 120 else f"{line[:119]}…"


def _keeping() -> str:
    """What becomes of a tensor that autograd saves here: "recomputed", "packed" away, or "" where
    it just stays.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return ""
    return (
        "recomputed"
        if getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        else "packed"
    )


def _three(form: Form, given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (given[name] for name in form.names[:3])
    return query, key, value


def _four(x: Tensor) -> Tensor:
    """`[..., N, D]` as `[B, H, N, D]`."""
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x.flatten(0, -4)


def _misfit(asked: Asked, query: Tensor, key: Tensor, value: Tensor) -> str:
    """Why operands `[..., H, N, D]` cannot be measured; empty where they can."""
    if (
        not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
        or min(query.ndim, key.ndim, value.ndim) < 2
    ):
        return "its batch entries are broadcast"
    heads, key_heads = _four(query).shape[1], _four(key).shape[1]
    if key_heads != _four(value).shape[1] or not key_heads or heads % key_heads:
        return "its heads are broadcast"
    if 0 in query.shape or 0 in key.shape:
        return "it is empty"
    if asked.sees.mask is not None and max(asked.sees.mask.ndim, query.ndim) > 4:
        return "its mask has more than 4 dimensions"
    return ""
