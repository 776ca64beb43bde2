"""What other calls of a kernel say of a way that explains one: it has to explain those that fail as
well, and to be wrong on none that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfulp.operations import Rounding
from halfulp.reconstruct.operation_trials import Trial
from halfulp.reconstruct.operation_ways import Way

SLIGHT = 0.01  # of the largest relative error
PROVES = 0.5  # share of a call's error from which on a way explains it

CALLS = 3  # that are right, by which those that are not finite are told from all


@dataclass(frozen=True)
class Others:
    """A call that is explained, and others on which ways are held against the kernel."""

    beside: Trial
    trials: Sequence[Trial]

    def fit(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """How well ways do on the other calls, where the kernel errs and where it does not."""
        others = [t for t in self.trials if t.knows(chosen)]
        return sum(t.share(base, chosen) for t in others) / max(1, len(others))

    def predicts(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """The mean share of the error that ways explain on the other calls that fail as badly."""
        least = SLIGHT * self.beside.relative
        others = [t for t in self.trials if t.failing and t.relative >= least and t.knows(chosen)]
        shares = [t.share(base, chosen) for t in others]
        return sum(shares) / len(shares) if shares else 1.0

    def harm(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """On how many of the calls where the kernel is right ways are grossly wrong."""
        sound = [t for t in self.trials if not t.failing and t.knows(chosen)]
        return sum(t.spoilt(base, chosen) for t in sound) / max(1, len(sound))

    def telling(self, base: Rounding, chosen: tuple[Way, ...]) -> bool:
        """Whether ways explain numbers, or which elements have none, or which calls: NaN everywhere
        is made in many ways, and in a part of a sum by all.
        """
        failing = [t for t in (self.beside, *self.trials) if t.failing and t.knows(chosen)]
        if any(t.is_mixed and t.share(base, chosen) > PROVES for t in failing):
            return True
        apart = sum(not t.failing for t in self.trials) >= CALLS and not self.harm(base, chosen)
        return apart and not any(way.region for way in chosen)
