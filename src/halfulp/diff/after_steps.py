"""What becomes of a gap when both sides train: the same weights and batches, each side's
arithmetic, and the gap in loss, outputs, gradients and weights after each step, held against A's
own training with random roundings.

A's weights and gradients of every step lie in a file meanwhile; in memory is one trained copy at a
time, with its optimizer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from halfulp.diff.difference import GroupShare, shares_of
from halfulp.diff.local_gap import squares, step_of
from halfulp.diff.noise import MARGIN, Chance, Moved, chance
from halfulp.diff.one_step import step_of_training
from halfulp.diff.setting import Setting
from halfulp.diff.shares import Carried, Share, Swapped, grouped, part_of_gap, share_of
from halfulp.diff.tape import Tape
from halfulp.diff.weights_apart import by_module
from halfulp.interpose import Swap
from halfulp.runs.results import plain_data

MakeOptimizer: TypeAlias = Callable[[nn.Module], Any]
"""Of a model's parameters: an optimizer, a pair of one and its learning-rate scheduler, or a
`Step`."""
Swaps: TypeAlias = Callable[[Setting, int], Sequence[Swap]]
"""Of the copy that is trained and the number of the pass."""
STRETCHES = 2
"""Stretches of batches that both sides are trained on, each from the same weights."""


@dataclass
class Gaps:
    """One training held against A's, after each step: squares by step and parameter. Of A itself
    the way of its weights, the size of its gradients, and its outputs.
    """

    weights: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # found − A's, by step
    losses: list[float | None] = field(default_factory=list)

    def add(
        self,
        weights: dict[str, float],
        gradients: dict[str, float],
        outputs: Tensor,
        loss: float | None,
    ) -> None:
        """What one more step shows."""
        self.weights.append(weights)
        self.gradients.append(gradients)
        self.outputs.append(outputs)
        self.losses.append(loss)


@dataclass(frozen=True)
class AtStep:
    """Both sides after so many steps, on the batch that comes next; mean over stretches.

    A gap's `noise` is that of rounding alone; `way` and `gradient` are shares of A's way from its
    first weights and of A's gradient.
    """

    step: int
    losses: tuple[float | None, float | None]
    outputs: float  # rms gap
    outputs_noise: float
    p: float | None  # of the gap in outputs from rounding alone
    gradient: float
    gradient_noise: float
    way: float | None
    way_error: float | None  # standard error over stretches
    way_noise: float | None
    updates: float | None  # the gap in weights in units of A's last update


@dataclass(frozen=True)
class ModuleCourse:
    """The weights of one module."""

    module: str
    # step from which on its gap is, in every stretch, beyond MARGIN × the largest of rounding
    first: int | None
    way: tuple[float, ...]  # by step from 1: gap as a share of A's way
    noise: tuple[float, ...]
    gradient: float  # before the first step, as a share of A's
    gradient_noise: float
    parameters: Mapping[str, float]  # gap at the end in units of A's last update


@dataclass(frozen=True)
class AfterSteps:
    """What `halfulp.diff(steps=)` found."""

    optimizer: str
    stretches: int
    formats: bool  # rounding is that of the coarser of both formats, and not of A's
    steps: tuple[AtStep, ...]
    growth: tuple[float, float] | None  # factor a step of the gap in weights, standard error
    growth_noise: tuple[float, float] | None
    modules: tuple[ModuleCourse, ...]
    groups: tuple[GroupShare, ...] = ()  # of the gap after the last step
    unmatched: tuple[str, ...] = ()  # parameters of B that A has not

    @property
    def p(self) -> float | None:
        """After the last step."""
        return self.steps[-1].p


class Training:
    """Both sides trained over several stretches of batches.

    Args:
        a, b: the settings, with the same weights; copies of their models are trained.
        batches: used one after the other, and again where there are too few.
        count: steps.
        optimizers: of a's and of b's copy.
        steps: relative size of a rounding by A's place; empty: nothing differs.
        folder: for A's weights.
    """

    def __init__(
        self,
        a: Setting,
        b: Setting,
        batches: Sequence[Any],
        count: int,
        optimizers: tuple[MakeOptimizer, MakeOptimizer],
        steps: Mapping[str, float],
        folder: Path,
    ) -> None:
        self.a, self.b, self.count = a, b, count
        self._batches, self._optimizers, self._steps = batches, optimizers, steps
        self._tapes = [Tape(folder / f"steps {i}") for i in range(STRETCHES)]
        self.own: list[Gaps] = []  # A's
        self.update: list[list[dict[str, float]]] = []  # A's last update, by step
        self.rounding: dict[str, float] = {}  # of each weight once
        self.optimizer = ""

    def _train(
        self,
        side: int,
        stretch: int,
        see: Callable[[int, nn.Module, Any], None],
        swaps: Swaps | None = None,
    ) -> None:
        setting = _trainee((self.a, self.b)[side])
        step = step_of_training(self._optimizers[side](setting.model))
        self.optimizer = type(step.optimizer).__name__
        # one pass more than steps, which shows the gap after the last update
        for k in range(self.count + 1):
            number = stretch * (self.count + 1) + k
            batch = self._batches[number % len(self._batches)]

            def chosen(part: int, k: int = k) -> Sequence[Swap] | None:
                return None if swaps is None else swaps(setting, k * step.accumulation + part)

            see(k, setting.model, step.gradients(setting, batch, chosen, number))
            if k < self.count:
                step.make(setting.model, k)

    def first(self) -> None:
        """A's own training, written down."""
        for stretch, tape in enumerate(self._tapes):
            self._write(stretch, tape)

    def _write(self, stretch: int, tape: Tape) -> None:
        own, update = Gaps(), []

        def see(k: int, model: nn.Module, found: Any) -> None:
            way, step, gradient = {}, {}, {}
            for name, x in model.named_parameters():
                tape.write(f"{k} {name}", x)
                # roundings of single weights are independent, so that their squares add
                self.rounding[name] = step_of(x.dtype) ** 2 * squares(x.detach(), x.detach())[1]
                way[name] = _apart(x, tape.read(f"0 {name}"))
                step[name] = _apart(x, tape.read(f"{max(0, k - 1)} {name}"))
                if x.grad is not None:
                    tape.write(f"{k} gradient {name}", x.grad)
                    gradient[name] = squares(x.grad, x.grad)[1]
            own.add(way, gradient, found.outputs, found.loss)
            update.append(step)

        self._train(0, stretch, see)
        self.own.append(own)
        self.update.append(update)

    def gaps(self, side: int, swaps: Swaps | None = None) -> list[Gaps]:
        """Another training held against A's, by stretch."""
        return [self._held(side, i, tape, swaps) for i, tape in enumerate(self._tapes)]

    def _held(self, side: int, stretch: int, tape: Tape, swaps: Swaps | None) -> Gaps:
        gaps = Gaps()

        def see(k: int, model: nn.Module, made: Any) -> None:
            weights, gradients = {}, {}
            for name, x in model.named_parameters():
                theirs = tape.read(f"{k} {name}")
                if theirs is None or theirs.shape != x.shape:
                    continue
                weights[name] = _apart(x, theirs)
                grad = tape.read(f"{k} gradient {name}")
                if grad is not None and x.grad is not None:
                    gradients[name] = _apart(x.grad, grad)
            apart = made.outputs - self.own[stretch].outputs[k]
            gaps.add(weights, gradients, apart, made.loss)

        self._train(side, stretch, see, swaps)
        return gaps

    def noise(self, repetitions: int) -> list[list[Gaps]]:
        """A trained with random roundings, by repetition and stretch."""
        if not self._steps:
            return []

        def swaps(seed: int) -> Swaps:
            # another noise at every pass and in every repetition
            return lambda setting, k: [Moved(setting, self._steps, seed * 1009 + k).swap()]

        return [self.gaps(0, swaps(i + 1)) for i in range(repetitions)]

    def shares(self, b: list[Gaps], swaps: Sequence[Swap], side: int) -> list[Share]:
        """Of the gap's square after the last step: what B's operations alone make of it in A, or
        what is gone of it with A's in B. No direction is kept of weights, so that both are told by
        sizes.
        """
        made = self.gaps(side, lambda *_: swaps)
        names = ("outputs", "gradients", "weights")
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for one, whole in zip(made, b, strict=True):
            for found, gap in zip(one.outputs[-1], whole.outputs[-1], strict=True):
                pairs["outputs"].append(part_of_gap(torch.zeros_like(gap), gap, found, side))
            for name in names[1:]:
                found, gap = (sum(getattr(x, name)[-1].values()) for x in (one, whole))
                pairs[name].append((found if side == 0 else gap - found, gap))
        return [share_of(name, x) for name, x in pairs.items()]


