"""What is kept from one measurement to the next: sums, signs and spread of a figure, without keeping the figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Running:
    """Figures `[...]` of every measurement so far: count, mean, squared deviations and changes, and signs (Welford)."""

    count: Tensor  # measurements, int64, one number
    mean: Tensor  # [...] fp64
    deviations: Tensor  # Σ (x − mean)² [...]
    changes: Tensor  # Σ (x − the x before)² [...]
    last: Tensor  # [...]
    positive: Tensor  # measurements above 0 [...], int64
    negative: Tensor

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> Running:
        """Before the first measurement."""
        whole, real = (torch.zeros(shape, dtype=dtype) for dtype in (torch.int64, torch.float64))
        return cls(torch.zeros((), dtype=torch.int64), real, real, real, real, whole, whole)

    def add(self, figures: Tensor) -> None:
        """Count one more measurement."""
        x = figures.detach().double().cpu()
        self.count = self.count + 1
        if int(self.count) > 1:
            self.changes = self.changes + (x - self.last).square()
        above, self.last = x - self.mean, x
        self.mean = self.mean + above / self.count
        self.deviations = self.deviations + above * (x - self.mean)
        self.positive = self.positive + (x > 0)
        self.negative = self.negative + (x < 0)

    @property
    def total(self) -> Tensor:
        """The sum of all measurements."""
        return self.mean * self.count

    @property
    def t(self) -> Tensor:
        """The mean in standard errors of it; NaN before the third measurement.

        Neighboring measurements are alike where they stand close or see the same batch. Their correlation ρ, read from
        the mean squared change, widens the standard error by √((1 + ρ) / (1 − ρ)), as in a first-order autoregression.
        """
        n = int(self.count)
        if n < 3:
            return torch.full_like(self.mean, math.nan)
        # Σ of n − 1 squared changes is about 2 (1 − ρ) (n − 1) variances
        rho = (1 - self.changes / (2 * self.deviations)).clamp(0, 1 - 1 / n)
        return self.mean / (self.deviations / (n * (n - 1)) * (1 + rho) / (1 - rho)).sqrt()

    @property
    def sign_p(self) -> Tensor:
        """Two-sided p of the sign test: so unequal a split of signs or a worse one, were either sign as likely; zeros
        are left out, and without signs p is 1. It takes measurements for independent.
        """
        from scipy.special import bdtr

        signs, fewer = self.positive + self.negative, torch.minimum(self.positive, self.negative)
        p = torch.as_tensor(2 * bdtr(fewer.double().numpy(), signs.numpy(), 0.5), dtype=torch.float64)
        return torch.where(signs > 0, p, 1.0).clamp_max(1.0)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The state by "name/field"."""
        return {f"{name}/{field}": x.clone() for field, x in vars(self).items()}

    @classmethod
    def of(cls, name: str, state: dict[str, Tensor]) -> Running:
        """What `tensors` gave."""
        return cls(**{field.name: state[f"{name}/{field.name}"].cpu().clone() for field in fields(cls)})
