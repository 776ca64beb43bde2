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
from halfulp.watch.functions import Asked, Form, Listener, Made, close_taps, listen, open_taps
from halfulp.watch.hooks import Hook, Tells

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
            self._handles.append(
                self.model.register_forward_hook(Tells(self._left), always_call=True)
            )

    def _left(self, _args: Any, out: Any) -> None:
        self.reached(ITSELF, out)
        self.leave()

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

    def called(self, name: str, made: Made) -> Any:
        """Run an attention function that the module of this name called."""
        self.reached(name, (made.args, made.kwargs))
        if self._resting:
            return made.run()
        result = self._seen_call(name, made)
        self._graph.known(result)
        return result

    def _seen_call(self, name: str, made: Made) -> Any:
        again = torch._C._current_graph_task_id() != -1
        # what is made again in a backward pass is counted apart, so that its n-th call answers to
        # the n-th
        key = (name, self._counts[again][name])
        self._counts[again][name] += 1
        if again:
            return self._recomputed(key, made)
        call = self._asked(f"{name} ({key[1] + 1})" if key[1] else name, made)
        self.calls[key] = call
        if call.unseen:
            return made.run()
        keeping = _keeping()
        if not torch.is_grad_enabled():  # a reentrant checkpoint, or a part that is not trained
            self._later[key] = call
            return made.run()
        if keeping == "recomputed":
            self._later[key] = call
        return self._run(call, made, keeping)

    def _recomputed(self, key: Key, made: Made) -> Any:
        """Run it in the recomputation of a checkpoint, which the backward pass makes."""
        call = self._later.pop(key, None)
        if call is not None and (key[0], 1) in self.calls:
            # which of them cannot be told
            call.unseen = "called more than once in a pass, and recomputed"
        if call is None or call.unseen:
            return made.run()
        if not call.expected:  # the first pass was made without gradients
            return self._run(call, made, "")
        self._keep(call, made.form, dict(zip(_OPERANDS, made.operands, strict=True)))
        return made.run()

    def _run(self, call: Foreign, made: Made, keeping: str) -> Any:
        """Run a call on views of its operands, and look at what comes back."""
        # a hook on a view sees what this call gives back; on x it would see the sum over all that
        # use x
        views = [x.view_as(x) if x.requires_grad else x for x in made.operands]
        result = made.on(views).run()
        out = result[0] if isinstance(result, tuple) else result
        if not out.requires_grad:
            call.unseen = "it has no gradient"
            return result
        tensors = dict(zip((*_OPERANDS, "out"), (*views, out), strict=True))
        # where the operands come again out need not; what is packed away is copied
        kept = {"out": out} if keeping == "recomputed" else tensors
        self._keep(call, made.form, kept, copy=bool(keeping))
        given = {f"grad_{name}": x for name, x in tensors.items() if x.requires_grad}
        call.expected = frozenset(given)
        for name, x in given.items():
            x.register_hook(partial(self._came, call, made.form, name))
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

    def _asked(self, name: str, made: Made) -> Foreign:
        """What a call asks for, and whether it can be measured."""
        try:
            why = made.form.unread or _unfit(made.operands)
            return Foreign(name, Asked(1.0), unseen=why) if why else self._read(name, made)
        except Exception as error:  # the function itself judges wrong arguments
            return Foreign(name, Asked(1.0), unseen=_said(error))

    def _read(self, name: str, made: Made) -> Foreign:
        form, (query, key, value) = made.form, made.operands
        if form.heads == -2:
            query, key, value = (x.transpose(-3, -2) for x in (query, key, value))
        asked = form.read(made.arguments, query, key)
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

    def __call__(self, made: Made) -> Any:
        return self.taps.called(self.name, made)


class _Listens(Hook):
    """Shows a module's attention calls to its own listener while its forward pass runs."""

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
    from_checkpoint = getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return "recomputed" if from_checkpoint else "packed"


def _four(x: Tensor) -> Tensor:
    """`[..., N, D]` as `[B, H, N, D]`."""
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x.flatten(0, -4)


def _unfit(operands: Sequence[Any]) -> str:
    """Why operands cannot be looked at at all; empty where they can."""
    if torch._C._are_functorch_transforms_active():
        return "it runs inside a transform of torch.func"
    plain = (
        type(x) in (Tensor, nn.Parameter) and not x.is_nested and x.layout == torch.strided
        for x in operands
    )
    return "" if all(plain) else "its operands are not plain dense tensors"


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
