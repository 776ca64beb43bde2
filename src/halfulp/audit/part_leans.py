"""Whether a result leans along what one step of its definition makes of it, part by part.

A step that always errs the same way, in some rows or columns alone, errs by less than the result's
own rounding and moves no norm; but its errors do not cancel along d result / d log step.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from halfulp.audit.figures import Lean
from halfulp.operations import OperationCalls, Tensors, defined
from halfulp.operations.seam import PLACE

_BY = 2.0**-20  # first order, and far above the 2⁻⁵³ of fp64
_ALIKE = 0.99  # cosine: steps that move a result alike are one direction
_BLOCK, _FIRST = 16, 8
_FEWEST = 4  # calls, and places of a part: fewer say nothing

Directions = dict[str, Tensors]
"""By result and step, in bf16: projections need no more, and they are kept on disk."""


def directions(calls: OperationCalls, truth: Tensors) -> Directions:
    """What each result `[calls, ...]` gains where every element of a step gains its own size; of
    steps that move it alike the first alone. {} where no test is made: of few calls, and in
    float32, where orders of sums lean.
    """
    if calls.dtype == "float32" or next(iter(truth.values())).shape[0] < _FEWEST:
        return {}
    found: Directions = {n: {"": t} for n, t in truth.items() if t.is_floating_point()}
    for step in _steps(calls):

        def grown(name: str, exact: Tensor, step: str = step) -> Tensor:
            return exact.detach() * (1 + _BY) if name == step else exact.detach()

        moved = defined(calls, grown, (step,))
        for name, own in found.items():
            along = ((moved[name] - truth[name]) / _BY).nan_to_num_(0.0, 0.0, 0.0)
            if _is_new(along, own):
                own[step] = along
    return {
        name: {step: x.bfloat16().nan_to_num_(0.0, 0.0, 0.0) for step, x in own.items() if step}
        for name, own in found.items()
    }


def _steps(calls: OperationCalls) -> dict[str, None]:
    seen: dict[str, None] = {}

    def noted(name: str, exact: Tensor) -> Tensor:
        if not name.removeprefix("grad_").startswith(PLACE):
            seen[name] = None
        return exact.detach()

    defined(calls, noted)
    return seen


def _is_new(along: Tensor, own: Tensors) -> bool:
    return bool(along.any()) and all(_cosine(along, other) < _ALIKE for other in own.values())


def _cosine(a: Tensor, b: Tensor) -> float:
    b = b.nan_to_num(0.0, 0.0, 0.0).flatten()
    a = a.flatten()
    return float(torch.dot(a, b).abs() / (a.norm() * b.norm()).clamp_min(1e-300))


@lru_cache(maxsize=256)
def _parts(symbol: str, n: int) -> tuple[list[str], Tensor]:
    """Parts of one dimension in words, and what is inside of each `[n, parts]`."""
    i, whole = torch.arange(n), n // _BLOCK * _BLOCK
    told = {
        "the first half": i < n // 2,
        "the last half": i >= n // 2,
        "odd places": i % 2 == 1,
        "the last block": i >= (whole if whole < n else n - _BLOCK),
        "the first block": i < _FIRST,
    }
    told = {part: own for part, own in told.items() if _FEWEST <= int(own.sum()) < n}
    inside = torch.stack([*told.values()], 1).double() if told else torch.zeros(n, 0).double()
    return [f", in {part} of {symbol}" for part in told], inside


def part_leans(
    name: str, off: Tensor, along: Tensors, weight: Tensor, symbols: list[str], unit: float
) -> list[Lean]:
    """A result's error `[calls, ...]` projected on each direction, and on itself as "", in each
    part, in unit roundoffs of the step; weights as wide as the error: rows count by what rounding
    makes of them.
    """
    found = list[Lean]()
    off, both = off * weight, off.new_empty(2, *off.shape)
    for step, direction in along.items():
        wide = direction.double()
        torch.mul(wide, off, out=both[0])
        torch.mul(wide.square(), weight, out=both[1])

        def put(parts: list[str], sums: Tensor, step: str = step) -> None:
            """Of sums `[2, calls, parts]`."""
            lean = torch.where(sums[1] > 0, sums[0] / sums[1].clamp_min(1e-300), 0.0) / unit
            told = [f"{step or 'its own size'}{part}" for part in parts]
            found.extend(map(Lean, [name] * len(told), lean.unbind(-1), told))

        if step:  # the lean of the whole along itself is another test's
            put([""], both.flatten(2).sum(-1, keepdim=True))
        for dim, symbol in enumerate(symbols, 2):
            parts, inside = _parts(symbol, both.shape[dim])
            rest = [d for d in range(2, both.ndim) if d != dim]
            put(parts, (both.sum(rest) if rest else both) @ inside)
    return found
