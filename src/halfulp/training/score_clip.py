"""QK-clip (Kimi K2, arXiv 2507.20534, algorithm 1): after a step in which a head's largest score
was beyond τ, its W_Q and W_K are scaled so that the same inputs would give τ.

Each of the two gets √(τ / largest). Where query heads share a key head, W_K gets that of the head
that is clipped most, and each W_Q the rest, so that every head's scores are scaled by its own
τ / largest and those of the others stay what they are. Biases are scaled alike, since they are part
of queries and keys; the optimizer's state is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfulp.calls import Call, scale_of, sees_of
from halfulp.interpose import Operation
from halfulp.training.attention_by_hand import SDPA, given
from halfulp.watch.weights import ACCEPTED, projections

MOST = 100.0
"""τ in natural units, as Kimi K2 was trained."""
_AT_ONCE = 2**22  # scores that are held


class ScoreClip:
    """Looks at the scores of every call of attention, as a tap or as an observer of
    `halfulp.interpose`, and clips W_Q and W_K when `clip` is called.

    Args:
        most: τ, above 0, natural units.
        modules: that hold W_Q and W_K, by what names their calls: the layer to a tap, the path to
            `saw`.

    Raises:
        ValueError: `most` is not accepted.
    """

    def __init__(self, most: float, modules: Mapping[Any, nn.Module]) -> None:
        if not 0 < most < float("inf"):
            raise ValueError(f"most_score={most}: accepted is a number above 0, natural units")
        self.most, self._modules, self._fits = most, modules, False
        self._largest: dict[tuple[Any, int | None], Tensor] = {}  # since the last step

    def __call__(self, layer: int, call: Call, out: Tensor) -> Tensor:
        """Look at a call of halfulp's own models, and give back out as it came."""
        self._keep((layer, call.query.shape[-1]), largest_scores(call))
        return out

    def saw(self, operation: Operation, _: Any) -> None:
        """Look at an operation of a user's model: PyTorch's attention, or the softmax of one that
        is written out.
        """
        if operation.name == SDPA:
            call = call_of(operation)
            self._keep((operation.path, call.query.shape[-1]), largest_scores(call))
            return
        scores = operation.tensors()[0] if operation.kind == "softmax" else None
        if scores is None or scores.ndim != 4:
            return
        if projections(self._modules.get(operation.path), scores.shape[1]) is not None:
            self._keep((operation.path, None), scores.detach().float().amax((0, 2, 3)))

    def _keep(self, key: tuple[Any, int | None], largest: Tensor) -> None:
        self._largest[key] = torch.maximum(largest, self._largest.get(key, largest))

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Clip after every step of an optimizer's, until the handle is removed."""

        def after(*_: Any) -> None:
            self.clip()

        return optimizer.register_step_post_hook(after)

    def clip(self) -> dict[Any, Tensor]:
        """Scale what is to be scaled, and begin anew.

        Returns:
            τ / largest `[H]` by layer or path, 1 where nothing was done.

        Raises:
            ValueError: scaling W_Q and W_K of a module would not do it.
        """
        if not self._fits and (why := self.unfit()):
            raise ValueError(f"most_score={self.most:g}: {why}")
        self._fits = True
        found, self._largest = self._largest, {}
        factors = {}
        for (where, width), largest in found.items():
            # processes saw other samples, and their copies of the weights must stay the same
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
            # not a head whose scores are not finite: τ / ∞ would make its weights 0
            beyond = largest.isfinite() & (largest > self.most)
            factors[where] = factor = torch.where(beyond, self.most / largest, 1.0)
            held = projections(self._modules[where], len(factor), width)
            assert held is not None
            group = len(factor) // len(held[1][0])
            # a key that is shared takes half of the strongest cut, and each query what is left of
            # its own, so that their product is the head's factor
            of_key = factor.view(-1, group).amin(1).sqrt()
            of_query = factor / of_key.repeat_interleave(group)
            with torch.no_grad():
                for part, share in zip(held, (of_query, of_key), strict=True):
                    for x in part:
                        x.mul_(share.to(x.dtype).view(-1, *[1] * (x.ndim - 1)))
        return factors

    def unfit(self) -> str:
        """Why scaling W_Q and W_K would not scale what was seen; empty where it does."""
        for (where, width), largest in self._largest.items():
            module = self._modules.get(where)
            if projections(module, len(largest), width) is None:
                return f"W_Q and W_K of {where} are not seen by head; accepted are {ACCEPTED}"
            assert module is not None
            if any(
                _NORMS.fullmatch(name) and inner is not None
                for name, inner in module.named_children()
            ):
                return f"queries and keys of {where} are normalized, whatever W_Q and W_K are"
        return "" if self._largest else f"no call of attention is seen; accepted is {SDPA}"


_NORMS = re.compile(r"(q|k|query|key)_?(layer)?_?norm|norm_(q|k|query|key)")


@torch.no_grad()
def largest_scores(call: Call) -> Tensor:
    """The largest score of every head that a query may see, fp32 `[H]`, natural units."""
    query, key = call.query.detach().float(), call.key.detach().float()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    many, cols = query.shape[2], slice(0, key.shape[-1])
    step = max(1, _AT_ONCE // (query.shape[0] * query.shape[1] * cols.stop))
    found = []
    for first in range(0, many, step):
        rows = slice(first, min(first + step, many))
        scores = query[:, :, rows] @ key * call.scale
        found.append(call.sees.apply(scores, rows, cols, 1.0).amax((0, 2, 3)))
    return torch.stack(found).amax(0)


def call_of(operation: Operation) -> Call:
    """A call of PyTorch's attention that a model makes."""
    named = given(operation)
    query, key, value = (_four(named[name]) for name in ("query", "key", "value"))
    lengths = query.shape[-2], key.shape[-2]
    sees = sees_of(named["attn_mask"], named["is_causal"], None, 0, lengths)
    return Call(query, key, value, sees, scale_of(named["scale"], query.shape[-1]))


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x.flatten(0, -4)
