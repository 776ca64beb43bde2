"""What a reconstruction found, as data and as sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from halfulp.recipes import Recipe, recipe_text
from halfulp.reconstruct.descent import Taken
from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, SHORT, TENSORS, Model, Way
from halfulp.reconstruct.evidence import Cosine
from halfulp.reconstruct.naming import Difference, Named
from halfulp.reconstruct.places import Place

WELL = 0.9  # share of an error from which on it is called explained
LIKE = 0.5  # below, a recipe is not what a kernel is


@dataclass(frozen=True)
class Explained:
    """One result: how like the kernel's error the model's is, and the stock recipe's beside it."""

    tensor: str
    model: Cosine
    stock: Cosine
    times_stock: float  # the kernel's error over the stock recipe's, the median of all trials
    times_halfulp: float

    @property
    def share(self) -> float:
        """Of the kernel's squared error, what the model explains."""
        return max(0.0, 1 - self.model.left)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "tensor": SHORT[self.tensor],
            "explained": self.share,
            "cosine": self.model.value,
            "standard_error": self.model.error,
            "groups": self.model.groups,
            "stock_cosine": self.stock.value,
            "stock_explained": max(0.0, 1 - self.stock.left),
            "times_stock": self.times_stock,
            "times_halfulp": self.times_halfulp,
        }


@dataclass(frozen=True)
class Reconstruction:
    """What a kernel does, and how sure that is."""

    target: str
    dtype: str
    model: Model
    stock: Recipe
    recipe: Recipe | None  # the one recipe that says it all; None where passes differ
    explained: tuple[Explained, ...]
    causes: tuple[Named, ...]  # what makes it worse than the stock recipe, the worst first
    ingredients: tuple[Named, ...]  # of the stock recipe's own errors: what rounds more than needed
    harmless: tuple[Difference, ...]
    beside: tuple[str, ...]  # what it does otherwise than halfulp's recipe
    places: tuple[Place, ...]  # of what is not explained
    steps: tuple[Taken, ...]
    nonfinite: dict[str, int]  # "trial tensor" → elements
    refused: tuple[str, ...]  # trials that the kernel does not take
    unsteady: bool  # gave other bits when called again
    tried: int
    seconds: float
    complete: bool  # the search was not cut off by its effort
    # in which order sums go, as masks of huge values reveal it: "O over keys" → in words
    sums: dict[str, str] = field(default_factory=dict)
    region: str = ""  # "in heads of odd number alone": what is said holds there, all else is right
    form: str = ""  # in which the kernel was called, where that is not [B, H, N, D]

    @property
    def text(self) -> str:
        """The recipe, or the ways of both passes."""
        return self._text_of(TENSORS)

    def _text_of(self, tensors: Sequence[str]) -> str:
        """The ways of these results, the forward pass's first."""
        if self.recipe is not None:
            return recipe_text(self.recipe)
        whose: dict[Way, list[str]] = {}
        for tensor in tensors:
            whose.setdefault(self.model.way(tensor), []).append(tensor)
        told = []
        for way, names in whose.items():
            if not set(names).isdisjoint(FORWARD):
                told.append(_way(way) + ", in what is returned alone" * self.model.apart)
            elif len(whose) == 1:  # whose it is is said beside it
                told.append(_way(way))
            elif names == [*GRADIENTS]:
                told.append(f"backward {_way(way)}")
            else:
                told.append(f"for {', '.join(SHORT[n] for n in names)} {_way(way)}")
        return "; ".join(told)

    @property
    def understood(self) -> bool:
        """Whether every result is explained."""
        if not self.explained:  # nothing errs by more than the order of sums makes
            return not (self.places or self.nonfinite)
        return all(e.share >= WELL for e in self.explained)

    @property
    def sentence(self) -> str:
        """One line: what it is, how much of each error that explains, what stays unexplained."""
        known = [e for e in self.explained if e.share >= LIKE]
        located = {p.tensor for p in self.places if known}  # where what is left is said
        shares = [f"{_percent(e.share)} of {SHORT[e.tensor]}'s error" for e in self.explained
                  if e in known or e.tensor not in located]  # fmt: skip
        if not shares:
            told = f"is {self.text}: it errs by no more than the order of its sums makes"
        elif self.understood or len(known) == len(self.explained):
            told = f"is {self.text}: explains {', '.join(shares)}"
        elif known:
            names = ", ".join(SHORT[e.tensor] for e in known)
            own = self._text_of([e.tensor for e in known])
            go = "goes" if len(known) == 1 else "go"
            told = f"is {own} as far as {names} {go}: explains {', '.join(shares)}"
        else:
            told = f"is no recipe that was tried; the nearest, {self.text}, explains"
            told += f" {', '.join(shares)}"
        if self.places:
            unsure = "; ".join(f"{SHORT[p.tensor]} ({p.text})" for p in self.places)
            told += f"; unexplained: {unsure}"
        return f"{self.region} {told}".lstrip()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "target": self.target,
            "dtype": self.dtype,
            "recipe": self.text,
            "one_recipe": self.recipe is not None,
            "text": self.sentence,
            "understood": self.understood,
            "explained": [e.as_dict() for e in self.explained],
            "causes": [n.as_dict() for n in self.causes],
            "ingredients": [n.as_dict() for n in self.ingredients],
            "harmless": [d.text for d in self.harmless],
            "otherwise_than_halfulp": list(self.beside),
            "unexplained": [p.as_dict() for p in self.places],
            "steps": [
                {
                    "stage": s.stage,
                    "change": s.text,
                    "left_before": s.left_before,
                    "left_after": s.left_after,
                    "standard_errors": s.sigma if math.isfinite(s.sigma) else None,
                    "as_likely": list(s.rivals),
                }
                for s in self.steps
            ],
            "sums": self.sums,
            "region": self.region,
            "form": self.form,
            "nonfinite": self.nonfinite,
            "refused": list(self.refused),
            "unsteady": self.unsteady,
            "tried": self.tried,
            "seconds": self.seconds,
            "complete": self.complete,
        }

    def __str__(self) -> str:
        return f"{self.target} {self.sentence}"


def _way(way: Way) -> str:
    told = recipe_text(way.recipe)
    return told if not way.twists else f"{told} where {', and '.join(t.text for t in way.twists)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 0.995 or share == 1 else f"{100 * share:.3g} %"


__all__ = ["SHORT", "TENSORS", "WELL", "Explained", "Reconstruction"]


class Rival(NamedTuple):
    """A way that explains about as much as the best."""

    text: str
    share: float
    fits: float


@dataclass(frozen=True)
class FoundWay:
    """Causes of an operation's errors, and how much of them they explain."""

    cause: str  # its key in `CAUSES`
    text: str
    share: float  # of the squared error of the tensor
    fits: float  # how well it fits the other calls: below 0 where it is wrong and the kernel is not
    tensor: str  # what errs, the worst first
    rivals: tuple[Rival, ...] = ()  # ways that were weighed, the one that is named first
    alike: tuple[str, ...] = ()  # ways that no call tells from it

    @property
    def told(self) -> str:
        """The way, and how much of what it explains."""
        if not self.share:
            return self.text
        alike = f" (as would: {'; or '.join(self.alike)})" if self.alike else ""
        return (
            f"{self.text}: explains {100 * self.share:.0f} % of the error of {self.tensor}{alike}"
        )
