"""How a side makes a step of a training: its micro-batches, the scale of its loss, clipping, its
optimizer and the rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.diff.setting import Outcome, Setting, cut, run, tensors_in
from halfulp.interpose import Swap


@dataclass
class Step:
    """What comes between a batch and the next weights.

    Attributes:
        optimizer: of the copy that is trained.
        scheduler: stepped after it.
        clip: global norm that gradients are clipped to.
        accumulation: micro-batches of one batch, of equally many entries.
        scaler: of the loss, as fp16 needs it.
        begin: called with the number of the step, from 0, before it; sets a rate, say.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    clip: float | None = None
    accumulation: int = 1
    scaler: torch.amp.GradScaler | None = None
    begin: Callable[[int], Any] | None = None

    def gradients(
        self, setting: Setting, batch: Any, swaps: Callable[[int], Sequence[Swap] | None], seed: int
    ) -> Outcome:
        """The gradients of one batch, unscaled and not yet clipped, and what the passes gave."""
        setting.model.zero_grad(set_to_none=True)
        first = tensors_in(batch)[0]
        total = first.shape[0] if first.dim() else 1
        if total % self.accumulation:
            raise ValueError(
                f"accumulation={self.accumulation}: accepted is a divisor of the batch, {total}"
            )
        size = total // self.accumulation
        found = [
            run(
                setting, cut(batch, 0, part * size, size, total) if size < total else batch,
                backward=self._backward, swaps=swaps(part), seed=seed,
            )
            for part in range(self.accumulation)
        ]  # fmt: skip
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        losses = [x.loss for x in found if x.loss is not None]
        loss = sum(losses) / len(losses) if losses else None
        return replace(found[0], loss=loss, outputs=torch.cat([x.outputs for x in found]))

    def _backward(self, loss: Tensor) -> None:
        loss = loss / self.accumulation if self.accumulation > 1 else loss
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def make(self, model: nn.Module, number: int) -> None:
        """Update the weights."""
        if self.begin is not None:
            self.begin(number)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()


def step_of_training(made: Any) -> Step:
    """Of what a user's function of a model gave: a Step, an optimizer, or one with its scheduler.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(made, Step):
        return made
    optimizer, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer gives {type(made).__name__}: accepted are a torch.optim.Optimizer, a pair"
            " of one and its scheduler, or a halfulp.diff.Step"
        )
    return Step(optimizer, scheduler)
