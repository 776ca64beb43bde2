"""What a candidate would have given: attention emulated on the trials, forward and backward in ways
of their own, each gradient in its own.

A `Way` is a recipe and what is done otherwise than attention's definition; a `Model` says which way
each result is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.algorithms import Kept, Problem, attend, attend_backward, golden
from halfulp.algorithms.problem import LOG2_E
from halfulp.calls import Result
from halfulp.formats import FORMAT_OF, FP64
from halfulp.recipes import FP32, Recipe, Step
from halfulp.reconstruct.evidence import Fit, Observed
from halfulp.reconstruct.panel import Trial

FORWARD = ("out", "lse")
GRADIENTS = ("grad_query", "grad_key", "grad_value")
TENSORS = FORWARD + GRADIENTS
SHORT = dict(zip(TENSORS, ("O", "lse", "dQ", "dK", "dV"), strict=True))
Tensors = Mapping[str, Tensor]

# what the backward pass decides and the forward pass already needs to keep
_KEPT_FOR = ("delta_from", "residual_bits", "residual")
_READ = ("query", "key", "value", "input_scaling", "compute", "seed")  # what operands are read by


ORDER = 8.0  # times what fp32 sums make: what sums in another order may differ by


def _as_it_is(_: Trial, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


@dataclass(frozen=True)
class Twist:
    """Something done otherwise than attention's definition: the call is turned into the one that is
    computed, and its results turned back.
    """

    key: str
    text: str
    cause: str  # a key of CAUSES; empty where it is no fault
    # the call that is computed; None: on this trial nothing is otherwise
    turn: Callable[[Trial], Trial | None] = field(compare=False, repr=False)
    back: Callable[[Trial, dict[str, Tensor]], dict[str, Tensor]] = field(
        compare=False, repr=False, default=_as_it_is
    )
    unrounded: tuple[str, ...] = ()  # operands that it rounds, or not, instead of the recipe
    number: float | None = None  # that it has stand for −∞
    around: bool = False  # done around a kernel that is sound: its backward pass reads its own O


@dataclass(frozen=True)
class Way:
    """How one pass is computed."""

    recipe: Recipe
    twists: tuple[Twist, ...] = ()


@dataclass(frozen=True)
class Model:
    """A candidate: how every result is computed."""

    forward: Way
    gradients: tuple[Way, Way, Way]
    # the backward pass reads O and lse of a forward pass of its own, in the gradients' ways
    apart: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> Model:
        """One recipe throughout."""
        return cls(Way(recipe), (Way(recipe),) * 3)

    def way(self, tensor: str) -> Way:
        """The way of one result."""
        return self.gradients[GRADIENTS.index(tensor)] if tensor in GRADIENTS else self.forward

    def before(self, tensor: str) -> Way:
        """The way of the forward pass that one result is computed from."""
        return self.way(tensor) if self.apart else self.forward

    def with_ways(self, tensors: frozenset[str], change: Callable[[Way], Way | None]) -> Model:
        """The same with the ways of these results changed; `change` may refuse with None, and such
        a way stays. Where the backward pass is apart it does not share the forward pass's.
        """
        touches = bool(tensors & set(FORWARD))
        forward = (change(self.forward) or self.forward) if touches else self.forward
        if touches and self.apart:
            return replace(self, forward=forward)
        query, key, value = (
            (change(way) or way) if name in tensors else way
            for name, way in zip(GRADIENTS, self.gradients, strict=True)
        )
        return replace(self, forward=forward, gradients=(query, key, value))


class Emulator:
    """Kernel and candidates on the same trials; what was computed once is kept."""

    def __init__(
        self,
        observed: Mapping[Trial, Result],
        run: Callable[[Trial], Result | None] = lambda _: None,
    ) -> None:
        self.run = run  # the kernel, for what must be asked on other inputs
        self.trials = {trial.name: trial for trial in observed}
        self.observed: dict[tuple[str, str], Observed] = {}
        self.nonfinite: dict[tuple[str, str], int] = {}
        self.kinds: dict[tuple[str, str], torch.dtype] = {}  # as the kernel returns them
        for trial, result in observed.items():
            truth = golden(trial.call, trial.grad_out)
            order = _order_noise(trial, truth)
            for name in TENSORS:
                got, exact = getattr(result, name), getattr(truth, name)
                if got is None:
                    continue
                broken = int((~got.isfinite() & exact.isfinite()).sum())
                if broken:
                    self.nonfinite[trial.name, name] = broken
                self.observed[trial.name, name] = Observed.of(got, exact, order.get(name, 0.0))
                self.kinds[trial.name, name] = got.dtype
        self._forward: OrderedDict[Any, tuple[Problem, Kept, dict[str, Tensor]] | None]
        self._forward = OrderedDict()
        self._read: OrderedDict[Any, Problem] = OrderedDict()
        self._fits: dict[Any, Fit] = {}
        self.emulations = 0

    def within(self, seen: Mapping[tuple[str, str], Tensor]) -> Emulator:
        """The same on these results of these trials alone, where masks that broadcast are not 0."""
        some = copy(self)
        some.observed = {key: self.observed[key].within(mask) for key, mask in seen.items()}
        some.nonfinite = {key: n for key, n in self.nonfinite.items() if key in seen}
        some._fits = {}
        return some

    def offered(self, names: tuple[str, ...] = TENSORS) -> frozenset[str]:
        """Which of these results the kernel gives."""
        return frozenset(tensor for _, tensor in self.observed if tensor in names)

    def only(self, trials: frozenset[str]) -> Emulator:
        """The same on some of the trials; what was computed is shared."""
        some = copy(self)
        some.trials = {name: t for name, t in self.trials.items() if name in trials}
        some.nonfinite = {key: n for key, n in self.nonfinite.items() if key[0] in trials}
        some.observed = {key: o for key, o in self.observed.items() if key[0] in trials}
        return some

    def fits(
        self, model: Model, tensors: frozenset[str], trials: frozenset[str] | None = None
    ) -> dict[tuple[str, str], Fit]:
        """How a candidate fits, result by result."""
        found = {}
        for trial, tensor in self.observed:
            if tensor in tensors and (trials is None or trial in trials):
                found[trial, tensor] = self._fit(self.trials[trial], tensor, model)
        return found

    def _fit(self, trial: Trial, tensor: str, model: Model) -> Fit:
        forward, backward = _ways(model, tensor)
        key = (trial.name, tensor, forward, backward)
        if key not in self._fits:
            computed = self.tensors(trial, forward, backward)
            for name, x in computed.items():
                if (trial.name, name) in self.observed:
                    way = backward if name in GRADIENTS else None
                    observed = self.observed[trial.name, name]
                    x = self._returned(trial.name, name, way or forward, x)
                    self._fits[trial.name, name, forward, way] = observed.against(x)
            if key not in self._fits:  # the combination cannot be computed
                nothing = torch.empty(0)
                self._fits[key] = self.observed[trial.name, tensor].against(nothing[None, None])
        return self._fits[key]

    def _returned(self, trial: str, name: str, way: Way, x: Tensor) -> Tensor:
        """A result as the kernel returns it: one in another 16-bit format is rounded once more."""
        kind = self.kinds.get((trial, name), torch.float32)
        stored = getattr(way.recipe, name, FORMAT_OF[torch.float32])
        wide = stored in (FORMAT_OF[torch.float32], FP64)  # returned in no such format
        return x if wide or stored == FORMAT_OF[kind] else x.to(kind).to(x.dtype)

    def made(self, trial: Trial, model: Model, tensor: str) -> Tensor | None:
        """One result as a candidate gives it; None where it cannot be computed."""
        forward, backward = _ways(model, tensor)
        x = self.tensors(trial, forward, backward).get(tensor)
        return None if x is None else self._returned(trial.name, tensor, backward or forward, x)

    def tensors(self, trial: Trial, forward: Way, backward: Way | None) -> Tensors:
        """Out and lse, or with `backward` the three gradients, float32 or float64; empty where the
        two passes do not fit together.
        """
        passed = self._passed(trial, _for(forward, backward))
        if passed is None:
            return {}
        if backward is None:
            return passed[2]
        turned = _turned(trial, backward)
        kept = passed[1]
        if turned.call.query.shape[:3] != kept.lse.shape[:3]:
            return {}
        if backward.recipe.base != forward.recipe.base:
            if "integer" in (backward.recipe.shift.kind, forward.recipe.shift.kind):
                return {}
            kept = _in_other_base(kept, passed[0].unit)
        self.emulations += 1
        for way in _computable(backward):
            try:
                problem = self._problem(trial, turned, way)
                gradients = attend_backward(problem, kept, turned.grad_out, None)
            except (ValueError, AssertionError):
                continue
            return _turned_back(trial, backward, dict(zip(GRADIENTS, gradients, strict=True)))
        return {}

    def _passed(self, trial: Trial, way: Way) -> tuple[Problem, Kept, dict[str, Tensor]] | None:
        key = (trial.name, way)
        if key not in self._forward:
            self.emulations += 1
            turned = _turned(trial, way)
            self._forward[key] = None
            for able in _computable(way):
                try:
                    problem = self._problem(trial, turned, able)
                    kept = attend(problem)
                except (ValueError, AssertionError):
                    continue
                lse = (kept.lse / problem.unit).squeeze(-1)
                found = _turned_back(trial, way, {"out": kept.out, "lse": lse})
                if any(not twist.around for twist in way.twists):
                    kept = _as_found(kept, found, problem.unit)
                self._forward[key] = (problem, kept, found)
                break
            if len(self._forward) > 256:
                self._forward.popitem(last=False)
        return self._forward[key]

    def _problem(self, trial: Trial, turned: Trial, way: Way) -> Problem:
        """The problem of a way; operands that are read alike are rounded once."""
        recipe = way.recipe
        if names := {name for twist in way.twists for name in twist.unrounded}:
            recipe = recipe.with_(**dict.fromkeys(names, FP64))
        key = (trial.name, way.twists, *(getattr(recipe, name) for name in _READ))
        if key not in self._read:
            self._read[key] = Problem.read(turned.call, Step(recipe))
            if len(self._read) > 128:
                self._read.popitem(last=False)
        return replace(self._read[key], step=Step(recipe))


def _computable(way: Way) -> Iterator[Way]:
    """The way, and for a call that only a mistake makes, which the library that the algorithm is of
    cannot compute (torch's takes no offset), the nearest that can.
    """
    yield way
    if way.twists and way.recipe.algorithm == "torch_cpu":
        yield replace(way, recipe=way.recipe.with_(algorithm="flash2"))


def _order_noise(trial: Trial, truth: Result) -> dict[str, float]:
    """Squared errors that another order of sums may make where all of an error is that: in
    float32, `ORDER` times what fp32 makes.
    """
    if trial.call.query.dtype != torch.float32:
        return {}
    problem = Problem.read(trial.call, Step(FP32))
    kept = attend(problem)
    gradients = attend_backward(problem, kept, trial.grad_out, None)
    made = {"out": kept.out, "lse": (kept.lse / problem.unit).squeeze(-1)}
    made |= dict(zip(GRADIENTS, gradients, strict=True))
    errors = {name: made[name].double() - getattr(truth, name) for name in TENSORS}
    return {n: ORDER**2 * float(e.nan_to_num(0.0).square().sum()) for n, e in errors.items()}


def _as_found(kept: Kept, found: Tensors, unit: float) -> Kept:
    """What the backward pass reads where results were changed after the forward pass."""
    out, lse = found["out"].to(kept.out.dtype), found["lse"].to(kept.out.dtype).unsqueeze(-1) * unit
    if out.shape != kept.out.shape or torch.equal(out, kept.out):
        for_delta = kept.out_for_delta
        out = kept.out
    else:
        for_delta = out
    lse = lse if lse.shape == kept.lse.shape else kept.lse
    return replace(kept, out=out, out_for_delta=for_delta, lse=lse)


def _in_other_base(kept: Kept, unit: float) -> Kept:
    """What the forward pass keeps, for a backward pass in base 2 where `unit` is base e's, or the
    other way round.
    """
    times = LOG2_E if unit == 1 else 1 / LOG2_E
    names = ("lse", "row_max", "largest_score")
    return replace(kept, **{name: getattr(kept, name) * times for name in names})


def _ways(model: Model, tensor: str) -> tuple[Way, Way | None]:
    """Those of both passes that a result is computed in."""
    return model.before(tensor), model.way(tensor) if tensor in GRADIENTS else None


def _for(forward: Way, backward: Way | None) -> Way:
    """The forward pass that keeps what this backward pass needs, without what is done around it."""
    if backward is None:
        return forward
    if any(twist.around for twist in forward.twists):
        forward = replace(forward, twists=tuple(t for t in forward.twists if not t.around))
    changes = {name: getattr(backward.recipe, name) for name in _KEPT_FOR}
    if all(getattr(forward.recipe, name) == x for name, x in changes.items()):
        return forward
    return replace(forward, recipe=forward.recipe.with_(**changes))


def _turned(trial: Trial, way: Way) -> Trial:
    for twist in way.twists:
        trial = twist.turn(trial) or trial
    return trial


def _turned_back(trial: Trial, way: Way, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of the turned call as those of the asked one."""
    stages = [trial]
    for twist in way.twists:
        stages.append(twist.turn(stages[-1]) or stages[-1])
    for twist, before, after in reversed(list(zip(way.twists, stages, stages[1:], strict=False))):
        if after is not before:
            tensors = twist.back(before, tensors)
    return tensors
