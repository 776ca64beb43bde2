"""Largest scores and σ of W_Q and W_K by layer and head of a user's model, so that scores that run
away can count as a failure of a run whose loss holds.

Scores are those of a measured step's own pass, seen as it is made; nothing is computed twice but
them. Layers are numbered as plans of attention number them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from halfulp.interpose import Operation
from halfulp.training.attention_by_hand import SDPA, AttentionCalls
from halfulp.training.score_clip import call_of, largest_scores
from halfulp.watch.weights import sigmas


class UserScores:
    """Measures every so many steps, and the first; nothing is looked at in between.

    Args:
        model: the user's.
        every: steps between two measurements.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every = every
        self._model, self._calls = model, AttentionCalls()
        self._largest: dict[int, Tensor] = {}  # by layer [H]
        self._open = False

    def begin(self, step: int) -> bool:
        """Look at the passes of this step, counted from 1, if it is to be measured."""
        self._open, self._largest = step == 1 or step % self.every == 0, {}
        return self._open

    def saw(self, operation: Operation, _: Any) -> None:
        """Look at an operation, as an observer of `halfulp.interpose`."""
        layer = self._calls.see(operation) if self._open else None
        if layer is None:
            return
        if operation.name == SDPA:
            largest = largest_scores(call_of(operation))
        elif operation.kind == "softmax":
            scores = operation.tensors()[0].detach().float()
            found = self._calls.by_hand[operation.path].by_head(operation, scores)
            if found is None:
                return
            largest = found.flatten(1).amax(1)
        else:
            return
        self._largest[layer] = torch.maximum(largest, self._largest.get(layer, largest))

    def end(self) -> dict[str, list[list[float]]]:
        """By name [layer][head]: max_score, the largest score of the step in natural units, and
        sigma_query and sigma_key; an empty list for a layer whose W_Q and W_K are not found.

        Raises:
            ValueError: no attention was seen.
        """
        if not self._largest:
            raise ValueError(
                f"measure_every={self.every}: no attention of the model is seen; accepted is 0, or"
                f" a model that calls {SDPA} or writes it out in products"
            )
        self._open = False
        if distributed.is_available() and distributed.is_initialized():
            for one in self._largest.values():
                distributed.all_reduce(one, op=distributed.ReduceOp.MAX)
        layers = range(len(self._calls.layers))
        paths = [path for path, _ in self._calls.layers]
        known = {
            layer: sigmas(self._model, {paths[layer]: (heads, self._calls.widths[layer])})
            for layer, heads in enumerate(self._calls.heads)
        }
        found = {"max_score": [_listed(self._largest.get(layer)) for layer in layers]}
        for name in ("sigma_query", "sigma_key"):
            found[name] = [
                _listed(known[layer].get(paths[layer], {}).get(name)) for layer in layers
            ]
        return found


def _listed(x: Tensor | None) -> list[float]:
    return [] if x is None else x.tolist()
