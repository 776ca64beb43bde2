"""What other calls of a kernel say of a way that explains one: it has to explain those that fail as
well, and to be wrong on none that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfulp.operations import Rounding, sizes_of
from halfulp.reconstruct.operation_places import only_in
from halfulp.reconstruct.operation_trials import Trial
from halfulp.reconstruct.operation_ways import Way

SLIGHT = 0.01  # of the largest relative error
BADLY = 0.05  # of it, which no rounding beside it makes
PROVES = 0.5  # share of a call's error from which on a way explains it

BESIDE = 0.2  # share of another call's error that may be left, as by another rounding
ALIKE = 3  # ways that give the same are told, at most
EQUAL = 1e-3  # share, at most, by which they differ
TRIED = 32  # ways, those that explain most, that are looked at in some calls alone
CALLS = 3  # that are right, by which those that are not finite are told from all


@dataclass(frozen=True)
class Others:
    """A call that is explained, and others on which ways are held against the kernel."""

    beside: Trial
    trials: Sequence[Trial]

    def fit(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """How well ways do on the other calls, where the kernel errs and where it does not."""
        others = [t for t in self.trials if t.knows(chosen)]
        shares = (self._weight(t) * self._share(t, base, chosen) for t in others)
        return sum(shares) / max(1, len(others))

    def most(self, chosen: tuple[Way, ...]) -> float:
        """What that is at most: these ways explain all that fails."""
        others = [t for t in self.trials if t.knows(chosen)]
        return sum(self._weight(t) for t in others if t.failing) / max(1, len(others))

    def predicts(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """The mean share of the error that ways explain on the other calls that fail as badly."""
        weighed = [(self._weight(t), t) for t in self.as_bad if t.knows(chosen)]
        whole = sum(weight for weight, _ in weighed)
        return sum(w * self._share(t, base, chosen) for w, t in weighed) / whole if whole else 1.0

    @property
    def as_bad(self) -> list[Trial]:
        """The other calls that fail about as badly, or worse."""
        return [t for t in self.trials if t.failing and self._weight(t) >= BADLY]

    def _share(self, other: Trial, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """What ways explain together, or one of them where the others do not show."""
        alone = [(way,) for way in chosen] if len(chosen) > 1 else []
        return max(other.share(base, some) for some in (chosen, *alone))

    def _weight(self, other: Trial) -> float:
        """What a call counts: where less is off than here another rounding may be what is."""
        own = min(1.0, self.beside.relative)
        return min(1.0, other.relative / own) if other.failing else 1.0

    def follows(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """On how many of the calls of the same sizes that fail as badly ways leave no more than
        another rounding may: what is no rounding is the kernel's own function on all of them.
        """
        sizes, least = sizes_of(self.beside.calls), SLIGHT * min(1.0, self.beside.relative)
        others = [
            t
            for t in self.trials
            if t.failing and t.relative >= least and sizes_of(t.calls) == sizes and t.knows(chosen)
        ]
        left = [(1 - self._share(t, base, chosen), t) for t in others]
        sketched = any(way.sketched for way in chosen)
        most = [BESIDE if sketched else min(BESIDE, t.near) for _, t in left]
        close = [rest <= max(m, 4 * t.of_rounding) for m, (rest, t) in zip(most, left, strict=True)]
        return sum(close) / len(close) if close else 1.0

    def harm(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """On how many of the calls where the kernel is right ways, not what they are ways of, are
        grossly wrong; 1 where they, by which numbers are missing, lack some that the kernel has.
        """
        sound = [t for t in self.trials if not t.failing and t.knows(chosen)]
        spoilt = [t for t in sound if t.spoilt(base, chosen) and not t.spoilt(base, ())]
        if self.beside.nonfinite and any(t.breaks(base, chosen) for t in spoilt):
            return 1.0
        return len(spoilt) / max(1, len(sound))

    def telling(self, base: Rounding, chosen: tuple[Way, ...]) -> bool:
        """Whether ways explain numbers, or which elements have none, or which calls: NaN everywhere
        is made in many ways, and in a part of a sum by all.
        """
        failing = [t for t in (self.beside, *self.trials) if t.failing and t.knows(chosen)]
        if any(t.is_mixed and t.share(base, chosen) > PROVES for t in failing):
            return True
        apart = sum(not t.failing for t in self.trials) >= CALLS and not self.harm(base, chosen)
        return apart and not any(way.region or way.only for way in chosen)

    def in_these_calls(
        self, found: Sequence[tuple[Rounding, float, Way]], least: float
    ) -> list[tuple[Rounding, float, Way]]:
        """Ways that explain this call, in the calls alone whose sizes or options those which fail
        share and no other has: a kernel has other code for them. Limits are fitted to a call, and
        where few calls are left to tell, rows that are alike have any. A call that is right, and
        stays so, may be of either kind, for a way that explains every call which fails.
        """
        ways = (one for one in found if one[2].only is None and one[2].cause != "limited")
        whole = [one for one in ways if one[1] >= least]
        made = []
        for of, share, way in sorted(whole, key=lambda one: -one[1])[:TRIED]:
            only, every = only_in(self.beside, self.trials), (of, (way,))
            if only is None and min(self.follows(*every), self.predicts(*every)) > 1 - SLIGHT:
                apart = [t for t in self.trials if t.failing or t.spoilt(*every)]
                only = only_in(self.beside, apart)
            if only is not None:
                made.append((of, share, replace(way, only=only)))
        return made

    def alike(
        self, base: Rounding, way: Way, found: Sequence[tuple[Rounding, float, Way]]
    ) -> tuple[str, ...]:
        """Ways of other names that give what this one gives, on every call."""
        shares = [one.share(base, (way,)) for one in self.trials]
        best = self.beside.share(base, (way,))
        if best < PROVES:
            return ()
        told: dict[object, str] = {_subject(way): ""}
        for of, share, other in found:
            where = _subject(other)
            if of is not base or abs(share - best) > EQUAL or where in told or len(told) > ALIKE:
                continue
            if way.eager and other.eager:  # from another step on is no other mistake
                continue
            if all(abs(one.share(of, (other,)) - own) <= 10 * EQUAL
                   for one, own in zip(self.trials, shares, strict=True)):  # fmt: skip
                told[where] = str(other)
        return tuple(dict.fromkeys(text for text in told.values() if text not in ("", str(way))))


def _subject(way: Way) -> object:
    return tuple(way.steps) or way.text.partition(" is ")[0]
