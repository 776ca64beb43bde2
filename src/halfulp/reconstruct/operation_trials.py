"""Calls of an operation on which a kernel is held against what a way to compute it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfulp.operations import (
    DTYPES,
    STOCHASTIC,
    OperationCalls,
    OperationResult,
    Recorded,
    Rounding,
    Tensors,
    UnlikeError,
    changed,
    disturbed,
)
from halfulp.reconstruct.operation_slopes import Slopes
from halfulp.reconstruct.operation_steps import OPERAND, RESULT, shapes_of_steps
from halfulp.reconstruct.operation_ways import FAILS, Way, computed, is_made

Run = Callable[[OperationCalls], OperationResult | None]

MOVED = 0.05  # of its size, by which a step is moved to see what hangs on it
SAME = 0.05  # share of an error that may be left of what is not random after all
ONE_PASS = 0.02  # share that a way must explain more in one pass alone than in both
NEAR_WIDE = 1e-4  # the same in float32, where nothing is rounded to less
NEAR = 0.03  # of its size, by which steps that are rounded otherwise may put a tensor off
SLIGHT = 0.02  # share that a rounding may explain to first order, below which it is not tried
FIRST_ORDER = 0.3  # relative error: what explains less moves results by little
LITTLE = 0.1  # share of an error below which it does not matter how little a way explains
OFTEN = 6  # ways tried of a call, from which on its evaluation is recorded
BROKEN = 1e3  # what a value that is not finite where another is counts, in its tensor's size


@dataclass(frozen=True)
class Trial:
    """One call: what the kernel gave, what is exact, how much of their difference rounding the
    results makes, and which tensors are off by more.
    """

    calls: OperationCalls
    kernel: Tensors
    exact: Tensors
    errors: dict[str, float]  # squared, of the kernel
    rounding: dict[str, float]  # squared, of the floor
    failing: tuple[str, ...]
    spared: Tensors = field(default_factory=dict)  # rows of results that are taken for right
    known: dict[Any, Any] = field(default_factory=dict)  # of the bases, and shares

    @property
    def numbers(self) -> int:
        """How many its operands have."""
        return sum(x.numel() for x in self.calls.operands.values())

    @property
    def relative(self) -> float:
        """The error of the tensor that fails worst, of its size."""
        return max(  # type: ignore[no-any-return]
            (self.errors[n] / max(square(self.exact[n]), 1e-300)) ** 0.5 for n in self.failing
        )

    @property
    def is_noise(self) -> bool:
        """Whether every tensor that fails is off by no more than where every step is off by a few
        percent at random: sums of many terms that cancel make much of what is little.
        """
        noisy = changed(self.calls, disturbed(torch.Generator().manual_seed(0), MOVED))
        return all(self.errors[n] <= square(noisy[n] - self.exact[n]) for n in self.failing)

    @property
    def near(self) -> float:
        """The share of the error that steps which are rounded otherwise may be, of what the kernel
        gives.
        """
        own = (square(self.kernel[n]) / max(self.errors[n], 1e-300) for n in self.failing)
        wide = self.calls.dtype == "float32" and "format" not in self.calls.options
        return (NEAR_WIDE if wide else NEAR) ** 2 * min(own)

    @property
    def as_rounded(self) -> float:
        """What rounding makes of results of the kernel's size, which may be much smaller."""
        found = 0.0
        for name in self.failing:
            own, due = (square(x[name]) for x in (self.kernel, self.exact))
            found += self.rounding[name] * (own / due if 0 < own < due else 1.0)
        return found

    @property
    def of_rounding(self) -> float:
        """The share of the error that that is."""
        return self.as_rounded / max(1e-300, sum(self.errors[name] for name in self.failing))

    @property
    def nonfinite(self) -> list[str]:
        """The tensors with NaN or Inf where the audited dtype has a number for the exact value."""
        most = torch.finfo(DTYPES[self.calls.dtype]).max
        return [
            name
            for name, x in self.kernel.items()
            if bool((~x.isfinite() & (self.exact[name].abs() <= most)).any())
        ]

    @property
    def is_mixed(self) -> bool:
        """Whether numbers are off in what fails, or elements alone have none."""
        every = [(self.kernel[n], self.exact[n]) for n in self.failing]
        return any(bool((x.isfinite() & (due != 0)).any()) for x, due in every)

    @cached_property
    def of_results(self) -> Trial | None:
        """The forward pass alone of a call where both err; None of any other."""
        names = [n for n in self.kernel if not n.startswith("grad_")]
        failing = tuple(n for n in self.failing if n in names)
        if not self.calls.grads or (self.failing and len(failing) in (0, len(self.failing))):
            return None
        kernel, exact, errors, rounding = (
            {n: x[n] for n in names} for x in (self.kernel, self.exact, self.errors, self.rounding)
        )
        spared = {n: x for n, x in self.spared.items() if n in names}
        calls = replace(self.calls, grads={})
        return Trial(calls, kernel, exact, errors, rounding, failing, spared)  # type: ignore[arg-type]

    def like(self, base: Rounding, way: Way) -> float:
        """The square of the cosine between the kernel's errors and a way's, over what fails."""
        way = replace(way, alone="") if way.alone else way
        if (key := self._likeness(base, way)) not in self.known:
            self._keep_likeness(base, way, self.emulated(base, (way,)))
        return self.known[key]  # type: ignore[no-any-return]

    def _likeness(self, base: Rounding, way: Way) -> tuple[Any, ...]:
        return ("like", self.failing, base.name, _known_as(way))

    def _keep_likeness(self, base: Rounding, way: Way, other: Tensors | None) -> None:
        """Kept as soon as a way has been computed: regions are looked for by it."""
        start = self.emulated(base, ())
        found = 0.0 if start is None or other is None else self.cosine(start, other)
        self.known[self._likeness(base, way)] = found

    def cosine(self, start: Tensors, other: Tensors) -> float:
        """The same of two emulations, the one without the way first."""
        a, b = ([(x[n] - start[n]).flatten().nan_to_num(0.0, 0.0, 0.0) for n in self.failing]
                for x in (self.kernel, other))  # fmt: skip
        inner = sum(float(x.dot(y)) ** 2 / max(float(x.dot(x)) * float(y.dot(y)), 1e-300)
                    for x, y in zip(a, b, strict=True))  # fmt: skip
        return inner / max(1, len(self.failing))

    def weighted(self, a: Tensors, b: Tensors) -> Tensor:
        """What fails, as one vector, each tensor in its error's size."""
        parts = [(a[n] - b[n]).flatten() / max(self.errors[n], 1e-300) ** 0.5 for n in self.failing]
        return torch.cat(parts).nan_to_num(0.0, 0.0, 0.0)

    def left(self, emulated: Tensors, name: str) -> float:
        """The squared distance of the kernel from an emulation."""
        return power(self.kernel[name], emulated[name], self.exact[name])

    def best(self, base: Rounding, chosen: tuple[Way, ...], way: Way) -> tuple[float, Way]:
        """The share that one more way explains, and the way: in both passes or in one alone, since
        kernels compute a value again or keep it.
        """
        key = ("best", self.failing, base.name, *map(_known_as, (*chosen, way)))
        share, alone = self.known.get(key) or self._best(base, chosen, way)
        if way.text and all(one.text for one in chosen):
            self.known[key] = share, alone
        return share, way if way.alone == alone else replace(way, alone=alone)

    def _best(self, base: Rounding, chosen: tuple[Way, ...], way: Way) -> tuple[float, str]:
        # beside another way other numbers are rounded, whose errors have nothing in common
        slopes = None if chosen else self._slopes(base)
        if slopes is not None and slopes.gain(way) < SLIGHT:
            return -1.0, way.alone
        if (most := self._most(base, chosen, way)) < LITTLE:
            return most, way.alone
        both = self.emulated(base, (*chosen, way))
        if not chosen:
            self._keep_likeness(base, way, both)
        if both is None or (self._random(way) and not self._same(both)):
            return -1.0, way.alone
        with_it = self._scores(both)
        found = (self._of_scores(with_it), way.alone)
        if not chosen:
            self._keep_share(base, (way,), found[0])
        without = self._scores_without(base, chosen) if self.calls.grads else None
        if without is None:
            return found
        gradients = [n for n in self.kernel if n.startswith("grad_")]
        for alone in ("forward", "backward", *(gradients if len(gradients) > 1 else ())):
            mixed = {n: (with_it if is_made(alone, n) else without)[n] for n in with_it}
            if (share := self._of_scores(mixed)) > found[0] + ONE_PASS:
                found = (share, alone)
        return found

    def _scores_without(self, base: Rounding, chosen: tuple[Way, ...]) -> dict[str, float] | None:
        """The scores of what a further way is tried beside, once for all of these."""
        key = ("scores", self.failing, base.name, *map(_known_as, chosen))
        if key not in self.known:
            none = self.emulated(base, chosen)
            self.known[key] = None if none is None else self._scores(none)
        return self.known[key]  # type: ignore[no-any-return]

    def _most(self, base: Rounding, chosen: tuple[Way, ...], way: Way) -> float:
        """The most that one more way can explain, by what fails alone: by the forward pass where
        nothing else does, half of an emulation or less; else by what it reaches of a recorded one.
        """
        calls, ways, only = self.calls, (*chosen, way), None
        if calls.grads and not any(n.startswith("grad_") for n in self.failing):
            calls = replace(calls, grads={})
        elif len(self.failing) < len(self.kernel) and all(
            w.may_be_in_part and not (w.alone or w.results) for w in ways
        ):
            only = self.failing if self._recorded(base, calls) is not None else None
        if calls is self.calls and only is None:
            return 1.0
        found = self._computed(calls, base, ways, only)
        if found is None:
            return 1.0
        if not chosen:
            self._keep_likeness(base, way, found)
        scores = {n: max(-1.0, 1 - self.left(found, n) / max(self.errors[n], 1e-300))
                  for n in self.failing}  # fmt: skip
        if only is not None:  # one gradient alone may be made so
            without = self._scores_without(base, chosen) or {}
            scores = {n: max(x, without.get(n, -1.0)) for n, x in scores.items()}
        return sum(scores.values()) / len(scores)

    def _random(self, way: Way) -> bool:
        """Whether a step is altered that common kernels round stochastically."""
        steps = self.calls.operation.stock.steps
        return any(steps.get(name) == STOCHASTIC for name in way.steps)

    def _same(self, emulated: Tensors | None) -> bool:
        """Whether the first result is the kernel's own, element by element."""
        name = self.calls.operation.results[0].name
        if emulated is None or name not in self.kernel:
            return False
        return self.left(emulated, name) <= SAME * self.errors[name]

    def alike(self, one: Rounding, other: Rounding) -> bool:
        """Whether two recipes make the same of what fails."""
        a, b = self.emulated(one, ()), self.emulated(other, ())
        return a is None or b is None or all(_equal(a[n], b[n]) for n in self.failing)

    def knows(self, chosen: tuple[Way, ...]) -> bool:
        """Whether the definition has a step of these ways on this call."""
        names = {name for way in chosen for name in (*way.steps, *way.formats)}
        if names and "steps" not in self.known:
            self.known["steps"] = dict.fromkeys(shapes_of_steps(self.calls), torch.zeros(()))
        known = self.known.get("steps", {})
        return not names or any(n in known or n.startswith((OPERAND, RESULT)) for n in names)

    def unexplained(self, base: Rounding, chosen: tuple[Way, ...]) -> set[str]:
        """The failing tensors of whose error these ways leave a tenth or more."""
        found = self.emulated(base, chosen) or self.exact
        return {n for n in self.failing if self.left(found, n) > 0.1 * self.errors[n]}

    def concerns(self, base: Rounding, way: Way, names: Collection[str] | None = None) -> bool:
        """Whether one of these tensors, or what fails, hangs on what the way alters."""
        if not (way.steps or way.formats) or way.options or way.operands or way.results:
            return True
        of = set(self.failing if names is None else names)
        return any(self.hangs_on(base, name) & of for name in (*way.steps, *way.formats))

    def hangs_on(self, base: Rounding, name: str) -> set[str]:
        """The tensors that change with a step, or all that fail where none does."""
        if name.startswith(RESULT):
            return {name.removeprefix(RESULT)}
        if (key := ("hangs", name)) not in self.known:
            self.known[key] = self._reached(base, name)
        # what moves nothing, as a maximum that is subtracted, may break everything
        return set(self.known[key] or self.failing)

    def _reached(self, base: Rounding, name: str) -> set[str]:
        start = self.emulated(base, ())
        if start is None:
            return {*self.exact}
        if (recorded := self._recorded(base, self.calls)) is not None:
            given = name.startswith(OPERAND)
            return recorded.reached(name.removeprefix(OPERAND), given=given) & self.exact.keys()
        moved = self.emulated(base, (moving(name),))
        if moved is None:
            return {*self.exact}
        return {n for n, x in moved.items() if not _equal(x, start[n])}

    def share(self, base: Rounding, chosen: tuple[Way, ...]) -> float:
        """How much of the failing tensors' squared errors these ways explain, less what they make
        wrong of the others: 1 for all, below 0 for less than nothing.
        """
        if (key := self._shared(base, chosen)) in self.known:
            return self.known[key]  # type: ignore[no-any-return]
        emulated = self.emulated(base, chosen)
        random = any(self._random(way) for way in chosen) and not self._same(emulated)
        found = -1.0 if random else self.of(emulated)
        self._keep_share(base, chosen, found)
        return found

    def _shared(self, base: Rounding, chosen: tuple[Way, ...]) -> tuple[Any, ...]:
        return ("share", self.failing, base.name, *map(_known_as, chosen))

    def _keep_share(self, base: Rounding, chosen: tuple[Way, ...], share: float) -> None:
        if all(way.text for way in chosen):  # else they are told alike
            self.known[self._shared(base, chosen)] = share

    def of(self, emulated: Tensors | None) -> float:
        """The share of an emulation."""
        return -1.0 if emulated is None else self._of_scores(self._scores(emulated))

    def _scores(self, emulated: Tensors) -> dict[str, float]:
        """Of every tensor that fails the share of its error that an emulation explains, of every
        other how wrong it is made.
        """
        scores: dict[str, float] = {}
        for name, error in self.errors.items():
            left = self.left(emulated, name)
            if name in self.failing:
                scores[name] = max(-1.0, 1 - left / max(error, 1e-300))
            elif left > 4 * max(error, self.rounding[name]):
                size = max(square(self.exact[name]), 1e-300)
                scores[name] = min(1.0, 10 * left / size) if self.failing else 1.0
            else:
                scores[name] = 0.0
        return scores

    def _of_scores(self, scores: dict[str, float]) -> float:
        shares = [scores[name] for name in self.failing if name in scores]
        wrong = [score for name, score in scores.items() if name not in self.failing]
        found = sum(shares) / len(shares) if shares else 0.0
        return found - sum(wrong) / max(1, len(wrong))

    def all_but_rounding(self, base: Rounding, way: Way) -> bool:
        """Whether a way leaves no more of what fails than rounding may make."""
        if (emulated := self.emulated(base, (way,))) is None:
            return False
        rest = sum(self.left(emulated, name) for name in self.failing)
        least = 1e-6 * sum(self.errors[name] for name in self.failing)
        return rest <= max(6 * self.as_rounded, least)

    def spoilt(self, base: Rounding, chosen: tuple[Way, ...]) -> bool:
        """Whether these ways put a tensor off by more than the kernel's rounding may."""
        found = self.emulated(base, chosen)
        return found is None or any(
            self.left(found, n) > max(4 * error, NEAR**2 * square(self.exact[n]))
            for n, error in self.errors.items()
        )

    def spares(self, base: Rounding, way: Way) -> bool:
        """Whether a way leaves as they are the tensors that do not fail."""
        found = self.emulated(base, (way,))
        scores = self._scores(found) if found is not None else {"": 1.0}
        return not any(x for name, x in scores.items() if name not in self.failing)

    def breaks(self, base: Rounding, chosen: tuple[Way, ...]) -> bool:
        """Whether these ways have NaN or Inf where the kernel has a number."""
        found = self.emulated(base, chosen)
        return found is not None and any(
            bool((x.isfinite() & ~found[n].isfinite()).any()) for n, x in self.kernel.items()
        )

    def emulated(self, base: Rounding, chosen: tuple[Way, ...]) -> Tensors | None:
        """What a kernel of these ways gives; None where a definition has no value there."""
        key = (base.name, tuple(str(way) for way in chosen))
        if any(way.alone for way in chosen):
            made: dict[tuple[str, ...], Tensors | None] = {}
            mixed: Tensors = {}
            for name in self.kernel:
                own = tuple(replace(w, alone="") for w in chosen if is_made(w.alone, name))
                told = tuple(map(str, own))
                if told not in made:
                    made[told] = self.emulated(base, own)
                if (found := made[told]) is None:
                    return None
                mixed[name] = found[name]
            return mixed
        if key in self.known:
            return self.known[key]  # type: ignore[no-any-return]
        emulated = self._computed(self.calls, base, chosen)
        if not chosen:
            self.known[key] = emulated
        return emulated

    def _computed(
        self,
        calls: OperationCalls,
        base: Rounding,
        chosen: tuple[Way, ...],
        only: Collection[str] | None = None,
    ) -> Tensors | None:
        try:
            found = self._found(calls, base, chosen, only)
        except FAILS:
            return None
        names = self.kernel.keys() & found.keys()
        if any(found[name].shape != self.kernel[name].shape for name in names):
            return None
        made = {name: found[name].double() for name in self.kernel if name in names}
        return made | {n: torch.where(here, self.exact[n], made[n])
                       for n, here in self.spared.items() if n in made}  # fmt: skip

    def _slopes(self, base: Rounding) -> Slopes | None:
        """What a rounding may explain; None where it is not known."""
        key = ("slopes", self.failing, base.name)
        if key not in self.known:
            start = self.emulated(base, ())
            left = {n: self.kernel[n] - start[n] for n in self.failing} if start else {}
            self.known[key] = None
            if left and (recorded := self._recorded(base, self.calls)) is not None:
                small = self.relative < FIRST_ORDER
                with suppress(UnlikeError, *FAILS):
                    self.known[key] = Slopes(recorded, base, left, self.errors, small)
        return self.known[key]  # type: ignore[no-any-return]

    def _recorded(self, base: Rounding, calls: OperationCalls) -> Recorded | None:
        """The call in this arithmetic, to be made again; None where it hangs on numbers."""
        key = ("recorded", base.name, bool(calls.grads))
        if key not in self.known:
            self.known[key] = None
            if STOCHASTIC not in base.steps.values():
                with suppress(UnlikeError, *FAILS):
                    self.known[key] = Recorded(calls, base.change(calls.dtype), torch.float32)
        return self.known[key]  # type: ignore[no-any-return]

    def _found(
        self,
        calls: OperationCalls,
        base: Rounding,
        chosen: tuple[Way, ...],
        only: Collection[str] | None,
    ) -> Tensors:
        key = ("tried", base.name, bool(calls.grads))
        in_parts = all(way.may_be_in_part for way in chosen)
        self.known[key] = tried = self.known.get(key, 0) + in_parts
        often = tried >= OFTEN or only is not None
        recorded = self._recorded(base, calls) if in_parts and often else None
        try:
            return computed(calls, base, chosen, recorded, only)
        except UnlikeError:
            return computed(calls, base, chosen)


def moving(name: str) -> Way:
    """A step that is off by a known share of itself, zeros by that of 1."""

    def move(x: Tensor) -> Tensor:
        return x * (1 + MOVED) + (x == 0) * MOVED if x.is_floating_point() else x

    return Way("", f"{name} moved", {name: move})


def _known_as(way: Way) -> tuple[str, Any]:
    """By what a way is known; several forms of eager code are told alike."""
    return str(way), way.eager


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def power(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """The squared distance; where one of two is not finite it counts as large."""
    difference = (a - b).flatten()
    plain = float(difference.dot(difference))
    if math.isfinite(plain):  # as nearly everywhere, and half of a search is spent here
        return plain
    one = a.isfinite() != b.isfinite()
    apart = (a - b).nan_to_num(0.0, 0.0, 0.0).square().sum()
    each = max(square(a), square(scale)) / max(1, scale.numel()) + float(scale.numel() == 0)
    return float(apart) + BROKEN * float(one.sum()) * max(each, 1e-300)


def square(x: Tensor) -> float:
    """The sum of squares of what is finite."""
    return float(x.nan_to_num(0.0, 0.0, 0.0).square().sum())
