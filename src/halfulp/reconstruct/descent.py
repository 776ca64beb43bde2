"""The search: from a start, the change that explains most is taken as long as one explains
significantly more; then what turns out not to be needed is put back.

Nothing here knows attention. A model is any hashable value; `neighbors` offers changed ones, and
`fits` emulates a model and holds it against what was observed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from halfulp.reconstruct.evidence import NOISE, SOUND, Fits, loss_of, surer

M = TypeVar("M", bound=Hashable)

GAIN = 0.05  # of the loss over all trials and tensors: a twentieth of one tensor's remainder
SURE = 3.5  # standard errors that a change must be better by
TRIED = 6  # changes, the best first, that are held against all trials before the search gives up
DECISIVE = 2.0  # of the loss: a gain that a few rows are enough for
ALIKE = 0.3  # of the loss: so near, what the other results say decides
TIED = 0.05  # of the loss on some trials: so near, all trials decide
MANY = 300  # changes, so many that they are first held against one trial alone
SIFTED = 24  # changes that are held against all trials of a screen
WHOLE = 10 * NOISE  # share left of an error that needs no further explanation
ORDERLY = 0.15  # share that another order of sums leaves where scores are far from 0


@dataclass(frozen=True)
class Taken:
    """One step of a search."""

    stage: str
    text: str  # what was changed
    left_before: float  # mean share of the squared error that is not explained
    left_after: float
    sigma: float  # standard errors that this is better by
    # changes that explain as much, within two standard errors
    rivals: tuple[str, ...] = ()


@dataclass
class Search(Generic[M]):
    """A descent over models of one kind."""

    fits: Callable[[M, frozenset[str], frozenset[str] | None], Fits]
    costly: frozenset[str] = frozenset()  # trials that are only used where others do not suffice
    also: frozenset[str] = frozenset()  # results that decide between changes that fit alike
    spent: Callable[[], bool] = lambda: False  # whether a descent shall stop where it is
    steps: list[Taken] = field(default_factory=list)
    tried: int = 0

    def loss(
        self, model: M, tensors: frozenset[str], trials: frozenset[str] | None = None
    ) -> float:
        """What is lowered."""
        return loss_of(self.fits(model, tensors, trials))

    def left(self, model: M, tensors: frozenset[str]) -> float:
        """Mean share that is left, each tensor of each trial counting once."""
        fits = self.fits(model, tensors, None)
        return sum(min(1.0, fit.left) for fit in fits.values()) / max(1, len(fits))

    def explained(self, model: M, tensors: frozenset[str]) -> bool:
        """Whether nothing is left to explain: in a few results another order of sums may leave
        some, where the model errs as much.
        """
        fits = self.fits(model, tensors, None)
        loose = [fit for fit in fits.values() if fit.left > WHOLE]
        return 4 * len(loose) <= len(fits) and all(
            fit.left < ORDERLY and fit.times < SOUND for fit in loose
        )

    def screen(self, model: M, tensors: frozenset[str], count: int) -> tuple[str, ...]:
        """The trials that are explained worst, the worst first."""
        worst: dict[str, float] = {}
        for (trial, _), fit in self.fits(model, tensors, None).items():
            worst[trial] = max(worst.get(trial, 0.0), fit.left)
        cheap = sorted(
            worst, key=lambda name: (worst[name] <= WHOLE, name in self.costly, -worst[name])
        )
        return tuple(cheap[:count])

    def descend(
        self,
        stage: str,
        model: M,
        neighbors: Callable[[M], Iterable[tuple[str, M]]],
        tensors: frozenset[str],
        *,
        screened: int = 4,
        most: int = 8,
    ) -> M:
        """Take the best change while one is significantly better."""
        for _ in range(most):
            if not tensors or self.explained(model, tensors) or self.spent():
                break
            better = self.best(stage, model, neighbors(model), tensors, screened)
            if better is None:
                break
            model = better
        return model

    def ranked(
        self, changes: Iterable[tuple[str, M]], tensors: frozenset[str], trials: tuple[str, ...]
    ) -> list[tuple[float, str, M]]:
        """Changed models by their loss on some trials, first sifted on half of them."""
        every, whole = list(changes), frozenset(trials)
        self.tried += len(every)
        half = 1 if len(every) > MANY else max(1, len(trials) // 2)
        few = frozenset(trials[:half])
        sifted = sorted(((self.loss(m, tensors, few), i) for i, (_, m) in enumerate(every)))[
            :SIFTED
        ]
        found = [(self.loss(every[i][1], tensors, whole), i) for _, i in sifted]
        return [(loss, *every[i]) for loss, i in sorted(found)]

    def best(
        self,
        stage: str,
        model: M,
        changes: Iterable[tuple[str, M]],
        tensors: frozenset[str],
        screened: int,
    ) -> M | None:
        """The change that explains most, if it is significantly better than none."""
        order = self.screen(model, tensors, screened)
        trials = frozenset(order)
        changes = [(text, m) for text, m in changes if m != model]
        ranked = self.ranked(changes, tensors, order)
        here = self.loss(model, tensors, trials)
        if self.also - tensors and ranked:
            near = [entry for entry in ranked if entry[0] < ranked[0][0] + ALIKE]
            near.sort(key=lambda entry: self.loss(entry[2], self.also, trials))
            ranked = near + ranked[len(near) :]
        alike = [e for e in ranked[:TRIED] if e[0] < min(ranked[0][0] + TIED, here - GAIN)]
        if len(alike) > 1:  # on a few trials; all of them tell, and where these do not, the others
            losses = [self.loss(entry[2], tensors) for entry in alike]
            most = min(losses) + TIED
            keys = [(loss > most, loss if loss > most else self.loss(entry[2], self.also - tensors))
                    for entry, loss in zip(alike, losses, strict=True)]  # fmt: skip
            alike = [alike[i] for i in sorted(range(len(alike)), key=keys.__getitem__)]
            ranked = alike + ranked[len(alike) :]
        old, before = self.fits(model, tensors, None), self.loss(model, tensors)
        for i, (loss, text, candidate) in enumerate(ranked[:TRIED]):
            if here - loss < GAIN:
                return None
            new = self.fits(candidate, tensors, None)
            sigma = surer(new, old)
            gain = before - loss_of(new)
            if gain >= GAIN and (sigma >= SURE or (gain >= DECISIVE and sigma >= 1.5)):
                rivals = tuple(
                    other
                    for other_loss, other, m in ranked[i + 1 : i + 6]
                    if other_loss - loss < 0.5 and abs(surer(new, self.fits(m, tensors, None))) < 2
                )
                self.note(stage, text, model, candidate, tensors, sigma, rivals)
                return candidate
        return None

    def note(
        self,
        stage: str,
        text: str,
        before: M,
        after: M,
        tensors: frozenset[str],
        sigma: float,
        rivals: tuple[str, ...] = (),
    ) -> None:
        """Keep a step that was taken."""
        left = self.left(before, tensors), self.left(after, tensors)
        self.steps.append(Taken(stage, text, left[0], left[1], sigma, rivals))

    def pairs(
        self,
        stage: str,
        model: M,
        singles: list[tuple[str, Callable[[M], M | None]]],
        tensors: frozenset[str],
        *,
        keep: int = 14,
        screened: int = 3,
    ) -> M:
        """Two changes at once, among those that alone do least harm: what only shows together."""
        trials = frozenset(self.screen(model, tensors, screened))
        alone = [
            (text, change, m) for text, change in singles
            if (m := change(model)) is not None and m != model
        ]  # fmt: skip
        losses = {text: self.loss(m, tensors, trials) for text, _, m in alone}
        alone.sort(key=lambda entry: losses[entry[0]])
        two = []
        for i, (text, _, first) in enumerate(alone[:keep]):
            for other, change, _ in alone[i + 1 : keep]:
                both = change(first)
                if both is not None and both not in (first, model):
                    two.append((f"{text}, {other}", both))
        return self.best(stage, model, two, tensors, screened) or model

    def pruned(
        self,
        model: M,
        without: Callable[[M], Iterable[tuple[str, M]]],
        tensors: frozenset[str],
    ) -> M:
        """The model without what it explains no worse without."""
        again = True
        while again:
            again = False
            for _, simpler in without(model):
                old, new = self.fits(model, tensors, None), self.fits(simpler, tensors, None)
                self.tried += 1
                worse = loss_of(new) - loss_of(old)
                if worse < GAIN or (worse < 4 * GAIN and surer(old, new) < SURE):
                    model, again = simpler, True
                    break
        return model
