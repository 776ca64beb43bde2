"""What a kernel of an operation does, found in its own error: the definition is computed in every
known way, and the one whose results are the kernel's explains it.

Ways that explain a failing call equally well are told apart on a call of every probe: one that is
wrong where the kernel is right is not what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from halfulp.operations import Rounding
from halfulp.reconstruct.operation_blocks import block_ways
from halfulp.reconstruct.operation_eager import eager_ways
from halfulp.reconstruct.operation_places import Place, further_ways, manner_of, place
from halfulp.reconstruct.operation_random import random_cause
from halfulp.reconstruct.operation_sums import sum_ways
from halfulp.reconstruct.operation_trials import Failure, Run, Trial, panel, square, trial
from halfulp.reconstruct.operation_ways import Way, ways

EXPLAINS = 0.5  # share of the error from which on a way is named
ALL = 0.995  # share from which on eager code is all that is looked at
WHOLLY = 0.9  # share from which on no other case is looked at, and nothing more looked for
FURTHER = 0.1  # share that a first way must have, or a further way must add
TOGETHER = 3  # ways at most
TELLING = 48  # ways, those that explain most alone, of which some together are looked at
RIVALS = 0.2  # ways that explain so much less than the best are told apart from it
MOST = 16  # of them
OTHERS = 18  # calls that they are held against: first those of its options, and that fail
PREDICTS = 0.3  # share of other failing calls' errors that a way which is named explains
EQUAL = 1e-3  # at most; of two ways that explain alike the one that is tried first is named
OTHERWISE = frozenset(
    {"option", "end", "neighbor", "factor", "term-missing", "exchanged", "limited"}
)
"""Causes that are no rounding: such a way computes the kernel's own function or it does not."""
LEFT = 0.05  # share of the error, beside what rounding makes, that such a way may leave
CASES = 3  # that are looked at until one is explained
WRONG = -0.05  # how a way fits other calls, below which it is wrong there
GROSS = 0.1  # relative error above which the question is which function it is


_Tried = tuple[Rounding, float, Way]


@dataclass(frozen=True)
class FoundWay:
    """Causes of an operation's errors, and how much of them they explain."""

    cause: str  # its key in `CAUSES`
    text: str
    share: float  # of the squared error of the tensor
    fits: float  # how well it fits the other calls: below 0 where it is wrong and the kernel is not
    tensor: str  # what errs, the worst first
    rivals: tuple[Rival, ...] = ()  # ways that were weighed, the one that is named first

    @property
    def told(self) -> str:
        """The way, and how much of what it explains."""
        if not self.share:
            return self.text
        return f"{self.text}: explains {100 * self.share:.0f} % of the error of {self.tensor}"


class Rival(NamedTuple):
    """A way that explains about as much as the best."""

    text: str
    share: float
    fits: float


def of_operation(
    run: Run, failures: Sequence[Failure], others: Sequence[Trial] | None = None
) -> FoundWay | None:
    """The way that explains most of an error on any of these cases, or of the `others`, which are a
    call of every probe where they are not given; where none explains enough, one that says where
    the first's error is. None where nothing errs, or the kernel gives nothing.
    """
    trials = [one for f in failures if (one := trial(run, f.calls, f.failing)) is not None]
    if others is None:
        of = failures[0].calls if failures else None
        others = panel(run, of.operation, of.dtype) if of is not None else ()
    found: list[FoundWay] = []
    wrong = sorted((t for t in (*trials, *others) if t.failing), key=lambda t: bool(t.calls.manner))
    if wrong and wrong[0].calls.manner and (text := manner_of(run, wrong[0])):
        return FoundWay("operation-place", text, 0.0, 0.0, ", ".join(wrong[0].failing))
    for one in wrong[:CASES]:
        rest = [t for t in (*trials, *others) if t is not one]
        rest.sort(key=lambda t: (t.calls.options != one.calls.options, not t.failing))
        del rest[OTHERS:]
        found.append(_Judge(one, rest, thorough=not found).found())
        if found[-1].share >= WHOLLY and found[-1].fits >= WRONG:
            break
    best = max(found, key=_rank, default=None)
    if best is not None and not (best.share and best.cause in OTHERWISE):
        asked = [(f.calls, f.failing) for f in failures]
        for calls, failing in asked or [(t.calls, t.failing) for t in others if t.failing]:
            if text := random_cause(run, calls):
                return FoundWay("random", text, 0.0, 0.0, ", ".join(failing))
    return best


def _rank(found: FoundWay) -> tuple[float, int]:
    """Where one case is off by no more than rounding may be, it is not another function."""
    order = ("operation-function", "operation-unexplained", "operation-place")
    known = order.index(found.cause) if found.cause in order else len(order)
    return found.share + min(0.0, found.fits), known


