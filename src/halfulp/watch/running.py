"""What is kept from one measurement to the next: a sum, counts of signs, and the last few
figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from halfulp.chances import binomial_at_most
from halfulp.watch.curvature import t_value

WINDOW = 20
"""Measurements that a mean and its t value look back on: a run's first steps say little about its
present.
"""


@dataclass
class Running:
    """Figures `[...]` of the measurements so far."""

    count: Tensor  # measurements, int64, one number
    total: Tensor  # sum of all [...] fp64
    positive: Tensor  # measurements above 0 [...], int64
    negative: Tensor
    recent: Tensor  # the last ones [up to WINDOW, ...] fp64, the newest last

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> Running:
        """Before the first measurement."""
        whole, real = (torch.zeros(shape, dtype=dtype) for dtype in (torch.int64, torch.float64))
        return cls(
            torch.zeros((), dtype=torch.int64), real, whole, whole, real.new_zeros((0, *shape))
        )

    def add(self, figures: Tensor) -> None:
        """Count one more measurement."""
        x = figures.detach().double().cpu()
        self.count, self.total = self.count + 1, self.total + x
        self.positive, self.negative = self.positive + (x > 0), self.negative + (x < 0)
        self.recent = torch.cat([self.recent, x[None]])[-WINDOW:]

    @property
    def t(self) -> Tensor:
        """The mean of the last `WINDOW` measurements in standard errors of it; NaN before the third
        measurement.

        Neighboring measurements are alike where they stand close or see the same batch. Their
        correlation ρ, read from the mean squared change, widens the standard error by √((1 + ρ) /
        (1 − ρ)), as in a first-order autoregression.
        """
        n = len(self.recent)
        if n < 3:
            return torch.full_like(self.total, math.nan)
        variance = self.recent.var(0)
        # for lag 1 the mean squared change is 2 (1 − ρ) of the variance; ρ below 0 would narrow the
        # error and is taken as 0
        rho = (1 - self.recent.diff(dim=0).square().mean(0) / (2 * variance)).clamp(0, 1 - 1 / n)
        return self.recent.mean(0) / (variance / n * (1 + rho) / (1 - rho)).sqrt()

    @property
    def sign_p(self) -> Tensor:
        """Two-sided p of the sign test over all measurements: so unequal a split of signs or a
        worse one, were either sign as likely; zeros are left out, and without signs p is 1. It
        takes measurements for independent.
        """
        # a sign test beside t, since it is blind to sizes: e shrinks by orders of magnitude while a
        # run learns, and t over steps pays for that
        signs, fewer = self.positive + self.negative, torch.minimum(self.positive, self.negative)
        counts = zip(fewer.flatten().tolist(), signs.flatten().tolist(), strict=True)
        p = [2 * binomial_at_most(int(count), int(tries)) for count, tries in counts]
        return torch.tensor(p, dtype=torch.float64).clamp_max(1.0).reshape(signs.shape)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The state by "name/field"."""
        return {f"{name}/{field}": x.clone() for field, x in vars(self).items()}

    @classmethod
    def of(cls, name: str, state: dict[str, Tensor]) -> Running:
        """What `tensors` gave."""
        return cls(
            **{field.name: state[f"{name}/{field.name}"].cpu().clone() for field in fields(cls)}
        )


SIZE, TOTAL, CUMULATIVE = "delta_error_size", "delta_error", "delta_error_cumulative"


def errors_of_delta(
    running: dict[str, Running], layer: int | str, parts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What a measurement adds to what is known of a layer's error of δ.

    Args:
        running: by "layer/part", brought up to date here.
        layer: whose.
        parts: by batch entry `[B, H]`: `SIZE`, the unit of the others; `TOTAL`; and more parts.

    Returns:
        `[H]` each: SIZE; every part summed, with _t over batch entries and _steps_t over
        measurements; CUMULATIVE, delta_error_positive and delta_error_sign_p of TOTAL.
    """
    size = parts[SIZE].sum(0)
    found = {SIZE: size}
    for name, part in parts.items():
        if name == SIZE:
            continue
        total = part.sum(0)
        # in units of its size, or the steps with the largest gradients would decide the mean
        known = _known(
            running, f"{layer}/{name}", total / size.clamp_min(torch.finfo(size.dtype).tiny)
        )
        found |= {name: total, f"{name}_t": t_value(part), f"{name}_steps_t": known.t}
    known = _known(running, f"{layer}/{CUMULATIVE}", found[TOTAL])
    found[CUMULATIVE] = known.total
    found["delta_error_positive"] = known.positive.double() / known.count
    return found | {"delta_error_sign_p": known.sign_p}


def _known(running: dict[str, Running], name: str, figures: Tensor) -> Running:
    """What is known of a figure once this measurement has joined."""
    known = running.setdefault(name, Running.start(tuple(figures.shape)))
    known.add(figures)
    return known
