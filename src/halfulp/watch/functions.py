"""The attention functions that models call, and how their arguments are read.

While somebody taps, each of them is replaced wherever a loaded module holds it by one that asks, in
the calling thread, whether a tapped model is running. Elsewhere it does what it did.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor

from halfulp.attention import attention, attention_varlen, patch
from halfulp.calls import EVERYTHING, Sees, scale_of, sees_of
from halfulp.targets import resolve
from halfulp.targets.form import BHND
from halfulp.targets.signature import Signature, signature_of

_PATCH = sys.modules[patch.__module__]
_SDPA = "query key value attn_mask dropout_p is_causal scale enable_gqa"
_FLASH = (
    "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    " return_attn_probs"
)
ACCEPTED = (
    "F.scaled_dot_product_attention, flash_attn_func, halfulp.attention, and your own in"
    " functions=(...)"
)


@dataclass(frozen=True)
class Asked:
    """What a call asks for beside its operands."""

    scale: float
    sees: Sees = EVERYTHING
    dropout: bool = False
    unseen: str = ""  # why nothing of this call is measured


@dataclass(frozen=True)
class Form:
    """How a function takes its arguments."""

    names: tuple[str, ...]  # by position; the first three are the operands
    heads: int  # where the heads are in them: −3 for [..., H, N, D], −2 for [B, N, H, D]
    # of arguments, query and key as [..., H, N, D]
    read: Callable[[Mapping[str, Any], Tensor, Tensor], Asked]
    casts: bool = False  # its operands to autocast's dtype
    unread: str = ""  # why none of its calls is measured


@dataclass(frozen=True)
class Made:
    """A call of an attention function, as a model makes it."""

    form: Form
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        """What the function returns."""
        return self.function(*self.args, **self.kwargs)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip(self.form.names, self.args, strict=False)) | dict(self.kwargs)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        given = self.arguments
        query, key, value = (given[name] for name in self.form.names[:3])
        return query, key, value

    def on(self, operands: Sequence[Tensor]) -> Made:
        """The same call of other operands."""
        names, count = self.form.names[:3], len(self.args)
        by_name = dict(zip(names[count:], operands[count:], strict=True))
        return replace(
            self, args=(*operands[:count], *self.args[3:]), kwargs={**self.kwargs, **by_name}
        )


Listener: TypeAlias = Callable[[Made], Any]
"""Shown a call in a thread that runs a tapped model; runs it and returns what it returned."""


def _read_sdpa(given: Mapping[str, Any], query: Tensor, key: Tensor) -> Asked:
    lengths = (query.shape[-2], key.shape[-2])
    offset = given.get("causal_offset") or 0
    causal = bool(given.get("is_causal", False))
    sees = sees_of(given.get("attn_mask"), causal, given.get("window"), offset, lengths)
    return Asked(
        scale_of(given.get("scale"), query.shape[-1]),
        replace(sees, mask=None if sees.mask is None else sees.mask.detach()),
        bool(given.get("dropout_p", 0.0)),
        _beyond(given, "softcap", "sinks"),
    )


def _read_flash(given: Mapping[str, Any], query: Tensor, key: Tensor) -> Asked:
    window = tuple(given.get("window_size") or (-1, -1))
    causal, offset = bool(given.get("causal", False)), key.shape[-2] - query.shape[-2]
    return Asked(
        scale_of(given.get("softmax_scale"), query.shape[-1]),
        Sees(causal, None if max(window) < 0 else (window[0], window[1]), offset),
        bool(given.get("dropout_p", 0.0)),
        _beyond(given, "softcap", "alibi_slopes"),
    )


def _beyond(given: Mapping[str, Any], *names: str) -> str:
    """Which of these options is asked for, so that the call is not measured."""
    asked = (x for x in names if isinstance(given.get(x), Tensor) or given.get(x))
    return next((f"{name} is given" for name in asked), "")


def _own_form(function: Callable[..., Any]) -> Form:
    """The form of a function of the user's, whose names for the options may be its own."""
    theirs = Signature.of(function, getattr(function, "__name__", "function"), BHND).names
    ours = {own: name for name, own in theirs.items()}

    def read(given: Mapping[str, Any], query: Tensor, key: Tensor) -> Asked:
        return _read_sdpa({ours.get(name, name): x for name, x in given.items()}, query, key)

    return Form(tuple(signature_of(function).parameters), -3, read)


