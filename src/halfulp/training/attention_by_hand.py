"""Attention that a model writes out itself, by head: scores = Q Kᵀ, what is done to them, softmax,
and the product with V.

A module's first product of two tensors of heads begins such an attention, and the next one that
sums over keys ends it: `matmul` of `[B, H, N, D]`, `einsum` of heads wherever its letters have
them, or `bmm`, `baddbmm` and `matmul` of `[B · H, N, D]`. In between everything is computed head by
head, so a head can be put into fp32 where the others keep their own: both are computed, and each
head takes its own result. Values of the others are those of the model's dtype, so that nothing is
lost where they are rounded to it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfulp.interpose import Operation, Wide, leaves
from halfulp.interpose.another import expected_by_model, is_wide, tag
from halfulp.interpose.operation import mapped

SDPA = "scaled_dot_product_attention"
BY_HAND = ("matmul", "softmax", "elementwise", "cast", "selection", "reduction")
"""Kinds of operation that attention consists of where it is written out."""
_REMEMBERED = 8  # numbers of tokens that linear layers have read


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


@dataclass(frozen=True)
class _Product:
    """A product that may be one of attention's."""

    axis: int  # of the heads in its result, from the last
    heads: int  # 0: they share the first dimension with the batch
    rows: int  # B · H, where they do
    queries: int
    keys: int
    summed: int  # over how many


@dataclass(frozen=True)
class Written:
    """How the heads of an attention lie that is written out."""

    layer: int
    heads: int
    axis: int  # of the heads in the scores, from the last
    rows: int  # B · H where one dimension holds both, else 0

    def chosen(self, operation: Operation, x: Tensor, heads: list[int]) -> Tensor | None:
        """Where these heads lie in a result, broadcasting to it; None: it has no heads."""
        axis, turns = self._lie(operation, x)
        members = torch.zeros(self.heads, dtype=torch.bool, device=x.device)
        members[heads] = True
        return members.repeat(turns).view(-1, *[1] * (-axis - 1)) if axis else None

    def by_head(self, operation: Operation, x: Tensor) -> Tensor | None:
        """A result with its heads first, `[H, …]`; None: it has no heads."""
        axis, turns = self._lie(operation, x)
        if not axis:
            return None
        x = x.movedim(axis, 0)
        return x.view(turns, self.heads, *x.shape[1:]).movedim(1, 0) if turns > 1 else x

    def _lie(self, operation: Operation, x: Tensor) -> tuple[int, int]:
        """The dimension of a result's heads, from the last, and how many batch entries share it; 0:
        it has no heads.
        """
        if self.rows and x.ndim == 3 and x.shape[0] == self.rows:
            return -3, self.rows // self.heads  # the heads of an entry in turn
        product = _product(operation)
        axis = self.axis if product is None else product.axis
        return (axis, 1) if x.ndim >= 4 and x.shape[axis] == self.heads else (0, 0)


class AttentionCalls:
    """The layers of attention of a model, in the order of their first call: calls of PyTorch's
    function, and products written out.
    """

    def __init__(self) -> None:
        self.layers: dict[tuple[str, int], int] = {}  # path and which call in it
        self.heads: list[int] = []  # of queries, by layer
        self.widths: list[int] = []  # D, by layer
        self.by_hand: dict[str, Written] = {}  # by path
        self._keys: dict[str, int] = {}  # by path, of the attention that has begun; 0: none has
        self._tokens: dict[int, None] = {}  # that linear layers have read, the last ones last

    def see(self, operation: Operation) -> int | None:
        """The layer that an operation belongs to; None: it is no part of attention."""
        path = operation.path
        if operation.name == SDPA:
            query = operation.args[0] if operation.args else operation.kwargs["query"]
            return self._layer(path, operation.order, query.shape[-3], query.shape[-1])
        if operation.kind == "linear":
            self._read(operation)
        product = _product(operation)
        if product is not None and path not in self.by_hand:
            heads = product.heads or self._heads_of(product)
            # a module that calls PyTorch's attention does not write one out beside it
            if not heads or any(known == path for known, _ in self.layers):
                return None
            layer = self._layer(path, 0, heads, product.summed)
            self.by_hand[path] = Written(layer, heads, product.axis, product.rows)
        written = self.by_hand.get(path)
        if written is None:
            return None
        begun = self._keys.get(path, 0)
        # the product that ends it sums over the keys of the one that began; others are in between
        if product is not None and (not begun or product.summed == begun):
            self._keys[path] = 0 if begun else product.keys
        return written.layer if begun or product is not None else None

    def _layer(self, path: str, order: int, heads: int, width: int) -> int:
        if (path, order) not in self.layers:
            self.layers[path, order] = len(self.layers)
            self.heads.append(heads)
            self.widths.append(width)
        return self.layers[path, order]

    def _read(self, operation: Operation) -> None:
        rows = math.prod(next((x.shape[:-1] for x in operation.tensors() if x.ndim > 1), ()))
        self._tokens.pop(rows, None)
        self._tokens[rows] = None
        if len(self._tokens) > _REMEMBERED:
            del self._tokens[next(iter(self._tokens))]

    def _heads_of(self, scores: _Product) -> int:
        """How many heads share a dimension with the batch: B · N and B · N_k are numbers of tokens
        that linear layers have read; 0: not known.
        """
        for tokens in reversed(self._tokens):
            batch, over = divmod(tokens, scores.queries)
            if (
                batch
                and not over
                and not scores.rows % batch
                and batch * scores.keys in self._tokens
            ):
                return scores.rows // batch
        return 0


