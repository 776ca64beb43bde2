"""Rounding in the native library: one pass over the memory for any scalar format, bit for bit what
`general` gives; of numbers, and of sums as they run.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from halfulp.formats.format import Format, Overflow, Rounding
from halfulp.formats.general import fits_container
from halfulp.native import BEST_ISA, CFormat, function, missing

_ROUNDINGS: dict[Rounding, int] = {
    "nearest_even": 0,
    "nearest_away": 1,
    "toward_zero": 2,
    "up": 3,
    "down": 4,
}
_OVERFLOWS: dict[Overflow, int] = {"infinity": 0, "saturate": 1, "nan": 2}


@lru_cache(maxsize=1024)
def c_format(fmt: Format, rounding: Rounding, dtype: torch.dtype) -> CFormat | None:
    """The format as the library reads it; None where it does not round so: stochastically, or
    beyond the container.
    """
    if rounding not in _ROUNDINGS or not fits_container(fmt, dtype):
        return None
    policies = (
        _ROUNDINGS[rounding],
        _OVERFLOWS[fmt.overflow],
        fmt.specials == "ieee",
        fmt.subnormals,
    )
    return CFormat(1, *policies, fmt.mantissa_bits, fmt.min_exponent, fmt.bias, fmt.max)


def rounded(x: Tensor, fmt: Format, rounding: Rounding, isa: int = BEST_ISA) -> Tensor | None:
    """`x` (float32 or float64) rounded, contiguous; None where the library is missing or does not
    take the call.
    """
    return _called("halfulp_round", x, fmt, rounding, isa, x.numel())


def running_sums(x: Tensor, fmt: Format, isa: int = BEST_ISA) -> Tensor | None:
    """The sums of x `[terms, ...]` from 0 on, each rounded after every term; None as above."""
    size = (x.shape[0], x[0].numel()) if len(x) else (0, 0)
    return _called("halfulp_running", x, fmt, fmt.rounding, isa, *size)


def _called(
    name: str, x: Tensor, fmt: Format, rounding: Rounding, isa: int, *size: int
) -> Tensor | None:
    # a subclass may have no memory of its own to read from
    if type(x) is not Tensor or x.device.type != "cpu" or missing() is not None:
        return None
    spec = c_format(fmt, rounding, x.dtype)
    if spec is None:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    call = function(name, "iiippp" + "l" * len(size))
    wide, pointers = (
        x.dtype is torch.float64,
        (ctypes.addressof(spec), x.data_ptr(), out.data_ptr()),
    )
    call(isa, torch.get_num_threads(), wide, *pointers, *size)
    return out
