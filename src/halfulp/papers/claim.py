"""What a claim, its measurement and its verdict are; the claims themselves stand in the files by
topic.

A verdict is computed from measured figures by a rule that is printed beside it. "Not reproduced" is
a good answer where it is true, and a claim that nobody has measured yet says so and shows no
figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from halfulp.chances import student_beyond
from halfulp.experiments.compare_summary import Interval
from halfulp.experiments.failure import FailureRun, run_failures
from halfulp.experiments.failure_recipes import RUNGS
from halfulp.runs.results import Progress, no_progress, plain_data

VerdictKind: TypeAlias = Literal[
    "reproduced",
    "reproduced at reduced scale",
    "reproduced with altered arithmetic",
    "not reproduced",
    "needs a GPU",
    "not yet",
]
Setup: TypeAlias = Literal["whole", "reduced", "altered"]
_HELD: Mapping[Setup, VerdictKind] = {
    "whole": "reproduced",
    "reduced": "reproduced at reduced scale",
    "altered": "reproduced with altered arithmetic",
}
Figures: TypeAlias = Mapping[str, float]
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class Measured:
    """What was measured for one claim."""

    figures: dict[str, float]  # what the rule looks at
    text: str  # the same for a reader, with sample size and uncertainty
    # figures and heat maps in their JSON form, for a page
    pictures: tuple[dict[str, Any], ...] = ()
    # what was estimated, with its 95 % interval and the number of independent samples
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    exact: str = ""  # why there is nothing to estimate, where that is so

    @property
    def estimates(self) -> str:
        """What was estimated, each with its 95 % interval and sample size; or why there is
        nothing.
        """
        said = (f"{name.replace('_', ' ')} {one}" for name, one in self.intervals.items())
        return "; ".join(said) or self.exact


@dataclass(frozen=True)
class Rule:
    """When a claim counts as reproduced: in words and as a function of the figures."""

    text: str
    holds: Callable[[Figures], bool]


@dataclass(frozen=True)
class Claim:
    """One row of the ledger."""

    id: str  # its group, A to D, and a number
    statement: str
    paper: str  # what the paper saw, or "" for observations of our own
    measure: Callable[[Lab], Measured] | None = None
    rule: Rule | None = None
    # what it is measured on, which the verdict then says: reduced, something smaller than the
    # paper's; altered, something that rests on arithmetic coarser than the paper's, such as an O of
    # 1 mantissa bit, however small it is as well
    setup: Setup = "whole"
    # what was changed after a look at the figures, and when; "" where nothing was
    history: str = ""
    # the verdict where there is no measurement
    without: Literal["not yet", "needs a GPU"] = "not yet"
    seconds: float = 1.0  # rough cost, for the progress bar
    timed: bool = False  # it measures times, which are taken anew at every call

    @property
    def group(self) -> str:
        """A: Qiu & Yao, B: Golden et al., C: other papers, D: halfulp's own."""
        return self.id[0]

    @property
    def source(self) -> Literal["papers", "halfulp"]:
        """Whose claim it is."""
        return "halfulp" if self.group == "D" else "papers"


@dataclass(frozen=True)
class Verdict:
    """A claim with what was found."""

    claim: Claim
    measured: Measured
    verdict: VerdictKind
    command: str  # that repeats it
    seconds: float
    kept: str = ""  # what of it an earlier call has measured

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; figures that are not finite become None."""
        claim, found = self.claim, self.measured
        return {
            "id": claim.id,
            "group": claim.group,
            "statement": claim.statement,
            "paper": claim.paper,
            "measured": found.text,
            "rule": "" if claim.rule is None else claim.rule.text,
            "history": claim.history,
            "source": claim.source,
            "verdict": self.verdict,
            "command": self.command,
            "seconds": self.seconds,
            "figures": plain_data(found.figures),
            "pictures": list(found.pictures),
            "intervals": plain_data(found.intervals),
            "exact": found.exact,
            "estimates": found.estimates,
            "kept": self.kept,
        }


def judge_claim(claim: Claim, measured: Measured) -> VerdictKind:
    """Return the verdict from the measured figures; a rule over a figure that is NaN does not
    hold.
    """
    assert claim.rule is not None, claim.id
    if any(math.isnan(x) for x in measured.figures.values()) or not claim.rule.holds(
        measured.figures
    ):
        return "not reproduced"
    return _HELD[claim.setup]


FULL_SEEDS, FULL_STEPS = (0, 1, 2, 3, 4), 4000
"""Of the failing task where the ledger is measured at the largest scale."""
MANY_SEEDS = FULL_SEEDS
"""Where a verdict comes near its bound, at every scale."""


@dataclass
class Lab:
    """Where claims are measured: what several of them share is measured once."""

    workers: int = 2
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 3000  # of the failing task, which has failed by 1500
    full: bool = False  # the largest scale that two cores can do in half an hour
    runs: dict[tuple[str, int], FailureRun] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # other measurements, by name
    report: Progress = no_progress  # of the claim being measured

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}: accepted is an integer of at least 1")

    def command(self, identifier: str) -> str:
        """What repeats a claim at this scale."""
        return f"halfulp claims {identifier}{' --all' if self.full else ''}"

    def trained(self, names: Sequence[str]) -> dict[str, list[FailureRun]]:
        """Return the failure task's runs by attention name: PyTorch's or a rung, every seed of
        each.
        """
        missing = [
            name for name in names if any((name, seed) not in self.runs for seed in self.seeds)
        ]
        choices = [RUNGS.get(name, name) for name in missing]
        found = run_failures(
            choices, self.seeds, self.steps, workers=self.workers, progress=self.report
        )
        for run in found:
            self.runs[run.attention, run.seed] = run
        return {name: [self.runs[name, seed] for seed in self.seeds] for name in names}

    def once(self, name: str, measure: Callable[[], Shared]) -> Shared:
        """Return what is kept under a name, measured if it is not there yet."""
        if name not in self.kept:
            self.kept[name] = measure()
        return self.kept[name]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error and sample count."""

    value: float
    error: float
    count: int

    @property
    def t(self) -> float:
        """How many standard errors the mean lies from zero; 0 where it is exactly 0."""
        if self.error == 0:
            return math.copysign(math.inf, self.value) if self.value else 0.0
        return self.value / self.error

    def __str__(self) -> str:
        return f"{self.value:+.3g} ± {self.error:.1g} (n = {self.count})"


def mean_of(values: Tensor) -> Mean:
    """Return the mean of independent values, in float64."""
    x = values.detach().double().flatten()
    error = float(x.std() / math.sqrt(x.numel())) if x.numel() > 1 else math.nan
    return Mean(float(x.mean()), error, x.numel())


def share_of(hits: int, count: int) -> Interval:
    """Return a share of independent cases with its 95 % interval (Clopper and Pearson)."""
    from scipy.stats import binomtest

    ends = binomtest(hits, count).proportion_ci(0.95, "exact")
    return Interval(hits / count, float(ends.low), float(ends.high), count)


def spread(mean: Mean) -> Interval:
    """Return a mean's 95 % interval by Student's t."""
    half = student_beyond(0.025, mean.count - 1) * mean.error
    return Interval(mean.value, mean.value - half, mean.value + half, mean.count)


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator with that seed."""
    return torch.Generator().manual_seed(seed)


def relative(value: Tensor, truth: Tensor) -> float:
    """Return the relative L2 distance, in float64."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())
