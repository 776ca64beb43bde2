"""The one door through which a number is put into a low-precision format.

Every experiment in halfulp stands on this step, so it has one meaning: the value as if computed
exactly and rounded once, by the format's own rules. `round_to` picks the quickest way that has
those bits (tests/formats holds them equal): nothing where the format holds the dtype, the native
library, torch's own cast, and the general way for the rest.
"""

from __future__ import annotations

from typing import Final, get_args

import torch
from torch import Tensor

from halfulp.formats import compiled
from halfulp.formats.blocks import BlockFormat, round_blocks
from halfulp.formats.format import Format, Rounding
from halfulp.formats.general import fits_container, power_of_two_below, round_general
from halfulp.formats.names import parse_format

_ROUNDINGS: Final = frozenset(get_args(Rounding))


def round_to(
    x: Tensor,
    fmt: Format | BlockFormat | str,
    *,
    rounding: Rounding | None = None,
    seed: int = 0,
    offset: int = 0,
) -> Tensor:
    """Return x rounded to fmt, kept in x's dtype.

    Each value is rounded once, from float64 too. NaN stays NaN, zeros keep their sign, and
    infinities and what lies beyond the largest number follow `fmt.overflow`. A tie under
    "nearest_even" goes to the even code, which in a format without mantissa bits is the even
    exponent field. A rounded value beyond the range of x's own dtype is infinite.

    Args:
        x: float32 or float64, any shape and strides; never modified.
        fmt: the format or its name, such as "bf16" or "e5m2"; a `BlockFormat` shares scales along
            the last dimension (a scalar is a block of one).
        rounding: instead of the format's own; in a `BlockFormat` it goes for the elements and not
            for the scales.
        seed: of stochastic rounding. Which of the two neighbors a number gets depends on the seed
            and on its position.
        offset: position of x's first element in row-major order, for a tensor that is rounded in
            pieces.

    Returns:
        x itself where `fmt.holds(x.dtype)`, otherwise a new tensor of the same shape and dtype.
        Rounding has no gradient.

    Raises:
        ValueError: x is no tensor of float32 or float64, the format or the rounding is unknown, or
            autograd would record the call.
    """
    _check_dtype(x)
    fmt = _format_of(fmt)
    mode = (
        rounding
        if rounding is not None
        else (fmt.element if isinstance(fmt, BlockFormat) else fmt).rounding
    )
    if mode not in _ROUNDINGS:
        raise ValueError(
            f"rounding={mode!r} is not accepted; accepted: {', '.join(get_args(Rounding))}"
        )
    if fmt.holds(x.dtype):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "x.requires_grad=True is not accepted: rounding has no gradient; accepted: x.detach()"
        )
    if isinstance(fmt, BlockFormat):
        return round_blocks(x, fmt, mode, seed, offset)
    found = compiled.rounded(x, fmt, mode)
    if found is not None:
        return found
    native = _native_dtype(fmt, mode, x.dtype)
    if native is not None:
        y = x.to(native).to(x.dtype)
        return y.clamp_(-fmt.max, fmt.max) if fmt.overflow == "saturate" else y
    return round_general(x.contiguous(), fmt, mode, seed, offset)


def running_sums(x: Tensor, fmt: Format) -> Tensor:
    """Return the sums of x `[terms, ...]` as they run from 0, rounded to fmt after every term."""
    found = compiled.running_sums(x, fmt)
    if found is not None:
        return found
    totals = [torch.zeros_like(x[0])]
    for term in x.unbind():
        totals.append(round_to(totals[-1] + term, fmt))
    return torch.stack(totals)[1:]


def _native_dtype(fmt: Format, rounding: Rounding, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype whose cast from `dtype` is bit-equal, or None.

    float64 goes natively to float32 alone, since torch's casts to narrower types pass through
    float32 and round twice. The 8-bit types are left out: torch decodes them slower than the
    general way rounds.
    """
    if rounding != "nearest_even" or fmt.overflow == "nan":
        return None
    native = fmt.torch_dtype
    accepted = (torch.bfloat16, torch.float16) if dtype is torch.float32 else (torch.float32,)
    return native if native in accepted else None


def ulp(x: Tensor, fmt: Format | str) -> Tensor:
    """Return the spacing of fmt's numbers in the binade of |x|, in x's shape and dtype.

    Below `fmt.min_normal` it is `fmt.min_subnormal`, beyond `fmt.max` that of the top binade, at
    infinities and NaN it is NaN. A spacing too small for x's dtype (a float64 format asked about
    float32 numbers) underflows.

    Args:
        x: float32 or float64, any shape.
        fmt: the format whose spacing is asked for, or its name; not a `BlockFormat`.

    Raises:
        ValueError: x is no tensor of float32 or float64, or fmt is no scalar format.
    """
    _check_dtype(x)
    fmt = _scalar_format(fmt)
    inside = x.detach() if fits_container(fmt, x.dtype) else x.detach().double()
    binade = power_of_two_below(inside.contiguous()).clamp(fmt.min_normal, 2.0**fmt.max_exponent)
    return binade.mul_(2.0**-fmt.mantissa_bits).masked_fill_(~x.isfinite(), torch.nan).to(x.dtype)


def is_representable(x: Tensor, fmt: Format | str) -> Tensor:
    """Return a bool tensor of x's shape: whether fmt holds each value, infinities and NaN included.

    Args:
        x: float32 or float64, any shape.
        fmt: the format or its name; not a `BlockFormat`, where the answer depends on the neighbors.

    Raises:
        ValueError: x is no tensor of float32 or float64, or fmt is no scalar format.
    """
    _check_dtype(x)
    x, fmt = x.detach(), _scalar_format(fmt)
    nan = fmt.specials == "nan_only" or (fmt.specials == "ieee" and fmt.mantissa_bits > 0)
    finite = round_to(x, fmt.with_(overflow="saturate"), rounding="toward_zero") == x
    return torch.where(x.isnan(), nan, torch.where(x.isinf(), fmt.specials == "ieee", finite))


def _format_of(fmt: object) -> Format | BlockFormat:
    if isinstance(fmt, (Format, BlockFormat)):
        return fmt
    if isinstance(fmt, (str, torch.dtype)):
        return parse_format(fmt)
    raise ValueError(f"fmt={fmt!r} is not accepted; accepted: a Format or its name, such as 'bf16'")


def _scalar_format(fmt: object) -> Format:
    found = _format_of(fmt)
    if not isinstance(found, Format):
        raise ValueError(f"fmt={found.name!r} is a block format; accepted: a scalar one")
    return found


def _check_dtype(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x={x!r} is not accepted; accepted: a tensor")
    if x.dtype is not torch.float32 and x.dtype is not torch.float64:
        raise ValueError(
            f"x.dtype={x.dtype} is not accepted; accepted: torch.float32 or torch.float64"
        )
