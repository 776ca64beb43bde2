"""How well one error explains another: shares, cosines and how sure they are, from sums over groups
of rows.

Nothing here knows attention: observed, exact and candidate results are tensors by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

ROWS = 16  # of one head, summed into one group: the unit that a spread is estimated from
NOISE = 3e-3
"""Share of an error that two orders of summing in fp32 leave between kernels of one recipe; below
it no candidate is better than another."""
FLOOR = 2.0**-21  # of a result: an error below that is the order of sums, and explains itself
HARMFUL = 1.25  # times the error without it: what is below is no cause
ONCE = HARMFUL**2  # where one call of all has it, unproven: sound ways differ by 1.26 in one
SOUND = 1.1  # times a model's error: below, nothing is at fault
UNEXPLAINED = 0.3  # share of an error left from which a result is not explained
NEARLY_NONE = 1e-3  # share of an error that a number which was fitted may leave
LEAVES = 4.0  # times stock's error: what a mistake that is the right one leaves is less
WORST = 30.0  # a candidate's residual counts at most so many times the kernel's own error


@dataclass(frozen=True)
class Observed:
    """One result of a kernel on one trial beside the exact value, both float64 of one shape."""

    value: Tensor
    exact: Tensor
    usable: Tensor  # elements where both are finite
    error: Tensor  # value − exact, float32, in groups of rows
    energy: Tensor  # its square, by group
    # the exact value as a sum of two float32, so that a float32 result's error is as precise as
    # float64 would make it, at half the cost
    parts: tuple[Tensor, Tensor]
    all_usable: bool
    floor: float  # the squared error that is none

    @classmethod
    def of(cls, value: Tensor, exact: Tensor, noise: float = 0.0) -> Observed:
        """Compare two tensors `[..., N, D]`, or `[..., N]` of one number a row; a squared error of
        `noise` is none.
        """
        value, exact = value.double(), exact.double()
        if value.ndim == 3:
            value, exact = value.unsqueeze(-1), exact.unsqueeze(-1)
        usable = value.isfinite() & exact.isfinite()
        value, exact = (torch.where(usable, x, 0.0) for x in (value, exact))
        error, high = in_groups((value - exact).float()), exact.float()
        parts = high, (exact - high).float()
        floor = max(noise, FLOOR**2 * float(exact.square().sum()))
        return cls(value, exact, usable, error, squared(error), parts, bool(usable.all()), floor)

    def within(self, mask: Tensor) -> Observed:
        """The same where a mask that broadcasts is not 0."""
        usable = self.usable & (mask != 0)
        error = in_groups(torch.where(usable, self.value - self.exact, 0.0).float())
        return replace(self, usable=usable, error=error, energy=squared(error), all_usable=False)

    @property
    def gone(self) -> Tensor:
        """Rows that are 0 where the exact ones are not, `[B, H, N]`."""
        return (self.value == 0).all(-1) & (self.exact != 0).any(-1)

    @property
    def total(self) -> float:
        """The kernel's squared error."""
        return float(self.energy.sum())

    @property
    def relative(self) -> float:
        """The kernel's error, of the exact value's norm."""
        size = float(self.exact.square().sum())
        return math.sqrt(self.total / size) if size else math.inf if self.total else 0.0

    def against(self, candidate: Tensor) -> Fit:
        """How a candidate's result fits."""
        found = candidate.unsqueeze(-1) if candidate.ndim == 3 else candidate
        if found.shape != self.value.shape:
            # what cannot be computed explains nothing
            return Fit(self.energy, self.energy, self.energy, self.floor)
        if found.dtype == torch.float64:
            other = (found - self.exact).float()
        else:
            other = found - self.parts[0]
            other -= self.parts[1]
        if not self.all_usable:
            other = torch.where(self.usable, other, 0.0)
        if not math.isfinite(float(other.sum())):
            return self._against_broken(other)
        other = in_groups(other)
        return Fit(squared(self.error - other), self.energy, squared(other), self.floor)

    def _against_broken(self, other: Tensor) -> Fit:
        """A candidate that is not finite where the kernel is."""
        broken = ~other.isfinite()
        other, broken = in_groups(torch.where(broken, 0.0, other)), in_groups(broken.float()) > 0
        wrong = self.error.square() * WORST + 1e-30
        residual = torch.where(broken, wrong, (self.error - other).square()).sum(-1).double()
        return Fit(residual, self.energy, squared(other), self.floor)


