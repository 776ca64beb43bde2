"""What was tried, what became of it and what follows, as plain frozen data and in words.

The verdict says no more than runs showed. A remedy of rounding that cures, changing nothing but in
which arithmetic something is computed, shows that rounding there is the cause. One of optimization
shows that the run can be trained so; and where everything in fp32 fails as well, that rounding in
what was put into fp32 is not the cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfulp.isolate.climb import TWIN
from halfulp.prescribe.candidates import Untried
from halfulp.prescribe.trials import ALIKE, CONFIDENCE, Control, Trial
from halfulp.runs.results import Figure, Table, plain_data

FOLLOWS = "another order of the batches and random numbers that follow; weights are the same"
FRESH = "other weights and another order of the data"


@dataclass(frozen=True)
class Prescription:
    """The whole of it; see `prescribe`."""

    run: str
    config: Mapping[str, Any]
    rule: str
    seeds: tuple[int, ...]
    start: int
    horizon: int
    alike: bool  # whether every seed gave the same losses
    status: str  # running, done or interrupted
    symptoms: tuple[str, ...]
    control: Control = field(repr=False)
    trials: tuple[Trial, ...]  # ranked
    untried: tuple[Untried, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    seconds: float
    steps: int  # of training
    command: str

    @property
    def troubles(self) -> Mapping[int, str]:
        """Of the run as it is, by seed; an empty text: none."""
        return self.control.troubles

    @property
    def failing(self) -> list[int]:
        """Seeds on which the run as it is is in trouble."""
        return [seed for seed, why in self.troubles.items() if why]

    @property
    def helping(self) -> list[Trial]:
        """Remedies that cure; of a run that is in no trouble, those that lower its loss."""
        wanted = "cures" if self.failing else "lowers the loss"
        return [one for one in self.trials if one.effect == wanted]

    @property
    def exit_code(self) -> int:
        """0: something helps; 1: nothing does, or there is nothing to cure."""
        return 0 if self.helping else 1

    @property
    def verdict(self) -> str:
        """What follows from it, in a few sentences."""
        if not self.troubles:
            return "Not known: the budget was spent before the run as it is was made."
        if not self.trials and not self.failing:
            return self._healthy()
        rounding = [one for one in self.helping if one.remedy.group == "rounding"]
        others = [one for one in self.helping if one.remedy.group == "optimization"]
        if rounding:
            small = [one for one in rounding if one.remedy.touches != "the model"] or rounding
            said = f"It is rounding: {_said(small[0])}{', which are one trial' * self.alike}."
            if len(small) > 1:
                said += f" So {_verb(len(small) - 1)} {_listed(small[1:])}."
            if not others:
                count = sum(one.remedy.group == "optimization" for one in self.trials)
                said += f" No change of the optimization does ({count} tried)." * bool(count)
            else:
                gets = "gets" if len(others) == 1 else "get"
                said += (
                    f" {_capital(_listed(others))} {gets} through these"
                    f" {self.horizon - self.start} steps too, which says nothing of the cause and"
                    " may only put it off."
                )
            return said
        if others:
            said = f"{self._not_rounding()} What helps is in the optimization: {_said(others[0])}."
            more = f" So {_verb(len(others) - 1)} {_listed(others[1:])}."
            return said + more * (len(others) > 1)
        return self._nothing()

    def _healthy(self) -> str:
        """Nothing was tried, since nothing is wrong."""
        made, count = self.horizon - self.start, len(self.seeds)
        said = (
            f"Nothing to cure: in {made} steps the run as it is does not fail, on {count} of"
            f" {count} seeds"
        )
        if self.symptoms:
            return f"{said}. What speaks against it comes from elsewhere: more steps may show it."
        return f"{said}, and nothing is known that speaks against it. No remedy was tried."

    def _not_rounding(self) -> str:
        """What everything in fp32 says."""
        exact = next((one for one in self.trials if one.remedy.name == TWIN), None)
        if exact is None:
            return "Whether it is rounding is not known: nothing could be put into fp32."
        tried = len(exact.seeds)
        if exact.effect in ("helps on some seeds", "lowers the loss"):
            return (
                f"Rounding has a part in it: {exact.remedy.change} brings the loss to"
                f" {_ratio(exact)} times, and the run is in trouble all the same."
            )
        if self.failing:
            saved, asked = exact.cures
            if not saved and asked:
                return (
                    "It is not rounding, in what was tried: with"
                    f" {exact.remedy.change} the run fails too, on {asked} of {asked} seeds."
                )
            return (
                f"Whether it is rounding is not known: {exact.remedy.change} gets through {saved}"
                f" of {asked} seeds, with no lower loss than chance makes."
            )
        return (
            f"Rounding is not seen: {exact.remedy.change} does not lower the loss on {tried} seeds."
        )

    def _nothing(self) -> str:
        count = f"{len(self.trials)} remed{'y' if len(self.trials) == 1 else 'ies'}"
        partly = ("helps on some seeds", "lowers the loss")
        some = [one for one in self.trials if one.effect in partly and one.remedy.name != TWIN]
        if some:
            return (
                f"Nothing tried here cures it ({count}). {self._not_rounding()} What"
                f" lowers its loss: {'; '.join(_lowers(one) for one in some[:4])}."
            )
        said = f"Nothing tried here helps ({count}). {self._not_rounding()}"
        if self.failing:
            return said
        return f"{said} In these {self.horizon - self.start} steps the run as it is does not fail."

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, tables included."""
        apart = ("trials", "untried", "figures", "control")
        plain = {name: x for name, x in vars(self).items() if name not in apart}
        return plain | {
            "config": dict(self.config),
            "noise": plain_data(self.control.noise),
            "least": plain_data(self.control.least),
            "troubles": {str(seed): why for seed, why in self.troubles.items()},
            "verdict": self.verdict,
            "what_a_seed_changes": FOLLOWS if self.start else FRESH,
            "trials": [one.as_dict() for one in self.trials],
            "untried": [vars(one) for one in self.untried],
            "helping": [one.remedy.name for one in self.helping],
            "figures": [figure.as_dict() for figure in self.figures],
            "tables": [table.as_dict() for table in self.tables()],
            "exit_code": self.exit_code,
        }

    def tables(self) -> list[Table]:
        """Return what was tried, the lines that apply it, and what was not tried."""
        found = [self._tried()] if self.trials else []
        if self.helping:
            found.append(self._lines())
        if self.untried:
            rows = tuple((one.name, one.why) for one in self.untried)
            found.append(Table("Not tried", ("what", "why"), rows, "", self.command))
        return found

    def _lines(self) -> Table:
        """How to apply what helps."""
        named = [one.remedy for one in self.helping]
        columns, said = ("remedy", "touches", "line"), "Options of halfulp train."
        if any(one.line != one.option for one in named):
            said = "For a loop of your own; names of remedies and options of halfulp train are in"
            said += " prescription.json."
        rows = tuple((one.change, one.touches, one.line) for one in named)
        return Table("How to apply what helps", columns, rows, said, self.command)

    def _tried(self) -> Table:
        rows = tuple(
            (
                one.remedy.change,
                one.remedy.group,
                one.effect + (_counted(one) if self.failing else ""),
                one.last,
                _ratio(one),
                one.cost if one.cost == one.cost else None,
            )
            for one in self.trials
        )
        columns = ("remedy", "of", "effect", "loss", "× the run's", "× time")
        seeds = ", ".join(map(str, self.seeds))
        caption = (
            f"Steps {self.start + 1} to {self.horizon}, seeds {seeds}: {self._seeds_text()}."
            " effect: with the seeds that it cures, on which the run fails as it is (by chance: its"
            " loss is not lower than chance makes it); loss: the"
            " median of"
            " the last tenth of the steps, the geometric mean over seeds; × the run's: of the run"
            " as it is, on the last batches that both read, with"
            f" {100 * CONFIDENCE:.0f} % over seeds. Once more with its weights moved by an ulp the"
            f" run comes to {self._chaos()}; a mean below"
            f" {math.exp(-self.control.least):.3g} is no chance. Among those"
            f" with {1 - ALIKE:.0%} of the best one's gain what is touched, and then × time, of a"
            " step beside the run's, makes the order."
        )
        return Table("What was tried", columns, rows, caption, self.command)

    def _chaos(self) -> str:
        noise = self.control.noise
        if math.isnan(noise):
            return "numbers that are not finite"
        return f"{math.exp(noise):.3g} times its loss"

    def _seeds_text(self) -> str:
        if self.alike:
            return "every seed gave the same losses, so they are one trial and not several"
        return f"a seed is {FOLLOWS if self.start else FRESH}"


