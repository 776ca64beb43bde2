"""Rounding in the native library: one pass over the memory for any scalar format, bit for bit what
`general` gives.
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
    # a subclass may have no memory of its own to read from
    if type(x) is not Tensor or x.device.type != "cpu" or missing() is not None:
        return None
    spec = c_format(fmt, rounding, x.dtype)
    if spec is None:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    call = function("halfulp_round", "iiipppl")
    wide, pointers = (
        x.dtype is torch.float64,
        (ctypes.addressof(spec), x.data_ptr(), out.data_ptr()),
    )
    call(isa, torch.get_num_threads(), wide, *pointers, x.numel())
    return out
