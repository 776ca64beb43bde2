"""Rounding to any scalar format, one rounding per value and none hidden.

A value is divided by the format's spacing around it, rounded to an integer and multiplied back. The spacing is a power
of two read off the exponent bits, so both scalings are exact and the only rounding is the one asked for, whatever the
mode. A tensor on the CPU is walked in pieces that stay in the second-level cache and below the size at which torch
starts its thread pool: eager operations on 2**15 numbers run at about the speed of one pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from halfulp.formats.counter import uniform
from halfulp.formats.format import Format, Rounding

CHUNK: Final = 2**15

_INT: Final = {torch.float32: torch.int32, torch.float64: torch.int64}
_EXPONENT_MASK: Final = {torch.float32: 0x7F80_0000, torch.float64: 0x7FF0_0000_0000_0000}
_MIN_EXPONENT: Final = {torch.float32: -126, torch.float64: -1022}
_MAX_EXPONENT: Final = {torch.float32: 127, torch.float64: 1023}
_MANTISSA_BITS: Final = {torch.float32: 23, torch.float64: 52}


@dataclass(frozen=True)
class _Plan:
    """The constants of one format in one container dtype, worked out once."""

    mask: int  # exponent bits of the container
    lowest: float  # binades below this one share its spacing
    highest: float  # the last binade that needs a spacing of its own: one above max, where the container has it
    spacing: float  # spacing relative to the power of two below the value
    stretch: float | None  # multiplying by it pushes exactly the values beyond max out of the container


@lru_cache(maxsize=256)
def _plan(fmt: Format, dtype: torch.dtype) -> _Plan:
    top = _MAX_EXPONENT[dtype]
    stretch = 2.0 ** (top - fmt.max_exponent) if fmt.overflow == "infinity" and fmt.max_exponent > 0 else None
    return _Plan(
        mask=_EXPONENT_MASK[dtype],
        lowest=fmt.min_normal,
        highest=2.0 ** min(fmt.max_exponent + 1, top),
        spacing=2.0**-fmt.mantissa_bits,
        stretch=stretch,
    )


def fits_container(fmt: Format, dtype: torch.dtype) -> bool:
    """Whether every step of rounding to fmt stays inside the range of dtype."""
    return (
        fmt.min_exponent >= _MIN_EXPONENT[dtype]
        and fmt.max_exponent <= _MAX_EXPONENT[dtype]
        and fmt.mantissa_bits <= _MANTISSA_BITS[dtype]
    )


def round_general(x: Tensor, fmt: Format, rounding: Rounding, seed: int, offset: int) -> Tensor:
    """Return x (contiguous, float32 or float64, detached) rounded to fmt, a new contiguous tensor of the same dtype."""
    if not fits_container(fmt, x.dtype):
        return round_general(x.double(), fmt, rounding, seed, offset).to(x.dtype)
    plan = _plan(fmt, x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat, flat_out = x.view(-1), out.view(-1)
    size = CHUNK if x.device.type == "cpu" else max(flat.numel(), 1)
    scratch = torch.empty(min(size, flat.numel()), dtype=x.dtype, device=x.device)
    integers = scratch.view(_INT[x.dtype])
    start = 0
    for part, y in zip(torch.split(flat, size), torch.split(flat_out, size), strict=True):
        count = part.numel()
        if count < scratch.numel():
            scratch, integers = scratch[:count], integers[:count]
        torch.bitwise_and(part.view(integers.dtype), plan.mask, out=integers)
        spacing = scratch.clamp_(plan.lowest, plan.highest).mul_(plan.spacing)
        if rounding == "nearest_even" and fmt.mantissa_bits > 0:
            torch.div(part, spacing, out=y).round_().mul_(spacing)
        elif rounding == "up":
            torch.div(part, spacing, out=y).ceil_().mul_(spacing)
        elif rounding == "down":
            torch.div(part, spacing, out=y).floor_().mul_(spacing)
        else:
            _round_magnitude(part, spacing, y, fmt, rounding, seed, offset + start)
        if not fmt.subnormals:
            y.mul_(y.abs() >= fmt.min_normal)
        _apply_overflow(part, y, fmt, rounding, plan)
        start += count
    return out


def _round_magnitude(
    x: Tensor, spacing: Tensor, y: Tensor, fmt: Format, rounding: Rounding, seed: int, offset: int
) -> None:
    """Write the rounded x into y for the modes that look at the distance to the neighbor nearer zero."""
    distance = torch.div(x, spacing).abs_()
    torch.floor(distance, out=y)
    distance.sub_(y)  # infinity minus itself is NaN, for which every comparison below is false: infinity stays
    if rounding == "nearest_away":
        y.add_(distance >= 0.5)
    elif rounding == "stochastic":
        y.add_(uniform(seed, offset, x.numel(), x.device) < distance)
    elif rounding == "nearest_even":
        y.add_((distance > 0.5) | ((distance == 0.5) & _odd_exponent_code(spacing, y, fmt)))
    torch.copysign(y.mul_(spacing), x, out=y)


def _odd_exponent_code(spacing: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Whether the neighbor nearer zero has an odd code, in a format whose code is its exponent field alone.

    There the integer y is 1 for every normal number, so its parity says nothing, and a tie goes to the even exponent.
    """
    dtype = spacing.dtype
    exponent_field = spacing.view(_INT[dtype]) >> _MANTISSA_BITS[dtype]
    return ((exponent_field + (fmt.bias - _MAX_EXPONENT[dtype])) & 1).bool() & (y >= 1)


def _apply_overflow(x: Tensor, y: Tensor, fmt: Format, rounding: Rounding, plan: _Plan) -> None:
    """Replace, in y, what lies beyond the largest finite number."""
    if fmt.overflow == "saturate":
        y.clamp_(-fmt.max, fmt.max)
        return
    if plan.stretch is not None and rounding not in ("up", "down", "toward_zero"):
        if plan.stretch != 1.0:
            y.mul_(plan.stretch).mul_(1.0 / plan.stretch)
        return
    beyond = torch.inf if fmt.overflow == "infinity" else torch.nan
    above = fmt.max if rounding in ("toward_zero", "down") else beyond
    below = -fmt.max if rounding in ("toward_zero", "up") else -beyond
    y.masked_fill_(y > fmt.max, above)
    y.masked_fill_(y < -fmt.max, below)
    infinite = x.isinf()
    if fmt.specials == "ieee":
        torch.where(infinite, x, y, out=y)
    else:
        y.masked_fill_(infinite, torch.nan)


def power_of_two_below(x: Tensor) -> Tensor:
    """Return 2**floor(log2 |x|) for normal x, 0 for zeros and subnormals, inf for infinities and NaN."""
    return (x.view(_INT[x.dtype]) & _EXPONENT_MASK[x.dtype]).view(x.dtype)
