"""How one quantity that was read off a kernel differs from what it should be: where, by what
factor, in how many bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfulp.reconstruct.ranges import ranges
from halfulp.reconstruct.sums_read import BITS

OFF = 1.8  # times the spread that rounding makes: from there on a quantity differs
HELD = 0.9  # share of what differs that a place must hold
FITTED = 0.85  # share of it that a fit must explain


@dataclass(frozen=True)
class Unlike:
    """How one quantity differs from what it should be."""

    text: str  # empty where it does not
    # right, head, tail, rows, zero, factor, row-factor, column-factor, bits, noise, hidden
    kind: str
    size: float = 0.0  # rms of the difference, of the quantity's
    bits: int = 0  # of the mantissas, where they are fewer than the dtype's
    where: str = ""  # " in queries 3-9 of 64"
    inside: Tensor | None = field(default=None, compare=False, repr=False)  # which elements
    # the kind, wherever it is: zero, factor, row-factor, column-factor, bits, noise
    how: str = ""
    of: str = ""  # what the rows or columns are called that hold it

    @property
    def right(self) -> bool:
        """Whether it is what it should be."""
        return self.kind == "right"


RIGHT = Unlike("", "right")


def unlike(
    x: Tensor,
    exact: Tensor,
    sigma: Tensor,
    dtype: torch.dtype,
    of: tuple[str, str] = ("queries", "keys"),
) -> Unlike:
    """How `x` `[B, H, R, C]` differs from the exact one, where rounding makes an error of `sigma`;
    `of` is what its rows and columns are called.
    """
    usable = (sigma > 0) & x.isfinite() & exact.isfinite()
    x, exact = (torch.where(usable, t, 0.0) for t in (x, exact))
    weight = torch.where(usable, 1 / sigma.clamp_min(1e-300), 0.0)
    z = ((x - exact) * weight).square()
    count = usable.double()
    if float(z.sum()) < OFF**2 * float(count.sum().clamp_min(1)):
        # a place so small that it does not count among all
        small = place_of(z, count, of, least=30.0)
        return small or RIGHT
    size = math.sqrt(float((x - exact).square().sum() / exact.square().sum().clamp_min(1e-300)))
    place = place_of(z, count, of)
    where, kind = ("", "") if place is None else (place.text, place.kind)
    told, how = _fitted(x, exact, weight, float(z.sum()))
    bits = mantissa_bits(x)
    if how == "noise" and 0 < bits < BITS[dtype]:
        told, how = f"comes in {bits} bits", "bits"
    if how == "noise":
        told = f"is off by {100 * size:.2g} %"
    inside = None if place is None else place.inside
    bits = bits if bits < BITS[dtype] else 0
    return Unlike(f"{told}{where}", kind or how, size, bits, where, inside, how)


def place_of(z: Tensor, count: Tensor, of: tuple[str, str], least: float = OFF**2) -> Unlike | None:
    """Few heads, rows or columns that hold what differs, where the others are right."""

    def few(dims: tuple[int, ...]) -> Tensor | None:
        excess, every = (z - count).sum(dims), count.sum(dims)
        bad = z.sum(dims) > least * every.clamp_min(1)
        most = HELD * float(excess.clamp_min(0).sum())
        held = bool(bad.any()) and float(excess[bad].sum()) > most
        return bad.nonzero() if held and 2 * int(bad.sum()) <= int((every > 0).sum()) else None

    found = few((2, 3))
    if found is not None:
        heads = [f"({b}, {h})" for b, h in found.tolist()]
        more = " and others" * (len(heads) > 3)
        inside = torch.zeros_like(z, dtype=torch.bool)
        inside[found[:, 0], found[:, 1]] = True
        text = f" in heads (sequence, head) {', '.join(heads[:3])}{more}"
        return Unlike(text, "head", inside=inside)
    for dims, name in (((0, 1, 3), of[0]), ((0, 1, 2), of[1])):
        found = few(dims)
        if found is not None:
            some, n = found.flatten(), z.shape[6 - sum(dims)]
            last = int(some[-1]) == n - 1 and len(some) == n - int(some[0])
            at = torch.zeros(n, dtype=torch.bool)
            at[some] = True
            inside = (at[:, None] if 2 not in dims else at).expand(z.shape)
            kind = "tail" if last else "rows"
            return Unlike(f" in {name} {ranges(some)} of {n}", kind, inside=inside, of=name)
    return None


def _fitted(x: Tensor, exact: Tensor, weight: Tensor, total: float) -> tuple[str, str]:
    """One factor, or one for each row or column, that explains what differs."""
    u, v = x * weight, exact * weight
    for dims, told, kind in (
        ((-1, -2, -3, -4), "", "factor"),
        ((-1,), "is off by a factor in each row", "row-factor"),
        ((-2,), "is off by a factor in each column", "column-factor"),
    ):
        along = (u * v).sum(dims, keepdim=True)
        factor = along / v.square().sum(dims, keepdim=True).clamp_min(1e-300)
        left = float((u - factor * v).square().sum())
        if left < (1 - FITTED) * total:
            if kind == "factor":
                f = float(factor)
                zero = abs(f) < 1e-6
                return ("is 0", "zero") if zero else (f"is {f:.4g} × what it should be", kind)
            return told, kind
    return "", "noise"


def mantissa_bits(x: Tensor) -> int:
    """The bits that all but one in fifty of the numbers need, the first counted."""
    numbers = x[(x != 0) & x.isfinite()].double().abs()
    if len(numbers) < 32:
        return 0
    fraction, _ = torch.frexp(numbers)
    for bits in range(1, 24):
        scaled = fraction * 2.0**bits
        if float((scaled == scaled.round()).double().mean()) > 0.98:
            return bits
    return 24