def _trainee(setting: Setting) -> Setting:
    """The same with a copy of its model, in the mode that it is in."""
    # a copy, so that every stretch and every noise begins at the same weights; in its dtype already
    return replace(setting, model=copy.deepcopy(setting.model), dtype=None)


def _apart(x: Tensor, y: Tensor | None) -> float:
    return 0.0 if y is None else squares(x.detach().cpu(), y)[0]


def after_steps(
    training: Training, repetitions: int, formats: bool, swapped: Swapped | None, most: int
) -> AfterSteps:
    """Train, and say what was found.

    Args:
        training: not begun yet.
        repetitions: trainings of A with random roundings.
        formats: for the report.
        swapped: that makes the swaps of groups; None: none is swapped.
        most: groups that are swapped.
    """
    training.first()
    b, noise = training.gaps(1), training.noise(repetitions)
    names = {name for gaps in b for name in gaps.weights[0]}
    steps = tuple(_at_step(training, b, noise, k) for k in range(training.count + 1))
    carried = []
    if swapped is not None and any(x for gaps in b for x in gaps.weights[-1].values()):
        measured = partial(training.shares, b)
        groups = grouped(list(swapped.gaps.values()))[:most]
        carried = [swapped.carried(group, measured) for group in groups]
        carried.sort(key=_last_first)
        layers = grouped(carried[0].group.members, by_layer=True) if carried else []
        if 1 < len(layers) <= most:
            inside = [swapped.carried(layer, measured) for layer in layers]
            carried += sorted(inside, key=_last_first)
    every = {name for name, _ in training.b.model.named_parameters()}
    return AfterSteps(
        training.optimizer, STRETCHES, formats, steps, _growth(b),
        _growth([gaps for one in noise for gaps in one]),
        tuple(_modules(training, b, noise, sorted(names))),
        shares_of(carried), tuple(sorted(every - names)),
    )  # fmt: skip


