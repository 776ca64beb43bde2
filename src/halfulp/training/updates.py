"""What updates the weights: AdamW at the rates that the configuration lays down, or the user's own
optimizer with its scheduler.

Of a user's optimizer nothing is known but what every one of PyTorch's has: state by parameter and
options by group. A scheduler is a function of the steps that were made, so a run that goes on steps
a new one as often, and no checkpoint holds its code.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn

from halfulp.training.adjusted import Adjustment, adjust, warmed
from halfulp.training.config import Optimizer, RunConfig
from halfulp.training.operations import OWN
from halfulp.training.optimizer_arithmetic import OptimizerArithmetic
from halfulp.training.score_clip import ScoreClip
from halfulp.training.user_model import Parts


class Updates:
    """The optimizer of a run.

    Args:
        config: of the run.
        parameters: of the model, by name, as they are trained: sharded where FSDP shards them.
        theirs: what the user's function made, or None.
        before: names of the user's parameters by identity, from before they were sharded.
        chosen: the arithmetic of the user's optimizer by name of parameter.

    Raises:
        ValueError: the plan puts this optimizer into an arithmetic that it cannot have.
    """

    def __init__(
        self,
        config: RunConfig,
        parameters: dict[str, nn.Parameter],
        theirs: Parts | None,
        before: dict[int, str],
        chosen: dict[str, str],
    ) -> None:
        self.config, self.rates = config, config.optimizer
        self.scheduler: Any = None if theirs is None else theirs.scheduler
        self.theirs = theirs is not None
        self.adjustment: Adjustment | None = None
        self.optimizer: torch.optim.Optimizer
        self.arithmetic: OptimizerArithmetic | None = None
        if theirs is None:
            self.optimizer = torch.optim.AdamW(
                [p for p in parameters.values() if p.requires_grad],
                lr=self.rates.learning_rate,
                betas=self.rates.betas,
                weight_decay=self.rates.weight_decay,
            )
            return
        self.optimizer = theirs.optimizer
        for group in self.optimizer.param_groups:
            group["params"] = [parameters[before[id(p)]] for p in group["params"]]
        if any(into != OWN for into in chosen.values()):
            self.arithmetic = OptimizerArithmetic(self.optimizer, parameters, chosen, config.seed)
            if self.arithmetic.kernels and config.autocast == "fp16":
                raise ValueError(
                    "operations: a kernel of the optimizer's step cannot leave one out, as the"
                    " scaler of fp16 asks; accepted with autocast none and bf16"
                )

    def begin(self, number: int) -> float:
        """Set the rate of a step, counted from 1, and return what it is made at; of the user's the
        first group's.
        """
        if not self.theirs:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.rates, number, self.config.steps)
        changed = self.config.adjusted
        if self.adjustment is not None:  # steps that a GradScaler leaves out count too
            self.adjustment.made = number - changed.since - 1
        if self.arithmetic is not None:
            # what stochastic rounding draws by, so that a run which goes on draws the same
            self.arithmetic.made = number - 1
        share = changed.rate * warmed(number - changed.since, changed.warm_up)
        return float(self.optimizer.param_groups[0]["lr"]) * share

    def adjust(self, clip: ScoreClip | None) -> None:
        """Have the steps be made as the configuration says they are otherwise, by hooks: the
        arithmetic's stand around what `clip` does after a step.
        """
        c = self.config.adjusted
        if (c.rate, c.warm_up, c.beta2, c.eps) != (1.0, 0, None, None):
            self.adjustment = adjust(
                self.optimizer, rate=c.rate, warm_up=c.warm_up, beta2=c.beta2, eps=c.eps
            )
        if clip is not None:
            clip.attach(self.optimizer)
        if self.arithmetic is not None:
            # hooks run in the order of their making: clipping scales the wide copies, before they
            # are rounded
            self.arithmetic.attach()

    def masters(self) -> dict[str, torch.Tensor]:
        """What the optimizer's arithmetic keeps from step to step, for a checkpoint."""
        return {} if self.arithmetic is None else self.arithmetic.state()

    def take_up(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take what `masters` gave, and return the rest of a checkpoint's state."""
        return state if self.arithmetic is None else self.arithmetic.take_up(state)

    def end(self) -> None:
        """Take a step of the user's scheduler."""
        if self.scheduler is not None:
            self.scheduler.step()

    def replay(self, steps: int) -> None:
        """Bring a new scheduler to where one is after so many steps."""
        if self.scheduler is not None:
            with warnings.catch_warnings():  # that the optimizer has made no step yet
                warnings.simplefilter("ignore")
                for _ in range(steps):
                    self.scheduler.step()


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then constant or a cosine down."""
    top = optimizer.learning_rate
    if step <= optimizer.warm_up or optimizer.schedule == "constant":
        return top * min(1, step / max(optimizer.warm_up, 1))
    span = (optimizer.cosine_steps or steps) - optimizer.warm_up
    done = min(1.0, (step - optimizer.warm_up) / max(span, 1))
    return optimizer.least_rate + (top - optimizer.least_rate) * 0.5 * (
        1 + math.cos(math.pi * done)
    )