@dataclass(frozen=True)
class _Judge:
    """One call that fails, and others that tell alike ways apart."""

    trial: Trial
    others: list[Trial]
    thorough: bool  # whether to go on where no common way explains

    def found(self) -> FoundWay:
        """The best way, and up to two beside it where they explain more together."""
        operation = self.trial.calls.operation
        bases = [operation.stock, operation.floor]
        if self.trial.alike(*bases):
            del bases[0]
        start = max(self.trial.share(base, ()) for base in bases)
        floor = operation.floor
        eager = [
            (floor, *self.trial.best(floor, (), way))
            for way in eager_ways(self.trial.calls, lambda way: self.trial.share(floor, (way,)))
        ]
        found: list[_Tried] = []
        tried: list[Way] = []
        if not eager or max(eager, key=_share)[1] < ALL:
            every = (*ways(self.trial.calls), *sum_ways(self.trial.calls))
            tried = [way for way in every if self.trial.concerns(floor, way)]
            bases.sort(key=lambda base: -self.trial.share(base, ()))
            for base in bases:  # the other recipe where the nearer one does not do
                if not found or max(found, key=_share)[1] < WHOLLY:
                    here = [
                        (base, *self.trial.best(base, (), way))
                        for way in (*block_ways(self.trial.calls, base), *tried)
                        if self.trial.concerns(base, way)
                    ]
                    telling = sorted(here, key=_share, reverse=True)[:TELLING]
                    tried = [replace(way, alone="") for _, _, way in telling]
                    found += here
        found += eager
        if self.thorough and not self._whole(found):
            further = [(base, way) for base in bases for way in further_ways(self.trial, base)]
            found += [(base, *self.trial.best(base, (), way)) for base, way in further]
        (base, share, way), fits, rivals = self._told_apart(found)
        chosen: tuple[Way, ...] = (way,)
        while tried and FURTHER < share < WHOLLY and len(chosen) < TOGETHER:
            rest = self.trial.unexplained(base, chosen)
            tried = [way for way in tried if self.trial.concerns(base, way, rest)]
            more = [(base, *self.trial.best(base, chosen, way)) for way in tried]
            if not more:
                break
            base, risen, way = max(more, key=_share)
            if risen < share + max(FURTHER, (1 - share) / 3):
                break
            share, chosen = risen, (*chosen, way)
        of_rounding = self._of_rounding()
        otherwise = {w.cause for w in chosen} & OTHERWISE
        most = max(LEFT, 4 * of_rounding) if otherwise else 1.0
        predicts = self._predicts(base, chosen)
        if len(chosen) > 1:
            fits = self._fit(base, chosen)
        wrong = share + min(0.0, fits) < EXPLAINS or predicts < PREDICTS
        if wrong or 1 - share > min(most, EXPLAINS * (1 - start)):
            return self._unexplained(share, chosen, base)
        text = "; ".join(str(way) for way in chosen)
        return FoundWay(chosen[0].cause, text, share, fits, self._failing, rivals)

    def _whole(self, found: list[_Tried]) -> bool:
        """Whether a way leaves no more than rounding may make."""
        base, share, way = max(found, key=_share)
        emulated = self.trial.emulated(base, (way,))
        if share < WHOLLY or emulated is None:
            return False
        names = self.trial.failing
        rest = sum(self.trial.left(emulated, name) for name in names)
        return rest <= max(16 * self._rounding(), 1e-6 * sum(self.trial.errors[n] for n in names))

    def _rounding(self) -> float:
        """What rounding makes of results of the kernel's size, which may be much smaller."""
        found = 0.0
        for name in self.trial.failing:
            own, due = (square(x[name]) for x in (self.trial.kernel, self.trial.exact))
            found += self.trial.rounding[name] * (own / due if 0 < own < due else 1.0)
        return found

    def _of_rounding(self) -> float:
        errors = sum(self.trial.errors[name] for name in self.trial.failing)
        return self._rounding() / max(1e-300, errors)

    def _told_apart(self, found: list[_Tried]) -> tuple[_Tried, float, tuple[Rival, ...]]:
        """Of ways that explain about as much as the best the one that fits the other calls too."""
        best = max(found, key=_share)[1]
        rivals = [one for one in found if one[1] >= best - RIVALS]
        rivals = sorted(rivals, key=_share, reverse=True)[:MOST]
        if best < FURTHER:
            return rivals[0], 0.0, ()
        fits = [self._fit(base, (way,)) for base, _, way in rivals]
        scores = [one[1] + fit for one, fit in zip(rivals, fits, strict=True)]
        order = {id(way): number for number, (_, _, way) in enumerate(found)}
        equal = min(EQUAL, 4 * self._of_rounding())
        rows = list(zip(rivals, fits, scores, strict=True))
        alike = [row for row in rows if row[2] >= max(scores) - equal]
        named = min(alike, key=lambda row: order[id(row[0][2])])
        rows.sort(key=lambda row: (row is not named, -row[2]))
        told: dict[str, Rival] = {}
        for one, fit, _ in rows:
            told.setdefault(str(one[2]), Rival(str(one[2]), one[1], fit))
        return named[0], named[1], tuple(told.values())

    def _fit(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """How well ways do on the other calls, where the kernel errs and where it does not."""
        others = [t for t in self.others if t.knows(chosen)]
        return sum(t.share(base, chosen) for t in others) / max(1, len(others))

    def _predicts(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """The mean share of the error that ways explain on the other calls that fail."""
        shares = [t.share(base, chosen) for t in self.others if t.failing and t.knows(chosen)]
        return sum(shares) / len(shares) if shares else 1.0

    @property
    def _failing(self) -> str:
        return ", ".join(self.trial.failing)

    def _unexplained(self, share: float, chosen: tuple[Way, ...], base: Rounding) -> FoundWay:
        found: Place = place(self.trial, base, self.others)
        nearest = "; ".join(str(way) for way in chosen)
        nearest = f"; nearest is: {nearest} ({100 * share:.0f} %)" if share > EXPLAINS else ""
        key = "operation-unexplained"
        if found.told:
            key = "operation-place"
        elif found.relative > GROSS:
            key = "operation-function"
        return FoundWay(key, f"{found.text}{nearest}", 0.0, 0.0, self._failing)


def _share(one: _Tried) -> float:
    return one[1]
