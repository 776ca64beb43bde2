"""Attention that a model writes out itself, by head: scores = Q Kᵀ, what is done to them, softmax,
and the product with V.

A module's first product of two tensors `[B, H, N, D]` begins such an attention and its next one
ends it. In between everything of shape `[…, H, ·, ·]` is computed head by head, so a head can be
put into fp32 where the others keep their own: both are computed, and each head takes its own
result. Values of the others are those of the model's dtype, so that nothing is lost where they are
rounded to it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfulp.interpose import Operation, Wide, leaves
from halfulp.interpose.another import expected_by_model, is_wide, tag
from halfulp.interpose.operation import mapped

SDPA = "scaled_dot_product_attention"
BY_HAND = ("matmul", "softmax", "elementwise", "cast", "selection", "reduction")
"""Kinds of operation that attention consists of where it is written out."""


def given(operation: Operation) -> dict[str, Any]:
    """The arguments of PyTorch's attention by name, key and value with as many heads as query."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    found: dict[str, Any] = dict.fromkeys(names) | {
        "dropout_p": 0.0,
        "is_causal": False,
        "enable_gqa": False,
    }
    found |= dict(zip(names, operation.args, strict=False)) | dict(operation.kwargs)
    heads = found["query"].shape[-3]
    for name in ("key", "value"):
        if found[name].shape[-3] != heads:
            found[name] = found[name].repeat_interleave(heads // found[name].shape[-3], -3)
    return found


class AttentionCalls:
    """The layers of attention of a model, in the order of their first call: calls of PyTorch's
    function, and products written out.
    """

    def __init__(self) -> None:
        self.layers: dict[tuple[str, int], int] = {}  # path and which call in it
        self.heads: list[int] = []  # of queries, by layer
        self.by_hand: dict[str, int] = {}  # path: layer
        self._inside: dict[str, bool] = {}  # of paths, whether their attention has begun

    def see(self, operation: Operation) -> int | None:
        """The layer that an operation belongs to; None: it is no part of attention."""
        if operation.name == SDPA:
            query = operation.args[0] if operation.args else operation.kwargs["query"]
            return self._layer(operation.path, operation.order, query.shape[-3])
        product = operation.name == "matmul" and _of_heads(operation)
        if product and operation.path not in self.by_hand:
            if any(path == operation.path for path, _ in self.layers):
                return None
            heads = max(x.shape[-3] for x in operation.tensors()[:2])
            self.by_hand[operation.path] = self._layer(operation.path, 0, heads)
        layer = self.by_hand.get(operation.path)
        if layer is None:
            return None
        before = self._inside.get(operation.path, False)
        if product:
            self._inside[operation.path] = not before
        return layer if before or product else None

    def _layer(self, path: str, order: int, heads: int) -> int:
        if (path, order) not in self.layers:
            self.layers[path, order] = len(self.layers)
            self.heads.append(heads)
        return self.layers[path, order]


def _of_heads(operation: Operation) -> bool:
    operands = operation.tensors()[:2]
    return len(operands) == 2 and all(x.ndim >= 4 for x in operands)


class HeadsInFp32:
    """Puts some heads of attention that is written out into fp32.

    Args:
        heads: of an operation's module, how many there are and which of them are exact.
    """

    takes_wide = True

    def __init__(self, heads: Callable[[Operation], tuple[int, list[int]]]) -> None:
        self._heads, self._wide = heads, Wide(torch.float32)
        self.refused = self._wide.refused

    def __call__(self, operation: Operation) -> Any:
        """What the model gets: wide, with a note of the dtype that it expects."""
        args, kwargs = mapped((operation.args, dict(operation.kwargs)), expected_by_model)
        own = operation.function(*args, **kwargs)
        many, exact = self._heads(operation)
        results = list(leaves(own))
        if not results or any(x.ndim < 4 or x.shape[-3] != many for x in results):
            return own
        wide = leaves(self._wide(operation))
        chosen = torch.zeros(many, 1, 1, dtype=torch.bool, device=results[0].device)
        chosen[exact] = True
        mixed = iter([_mixed(chosen, x, y) for x, y in zip(wide, results, strict=True)])
        return mapped(own, lambda x: next(mixed) if isinstance(x, Tensor) else x)


def _mixed(chosen: Tensor, wide: Tensor, own: Tensor) -> Tensor:
    if not own.is_floating_point() or not is_wide(wide):
        return torch.where(chosen, wide, own)
    return tag(torch.where(chosen, wide, own.to(wide.dtype)), own.dtype)