def functions_named(
    functions: Sequence[Callable[..., Any] | str],
) -> tuple[Callable[..., Any], ...]:
    """The functions to tap beside those that are tapped anyway; names as `halfulp.targets` reads
    them.

    Raises:
        ValueError: a name is not known, or its calls cannot be looked at.
    """
    found = []
    for given in functions:
        if not isinstance(given, str):
            found.append(given)
            continue
        target = resolve(given, "functions")
        if target.missing is not None or target.unseen is not None:
            why = target.missing or target.unseen
            raise ValueError(f"functions={given!r}: {why}; accepted are {ACCEPTED}")
        if target.function is not None:
            found.append(target.function)
    return tuple(found)


_SDPA_FORM = Form(tuple(_SDPA.split()), -3, _read_sdpa, casts=True)
_FLASH_FORM = Form(tuple(_FLASH.split()), -2, _read_flash)
_PACKED_FORM = Form((), -2, _read_flash, unread="its sequences or operands are packed")
_FLEX_FORM = Form((), -3, _read_sdpa, unread="it is FlexAttention, whose masks are functions")

_KNOWN = (
    ("torch.nn.functional", "scaled_dot_product_attention", _SDPA_FORM),
    ("torch.nn.attention.flex_attention", "flex_attention", _FLEX_FORM),
    ("torch.nn.attention.varlen", "varlen_attn", _PACKED_FORM),
    ("flash_attn", "flash_attn_func", _FLASH_FORM),
    ("flash_attn", "flash_attn_varlen_func", _PACKED_FORM),
    ("flash_attn", "flash_attn_qkvpacked_func", _PACKED_FORM),
    ("flash_attn", "flash_attn_kvpacked_func", _PACKED_FORM),
)

_lock = threading.Lock()
# who taps, and which functions beside the known ones
_open: dict[object, tuple[Callable[..., Any], ...]] = {}
_replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # (stock, tapped)
_places: list[tuple[ModuleType, str, Any]] = []  # where they are, and what was there
_looked_at: set[str] = set()
_here = threading.local()


def listen(listener: Listener | None) -> Listener | None:
    """Have calls of this thread shown to a listener; return the one before."""
    before = listening()
    _here.listener = listener
    return before


def listening() -> Listener | None:
    """Who listens in this thread."""
    found: Listener | None = getattr(_here, "listener", None)
    return found


def open_taps(who: object, own: Sequence[Callable[..., Any]] = ()) -> None:
    """Replace the attention functions until `close_taps`."""
    with _lock:
        _take_out()
        if not _open:
            _PATCH.hold()  # so that no patch comes or goes beneath the replacements
        _open[who] = tuple(own)
        _put_in()


def close_taps(who: object) -> None:
    """Undo `open_taps`; nothing if that has been done."""
    with _lock:
        if who not in _open:
            return
        _take_out()
        del _open[who]
        if _open:
            _put_in()
        else:
            _PATCH.release()


def _put_in() -> None:
    forms: dict[int, tuple[Callable[..., Any], Form]] = {}
    for module, name, form in _KNOWN:
        function = getattr(sys.modules.get(module), name, None)
        if function is not None:
            forms[id(function)] = (function, form)
    mine: list[tuple[Callable[..., Any], Form]] = [
        (attention, _SDPA_FORM),
        (attention_varlen, _PACKED_FORM),
    ]
    for function in (function for functions in _open.values() for function in functions):
        mine.append((function, _own_form(function)))
    forms |= {id(function): (function, form) for function, form in mine}
    _replaced.extend((function, _tapped(function, form)) for function, form in forms.values())
    _looked_at.update(sys.modules)
    _exchange({id(stock): tapped for stock, tapped in _replaced}, list(sys.modules.values()))


def _take_out() -> None:
    if not _replaced:
        return
    tapped = {id(tapped): stock for stock, tapped in _replaced}
    for module, name, stock in _places:
        if id(getattr(module, name, None)) in tapped:
            setattr(module, name, stock)
    # a module that was imported meanwhile took the replacements over
    late = [module for name, module in list(sys.modules.items()) if name not in _looked_at]
    _exchange(tapped, late)
    for kept in (_replaced, _places, _looked_at):
        kept.clear()


def _exchange(by_id: Mapping[int, Callable[..., Any]], modules: Sequence[ModuleType]) -> None:
    """halfulp's patch calls its own functions directly."""
    _places.extend(_PATCH.exchange(by_id, modules, (*_PATCH.OWN, __name__)))


def _tapped(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        listener = listen(None)  # what the function calls itself is part of it
        if listener is None:
            return function(*args, **kwargs)
        try:
            return listener(Made(form, function, args, kwargs))
        finally:
            listen(listener)

    return tapped
