"""Attention that no function told of, found in the graph that autograd keeps of a pass.

Whatever is trained leaves a node there: PyTorch's operators however they are called (from Python,
TorchScript or C++), custom operators and autograd Functions under their own names, compiled code as
one node. Nothing runs to look at it and no value is read, so the pass is what it would be. Nodes
have no module; they belong to the one whose forward ran when they were first found, at its end or
where it called another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from halfulp.interpose import leaves

WRITTEN_OUT = "attention written out in products"
COMPILED = "compiled code, in which no attention is seen"
_DIRECT = "{} is called past the functions that are measured"
_LOOKS_SO = "{} takes what look like queries, keys and values, and nobody sees inside"
_LEAST_SQUARE = 8  # tokens; smaller squares may be anything
_MOST_NODES = 256  # between two products

_NAMED_SO = re.compile(r"attention|attn|flash|sdpa?(?![a-z])|fmha|mha(?![a-z])", re.IGNORECASE)
_PRODUCTS = {"BmmBackward0": 0, "MmBackward0": 0, "BaddbmmBackward0": 1, "AddmmBackward0": 1}
"""Where the operands of a product stand among those of its node."""
_ENDS = re.compile(r"(Addmv|Mv|Convolution\w*|Embedding|NativeLayerNorm|AccumulateGrad)(Backward)?")
_BENDS = re.compile(r"(Exp2?|Relu|Sigmoid|Gelu|Silu|Pow|Softplus|Elu)Backward")
_SAME = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Expand|ToCopy|Unsqueeze|Squeeze|Slice"
    r"|Select|Clone|Alias|Cat|Stack|Split|Unbind|AsStrided)Backward"
)


class BackwardGraph:
    """What was found in one pass: `found`, by module, why it is not measured."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._looked_at: set[Any] = set()

    def forget(self) -> None:
        """Hold no node any longer."""
        self._looked_at.clear()

    def known(self, values: Any) -> None:
        """What these were made by is known, or none of the model's."""
        self._looked_at.update(self._new(values))

    def reached(self, path: str, values: Any) -> None:
        """Look at all that these were made by; what is new was made in the module of that path."""
        for node in list(self._new(values)):
            why = _judged(node)
            if why and path not in self.found:
                self.found[path] = why

    def _new(self, values: Any) -> Iterator[Any]:
        waiting = _nodes(values)
        while waiting:
            node = waiting.pop()
            # once a pass each, however often modules inside each other reach them
            if node not in self._looked_at:
                self._looked_at.add(node)
                waiting += _before(node)
                yield node


def _nodes(values: Any) -> list[Any]:
    if torch._C._are_functorch_transforms_active():
        return []
    return [x.grad_fn for x in leaves(values) if x.grad_fn is not None]


def _before(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def _judged(node: Any) -> str:
    """Why a node is attention that is not measured; empty where it is none."""
    name = node.name()
    if "CompiledFunction" in name or "DifferentiableGraph" in name:
        return COMPILED
    if name.startswith("CheckpointFunction"):  # what is in it is recomputed, and found then
        return ""
    if _NAMED_SO.search(name):
        return _DIRECT.format(_plain(name))
    # scores of self-attention are square; a loss's (LogSoftmax) and a router's are not
    if "Softmax" in name and not name.startswith("Log"):
        shape = node._input_metadata[0].shape
        square = len(shape) >= 3 and shape[-1] == shape[-2] >= _LEAST_SQUARE
        return WRITTEN_OUT if square else ""
    if name in _PRODUCTS:
        return WRITTEN_OUT if any(_weighs(node, place) for place in (0, 1)) else ""
    opaque = isinstance(node, torch.autograd.function.BackwardCFunction)
    if (opaque or type(node).__name__ == "CppFunction") and _takes_three(node):
        return _LOOKS_SO.format(_plain(name))
    return ""


def _plain(name: str) -> str:
    short = re.sub(r"Backward\d*$", "", name).removeprefix("GeneratedBackwardFor_")
    return short.removesuffix("_default").rpartition("::")[2]


def _takes_three(node: Any) -> bool:
    """Whether its operands and its one large result have the shapes of attention's."""
    shapes = [
        tuple(before._input_metadata[index].shape)
        for before, index in node.next_functions
        if before is not None
    ]
    large = [shape for shape in shapes if len(shape) >= 3]
    results = [tuple(x.shape) for x in node._input_metadata if len(x.shape) >= 3]
    if len(large) != 3 or len(results) != 1:
        return False
    query, key, value = large
    alike = query[-1] == key[-1] and key[:-1] == value[:-1] and query[0] == key[0]
    return alike and results[0] == (*query[:-1], value[-1])


def _weighs(product: Any, place: int) -> bool:
    """Whether an operand of a product is made of another product's scores: through a softmax, or,
    where all other operands are activations, through another function that is not linear.
    """
    first = _PRODUCTS[product.name()]
    operand, other = (
        product.next_functions[first + i][0] if first + i < len(product.next_functions) else None
        for i in (place, 1 - place)
    )
    softmax, bends, scores = False, False, []
    waiting, walked = [operand] if operand is not None else [], set[Any]()
    while waiting and len(walked) < _MOST_NODES:
        node = waiting.pop()
        if node in walked:
            continue
        walked.add(node)
        name = node.name()
        if name in _PRODUCTS:
            scores.append(node)
            continue
        softmax |= "Softmax" in name
        bends |= _BENDS.match(name) is not None
        opaque = isinstance(node, torch.autograd.function.BackwardCFunction)
        if not opaque and not _ENDS.search(name):
            waiting += _before(node)
    if _is_weight(other):  # a linear layer
        return False
    of_activations = any(not any(map(_is_weight, _operands(one))) for one in scores)
    return of_activations and (softmax or (place == 0 and bends))


def _operands(product: Any) -> list[Any]:
    first = _PRODUCTS[product.name()]
    return [node for node, _ in product.next_functions[first : first + 2]]


def _is_weight(node: Any) -> bool:
    """Whether it is a leaf, or one that was only moved or cast."""
    while node is not None and _SAME.match(node.name()):
        node = next(iter(_before(node)), None)
    return node is not None and node.name().endswith("AccumulateGrad")
