"""The live side of a workload: a model, the order of its data, a batch of it, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from halfulp.interpose import Swap
from halfulp.training.attention import AttentionFunction, AttentionPlan
from halfulp.training.config import Language, LayerTask, Pictures, UserModel, WorkloadConfig
from halfulp.training.operations import OperationPlan
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


def build_workload(
    config: WorkloadConfig,
    plan: AttentionPlan,
    *,
    seed: int,
    data_seed: int,
    device: torch.device | str = "cpu",
    own: Mapping[str, AttentionFunction] | None = None,
    operations: OperationPlan | None = None,
) -> Workload:
    """Return the workload with freshly initialized weights; equal arguments give equal bits.

    Raises:
        ValueError: the plan names an attention, layer or head that is not there, or the data cannot
            be read.
    """
    match config:
        case LayerTask():
            from halfulp.training.layer import LayerWorkload

            return LayerWorkload(
                config, plan, seed=seed, data_seed=data_seed, device=device, own=own
            )
        case Language():
            from halfulp.training.language import LanguageWorkload

            return LanguageWorkload(
                config, plan, seed=seed, data_seed=data_seed, device=device, own=own
            )
        case Pictures():
            from halfulp.training.pictures import PictureWorkload

            return PictureWorkload(
                config, plan, seed=seed, data_seed=data_seed, device=device, own=own
            )
        case UserModel():
            from halfulp.training.user_model import UserWorkload

            return UserWorkload(
                config, plan, operations or OperationPlan(), seed=seed, device=device, own=own
            )