def _ratio(one: Trial) -> str:
    """The ratio of losses and its interval as a factor, or where the one was not finite."""
    mean, low, high = (math.exp(min(x, 700)) for x in one.interval())
    endless = sum(one.log_ratio(seed) == -math.inf for seed in one.seeds)
    apart = f"finite where it is not ({endless})" if endless else ""
    if math.isnan(mean):
        return apart or "–"
    wide = "" if math.isnan(low) else f" ({low:.2g} to {high:.2g})"
    return f"{mean:.3g}{wide}" + (f"; {apart}" if apart else "")


def _counted(one: Trial) -> str:
    """On how many seeds it gets the run through; by chance where its effect is another."""
    saved, tried = one.cures
    chance = saved and one.effect in ("no effect", "worse")
    return f", {saved} of {tried}{' by chance' if chance else ''}"


def _said(one: Trial) -> str:
    saved, tried = one.cures
    if not tried:
        return f"{_lowers(one)} times that of the run as it is"
    return f"{one.remedy.change} cures {saved} of {tried} seeds"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lowers(one: Trial) -> str:
    return f"{one.remedy.change}, to {_ratio(one)}"


def _listed(trials: Sequence[Trial], most: int = 4) -> str:
    named = [one.remedy.change for one in trials[:most]]
    more = len(trials) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def _verb(count: int) -> str:
    return "does" if count == 1 else "do"
