"""Values as plain data beside their tensors, and back by their type: for files that run nothing.

A value is made of dataclasses, tensors, arrays, numbers, texts, tuples, lists and dictionaries. Its
type says all that the plain data does not, so that what is read is what was written, or nothing.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
        value: T = _decoded(kind, plain, tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        return None
    return value


def _key(name: Any) -> str:
    if not isinstance(name, str | int):
        raise TypeError(f"{name!r}: not one of a key's types")
    return str(name)


@lru_cache(maxsize=256)
def _fields(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def _decoded(kind: Any, plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """`decoded`, which raises."""
    if kind is Any:
        return plain
    if kind is Tensor or kind is np.ndarray:
        number, order = plain
        x = tensors[number].permute([order.index(i) for i in range(len(order))])
        return x if kind is Tensor else x.numpy()
    if dataclasses.is_dataclass(kind):
        known: Any = kind
        fields = _fields(known)
        if plain.keys() != fields.keys():
            raise ValueError(f"fields {sorted(plain)}: expected {sorted(fields)}")
        return known(**{n: _decoded(hint, plain[n], tensors) for n, hint in fields.items()})
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(inside, plain, tensors)
    if origin is Literal:
        if plain not in inside:
            raise ValueError(f"{plain!r}: expected one of {inside}")
        return plain
    if origin in (dict, Mapping):
        kinds = (inside[0] if inside[0] is int else str, inside[1])
        return {kinds[0](name): _decoded(kinds[1], x, tensors) for name, x in plain.items()}
    if origin in (list, Sequence):
        return [_decoded(inside[0], x, tensors) for x in plain]
    if origin is tuple:
        each = inside[:1] * len(plain) if inside[-1] is Ellipsis else inside
        return tuple(_decoded(k, x, tensors) for k, x in zip(each, plain, strict=True))
    if kind is float and type(plain) is int:  # as a field of floats may hold one
        return plain
    if not isinstance(plain, kind):
        raise TypeError(f"{plain!r}: expected {kind}")
    return plain


def _one_of(kinds: Sequence[Any], plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The first of some types that the plain data has the form of."""
    for kind in kinds:
        try:
            return _decoded(kind, plain, tensors)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    raise ValueError(f"{plain!r}: expected one of {kinds}")
