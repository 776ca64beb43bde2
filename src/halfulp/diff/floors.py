"""What rounding alone makes of an operation: its floor, and the operation in fp64.

A floor is a mean square, so that few of the numbers tell it: every n-th row, column or head of the
operands goes into it, where an operation treats them alike.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfulp.diff.local_gap import step_of
from halfulp.diff.tape import Entry, result_of
from halfulp.interpose import Operation, leaves
from halfulp.interpose.another import Wide

# a floor of so few against that of all: standard deviation 0.5 % for a norm, 2.6 % for a linear
# layer, 8.8 % for a softmax (docs/log.md)
FEW = 2**14
"""Numbers of the largest operand that a floor is measured on, about."""
_COARSE = 1e-4  # a rounding that arithmetic in fp32 does not blur
# manual_seed(0) gives a user's tensor of seed 0 once more: floors were 1.7 times too large
_SEED = 0x6861_6C66  # one that nobody's operands were drawn from, so that noise is not they
_ROWS, _PRODUCTS = 32, 2**16  # of a product: rows, and numbers of the weights of its columns
_ONE_BY_ONE = (
    "gelu silu relu sigmoid tanh add sub rsub mul div true_divide rdiv neg pow rpow square sqrt"
    " rsqrt reciprocal exp log sin cos abs clamp clamp_min clamp_max maximum minimum where"
    " masked_fill"
)
# dimensions, from the last, that an operation does not treat one by one
_WHOLE = dict.fromkeys(_ONE_BY_ONE.split(), 0)
_WHOLE |= {"layer_norm": 1, "rms_norm": 1, "matmul": 2, "bmm": 2, "scaled_dot_product_attention": 2}
_LAST = ("softmax", "log_softmax", "mean", "sum", "amax")  # where they are asked for dimension −1


def floors_of(entries: list[Entry], operation: Operation) -> list[float]:
    """What rounding operands and result once, in each entry's formats, makes of the result of an
    operation, relative to it (rms): operands moved at random by one rounding, in fp64. To first
    order that grows with the rounding, so that it is measured once, at the coarsest.
    """
    steps = [step_of(entry.coarsest) for entry in entries]
    results = [step_of(entry.dtype) for entry in entries]
    # no arithmetic: each number of the result is one of the operand's, rounded
    if operation.kind in ("embedding", "cast"):
        return list(map(max, results, steps))
    rate = _moved(sampled(operation), max(steps)) / max(steps)
    return [math.hypot(result, rate * step) for result, step in zip(results, steps, strict=True)]


def _moved(operation: Operation, step: float) -> float:
    """How far the result moves, relative to it, with operands moved by so much of themselves."""
    generator = torch.Generator().manual_seed(_SEED)
    wide = torch.float32 if step > _COARSE else torch.float64

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        # drawn in fp32 for fp64 too: a million numbers take 4.7 ms so, and 35 ms in fp64
        noise = torch.randn(x.shape, generator=generator).to(x.device, wide)
        return torch.addcmul(y := x.to(wide), y, noise, value=step)

    exact, apart = exactly(operation, wide), exactly(operation, wide, moved)
    # without an fp64 kernel `exactly` gives fp32, whose own rounding would pass for an effect
    if exact is None or apart is None or torch.finfo(exact.dtype).eps > step / 16:
        return 0.0
    change, size = (
        float(torch.dot(x, x))
        # hidden scores are −inf in both, and their difference NaN
        for x in (y.nan_to_num(0, 0, 0).double().flatten() for y in (apart - exact, exact))
    )
    return math.sqrt(change / size) if size else 0.0


def sampled(operation: Operation) -> Operation:
    """The operation on a part of its operands that has the floor of all, or as it is."""
    args = tuple(x for x in operation.args if x is not None)  # a layer without a bias hands None
    every = all(isinstance(x, Tensor) and x.dim() for x in args) and not operation.kwargs
    if operation.name == "linear" and every and len(args) in (2, 3):
        x, weight = args[0].flatten(0, -2) if args[0].dim() > 1 else args[0], args[1]
        # rows and columns are alike; what is summed over stays whole, on which a sum's floor rests
        columns = max(16, _PRODUCTS // weight.shape[-1])
        few = [_few(x, 0, _ROWS), *(_few(part, 0, columns) for part in (weight, *args[2:]))]
        return replace(operation, args=tuple(few))
    if operation.name == "addmm" and every and len(args) == 3 and args[0].dim() == 1:
        columns = max(16, _PRODUCTS // args[2].shape[0])
        few = [_few(args[0], 0, columns), _few(args[1], 0, _ROWS), _few(args[2], 1, columns)]
        return replace(operation, args=tuple(few))
    whole = _WHOLE.get(operation.name)
    if operation.name in _LAST:
        asked = operation.kwargs.get("dim", operation.args[1] if operation.args[1:] else None)
        whole = 1 if asked == -1 else None
    return operation if whole is None or operation.in_place else _strided(operation, whole)


def _strided(operation: Operation, whole: int) -> Operation:
    """Every n-th of the leading dimensions, which operands share by PyTorch's broadcasting."""
    tensors = list(leaves((operation.args, operation.kwargs)))
    leading = [x.shape[: x.dim() - whole] for x in tensors if x.dim() > whole]
    try:
        sizes = np.broadcast_shapes(*leading)
    except ValueError:  # heads of key and value that several heads of query share
        return operation
    over = max(x.numel() for x in tensors) / FEW
    strides = []
    for size in sizes:
        strides.append(min(size, max(1, math.ceil(over))))
        over /= strides[-1]

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= whole:
            return x
        own = x.dim() - whole
        chosen = [
            slice(None, None, stride if size > 1 else 1)
            for size, stride in zip(x.shape[:own], strides[len(strides) - own :], strict=True)
        ]
        return x[tuple(chosen)]

    return operation.changed(part)


def _few(x: Tensor, dim: int, most: int) -> Tensor:
    return x if x.shape[dim] <= most else x.narrow(dim, 0, most)


def exactly(
    operation: Operation, wide: torch.dtype = torch.float64, change: Any = None
) -> Tensor | None:
    """The operation in fp64 (or as asked), or in fp32 where it has no other kernel (None: in
    neither); a cast rounds nothing.
    """
    given = operation if change is None else operation.changed(change)
    for dtype in (wide, torch.float32):
        run = Wide(dtype, noted=False)
        if dtype != wide:  # what was moved is in fp64
            given = given.changed(_single)
        try:
            found = result_of(run(given))
        except (RuntimeError, TypeError):
            continue
        if not run.refused:
            return found
    return None


def _single(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
