"""What a watched training shows beside its attention: the loss where it can be seen, gradients that
are not finite, steps that a GradScaler left out.

Everything is kept on the device it is on, so that a step waits for nothing: it is read when a
report is asked for. An alarm of attention is worth nothing in a run that has broken elsewhere, and
a report without one must not look calm over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

NEVER = -1


class Health:
    """Numbers of the steps so far, one in a few scalar tensors a device."""

    def __init__(self) -> None:
        self.skipped = 0  # by a GradScaler
        self._bad: dict[tuple[str, torch.device], Tensor] = {}  # first step that was not finite
        self._loss: tuple[Tensor, Tensor] | None = None  # the last one and the lowest, fp32
        self._smallest: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def saw_output(self, output: Any, step: int) -> None:
        """Keep the loss of a forward pass that gives one: a number, `.loss`, ["loss"], or first."""
        loss = loss_of(output)
        if loss is not None:
            self.saw_loss(loss, step)

    def saw_loss(self, loss: Tensor | float, step: int) -> None:
        """Keep a loss, a tensor of one number or a float."""
        value = torch.as_tensor(loss).detach().float().reshape(())
        self._first_bad("loss", value, step)
        if self._loss is None or self._loss[1].device != value.device:
            self._loss = (value, value)
        else:  # fmin: what is not a number is not the lowest
            self._loss = (value, torch.fmin(self._loss[1], value))

    def saw_gradients(self, optimizer: Optimizer, step: int) -> None:
        """Look at one gradient of an optimizer that has just stepped, the smallest tensor: a loss
        or a backward pass that is not finite reaches all of them.
        """
        chosen = self._smallest.get(optimizer)
        if chosen is None or chosen.grad is None:
            having = [p for group in optimizer.param_groups for p in group["params"] if _dense(p)]
            if not having:
                return
            chosen = self._smallest[optimizer] = min(having, key=Tensor.numel)
        grad = chosen.grad
        assert grad is not None
        local = getattr(grad, "to_local", None)  # of a DTensor
        self._first_bad("gradient", grad if local is None else local(), step)

    def _first_bad(self, what: str, x: Tensor, step: int) -> None:
        with torch.no_grad():
            fine = x.detach().isfinite().all()
            before = self._bad.get((what, x.device))
            if before is None:
                before = torch.full((), NEVER, dtype=torch.int64, device=x.device)
            known = fine | (before != NEVER)
            self._bad[what, x.device] = torch.where(known, before, step)

    def first_bad(self, what: str) -> int | None:
        """The first step whose "loss" or "gradient" was not finite; None if all were."""
        steps = [int(x) for (kind, _), x in self._bad.items() if kind == what]
        return min((step for step in steps if step != NEVER), default=None)

    def numbers(self) -> dict[str, int]:
        """What is wrong, as a line of metrics has it; empty where nothing is."""
        found = {f"bad_{what}_step": self.first_bad(what) for what in ("loss", "gradient")}
        known = {name: step for name, step in found.items() if step is not None}
        return known | ({"skipped_steps": self.skipped} if self.skipped else {})

    def loss_text(self) -> str:
        """The loss in words; "" where nobody showed it: the model returns none, and steps gave
        none.
        """
        if self._loss is None:
            return ""
        last, lowest = (float(x) for x in self._loss)
        at_best = f", lowest {lowest:.4g}" if math.isfinite(lowest) and lowest < last else ""
        return f"loss {last:.4g}{at_best}"


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


def _dense(parameter: Any) -> bool:
    grad = getattr(parameter, "grad", None)
    return grad is not None and grad.layout == torch.strided and grad.numel() > 0
