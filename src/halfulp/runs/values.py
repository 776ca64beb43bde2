"""Values as plain data beside their tensors, and back by their type: for files that run nothing.

A value is made of dataclasses, tensors, arrays, numbers, texts, tuples, lists and dictionaries. Its
type says all that the plain data does not, so that what is read is what was written, or nothing.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


def encoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return plain data, in which a tensor is its number in `tensors`; raises TypeError for what
    has no such form.
    """
    if isinstance(value, np.ndarray):
        return encoded(torch.from_numpy(value), tensors)
    if isinstance(value, Tensor):
        number, x = str(len(tensors)), value.detach()
        # in the order that it has in memory, which a product's bits may depend on
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        # clones, since safetensors takes no two names of one memory
        tensors[number] = x.permute(order).contiguous().clone()
        return [number, order]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.init]
        return {f.name: encoded(getattr(value, f.name), tensors) for f in fields}
    if isinstance(value, Mapping):
        return {_key(name): encoded(x, tensors) for name, x in value.items()}
    if isinstance(value, tuple | list):
        return [encoded(x, tensors) for x in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{type(value).__name__}: not one of a value's types")
    return value


def decoded(kind: type[T], plain: Any, tensors: Mapping[str, Tensor]) -> T | None:
    """Return what `encoded` was given, by its type; None for what is no such value."""
    try:
        value: T = _reader(cast("Any", kind))(plain, tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        return None
    return value


def _key(name: Any) -> str:
    if not isinstance(name, str | int):
        raise TypeError(f"{name!r}: not one of a key's types")
    return str(name)


_Reader = Callable[[Any, Mapping[str, Tensor]], Any]
"""Makes a value of plain data and tensors, or raises."""


@lru_cache(maxsize=512)
def _reader(kind: Any) -> _Reader:
    """What reads a type, which is looked into once: an entry holds thousands of values."""
    if kind is Any:
        return lambda plain, _: plain
    if kind is Tensor or kind is np.ndarray:
        return _tensor if kind is Tensor else lambda plain, tensors: _tensor(plain, tensors).numpy()
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(kind)
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(inside)
    if origin is Literal:
        return partial(_only, inside)
    if origin in (dict, Mapping):
        key, each = int if inside[0] is int else str, _reader(inside[1])
        return lambda plain, tensors: {key(n): each(x, tensors) for n, x in plain.items()}
    if origin in (list, Sequence):
        each = _reader(inside[0])
        return lambda plain, tensors: [each(x, tensors) for x in plain]
    if origin is tuple:
        return _of_tuple(inside)
    # as a field of floats may hold an integer
    return partial(_plain, (float, int) if kind is float else (kind,))


def _tensor(plain: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    number, order = plain
    if order == [0]:
        return tensors[number]
    return tensors[number].permute([order.index(i) for i in range(len(order))])


def _of_dataclass(kind: Any) -> _Reader:
    fields: dict[str, _Reader] = {}

    def read(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
        if not fields:  # not before, since a type may hold itself
            hints = get_type_hints(kind)
            fields.update(
                {f.name: _reader(hints[f.name]) for f in dataclasses.fields(kind) if f.init}
            )
        if plain.keys() != fields.keys():
            raise ValueError(f"fields {sorted(plain)}: expected {sorted(fields)}")
        return kind(**{name: reader(plain[name], tensors) for name, reader in fields.items()})

    return read


def _of_tuple(inside: Sequence[Any]) -> _Reader:
    endless = inside[-1] is Ellipsis
    readers = [_reader(each) for each in inside[:1] if endless] or list(map(_reader, inside))

    def read(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
        each = readers * len(plain) if endless else readers
        return tuple(reader(x, tensors) for reader, x in zip(each, plain, strict=True))

    return read


def _one_of(kinds: Sequence[Any]) -> _Reader:
    """The first of some types that the plain data has the form of."""
    readers = [_reader(kind) for kind in kinds if kind is not types.NoneType]

    def read(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
        if plain is None and len(readers) < len(kinds):
            return None
        for reader in readers:
            try:
                return reader(plain, tensors)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
        raise ValueError(f"{plain!r}: expected one of {kinds}")

    return read


def _only(accepted: Sequence[Any], plain: Any, _: Mapping[str, Tensor]) -> Any:
    if plain not in accepted:
        raise ValueError(f"{plain!r}: expected one of {accepted}")
    return plain


def _plain(kinds: tuple[type, ...], plain: Any, _: Mapping[str, Tensor]) -> Any:
    if not isinstance(plain, kinds) or (type(plain) is bool and kinds == (float, int)):
        raise TypeError(f"{plain!r}: expected {kinds[0]}")
    return plain
