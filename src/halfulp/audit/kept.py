"""What an audit holds a target against, in the cache on disk: dataclasses as plain data beside
their tensors, under a name that says everything their bits depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from halfulp import __version__, native
from halfulp.audit.inputs import Case
from halfulp.runs import cache
from halfulp.runs.machine import describe_machine

_MADE_BY = ("formats", "recipes", "calls", "algorithms", "attention", "audit")
"""The sources that decide a reference's bits; the rest of the package may change without a word."""

T = TypeVar("T")


def name_of(case: Case) -> str:
    """The name of a case's references: the case, the sources, the native library, torch, the
    processor, and the settings of this process that change a sum.
    """
    file = None
    if case.file is not None:
        file = hashlib.sha256(Path(case.file).read_bytes()).hexdigest()
    named = dataclasses.replace(case, file=None)
    settings = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )
    return cache.name_of("references", named, file, *_machine(), settings)


@lru_cache(maxsize=1)
def _machine() -> tuple[str, ...]:
    told = describe_machine()
    library = "none" if native.missing() else native.best_isa()
    known = ("system", "architecture", "processor", "vector_instructions")
    return (
        __version__,
        torch.__version__,
        library,
        _sources(),
        *(str(told[name]) for name in known),
    )


def _sources() -> str:
    """A digest of the sources that make references, and of the library that was built of ours."""
    top = Path(native.__file__).parent
    files = [top / name for name in _MADE_BY if name.endswith(".py")]
    files += [
        f for name in _MADE_BY if not name.endswith(".py") for f in (top / name).rglob("*.py")
    ]
    files += [*top.glob("libhalfulp.*")]
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(hashlib.sha256(file.read_bytes()).digest())
        whole.update(str(file.relative_to(top)).encode())
    return whole.hexdigest()


def read(case: Case, kind: type[T]) -> T | None:
    """What was kept of a case, None where nothing is that has this form."""
    found = cache.read(name_of(case)) if cache.folder() is not None else None
    if found is None:
        return None
    plain, tensors = found
    try:
        value: T = _decoded(kind, plain, tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return value


def write(case: Case, value: Any) -> None:
    """Keep a dataclass of tensors, numbers, texts, tuples, dictionaries and dataclasses."""
    if cache.folder() is not None:
        tensors: dict[str, Tensor] = {}
        plain = _encoded(value, tensors)
        cache.write(name_of(case), plain, tensors)


def _encoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain data, in which a tensor is its number in `tensors`."""
    if isinstance(value, Tensor):
        # clones, since safetensors takes no two names of one memory
        tensors[str(len(tensors))] = value.detach().contiguous().clone()
        return str(len(tensors) - 1)
    if dataclasses.is_dataclass(value):
        return {
            f.name: _encoded(getattr(value, f.name), tensors) for f in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {name: _encoded(x, tensors) for name, x in value.items()}
    if isinstance(value, tuple | list):
        return [_encoded(x, tensors) for x in value]
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


@lru_cache(maxsize=64)
def _fields(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def _decoded(kind: Any, plain: Any, tensors: dict[str, Tensor]) -> Any:
    """What `_encoded` was given, by its type; raises KeyError, TypeError or ValueError for what is
    no such value.
    """
    if kind is Tensor:
        return tensors[plain]
    if dataclasses.is_dataclass(kind):
        known: Any = kind
        fields = _fields(known)
        if plain.keys() != fields.keys():
            raise ValueError(f"fields {sorted(plain)}: expected {sorted(fields)}")
        given = {name: _decoded(hint, plain[name], tensors) for name, hint in fields.items()}
        return known(**given)
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (other,) = (option for option in inside if option is not type(None))
        return None if plain is None else _decoded(other, plain, tensors)
    if origin is dict:
        return {name: _decoded(inside[1], x, tensors) for name, x in plain.items()}
    if origin is tuple:
        kinds = inside[:1] * len(plain) if inside[-1] is Ellipsis else inside
        return tuple(_decoded(k, x, tensors) for k, x in zip(kinds, plain, strict=True))
    if not isinstance(plain, kind):
        raise TypeError(f"{plain!r}: expected {kind}")
    return plain
