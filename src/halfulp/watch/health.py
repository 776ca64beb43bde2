"""What a watched training shows beside its attention, step by step: loss, gradient norm, learning
rate, a GradScaler's scale, and whether its batches repeat.

What is on a device stays there, one number each, and is read a few steps at a time, so that a step
waits for nothing. An alarm of attention is worth nothing in a run that has broken elsewhere, and a
report without one must not look calm over it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.interpose import leaves

HISTORY = 512
"""Steps that are remembered."""
BEFORE = 32  # steps that a step is compared with
LEAST = 16  # of them that must be known
SHARE = 0.1  # of its median, at least, by which a loss has risen
_FIRST = 8  # losses that a run began at
_SAMPLE = 4096  # numbers of a batch's tensor that tell it from others


@dataclass(frozen=True)
class Step:
    """One step; NaN is what nobody showed."""

    number: int
    loss: float  # the mean over its passes
    grad_norm: float  # before clipping, where clipping computes it
    learning_rate: float  # the largest of all groups
    scale: float  # of a GradScaler
    batch: float  # a number that batches share which are alike, bit by bit
    skipped: bool = False  # by a GradScaler


class Health:
    """The steps so far: the last `HISTORY`, and what was ever wrong."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=HISTORY)
        self.skipped = 0  # by a GradScaler
        self.lowest = math.inf  # of the losses
        self._early: list[float] = []  # the first losses
        self._first: dict[str, int] = {}  # step in which "loss" or "gradient" was first not finite
        self._pending: list[tuple[Step, Tensor | None, Tensor | None, Tensor | None]] = []
        # of the step that is being made
        self._losses: list[Tensor] = []
        self.norm: Tensor | None = None
        self._clipped = False
        self._batches: list[Tensor] = []

    def saw_output(self, output: Any) -> bool:
        """Keep the loss of a forward pass that gives one: a number, `.loss`, ["loss"], or first."""
        loss = loss_of(output)
        if loss is not None:
            self.saw_loss(loss)
        return loss is not None

    def saw_loss(self, loss: Tensor | float) -> None:
        """Keep a loss, a tensor of one number or a float."""
        self._losses.append(torch.as_tensor(loss).detach().float().reshape(()))

    def saw_step_loss(self, loss: Tensor | float) -> None:
        """Keep the loss of a whole step, in place of what its passes showed."""
        self._losses = []
        self.saw_loss(loss)

    def saw_batch(self, values: Iterable[Any]) -> None:
        """Keep a number that tells what a pass was given from anything else."""
        # plain tensors that differ from number to number
        told = (x for x in leaves(values) if type(x) is Tensor and x.numel() > 1)
        parts = [_mark(x) for x in told if x.layout == torch.strided]
        if parts:
            self._batches.append(torch.stack([x.to(parts[0].device) for x in parts]).sum())

    def saw_norm(self, norm: Tensor, *, clipped: bool) -> None:
        """Keep a gradient norm; one that was computed to clip by stands before it is clipped."""
        if not self._clipped:
            self.norm, self._clipped = norm.detach().float().reshape(()), clipped

    def end(self, number: int, learning_rate: float, scale: float, *, skipped: bool) -> None:
        """A step has ended."""
        self.skipped += skipped
        step = Step(number, math.nan, math.nan, learning_rate, scale, math.nan, skipped)
        loss = torch.stack(self._losses).mean() if _alike(self._losses) else None
        batch = torch.stack(self._batches).sum() if _alike(self._batches) else None
        self._pending.append((step, loss, self.norm, batch))
        self._losses, self._batches = [], []
        self.norm, self._clipped = None, False

    def read(self) -> list[Step]:
        """Bring the steps that have ended to the host, and return those that are new."""
        waiting, self._pending = self._pending, []
        read = []
        for step, loss, norm, batch in waiting:
            numbers = [math.nan if x is None else float(x) for x in (loss, norm, batch)]
            found = replace(step, loss=numbers[0], grad_norm=numbers[1], batch=numbers[2])
            if loss is not None and not math.isfinite(found.loss):
                self._first.setdefault("loss", step.number)
            if norm is not None and not math.isfinite(found.grad_norm) and not step.skipped:
                self._first.setdefault("gradient", step.number)
            if len(self._early) < _FIRST and math.isfinite(found.loss):
                self._early.append(found.loss)
            self.lowest = min(self.lowest, found.loss if math.isfinite(found.loss) else math.inf)
            read.append(found)
        self.steps.extend(read)
        return read

    @property
    def first_loss(self) -> float:
        """The median of the first losses; NaN before there was one."""
        return statistics.median(self._early) if self._early else math.nan

    def numbers(self) -> dict[str, int]:
        """What is wrong, as a line of metrics has it; empty where nothing is."""
        found = {f"bad_{what}_step": self._first.get(what) for what in ("loss", "gradient")}
        known = {name: step for name, step in found.items() if step is not None}
        return known | ({"skipped_steps": self.skipped} if self.skipped else {})

    def loss_text(self) -> str:
        """The loss in words; "" where nobody showed it."""
        last = next((step.loss for step in reversed(self.steps)), math.nan)
        if not self.steps or (math.isnan(last) and "loss" not in self._first):
            return ""
        at_best = f", lowest {self.lowest:.4g}" if self.lowest < last else ""
        return f"loss {last:.4g}{at_best if math.isfinite(self.lowest) else ''}"


