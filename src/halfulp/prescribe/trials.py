"""One remedy beside the run as it is, seed by seed: whether it still fails, how far its loss is
from the unchanged run's on the same batches, and what a step costs.

A remedy cures a seed if the run fails there as it is and does not with the remedy, and its loss is
lower where both were made. Losses are compared step by step, since both read the same batches in
the same order; over seeds the mean of their logarithms has Student's interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from halfulp.chances import student_beyond
from halfulp.isolate.rung import RungRun
from halfulp.prescribe.candidates import TOUCHES, Remedy
from halfulp.runs.results import number_of, plain_data
from halfulp.training.journal import Row

Effect: TypeAlias = Literal["cures", "helps on some seeds", "lowers the loss", "no effect", "worse"]
EFFECTS: tuple[Effect, ...] = (
    "cures", "helps on some seeds", "lowers the loss", "no effect", "worse"
)  # fmt: skip
LESS = 1.05  # times, at least, by which a loss that is lower is lower
LEARNT = 0.95  # of its first loss, at most, is the last one of a run that learns
ALIKE = 0.25  # of the most that a remedy lowers the loss: what two may differ by and be alike
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Seen:
    """One run, judged."""

    run: RungRun
    losses: Mapping[int, float]  # by step
    steps: int  # planned, from where it began
    begins: bool  # at the beginning of the training
    trouble: str = ""  # why it is in trouble, by its own losses alone

    @property
    def finite(self) -> bool:
        """Whether every loss is a finite number."""
        return all(map(math.isfinite, self.losses.values()))

    @property
    def lowest(self) -> float:
        """The lowest loss."""
        return min((x for x in self.losses.values() if math.isfinite(x)), default=math.inf)

    @property
    def last(self) -> float:
        """The last loss: the median of a tenth of the steps."""
        return _median(list(self.losses.values())[-max(1, len(self.losses) // 10) :])


def seen(run: RungRun, rows: Sequence[Row], start: int, horizon: int) -> Seen:
    """Judge a run by its own losses: by the rule, and from the beginning also whether it learns."""
    losses = {r["step"]: number_of(r["loss"]) for r in rows if "loss" in r and r["step"] <= horizon}
    found = Seen(run, losses, horizon - start, start == 0)
    return replace(found, trouble=_trouble(found))


def _trouble(one: Seen) -> str:
    if not one.run.survived:
        return one.run.reason
    values = list(one.losses.values())
    first = _median(values[: max(1, len(values) // 20)])
    if one.begins and len(values) >= 10 and one.last > LEARNT * first:
        return f"it does not learn: loss {one.last:.3g}, {first:.3g} at first"
    return ""


@dataclass(frozen=True)
class Control:
    """The run as it is on every seed, twice: the second time with its weights moved by an ulp."""

    once: Mapping[int, Seen]
    again: Mapping[int, Seen]
    troubles: Mapping[int, str]  # of both, by seed; empty where one of them is in none
    remedies: int = 1  # that are tried beside it

    @property
    def noise(self) -> float:
        """How far apart the two are: root mean square of the log ratio of their losses, over seeds
        on which both are finite; NaN where none is.
        """
        known = [log_ratio(self.again[seed], self.once[seed]) for seed in self.once]
        finite = [x for x in known if math.isfinite(x)]
        return math.sqrt(statistics.fmean(x * x for x in finite)) if finite else math.nan

    @property
    def least(self) -> float:
        """The mean log ratio beyond which none of so many idle remedies is, in 19 of 20 cases."""
        count = len(self.once)
        if math.isnan(self.noise):
            return math.log(LESS)
        # Bonferroni over the remedies, since the luckiest of many idle ones is looked at. As many
        # degrees of freedom as seeds: the mean difference of two runs an ulp apart is known, 0
        wide = student_beyond((1 - CONFIDENCE) / max(1, self.remedies), count)
        return max(math.log(LESS), wide * self.noise / math.sqrt(count))

    def last(self) -> float:
        """The last loss, in the geometric mean over seeds; ∞ where one is not finite."""
        return _mean([one.last for one in self.once.values()])


def log_ratio(one: Seen, other: Seen) -> float:
    """Logarithm of a run's loss over another's, the median of the last steps that both made; −∞
    where the other's was not finite there, ∞ where its own was.
    """
    both = sorted(one.losses.keys() & other.losses.keys())
    if not both:
        return math.nan
    own, its = one.losses[both[-1]], other.losses[both[-1]]
    if not math.isfinite(own) or not math.isfinite(its):
        finite = (math.isfinite(own), math.isfinite(its))
        return {(True, False): -math.inf, (False, True): math.inf}.get(finite, 0.0)
    few = [s for s in both if s > both[-1] - max(1, one.steps // 10)]
    return _median([_log(one.losses[s]) - _log(other.losses[s]) for s in few])


@dataclass(frozen=True)
class Trial:
    """One remedy on every seed, beside the run as it is."""

    remedy: Remedy
    runs: Mapping[int, Seen] = field(repr=False)
    control: Control = field(repr=False)
    cost: float = math.nan  # time of a step, in those of the run as it is; NaN: not measured

    @property
    def seeds(self) -> list[int]:
        """On which both were made."""
        return [seed for seed in self.control.once if seed in self.runs]

    def log_ratio(self, seed: int) -> float:
        """Logarithm of its loss over that of the run as it is, the better one of the two."""
        both = (self.control.once[seed], self.control.again[seed])
        return max(log_ratio(self.runs[seed], one) for one in both)

    def cured(self, seed: int) -> bool:
        """Whether the run is in trouble on a seed as it is, and not with the remedy."""
        mine, before = self.runs[seed], self.control.once[seed]
        # far below all that the run as it is ever had, a rise is of noise
        well = not mine.trouble or (mine.finite and mine.last < before.lowest / 2)
        if not self.control.troubles[seed] or not well:
            return False
        # scores that walk off do not show in the loss at once
        least = 1 if self.control.once[seed].run.outcome == "drifting" else -1
        return self.log_ratio(seed) < least * math.log(LESS)

    @property
    def cures(self) -> tuple[int, int]:
        """On how many seeds, of those on which the run is in trouble."""
        tried = [seed for seed in self.seeds if self.control.troubles[seed]]
        return sum(map(self.cured, tried)), len(tried)

    @property
    def beyond_chance(self) -> bool:
        """Whether the loss is lower by more than chaos makes of a rounding."""
        ratios = [self.log_ratio(seed) for seed in self.seeds]
        # finite on a seed where the run as it is was not, the reverse on none: no ratio is needed
        if any(x == -math.inf for x in ratios) and not any(x == math.inf for x in ratios):
            return True
        drifts = [self.control.once[seed].run.outcome == "drifting" for seed in self.seeds]
        mean = self.interval()[0]
        return mean < -self.control.least or all(drifts)

    def interval(self) -> tuple[float, float, float]:
        """Mean of the log ratio over seeds where it is finite, and its 95 % interval; NaN where
        there are fewer than two.
        """
        known = [x for x in map(self.log_ratio, self.seeds) if math.isfinite(x)]
        if not known:
            return math.nan, math.nan, math.nan
        mean = statistics.fmean(known)
        if len(known) < 2:
            return mean, math.nan, math.nan
        error = statistics.stdev(known) / math.sqrt(len(known))
        wide = error * student_beyond((1 - CONFIDENCE) / 2, len(known) - 1)
        return mean, mean - wide, mean + wide

    @property
    def effect(self) -> Effect:
        """What became of it."""
        saved, tried = self.cures
        mean, low, high = self.interval()
        ruined = [seed for seed in self.seeds if self.runs[seed].trouble]
        if self.beyond_chance:
            if tried and saved == tried:
                return "cures"
            if saved:
                return "helps on some seeds"
            if high < 0:
                return "lowers the loss"
        sound = [seed for seed in ruined if not self.control.troubles[seed]]
        return "worse" if sound or (low > 0 and mean > self.control.least) else "no effect"

    @property
    def last(self) -> float:
        """The last loss, in the geometric mean over seeds; ∞ where one is not finite."""
        return _mean([self.runs[seed].last for seed in self.seeds])

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        mean, low, high = self.interval()
        saved, tried = self.cures
        ratios = {"mean": mean, "low": low, "high": high, "confidence": CONFIDENCE}
        return {
            **self.remedy.as_dict(),
            "effect": self.effect,
            "cured": saved,
            "in_trouble": tried,
            "loss": plain_data(self.last),
            "log_ratio": plain_data(ratios),
            "step_time": plain_data(self.cost),
            "runs": [self._run_as_dict(seed) for seed in self.seeds],
        }

    def _run_as_dict(self, seed: int) -> dict[str, Any]:
        mine, its = self.runs[seed], self.control.once[seed]
        return {
            **asdict(mine.run),
            "seed": seed,
            "last_loss": plain_data(mine.last),
            "trouble": mine.trouble,
            "cured": self.cured(seed),
            "log_ratio": plain_data(self.log_ratio(seed)),
            "its_loss": plain_data(its.last),
        }


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Trials by effect, last loss where they are not alike, what they touch, a step's cost."""
    least = min((one.last for one in trials), default=math.nan)

    before = trials[0].control.last() if trials else math.nan

    def key(one: Trial) -> tuple[float, ...]:
        most = before - least
        if not math.isfinite(one.last):
            tier = math.inf
        elif math.isfinite(before):  # of what the best of them wins
            # losses within a quarter of what the best one wins are alike, so that what a remedy
            # touches and costs decides between them
            tier = math.floor((one.last - least) / most / ALIKE) if most > 0 else 0.0
        else:
            tier = math.floor((_log(one.last) - _log(least)) / ALIKE)
        cost = round(one.cost, 1) if math.isfinite(one.cost) else 1.0
        return EFFECTS.index(one.effect), tier, TOUCHES.index(one.remedy.touches), cost

    return sorted(trials, key=key)


def _mean(values: Sequence[float]) -> float:
    """Geometric; ∞ where a value is not finite."""
    logs = [_log(x) for x in values]
    return math.exp(statistics.fmean(logs)) if logs and max(logs) < math.inf else math.inf


def _median(values: Sequence[float]) -> float:
    """∞ where a value is not finite."""
    if not values:
        return math.nan
    return statistics.median(x if math.isfinite(x) else math.inf for x in values)


def _log(x: float) -> float:
    if not math.isfinite(x):
        return math.inf
    return math.log(max(x, 5e-324))
