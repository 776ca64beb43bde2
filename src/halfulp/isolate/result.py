"""What an isolation found, as plain frozen data: the ladder, the verdict, how sure it is, and what
was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfulp.isolate.climb import Rung
from halfulp.isolate.rule import Outcome
from halfulp.isolate.rung import RungRun
from halfulp.isolate.search import share_bound
from halfulp.isolate.substitutions import Place
from halfulp.runs.results import Figure, Table

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Seeds:
    """On how many seeds something held."""

    held: int
    tried: int
    # of both: the seed on which it was found among other answers, so that it says nothing of others
    searched: int = 0

    @property
    def bound(self) -> float | None:
        """The least share of all seeds on which it would hold, at 95 % confidence (Clopper–Pearson,
        one-sided), from those on which it was not searched for; None where there are none.
        """
        held, tried = self.held - self.searched, self.tried - self.searched
        return share_bound(held, tried, CONFIDENCE) if tried else None

    def text(self) -> str:
        """Return on how many seeds, and what that says of all seeds."""
        if not self.tried:
            return "no seeds"
        said = f"{self.held} of {self.tried} seed{'s' * (self.tried > 1)}"
        if not self.held:
            return said
        if self.bound is None:
            return f"{said}, the one it was searched on; others were not tried"
        if self.searched:
            held, tried = self.held - self.searched, self.tried - self.searched
            said += f": found on one, confirmed on {held} of {tried}"
        return (
            f"{said}, so it holds for at least {100 * self.bound:.0f} % of all seeds at"
            f" {100 * CONFIDENCE:.0f} % confidence"
        )


@dataclass(frozen=True)
class Rescue:
    """A minimal set of changes with which the run survives."""

    rung: str
    operations: tuple[str, ...]  # names of `substitutions.OPERATIONS`
    change: str
    blames: tuple[str, ...]
    repair: bool  # all of it a kernel can afford
    seeds: Seeds


@dataclass(frozen=True)
class Bits:
    """The guilty tensor with another number of mantissa bits."""

    step: str
    bits: int
    rung: str


@dataclass(frozen=True)
class Isolation:
    """The whole of it; see `isolate`."""

    run: str
    config: dict[str, Any]
    rule: str
    seeds: tuple[int, ...]
    failing: tuple[int, ...]  # seeds on which the original fails or drifts
    horizon: int
    start: int
    status: str  # running, done or interrupted
    found: bool  # a cause
    verdict: str
    confidence: Seeds
    places: tuple[Place, ...]  # layers and heads that carry the failure; empty: not told apart
    rescues: tuple[Rescue, ...]  # minimal sets, the one that names the cause first
    fix: str
    bits: tuple[Bits, ...]
    rungs: tuple[Rung, ...]
    notes: tuple[str, ...]
    not_tested: tuple[tuple[str, str], ...]  # what, why
    figures: tuple[Figure, ...]
    seconds: float
    steps: int  # of training
    command: str
    sites: tuple[str, ...] = ()  # of a user's model: "KIND in MODULE", where the failure is

    @property
    def exit_code(self) -> int:
        """0: a cause was found; 1: none, or the run does not fail."""
        return 0 if self.found else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, tables included."""
        plain = asdict(self)
        for rung in plain["rungs"]:
            rung["runs"] = list(rung["runs"].values())
        plain["confidence"] |= _bound(self.confidence)
        for one, rescue in zip(self.rescues, plain["rescues"], strict=True):
            rescue["seeds"] |= _bound(one.seeds)
        plain["figures"] = [figure.as_dict() for figure in self.figures]
        plain["tables"] = [table.as_dict() for table in self.tables()]
        return plain | {"exit_code": self.exit_code}

    def tables(self) -> list[Table]:
        """Return the ladder, the bits if they were varied, and what was not tested if anything."""
        tables = [self.ladder()]
        if self.bits:
            tables.append(self.bit_table())
        if self.not_tested:
            asked = {rung.question for rung in self.rungs if rung.runs}
            rows = tuple(
                (f"the rest of {what}" if what in asked else what, why)
                for what, why in self.not_tested
            )
            tables.append(Table("Not tested", ("what", "why"), rows, "", self.command))
        return tables

    def ladder(self) -> Table:
        """Return one row a rung: the worst of its seeds, and the figure that decided it."""
        varied = {one.rung for one in self.bits[1:]}  # the first is the failing recipe itself
        rows = tuple(
            (rung.question, rung.change, *_became(rung))
            for rung in self.rungs
            if rung.runs and rung.name not in varied
        )
        columns = ("question", "what is changed", *_BECAME)
        caption = (
            f"{self.horizon - self.start} steps, seeds {', '.join(map(str, self.seeds))}. Rule:"
            f" {self.rule}."
        )
        return Table("Substitution ladder", columns, rows, caption, self.command)

    def bit_table(self) -> Table:
        """Return one row a number of mantissa bits."""
        by_name = {rung.name: rung for rung in self.rungs}
        rungs = [(one.bits, by_name[one.rung]) for one in sorted(self.bits, key=lambda b: b.bits)]
        rows = tuple((bits, *_became(rung)) for bits, rung in rungs if rung.runs)
        title = f"Mantissa bits of {self.bits[0].step}"
        caption = "All else as in the failing recipe."
        return Table(title, ("mantissa bits", *_BECAME), rows, caption, self.command)


_BECAME = ("outcome", "failed at step", "decided by")


def _became(rung: Rung) -> tuple[str, str, str]:
    runs = list(rung.runs.values())
    return outcome_text(rung), failure_text(runs), worst(rung).reason


def worst(rung: Rung) -> RungRun:
    """The run of a rung that got least far."""
    return min(rung.runs.values())


def outcome_text(rung: Rung) -> str:
    """Return "failed", or "2 survived, 1 drifting" where seeds differ."""
    outcomes: Sequence[Outcome] = [run.outcome for run in rung.runs.values()]
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(sorted(outcomes)))


def failure_text(runs: Sequence[RungRun]) -> str:
    """Return the times to failure of the runs that failed, as a range; a dash where none did."""
    steps = [run.failed_at for run in runs if run.failed_at is not None]
    if not steps:
        return "–"
    return str(steps[0]) if len(set(steps)) == 1 else f"{min(steps)} … {max(steps)}"


def _bound(seeds: Seeds) -> dict[str, Any]:
    return {"bound": seeds.bound, "confidence": CONFIDENCE}