def jumps(values: Sequence[float], at: int) -> float:
    """How far a value lies above the `BEFORE` values before it, in robust standard deviations (1.48
    × the median distance from their median, 2 % of that median at least); NaN where too few are
    known.
    """
    before = [x for x in values[max(0, at - BEFORE) : at] if math.isfinite(x)]
    if len(before) < LEAST or not math.isfinite(values[at]):
        return math.nan
    middle = statistics.median(before)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in before)
    return (values[at] - middle) / max(spread, 0.02 * abs(middle), 1e-12)


def rises(steps: Sequence[Step], first: float = math.nan) -> tuple[int, float, float] | None:
    """Whether the loss rises: the step since when, its lowest median of 8 steps and the last one.

    It does where the last median of 8 is `SHARE` and 4 robust standard deviations above the lowest,
    and by `SHARE` of what the loss had fallen since the first of the run; and where it is higher
    than the one 8 steps ago.
    """
    known = [(step.number, step.loss) for step in steps if math.isfinite(step.loss)]
    if len(known) < 24:
        return None
    medians = [
        statistics.median(loss for _, loss in known[i : i + 8]) for i in range(len(known) - 7)
    ]
    lowest = min(range(len(medians) - 8), key=medians.__getitem__)
    at_best = [loss for _, loss in known[max(0, lowest - 8) : lowest + 16]]
    # 1.4826 × the median distance is the standard deviation of normal numbers
    spread = 1.4826 * statistics.median(abs(x - medians[lowest]) for x in at_best)
    last = medians[-1]
    fallen = first - medians[lowest] if math.isfinite(first) else 0.0
    least = max(4 * spread, SHARE * abs(medians[lowest]), SHARE * fallen)
    if last - medians[lowest] <= least or last <= medians[-9]:
        return None
    half = medians[lowest] + (last - medians[lowest]) / 4
    since = next(i for i in range(lowest, len(medians)) if medians[i] > half)
    return known[since][0], medians[lowest], last


def sentences_of(numbers: Mapping[str, Any]) -> list[str]:
    """`Health.numbers`, alone or in a line of metrics, in words, a sentence each."""
    said = []
    for name, what in (("bad_loss_step", "the loss is"), ("bad_gradient_step", "gradients are")):
        if numbers.get(name) is not None:
            said.append(f"{what} not finite, first in step {numbers[name]}")
    if skipped := numbers.get("skipped_steps"):
        many = f"{skipped} step{'s' * (skipped > 1)}"
        said.append(f"GradScaler skipped {many}: gradients overflowed at its scale")
    return said


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a model returns, if there is one that can be told."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif not isinstance(output, Tensor):
        first = output[0] if isinstance(output, tuple | list) and output else None
        output = getattr(output, "loss", first)
    is_loss = isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point()
    return output if is_loss else None


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor | None:
    """The norm of all dense gradients, fp32, on the first one's device; None where there are none.
    Of a sharded model it is that of this process's part.
    """
    local = [_local(p.grad) for p in parameters if p.grad is not None]
    grads = [grad for grad in local if grad.layout == torch.strided and grad.numel()]
    if not grads:
        return None
    norms: list[Tensor] = []
    for kind in dict.fromkeys((x.device, x.dtype) for x in grads):
        alike = [x for x in grads if (x.device, x.dtype) == kind]
        norms += torch._foreach_norm(alike, 2, dtype=torch.float32)
    whole: Tensor = torch.stack([norm.to(grads[0].device) for norm in norms]).norm()
    return whole


def _local(x: Tensor) -> Tensor:
    found = getattr(x, "to_local", None)  # of a DTensor
    return (x if found is None else found()).detach()


def _mark(x: Tensor) -> Tensor:
    """A number in fp64 that two tensors as good as surely share only where they are the same."""
    with torch.no_grad():
        flat = x.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // _SAMPLE)].double()
        places = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64)
        # multiples of the golden ratio modulo 1 are spread evenly and none comes twice, so that
        # numbers in another order give another sum
        return (flat * (places * 0.6180339887498949).frac()).sum()


def _alike(numbers: list[Tensor]) -> bool:
    """Whether there are numbers, on one device."""
    return bool(numbers) and len({x.device for x in numbers}) == 1
