"""The door to the native library: plain C behind ctypes (sources and specification: native/), and
its structures, whose sizes are held to the library's when it is loaded.

It is built with the package where a C++ compiler was there. Whoever calls into it checks before the
call everything that could make it read beyond a tensor.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

Isa = Literal["portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
ISAS: tuple[str, ...] = get_args(Isa)
BEST_ISA = -1  # in place of a number: the best that this machine has
_ABI = 5
_TYPES: dict[str, Any] = {
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "w": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "p": ctypes.c_void_p,
}


def _fields(*lines: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure, a line for neighbors of one type: its letter in `_TYPES`, then their
    names.
    """
    words = (line.split() for line in lines)
    return tuple((name, _TYPES[letter]) for letter, *names in words for name in names)


class CTensor(ctypes.Structure):
    """`[batch, heads, rows, width]`: strides in elements, the last one is 1."""

    _fields_ = _fields("p data", "l batch head row")


class CMatrix(ctypes.Structure):
    """A matrix in a batch: strides in elements."""

    _fields_ = _fields("p data", "l batch row column")


class CFormat(ctypes.Structure):
    """A scalar format that lies within the container."""

    _fields_ = _fields(
        "i active rounding overflow infinities subnormals mantissa_bits min_exponent bias", "d max"
    )


class CCall(ctypes.Structure):
    """One call of attention."""

    _fields_ = (
        *_fields(
            "i isa dtype recipe threads",
            "l batch heads key_heads n_query n_key d dv left right offset",
            "f scale",
            "i chunks mask_kind",
            "f softcap",
            "u drop_below",
            "f kept_scale",
            "w seed",
            "l sequences",
            "p query_ends key_ends seeds",
            "l stat_batch stat_head",
        ),
        ("mask_shape", ctypes.c_int64 * 4),
        *((name, CTensor) for name in ("query", "key", "value", "grad_out", "mask")),
        *((name, CTensor) for name in ("out", "grad_query", "grad_key", "grad_value")),
        *_fields("p sinks residual lse row_max row_sum own_lse grad_lse grad_sinks grad_mask"),
    )


class CEmulation(ctypes.Structure):
    """One emulated call."""

    _fields_ = (
        *_fields(
            "i isa threads algorithm reserved",
            "l batch heads n_query n_key d dv block_query block_key",
            "i bounded_below bounded_above",
            "l least greatest",
        ),
        ("mask", CTensor),
        *_fields(
            "i mask_kind",
            "f mask_factor score_factor gradient_scale",
            "i base2 split shift unconditional",
            "f beta gamma tie_tolerance offset",
            "i row_sum_rounded row_sum_exact",
            "f weights_scale row_sum_floor",
            "i weights_rounded scale_at",
            "p formats query key value out row_max row_sum exact_row_sum largest",
            "p grad_out shifts divisor value_divisor delta",
            "p grad_query grad_key grad_value summed_delta",
        ),
    )


# By the name that native/halfulp.h gives them after "halfulp_".
_STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "tensor": CTensor,
    "matrix": CMatrix,
    "format": CFormat,
    "call": CCall,
    "emulation": CEmulation,
}


@lru_cache(maxsize=1)
def _found() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    name = "libhalfulp.dylib" if sys.platform == "darwin" else "libhalfulp.so"
    file = Path(__file__).with_name(name)
    if not file.is_file():
        return (
            "the native library was not built: no C++ compiler was found when halfulp was installed"
        )
    try:
        opened = ctypes.CDLL(str(file))
        abi = opened.halfulp_abi()
    except (OSError, AttributeError) as error:
        return f"the native library does not load: {error}"
    if abi != _ABI:
        return (
            f"the native library speaks version {abi} of its interface, this halfulp {_ABI}:"
            " install halfulp again"
        )
    opened.halfulp_size.restype = ctypes.c_int64
    for name, structure in _STRUCTURES.items():
        size = opened.halfulp_size(name.encode())
        if size != ctypes.sizeof(structure):
            return (
                f"the native library's halfulp_{name} has {size} bytes, this halfulp's"
                f" {ctypes.sizeof(structure)}: install halfulp again"
            )
    return opened


def missing() -> str | None:
    """Why there is no native library here, in words; None where there is one."""
    found = _found()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """The loaded library; ValueError, with the reason, where there is none."""
    found = _found()
    if isinstance(found, str):
        raise ValueError(found)
    return found


@lru_cache(maxsize=64)
def function(name: str, arguments: str, result: type | None = None) -> Callable[..., Any]:
    """One function of the library: a letter of `_TYPES` an argument; a pointer is an integer, such
    as `ctypes.addressof` a structure.

    Raises ValueError where there is no library.
    """
    found = library()[name]
    found.argtypes = [_TYPES[letter] for letter in arguments]
    found.restype = result
    return found


def run(name: str, call: CCall | CEmulation) -> None:
    """Have one of the library's functions compute a call; raises MemoryError where it finds no
    memory.
    """
    if function(name, "p", ctypes.c_int32)(ctypes.addressof(call)):
        raise MemoryError(
            f"{name}: no memory for a call of {call.n_query} queries and {call.n_key} keys"
        )


def python_functions(*objects: Any) -> tuple[Callable[..., Any], ...]:
    """The library's functions that Python calls without ctypes (native/python.cpp); where there are
    none, such that answer False, by which a call is not for them.
    """
    import torch

    try:
        # PyDLL keeps the interpreter's lock, which whatever touches Python objects needs
        make = ctypes.PyDLL(library()._name).halfulp_python
        make.argtypes, make.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.py_object
        made: tuple[Callable[..., Any], ...] = make(objects, os.fsencode(torch._C.__file__))
    except (ValueError, AttributeError):  # no library, or none that finds what it needs
        return (lambda *_: False,) * 5
    return made


def best_isa() -> Isa:
    """The fastest instruction set that this machine and the library share; ValueError without a
    library.
    """
    name: Isa = ISAS[library().halfulp_best_isa()]
    return name


def isa_number(isa: Isa | None) -> int:
    """The library's number for an instruction set, None for the best; ValueError for one that this
    machine lacks.
    """
    best = library().halfulp_best_isa()
    if isa is not None and (isa not in ISAS or ISAS.index(isa) > best):
        raise ValueError(f"isa={isa!r}: accepted here are {', '.join(ISAS[: best + 1])}")
    return int(best) if isa is None else ISAS.index(isa)
