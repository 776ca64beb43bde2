"""The door to the native library: plain C behind ctypes (sources and specification: native/).

It is built with the package where a C++ compiler was there. Whoever calls into it checks before the
call everything that could make it read beyond a tensor.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

Isa = Literal["portable", "avx2", "avx512", "avx512_bf16"]
ISAS: tuple[str, ...] = get_args(Isa)
BEST_ISA = -1  # in place of a number: the best that this machine has
_ABI = 3


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


_TYPES: dict[str, Any] = {"i": ctypes.c_int32, "l": ctypes.c_int64, "p": ctypes.c_void_p}


@lru_cache(maxsize=64)
def function(name: str, arguments: str, result: type | None = None) -> Callable[..., Any]:
    """One function of the library: a letter an argument, i for int32, l for int64, p for a pointer
    as an integer.

    Raises ValueError where there is no library.
    """
    found = library()[name]
    found.argtypes = [_TYPES[letter] for letter in arguments]
    found.restype = result
    return found


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
