"""The one-layer task: a causal attention layer learns a random fp32 teacher on one fixed batch.

A few of the input coordinates are constant 1, so keys share a direction that softmax cannot see:
the only thing that can push the scores along it is a row sum of dS that is not zero. With attention
free of that error the mean score stays where it is; with the stock recipe it walks off, the weights
with it, and in the end the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfulp.training.attention import Attend, AttentionFunction
from halfulp.training.config import LayerTask, RunConfig
from halfulp.training.workload import Configured


class AttentionLayer(nn.Module):
    """One causal attention layer of one head; weights `[width, width]` map x to x Wᵀ."""

    def __init__(self, weights: list[Tensor], attend: Attend) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Parameter(w) for w in weights)
        self.attend = attend
        self.last: tuple[Tensor, Tensor] | None = None

    def head_weights(self) -> tuple[Tensor, Tensor]:
        """W_Q and W_K `[1, width, width]`."""
        return self.query[None], self.key[None]

    def forward(self, x: Tensor) -> Tensor:
        """Map X `[B, N, width]` to the same shape."""
        query, key, value = (x @ w.mT for w in (self.query, self.key, self.value))
        self.last = (query.detach(), key.detach())
        out = self.attend(query[:, None], key[:, None], value[:, None], is_causal=True)[:, 0]
        projected: Tensor = out @ self.out.mT
        return projected


class LayerWorkload(Configured):
    """Teacher, data and student of the one-layer task; see `halfulp.training.workload.Workload`."""

    def __init__(
        self, config: RunConfig, device: torch.device, own: Mapping[str, AttentionFunction] | None
    ) -> None:
        assert isinstance(config.workload, LayerTask)
        task, plan, data_seed = config.workload, config.attention, config.seed_of_data
        plan.check(1, 1)
        self.config, self.tokens_per_sample = task, task.batch * task.tokens
        self.source: dict[str, Any] = {"data": "a random teacher", "seed": data_seed}
        teacher, x, _ = _draw(task, data_seed)
        hidden = torch.triu(torch.ones(task.tokens, task.tokens, dtype=torch.bool), 1)
        query, key, value = (x @ w.mT for w in teacher[:3])
        weights = (query @ key.mT * task.width**-0.5).masked_fill(hidden, -math.inf).softmax(-1)
        self._hidden = hidden.to(device)
        self._fixed = (x.to(device), (weights @ value @ teacher[3].mT).to(device))
        *_, student = _draw(task, config.seed)
        self.model: AttentionLayer = AttentionLayer(student, Attend(0, 1, plan, own)).to(device)

    def order(self, steps: int, batch: int) -> np.ndarray:
        """Zeros: every step reads the one fixed batch."""
        if batch != 1:
            raise ValueError(
                f"batch={batch}: the one-layer task has one fixed batch; accepted is 1"
            )
        return np.zeros((steps, batch), dtype=np.int64)

    def batch(self, samples: np.ndarray, step: int) -> tuple[Tensor, ...]:  # noqa: ARG002 - every step is alike
        """X and the teacher's output, `[B, N, width]`."""
        return self._fixed

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean squared error."""
        x, target = batch
        error: Tensor = model(x) - target
        return error.square().mean()

    def figures(self) -> dict[str, float]:
        """Mean and largest score of the last forward pass (of those a query may see, scaled),
        σ(W_Q), σ(W_K) and σ(α W_Qᵀ W_K) now.
        """
        assert self.model.last is not None
        query, key = self.model.last
        scores = (query @ key.mT * self.config.width**-0.5)[:, ~self._hidden]
        return {
            "mean_score": scores.mean().item(),
            "max_score": scores.max().item(),
            "sigma_query": _sigma(self.model.query.detach()),
            "sigma_key": _sigma(self.model.key.detach()),
            "sigma_query_key": _sigma(
                self.config.width**-0.5 * self.model.query.detach().mT @ self.model.key.detach()
            ),
        }


def _draw(config: LayerTask, seed: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Teacher, inputs and student of a seed, in the order in which the failure was first seen."""
    g = torch.Generator().manual_seed(100 + seed)
    d = config.width
    teacher = [torch.randn(d, d, generator=g) * 1.5 / math.sqrt(d) for _ in range(4)]
    x = torch.randn(config.batch, config.tokens, d, generator=g)
    # the direction that all keys share, along which scores walk off
    x[..., : config.constant] = 1
    student = [torch.randn(d, d, generator=g) * 0.5 / math.sqrt(d) for _ in range(4)]
    return teacher, x, student


def _sigma(weights: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weights, 2)) if weights.isfinite().all() else math.nan
