"""Rounding to any scalar format, one rounding per value and none hidden.

Around a value the numbers of a format are equally spaced, and the spacing is a power of two read off the value's
exponent bits. Scaling by it is exact, so the only rounding is the one asked for, whatever the mode.

A tensor on the CPU is walked in pieces that stay in the second-level cache and below the size at which torch starts its
thread pool. Eager operations then run at cache speed, and never wait for a core that another process holds. For the
same reason torch's round, floor, ceil and trunc are avoided: they start threads at 2**11 numbers.
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


@dataclass(frozen=True)
class _Container:
    """The dtype that values are kept in."""

    integer: torch.dtype  # of the same width
    exponent_mask: int
    mantissa_bits: int
    min_exponent: int
    max_exponent: int


_CONTAINERS: Final = {
    torch.float32: _Container(torch.int32, 0x7F80_0000, 23, -126, 127),
    torch.float64: _Container(torch.int64, 0x7FF0_0000_0000_0000, 52, -1022, 1023),
}


@dataclass(frozen=True)
class _Plan:
    """The constants of one format in one container, worked out once."""

    lowest: float  # binades below this one share its spacing
    highest: float  # the last binade with a spacing of its own: one above max, where the container has it
    spacing: float  # relative to the power of two below the value
    integer: float | None  # s + integer - integer is s rounded to an integer, ties to even
    shift: float | None  # x + shift * binade - shift * binade is x rounded likewise, without scaling it first
    far: float  # a magnitude, in spacings, that is beyond max in every binade
    stretch: float | None  # multiplying by it pushes exactly the values beyond max out of the container


@lru_cache(maxsize=256)
def _plan(fmt: Format, dtype: torch.dtype) -> _Plan:
    container = _CONTAINERS[dtype]
    spare = container.mantissa_bits - fmt.mantissa_bits
    room = container.max_exponent - fmt.max_exponent
    return _Plan(
        lowest=fmt.min_normal,
        highest=2.0 ** (fmt.max_exponent + min(room, 1)),
        spacing=2.0**-fmt.mantissa_bits,
        integer=1.5 * 2.0**container.mantissa_bits if spare >= 2 else None,
        shift=1.5 * 2.0**spare if spare >= 2 and room > spare else None,
        far=2.0 ** (fmt.mantissa_bits + 2),
        stretch=2.0**room if fmt.overflow == "infinity" and fmt.max_exponent > 0 else None,
    )


def fits_container(fmt: Format, dtype: torch.dtype) -> bool:
    """Whether every step of rounding to fmt stays inside the range of dtype."""
    container = _CONTAINERS[dtype]
    return (
        fmt.min_exponent >= container.min_exponent
        and fmt.max_exponent <= container.max_exponent
        and fmt.mantissa_bits <= container.mantissa_bits
    )


def power_of_two_below(x: Tensor) -> Tensor:
    """Return 2**floor(log2 |x|) for normal x, 0 for zeros and subnormals, inf for infinities and NaN."""
    container = _CONTAINERS[x.dtype]
    return (x.view(container.integer) & container.exponent_mask).view(x.dtype)


def round_general(x: Tensor, fmt: Format, rounding: Rounding, seed: int, offset: int) -> Tensor:
    """Return x (contiguous, float32 or float64, detached) rounded to fmt, a new contiguous tensor of the same dtype."""
    if not fits_container(fmt, x.dtype):
        return round_general(x.double(), fmt, rounding, seed, offset).to(x.dtype)
    if x.numel() == 0:
        return x.clone()
    container, plan = _CONTAINERS[x.dtype], _plan(fmt, x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = CHUNK if x.device.type == "cpu" else x.numel()
    scratch = torch.empty(min(size, x.numel()), dtype=x.dtype, device=x.device)
    integers = scratch.view(container.integer)
    start = 0
    for part, y in zip(torch.split(x.view(-1), size), torch.split(out.view(-1), size), strict=True):
        if part.numel() < scratch.numel():
            scratch, integers = scratch[: part.numel()], integers[: part.numel()]
        torch.bitwise_and(part.view(container.integer), container.exponent_mask, out=integers)
        binade = scratch.clamp_(plan.lowest, plan.highest)
        if rounding == "nearest_even" and fmt.mantissa_bits > 0:
            _round_to_even(part, binade, y, plan)
        elif rounding in ("up", "down"):
            _round_directed(part, binade, y, plan, rounding)
        else:
            _round_magnitude(part, binade, y, plan, fmt, rounding, seed, offset + start)
        torch.copysign(y, part, out=y)
        if not fmt.subnormals:
            y.mul_(torch.ge(y.abs(), fmt.min_normal, out=scratch))
        _apply_overflow(part, y, plan, fmt, rounding)
        start += part.numel()
    return out


def _round_to_even(x: Tensor, binade: Tensor, y: Tensor, plan: _Plan) -> None:
    """Write x rounded to the nearest neighbor, ties to even, into y; a zero may have the wrong sign."""
    if plan.shift is not None:
        torch.add(x, binade, alpha=plan.shift, out=y).sub_(binade, alpha=plan.shift)
        return
    spacing = binade.mul_(plan.spacing)
    torch.div(x, spacing, out=y)
    if plan.integer is not None:
        y.add_(plan.integer).sub_(plan.integer)
    else:
        y.round_()
    y.mul_(spacing)


def _round_directed(x: Tensor, binade: Tensor, y: Tensor, plan: _Plan, rounding: Rounding) -> None:
    """Write x rounded up or down into y; a zero may have the wrong sign, and an infinity becomes a large number."""
    spacing = binade.mul_(plan.spacing)
    rest = torch.div(x, spacing, out=y).clamp_(-plan.far, plan.far).frac()
    y.sub_(rest).mul_(spacing)
    # Seen from x itself: where the spacing exceeds one, the quotient of a tiny number may have underflowed.
    torch.sub(x, y, out=rest)
    if rounding == "up":
        y.addcmul_(torch.gt(rest, 0.0, out=rest), spacing)
    else:
        y.addcmul_(torch.lt(rest, 0.0, out=rest), spacing, value=-1.0)


def _round_magnitude(
    x: Tensor, binade: Tensor, y: Tensor, plan: _Plan, fmt: Format, rounding: Rounding, seed: int, offset: int
) -> None:
    """Write |x| rounded into y by the modes that treat both signs alike; an infinity becomes a large number."""
    spacing = binade.mul_(plan.spacing)
    torch.div(x, spacing, out=y).abs_().clamp_max_(plan.far)
    rest = y.frac()
    y.sub_(rest)
    if rounding == "nearest_away":
        y.add_(torch.ge(rest, 0.5, out=rest))
    elif rounding == "stochastic":
        y.add_(uniform(seed, offset, x.numel(), x.device) < rest)
    elif rounding == "nearest_even":
        y.add_((rest > 0.5) | ((rest == 0.5) & _odd_exponent_code(spacing, y, fmt)))
    y.mul_(spacing)


def _odd_exponent_code(spacing: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Whether the neighbor nearer zero has an odd code, in a format whose code is its exponent field alone.

    There the integer y is 1 for every normal number, so its parity says nothing, and a tie goes to the even exponent.
    """
    container = _CONTAINERS[spacing.dtype]
    field = (spacing.view(container.integer) >> container.mantissa_bits) - container.max_exponent + fmt.bias
    return (field & 1).bool() & (y > 0)


def _apply_overflow(x: Tensor, y: Tensor, plan: _Plan, fmt: Format, rounding: Rounding) -> None:
    """Replace, in y, what lies beyond the largest finite number."""
    if fmt.overflow == "saturate":
        y.clamp_(-fmt.max, fmt.max)
        return
    if plan.stretch is not None and rounding not in ("up", "down", "toward_zero"):
        if plan.stretch != 1.0:
            y.mul_(plan.stretch).mul_(1.0 / plan.stretch)
        return
    if y.device.type == "cpu":
        smallest, largest = torch.aminmax(y)
        if smallest >= -fmt.max and largest <= fmt.max:
            return
    beyond = torch.inf if fmt.overflow == "infinity" else torch.nan
    y.masked_fill_(y > fmt.max, fmt.max if rounding in ("toward_zero", "down") else beyond)
    y.masked_fill_(y < -fmt.max, -fmt.max if rounding in ("toward_zero", "up") else -beyond)
    infinite = x.isinf()
    if fmt.specials == "ieee":
        torch.where(infinite, x, y, out=y)
    else:
        y.masked_fill_(infinite, torch.nan)
