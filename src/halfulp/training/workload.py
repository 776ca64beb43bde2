"""The live side of a workload: a model, the order of its data, a batch of it, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from halfulp.interpose import Swap
from halfulp.training.attention import AttentionFunction
from halfulp.training.config import Language, LayerTask, Pictures, RunConfig, UserModel
from halfulp.training.user_model import Parts


class Workload(Protocol):
    """What the loop trains; one class each for `LayerTask`, `Language`, `Pictures` and
    `UserModel`.
    """

    tokens_per_sample: int  # for tokens per second
    source: dict[str, Any]  # what the data are, for the record; plain JSON
    swaps: tuple[Swap, ...]  # what `computing` puts into another arithmetic

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context in which losses and their gradients are computed."""
        ...

    @property
    def parts(self) -> Parts | None:
        """The optimizer and its scheduler, where they are the user's; None: the configuration's."""
        ...

    def order(self, steps: int, batch: int) -> np.ndarray:
        """Return which samples every step reads, int64 `[steps, batch]`, from the data seed
        alone.
        """
        ...

    def batch(self, samples: np.ndarray, step: int) -> Any:
        """Return the tensors of these samples, on the run's device; equal arguments give equal
        bits.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss; `model` is `self.model` or a wrapper of it (DDP, FSDP)."""
        ...

    def figures(self) -> dict[str, float]:
        """Return cheap figures of the last step that stand in every line of metrics, by name; often
        none.
        """
        ...


class Configured:
    """What workloads have in common that bring no optimizer of their own and compute as their plan
    of attention says.
    """

    parts = None
    swaps: tuple[Swap, ...] = ()

    def computing(self) -> AbstractContextManager[Any]:
        """Nothing around losses and gradients."""
        return nullcontext()

    def figures(self) -> dict[str, float]:
        """None beyond the loss."""
        return {}


def build_workload(
    config: RunConfig,
    device: torch.device | str | None = None,
    own: Mapping[str, AttentionFunction] | None = None,
) -> Workload:
    """Return the workload of a run with freshly initialized weights; equal arguments give equal
    bits.

    Args:
        config: of the run.
        device: instead of the run's.
        own: attention functions of the caller's that the plan may name.

    Raises:
        ValueError: the plan names an attention, layer or head that is not there, or the data cannot
            be read.
    """
    place = torch.device(device or config.device)
    match config.workload:
        case UserModel():
            from halfulp.training.user_model import UserWorkload

            return UserWorkload(config, place, own)
        case LayerTask():
            from halfulp.training.layer import LayerWorkload

            return LayerWorkload(config, place, own)
        case Language():
            from halfulp.training.language import LanguageWorkload

            return LanguageWorkload(config, place, own)
        case Pictures():
            from halfulp.training.pictures import PictureWorkload

            return PictureWorkload(config, place, own)
