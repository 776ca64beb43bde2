"""Rounding to any scalar format, one rounding per value and none hidden.

Around a value the numbers of a format are equally spaced, and the spacing is a power of two read
off the value's exponent bits. Scaling by it is exact, so the only rounding is the one asked for,
whatever the mode.

A tensor on the CPU is walked in pieces that stay in the second-level cache and below the size at
which torch starts its thread pool. Eager operations then run at cache speed, and never wait for a
core that another process holds. For the same reason torch's round, floor, ceil and trunc are
avoided: they start threads at 2**11 numbers. Constants of the inner loop are tensors, since
wrapping a Python number takes a third of the time of an operation on a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from halfulp.formats.counter import counters, uniform
from halfulp.formats.format import Format, Rounding

CHUNK: Final = 2**15


@dataclass(frozen=True)
class _Container:
    """The dtype that values are kept in."""

    integer: torch.dtype  # of the same width
    exponent_mask: Tensor
    sign_mask: Tensor
    mantissa_bits: int
    min_exponent: int
    max_exponent: int


def _container(integer: torch.dtype, exponent_bits: int, mantissa_bits: int) -> _Container:
    mask = torch.tensor(((1 << exponent_bits) - 1) << mantissa_bits, dtype=integer, device="cpu")
    sign = torch.tensor(torch.iinfo(integer).min, dtype=integer, device="cpu")
    max_exponent = (1 << (exponent_bits - 1)) - 1
    return _Container(integer, mask, sign, mantissa_bits, 1 - max_exponent, max_exponent)


_CONTAINERS: Final = {
    torch.float32: _container(torch.int32, 8, 23),
    torch.float64: _container(torch.int64, 11, 52),
}


@dataclass(frozen=True)
class _Plan:
    """The constants of one format in one container, worked out once."""

    lowest: float  # binades below this one share its spacing
    highest: float  # binades above this one, whose numbers end beyond max anyway, share its spacing
    spacing: float  # relative to the power of two below the value
    far: float  # a magnitude, in spacings, that is beyond max in every binade
    # Adding and subtracting 1.5 * 2**(container's mantissa bits) rounds a scaled number to an
    # integer, ties to even.
    by_addition: bool  # whether the format leaves the two bits that this takes
    # x + shift * binade - shift * binade does it without scaling, if no exponent is too large
    shift: float | None
    # Multiplying by these in turn makes infinities of exactly the values beyond max. None: the
    # policy is another.
    stretch: tuple[float, ...] | None


@lru_cache(maxsize=256)
def _plan(fmt: Format, dtype: torch.dtype, rounding: Rounding) -> _Plan:
    container = _CONTAINERS[dtype]
    spare = container.mantissa_bits - fmt.mantissa_bits
    room = container.max_exponent - fmt.max_exponent
    to_even = rounding == "nearest_even" and fmt.mantissa_bits > 0
    # The directed modes may have to stop at max instead; stochastic rounding may step beyond it
    # like the nearest modes.
    stretchable = (
        fmt.overflow == "infinity"
        and fmt.max_exponent > 0
        and rounding not in ("up", "down", "toward_zero")
    )
    return _Plan(
        lowest=fmt.min_normal,
        highest=2.0**fmt.max_exponent,
        spacing=2.0**-fmt.mantissa_bits,
        far=2.0 ** (fmt.mantissa_bits + 2),
        by_addition=spare >= 2,
        shift=1.5 * 2.0**spare if to_even and room >= spare >= 2 else None,
        stretch=((2.0**room, 2.0**-room) if room else ()) if stretchable else None,
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
    """Return 2**floor(log2 |x|) for normal x, 0 for zeros and subnormals, inf for infinities and
    NaN.
    """
    container = _CONTAINERS[x.dtype]
    return (x.view(container.integer) & container.exponent_mask).view(x.dtype)


def round_general(x: Tensor, fmt: Format, rounding: Rounding, seed: int, offset: int) -> Tensor:
    """Return x (contiguous, float32 or float64) rounded to fmt, a new contiguous tensor of the same
    shape and dtype.
    """
    if x.numel() == 0:
        return x.clone()
    if not fits_container(fmt, x.dtype):
        return round_general(x.double(), fmt, rounding, seed, offset).to(x.dtype)
    container, plan = _CONTAINERS[x.dtype], _plan(fmt, x.dtype, rounding)
    constants = (1.5 * 2.0**container.mantissa_bits, plan.spacing, *(plan.stretch or ()))
    integer, spacing, *stretch = (
        torch.full((), value, dtype=x.dtype, device="cpu") for value in constants
    )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pieces = -(-x.numel() // CHUNK) if x.device.type == "cpu" else 1
    size = -(-x.numel() // pieces)
    scratch = torch.empty(size, dtype=x.dtype, device=x.device)
    steps = counters(size, x.device) if rounding == "stochastic" else None
    for part, y in zip(
        torch.chunk(x.view(-1), pieces), torch.chunk(out.view(-1), pieces), strict=True
    ):
        unit = scratch if part.numel() == size else scratch[: part.numel()]
        bits, unit_bits = part.view(container.integer), unit.view(container.integer)
        torch.bitwise_and(bits, container.exponent_mask, out=unit_bits)
        unit.clamp_(plan.lowest, plan.highest)
        if plan.shift is not None:
            torch.add(part, unit, alpha=plan.shift, out=y).sub_(unit, alpha=plan.shift)
        elif rounding == "nearest_even" and fmt.mantissa_bits > 0:
            torch.div(part, unit.mul_(spacing), out=y)
            y = y.add_(integer).sub_(integer) if plan.by_addition else y.round_()
            y.mul_(unit)
        elif rounding in ("up", "down"):
            _round_directed(part, unit.mul_(spacing), y, plan.far, rounding)
        else:
            chance = uniform(seed, offset, steps[: part.numel()]) if steps is not None else None
            _round_magnitude(part, unit.mul_(spacing), y, plan.far, fmt, rounding, chance)
        # A zero lost its sign on the way, and a magnitude never had it.
        y.view(container.integer).bitwise_or_(
            torch.bitwise_and(bits, container.sign_mask, out=unit_bits)
        )
        if not fmt.subnormals:
            y.mul_(torch.ge(y.abs(), fmt.min_normal, out=unit))
        for factor in stretch:
            y.mul_(factor)
        if plan.stretch is None:
            _apply_overflow(part, y, fmt, rounding)
        offset += part.numel()
    return out


def _round_directed(x: Tensor, unit: Tensor, y: Tensor, far: float, rounding: Rounding) -> None:
    """Write x rounded up or down into y; an infinity becomes a large number."""
    rest = torch.div(x, unit, out=y).clamp_(-far, far).frac()
    y.sub_(rest).mul_(unit)
    # Seen from x itself: where the spacing exceeds one, the quotient of a tiny number may have
    # underflowed.
    torch.sub(x, y, out=rest)
    if rounding == "up":
        y.addcmul_(torch.gt(rest, 0.0, out=rest), unit)
    else:
        y.addcmul_(torch.lt(rest, 0.0, out=rest), unit, value=-1.0)


def _round_magnitude(
    x: Tensor,
    unit: Tensor,
    y: Tensor,
    far: float,
    fmt: Format,
    rounding: Rounding,
    chance: Tensor | None,
) -> None:
    """Write |x| rounded into y by the modes that treat both signs alike; an infinity becomes a
    large number.
    """
    rest = torch.div(x, unit, out=y).abs_().clamp_max_(far).frac()
    y.sub_(rest)
    if chance is not None:
        y.add_(rest.copy_(torch.lt(chance, rest.double(), out=chance)))
    elif rounding == "nearest_away":
        y.add_(torch.ge(rest, 0.5, out=rest))
    elif rounding == "nearest_even":
        y.add_((rest > 0.5) | ((rest == 0.5) & _odd_exponent_code(unit, y, fmt)))
    y.mul_(unit)


def _odd_exponent_code(spacing: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Whether the neighbor nearer zero has an odd code, in a format whose code is its exponent
    field alone.

    There the integer y is 1 for every normal number, so its parity says nothing, and a tie goes to
    the even exponent.
    """
    container = _CONTAINERS[spacing.dtype]
    field = (
        (spacing.view(container.integer) >> container.mantissa_bits)
        - container.max_exponent
        + fmt.bias
    )
    return (field & 1).bool() & (y > 0)


def _apply_overflow(x: Tensor, y: Tensor, fmt: Format, rounding: Rounding) -> None:
    """Replace, in y, what lies beyond the largest finite number."""
    if fmt.overflow == "saturate":
        y.clamp_(-fmt.max, fmt.max)
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
