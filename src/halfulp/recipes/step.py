"""The seam: every named intermediate passes through a `Step`, which rounds it and shows it to
observers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from halfulp.formats import BlockFormat, round_to
from halfulp.recipes.recipe import STEPS, Recipe

Observer = Callable[[str, Tensor, Tensor], None]


class Step:
    """The seam: `step(name, value)` rounds the value as the recipe says and shows (name, exact,
    rounded) to observers.

    An observer that changes what it is shown raises RuntimeError. Stochastic rounding is keyed by
    the recipe's seed, the step's name and how often it was passed, so a run repeats bit for bit.
    """

    def __init__(self, recipe: Recipe, observers: Sequence[Observer] = ()) -> None:
        self.recipe = recipe
        self.observers = tuple(observers)
        self._passed: dict[str, int] = {}
        self._active = recipe.rounded_steps

    def __call__(self, name: str, exact: Tensor) -> Tensor:
        """Round `exact` (float32 or float64) to the step's format, in the same dtype."""
        fmt = self._active.get(name)
        if fmt is None:
            assert name in STEPS, name
            rounded = exact
        elif (fmt.element if isinstance(fmt, BlockFormat) else fmt).rounding == "stochastic":
            rounded = round_to(exact, fmt, seed=self.next_seed(name))
        else:
            rounded = round_to(exact, fmt)
        for observe in self.observers:
            _show(observe, name, exact, rounded)
        return rounded

    def rounds(self, name: str) -> bool:
        """Whether this step changes any bits."""
        return name in self._active

    def next_seed(self, name: str) -> int:
        """A seed that no other passage of this run has."""
        count = self._passed[name] = self._passed.get(name, 0) + 1
        return hash_seed(self.recipe.seed, name, count)

    def scratch(self, x: Tensor) -> Tensor | None:
        """`x` as an output buffer if it may be overwritten: an observer may have kept it, and then
        it may not.
        """
        return None if self.observers else x


def _show(observe: Observer, name: str, exact: Tensor, rounded: Tensor) -> None:
    # no version counter, so the observer gets copies
    if exact.is_inference() or rounded.is_inference():
        return observe(name, exact.clone(), rounded.clone())
    before = (exact._version, rounded._version)
    observe(name, exact, rounded)
    if (exact._version, rounded._version) != before:
        raise RuntimeError(
            f"an observer changed step {name!r}: it may look at what it is shown, not change it"
        )
    return None


def hash_seed(seed: int, name: str, count: int) -> int:
    """A 31-bit seed from a recipe seed, a step's name and a counter (FNV-1a, the same on every
    machine).
    """
    state = 0x811C9DC5
    for byte in f"{seed}/{name}/{count}".encode():
        state = ((state ^ byte) * 0x01000193) & 0xFFFFFFFF
    return state >> 1