def _last_first(carried: Carried) -> float:
    found = next((x.share for x in carried.out if x.of == "weights"), math.nan)
    return math.inf if math.isnan(found) else -found


def _at_step(
    training: Training, b: Sequence[Gaps], noise: Sequence[Sequence[Gaps]], k: int
) -> AtStep:
    gaps = [gaps.outputs[k] for gaps in b]
    moved = [[one[i].outputs[k] for one in noise] for i in range(len(b))] if noise else []
    found: Chance = chance(gaps, moved)
    usual = [x.flatten() for batch in moved for x in batch]
    way = [_share_of_way(training, gaps, i, k) for i, gaps in enumerate(b)]
    known = [x for x in way if x is not None]
    moved_way = [_share_of_way(training, x, i, k) for one in noise for i, x in enumerate(one)]
    usual_way = [x for x in moved_way if x is not None]
    losses = [(own.losses[k], gaps.losses[k]) for own, gaps in zip(training.own, b, strict=True)]
    update = [
        math.sqrt(_total(gaps.weights[k]) / step)
        if (step := _total(training.update[i][k]))
        else None
        for i, gaps in enumerate(b)
    ]
    return AtStep(
        k,
        (_mean([x for x, _ in losses]), _mean([y for _, y in losses])),
        float(torch.cat([x.flatten() for x in gaps]).square().mean().sqrt()),
        float(torch.cat(usual).square().mean().sqrt()) if usual else math.nan,
        plain_data(found.p),
        _gradient(training, b, k, None),
        _rms([_gradient(training, one, k, None) for one in noise]),
        _mean(way),
        _error(known),
        _rms(usual_way) if usual_way else None,
        _mean(update),
    )