@dataclass(frozen=True)
class Fit:
    """What a candidate leaves of an error, by group of rows."""

    residual: Tensor
    energy: Tensor  # the kernel's
    other: Tensor  # the candidate's
    floor: float

    @property
    def inner(self) -> Tensor:
        """Inner products of both errors, which the three squares say together."""
        return (self.energy + self.other - self.residual) / 2

    @cached_property
    def left(self) -> float:
        """Share of the squared error that is not explained; 0 where there is no error on either
        side.
        """
        total, residual = float(self.energy.sum()) + self.floor, float(self.residual.sum())
        if total == 0:
            return 0.0 if residual == 0 else WORST
        return min(WORST, residual / total)

    def within_rounding(self, stock: Fit) -> bool:
        """Whether what is left is no more than rounding makes, which is a recipe's error: what
        merely goes along with a mistake leaves more.
        """
        usual = float(stock.other.sum()) + self.floor
        return self.left < NEARLY_NONE or float(self.residual.sum()) < LEAVES**2 * usual

    @property
    def times(self) -> float:
        """The kernel's error over the candidate's."""
        energy, other = float(self.energy.sum()), float(self.other.sum())
        if not other or energy == math.inf:
            return math.inf if energy else 1.0
        return math.sqrt(energy / other)

    @property
    def loss(self) -> float:
        """What a search lowers: halving what is left counts the same at every size."""
        return math.log(self.left + NOISE)

    @property
    def piecewise(self) -> float:
        """The same group by group, their mean: what is right in a part of the rows counts there,
        however wrong the others are.
        """
        total = self.energy + self.floor / max(1, len(self.energy))
        left = (self.residual / total.clamp_min(1e-300)).clamp_max(WORST)
        return float((left[total > 0] + NOISE).log().mean()) if bool((total > 0).any()) else 0.0

    @property
    def cosine(self) -> float:
        """Of the angle between the two errors; 1 where neither errs."""
        size = math.sqrt(float(self.energy.sum()) * float(self.other.sum()))
        if size == 0:
            return 1.0 if float(self.residual.sum()) == 0 else 0.0
        return float(self.inner.sum()) / size


def in_groups(x: Tensor) -> Tensor:
    """`[..., N, D]` as `[groups, ROWS · D]`: a group is `ROWS` rows of one head."""
    n, d = x.shape[-2:]
    if n % ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, -n % ROWS))
    return x.reshape(-1, ROWS * d)


def squared(x: Tensor) -> Tensor:
    """Sums of squares along the last dimension, float64."""
    sums: Tensor = torch.linalg.vecdot(x, x)
    return sums.double()


@dataclass(frozen=True)
class Cosine:
    """A cosine with its standard error, from leaving out one group of rows after the other."""

    value: float
    error: float
    left: float  # share of the squared error that is not explained, every trial counting once
    groups: int

    @classmethod
    def of(cls, fits: list[Fit]) -> Cosine:
        """Over all of one tensor's trials together, each trial's error at norm 1."""
        inner, energy, other = [], [], []
        for fit in fits:
            unit = float(fit.energy.sum()) or 1.0
            inner.append(fit.inner / unit)
            energy.append(fit.energy / unit)
            other.append(fit.other / unit)
        if not fits:
            return cls(math.nan, math.nan, math.nan, 0)
        i, e, o = (torch.cat(x) for x in (inner, energy, other))
        left = sum(min(1.0, fit.left) for fit in fits) / len(fits)
        total, n = float(e.sum()), len(i)
        if total == 0 or float(o.sum()) == 0:
            return cls(float(left == 0), 0.0, left, n)
        without = (i.sum() - i) / ((e.sum() - e) * (o.sum() - o)).clamp_min(1e-300).sqrt()
        spread = math.sqrt((n - 1) / n * float((without - without.mean()).square().sum()))
        value = float(i.sum()) / math.sqrt(total * float(o.sum()))
        return cls(value, spread, left, n)


Fits = Mapping[tuple[str, str], Fit]  # (trial, tensor)


def loss_of(fits: Fits) -> float:
    """Summed over trials and tensors."""
    return sum(fit.loss for fit in fits.values())


def surer(better: Fits, worse: Fits) -> float:
    """By how many standard errors the first fits better, over the groups of rows in which the two
    differ: each counts by (its residual there − here) / their sum, so that no large group decides.
    One group more, in which they are alike, keeps a handful of groups from being sure.
    """
    total, squares = 0.0, 1.0
    for key in better.keys() & worse.keys():
        a, b = better[key].residual, worse[key].residual
        noise = NOISE * better[key].energy  # what fp32 sums leave is no difference
        d = (b - a) / (a + b + 2 * noise).clamp_min(1e-300)
        total += float(d.sum())
        squares += float(d.square().sum())
    return total / math.sqrt(squares)