def _product(operation: Operation) -> _Product | None:
    if operation.kind != "matmul":
        return None
    operands = operation.tensors()
    if operation.name == "einsum":
        return _by_letters(operation.args[0], operands)
    if operation.name not in ("matmul", "bmm", "baddbmm") or len(operands) < 2:
        return None
    left, right = operands[-2:]  # before them what baddbmm adds
    if min(left.ndim, right.ndim) < 3 or left.ndim == 3 < right.ndim or right.ndim == 3 < left.ndim:
        return None
    heads = 0 if left.ndim == 3 else max(left.shape[-3], right.shape[-3])
    rows = 0 if heads else left.shape[0]
    return _Product(-3, heads, rows, left.shape[-2], right.shape[-1], left.shape[-1])


def _by_letters(equation: Any, operands: list[Tensor]) -> _Product | None:
    """A product of four or three letters each: of those in both operands and in the result the last
    one stands for heads, and the one before, if there is one, for the batch.
    """
    terms, _, result = str(equation).replace(" ", "").partition("->")
    names = [_spelled(term, x) for term, x in zip(terms.split(","), operands, strict=False)]
    fit = [len(name) == x.ndim for name, x in zip(names, operands, strict=False)]
    if fit != [True, True] or len(operands) != 2 or not result:
        return None
    one, other = names
    result = result.replace("...", max((_dots(name) for name in names), key=len))
    shared = [letter for letter in result if letter in one and letter in other]
    summed = [letter for letter in one if letter in other and letter not in result]
    if len(shared) not in (1, 2) or len(summed) != 1 or len(result) != len(shared) + 2:
        return None
    merged = len(shared) == 1
    if merged and not one[0] == other[0] == result[0] == shared[0]:
        return None
    size = dict(zip(one, operands[0].shape, strict=True))
    size |= dict(zip(other, operands[1].shape, strict=True))
    queries, keys = (size[letter] for letter in result if letter not in shared)
    heads, rows = (0, size[shared[0]]) if merged else (size[shared[1]], 0)
    axis = result.index(shared[-1]) - len(result)
    return _Product(axis, heads, rows, queries, keys, size[summed[0]])


def _spelled(term: str, x: Tensor) -> str:
    """A term of an equation with digits for its dots, 0 for the last of them."""
    dots = "".join(map(str, reversed(range(x.ndim - len(term.replace("...", ""))))))
    return term.replace("...", dots)


def _dots(name: str) -> str:
    return "".join(letter for letter in name if letter.isdigit())


class HeadsInFp32:
    """Puts some heads of attention that is written out into fp32.

    Args:
        heads: of an operation's module: how they lie, and which of them are exact.
    """

    takes_wide = True

    def __init__(self, heads: Callable[[Operation], tuple[Written, list[int]]]) -> None:
        self._heads, self._wide = heads, Wide(torch.float32)
        self.refused = self._wide.refused

    def __call__(self, operation: Operation) -> Any:
        """What the model gets: wide, with a note of the dtype that it expects."""
        # the other heads' values come from operands as the model would have them
        args, kwargs = mapped((operation.args, dict(operation.kwargs)), expected_by_model)
        own = operation.function(*args, **kwargs)
        written, exact = self._heads(operation)
        results = list(leaves(own))
        chosen = [
            found for x in results if (found := written.chosen(operation, x, exact)) is not None
        ]
        if not results or len(chosen) < len(results):
            return own
        wide = leaves(self._wide(operation))
        mixed = iter([_mixed(*parts) for parts in zip(chosen, wide, results, strict=True)])
        return mapped(own, lambda x: next(mixed) if isinstance(x, Tensor) else x)


def _mixed(chosen: Tensor, wide: Tensor, own: Tensor) -> Tensor:
    if not own.is_floating_point() or not is_wide(wide):
        return torch.where(chosen, wide, own)
    return tag(torch.where(chosen, wide, own.to(wide.dtype)), own.dtype)