def _share_of_way(
    training: Training, gaps: Gaps, stretch: int, k: int, names: Sequence[str] | None = None
) -> float | None:
    way = _total(training.own[stretch].weights[k], names)
    return math.sqrt(_total(gaps.weights[k], names) / way) if way else None


def _gradient(
    training: Training, gaps: Sequence[Gaps], k: int, names: Sequence[str] | None
) -> float:
    size = sum(_total(one.gradients[k], names) for one in training.own)
    gap = sum(_total(one.gradients[k], names) for one in gaps)
    return math.sqrt(gap / size) if size else math.nan


def _modules(
    training: Training, b: Sequence[Gaps], noise: Sequence[Sequence[Gaps]], names: Sequence[str]
) -> list[ModuleCourse]:
    """By module, the one whose gap leaves rounding first, and farthest, first."""
    last, found = training.count, []
    for module, members in by_module(names).items():
        steps = range(1, last + 1)
        ways = [
            [_share_of_way(training, x, i, k, members) or 0.0 for i, x in enumerate(b)]
            for k in steps
        ]
        usual = [
            [
                # never below one rounding of the weights: Adam's first step turns on the sign of a
                # gradient near 0, and had norms of equal engines named (docs/log.md)
                math.hypot(
                    _share_of_way(training, x, i, k, members) or 0.0,
                    _once(training, i, k, members),
                )
                for one in noise
                for i, x in enumerate(one)
            ]
            for k in steps
        ]
        first = last + 1  # every stretch is beyond all that rounding made, and stays there
        while first > 1 and noise and min(ways[first - 2]) > MARGIN * max(usual[first - 2]):
            first -= 1
        parameters = {}
        for name in members:
            gap = sum(x.weights[last][name] for x in b)
            step = sum(x[last][name] for x in training.update)
            parameters[name] = math.sqrt(gap / step) if step else (math.inf if gap else 0.0)
        found.append(ModuleCourse(
            module, first if first <= last else None, tuple(sum(x) / len(x) for x in ways),
            tuple(map(_rms, usual)), _gradient(training, b, 0, members),
            _rms([_gradient(training, one, 0, members) for one in noise]), parameters,
        ))  # fmt: skip
    return sorted(found, key=_earliest)


def _once(training: Training, stretch: int, k: int, names: Sequence[str]) -> float:
    """What rounding the weights once makes, as a share of A's way."""
    way = _total(training.own[stretch].weights[k], names)
    return math.sqrt(_total(training.rounding, names) / way) if way else 0.0


def _earliest(one: ModuleCourse) -> tuple[float, float]:
    if one.first is None:
        return math.inf, -one.way[-1]
    gap, noise = one.way[one.first - 1], one.noise[one.first - 1]
    return one.first, -gap / noise if noise else -math.inf


def _growth(trainings: Sequence[Gaps]) -> tuple[float, float] | None:
    """The factor by which the gap in weights grows a step, and its standard error: least squares
    of its logarithm, from 3 steps.
    """
    steps = range(len(trainings[0].weights)) if trainings else ()
    gaps = [sum(_total(one.weights[k]) for one in trainings) for k in steps]
    # gaps are squares, hence the half
    points = [(k, math.log(x) / 2) for k, x in enumerate(gaps) if x]
    if len(points) < 3:
        return None
    k, y = (torch.tensor(x, dtype=torch.float64) for x in zip(*points, strict=True))
    # n − 2 degrees of freedom for level and slope; the error of the factor is that of its logarithm
    # times the factor, to first order
    centred = k - k.mean()
    slope = float((centred * y).sum() / centred.square().sum())
    rest = y - y.mean() - slope * centred
    error = math.sqrt(
        float(rest.square().sum()) / (len(points) - 2) / float(centred.square().sum())
    )
    return math.exp(slope), math.exp(slope) * error


def _total(squares: Mapping[str, float], names: Sequence[str] | None = None) -> float:
    return sum(squares.values() if names is None else (squares.get(x, 0.0) for x in names))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else None


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(x * x for x in values) / len(values)) if values else math.nan


def _error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    x = torch.tensor(values, dtype=torch.float64)
    return float(x.std()) / math.sqrt(len(values))
