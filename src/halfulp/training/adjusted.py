"""What a training does otherwise than its optimizer and the order of its data have it, from some
step on: another rate, a new warm-up, another β₂ or ε, the same batches in another order.

The optimizer's own numbers stay as they are: hooks change them for the length of a step. So a
scheduler goes on as before, a checkpoint holds what the user's code expects, and a run that is
taken up again is not changed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from halfulp.recipes import hash_seed


@dataclass(frozen=True)
class Adjusted:
    """What is otherwise after the step `since`; by default nothing."""

    since: int = 0
    rate: float = 1.0  # times the learning rate that the optimizer has
    warm_up: int = 0  # steps over which that grows linearly, once more
    beta2: float | None = None  # of Adam and its like; None: the optimizer's
    eps: float | None = None
    most_score: float | None = None  # QK-clip's τ, natural units; see `halfulp.training.score_clip`
    draw: int = 0  # number of the order of the steps that follow; 0: their own
    nudged: bool = False  # every weight moved at random by about an ulp, which chaos makes more of

    def __post_init__(self) -> None:
        if self.since < 0 or self.draw < 0:
            raise ValueError(f"adjusted={self}: accepted are since and draw of at least 0")
        _check(self.rate, self.warm_up, self.beta2, self.eps)

    def places(self, steps: int) -> np.ndarray:
        """Return whose batch and random numbers each step has, int64 `[steps]`, from 1: its own up
        to `since`; after it every step's once, in an order that `draw` gives.
        """
        found = np.arange(1, steps + 1)
        if self.draw:
            seed = hash_seed(self.draw, f"order after step {self.since}", 0)
            np.random.Generator(np.random.PCG64(seed)).shuffle(found[self.since :])
        return found


def nudge(parameters: Iterable[Tensor]) -> None:
    """Move every number by a random share of itself, of the size of an ulp of its dtype; the same
    every time.
    """
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in parameters:
            share = torch.randn(x.shape, generator=draw).to(x.device) * torch.finfo(x.dtype).eps
            # in fp64, rounded once: in x's own dtype 1 + share would often be 1
            x.copy_(x.double() * (1 + share.double()))


class Adjustment:
    """What `adjust` did; `remove` undoes it."""

    def __init__(self, optimizer: Optimizer, change: Callable[[dict[str, Any]], None]) -> None:
        self._change = change
        self._kept: list[dict[str, Any]] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )
        self.made = 0  # steps

    def remove(self) -> None:
        """Leave every later step as the optimizer has it."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._kept = [dict(group) for group in optimizer.param_groups]
        self.made += 1
        for group in optimizer.param_groups:
            self._change(group)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for group, kept in zip(optimizer.param_groups, self._kept, strict=True):
            group |= {name: kept[name] for name in ("lr", "betas", "eps") if name in kept}


def adjust(
    optimizer: Optimizer,
    *,
    rate: float = 1.0,
    warm_up: int = 0,
    beta2: float | None = None,
    eps: float | None = None,
) -> Adjustment:
    """Make every later step of an optimizer with other numbers than its groups have.

    The groups hold them during a step alone, so that schedulers and checkpoints see their own. The
    same as lower numbers in your own code, but for the last bit of a rate that a scheduler makes.

    Args:
        optimizer: of PyTorch, or like it.
        rate: factor of the learning rate.
        warm_up: steps over which the rate grows linearly from 1 / warm_up of it.
        beta2: instead of the optimizer's second beta.
        eps: instead of its eps.

    Raises:
        ValueError: a number is not accepted, or the optimizer has none of that name.
    """
    _check(rate, warm_up, beta2, eps)
    for name, group_has, asked in (("beta2", "betas", beta2), ("eps", "eps", eps)):
        if asked is not None and any(group_has not in g for g in optimizer.param_groups):
            raise ValueError(
                f"{name}={asked}: accepted with an optimizer that has {group_has}, which"
                f" {type(optimizer).__name__} has not"
            )

    def change(group: dict[str, Any]) -> None:
        group["lr"] = group["lr"] * (rate * warmed(adjustment.made, warm_up))
        if beta2 is not None:
            group["betas"] = (group["betas"][0], beta2)
        if eps is not None:
            group["eps"] = eps

    adjustment = Adjustment(optimizer, change)
    return adjustment


def warmed(step: int, warm_up: int) -> float:
    """The share of its rate that a step, counted from 1, has."""
    return min(1.0, step / warm_up) if warm_up else 1.0


def _check(rate: float, warm_up: int, beta2: float | None, eps: float | None) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"rate={rate}: accepted is a factor above 0")
    if warm_up < 0:
        raise ValueError(f"warm_up={warm_up}: accepted are steps, 0 or more")
    if beta2 is not None and not 0 <= beta2 < 1:
        raise ValueError(f"beta2={beta2}: accepted is a number from 0 to below 1")
    if eps is not None and not 0 < eps < math.inf:
        raise ValueError(f"eps={eps}: accepted is a number above 0")
