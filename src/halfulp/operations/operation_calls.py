"""Calls of an operation as values, and what its definition makes of them in any arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfulp.calls import gradients_of
from halfulp.operations.operation_data import Define, Operation, Sizes, Tensors
from halfulp.operations.operation_sizes import probe_of
from halfulp.operations.seam import Change, Rounding, Steps, exactly

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class OperationResult:
    """What the calls gave, stacked: results and gradients `[calls, ...]` by name."""

    tensors: Tensors

    def given(self) -> Tensors:
        """What there is, by name."""
        return dict(self.tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> OperationResult:
        """Each changed."""
        return OperationResult({name: change(x) for name, x in self.tensors.items()})


@dataclass(frozen=True)
class OperationCalls:
    """Independent calls of one operation, their operands stacked `[calls, ...]`."""

    operation: Operation
    dtype: str  # the audited one
    operands: Tensors
    grads: Tensors  # what reaches each differentiable result, "grad_" and its name
    options: Mapping[str, Any]
    manner: str = ""  # in which memory and how often a kernel is called, as its probe says

    @property
    def count(self) -> int:
        """How many calls there are."""
        return int(next(iter(self.operands.values())).shape[0])

    def to(self, device: str) -> OperationCalls:
        """The same on another device."""
        moved = {n: x.to(device) for n, x in self.operands.items()}
        return replace(self, operands=moved, grads={n: x.to(device) for n, x in self.grads.items()})

    def expected(self) -> dict[str, tuple[int, tuple[torch.dtype, ...]]]:
        """The dimensions of a call and the dtypes of every tensor that a target can give; the first
        dtype is what it is held against.
        """
        audited = DTYPES[self.dtype]
        kinds = {"audited": (audited,), "float": (audited, torch.float32)}
        kinds |= {"float32": (torch.float32,), "int64": (torch.int64,)}
        like = {r.name: (len(r.shape.split()), kinds[r.dtype]) for r in self.operation.results}
        for operand in self.operation.differentiable:
            x = self.operands[operand.name]
            like[f"grad_{operand.name}"] = (x.ndim - 1, (x.dtype,))
        return like


def drawn_calls(
    operation: Operation, probe: str, sizes: Sizes, dtype: str, generator: torch.Generator
) -> OperationCalls:
    """The calls of one probe at these sizes, each drawn after the other from one generator."""
    chosen = probe_of(operation, probe)
    # what reaches a float32 loss is a number that the audited dtype has too
    kinds = DTYPES | {"audited": DTYPES[dtype], "float": DTYPES[dtype]}
    stacked: dict[str, list[Tensor]] = {}
    for _ in range(sizes.calls):
        drawn = chosen.draw(sizes, generator)
        for operand in operation.operands:
            x, size = drawn.get(operand.name), sizes.shape(operand.shape)
            if x is None or tuple(x.shape) != size:
                what = f"no {operand.name}" if x is None else f"{operand.name} of {list(x.shape)}"
                raise ValueError(
                    f"op={operation.folder!r}: probe {probe!r} draws {what}; expected"
                    f" {operand.name} of {list(size)}, {operand.shape}"
                )
            stacked.setdefault(operand.name, []).append(x.to(kinds.get(operand.dtype, x.dtype)))
        for result in operation.results:
            if operation.differentiable and result.differentiable:
                name, shape = f"grad_{result.name}", sizes.shape(result.shape)
                g = drawn[name] if name in drawn else torch.randn(shape, generator=generator)
                stacked.setdefault(f"/{name}", []).append(g.to(kinds.get(result.dtype, g.dtype)))
    whole = {name: torch.stack(parts) for name, parts in stacked.items()}
    grads = {name[1:]: x for name, x in whole.items() if name.startswith("/")}
    operands = {name: x for name, x in whole.items() if not name.startswith("/")}
    options = {**operation.options, **chosen.options}
    return OperationCalls(operation, dtype, operands, grads, options, chosen.manner)


def defined(
    calls: OperationCalls, change: Change = exactly, names: Collection[str] | None = None
) -> Tensors:
    """The definition's results and gradients in fp64, each step changed so, or those that have
    these names.
    """
    return _evaluated(calls, change, torch.float64, () if change is exactly else names)


def emulated(calls: OperationCalls, recipe: Rounding, seed: int = 0) -> Tensors:
    """The same in fp32 and a recipe's roundings, results and gradients rounded to their dtypes."""
    return changed(calls, recipe.change(calls.dtype, seed), names=recipe.steps)


def changed(
    calls: OperationCalls,
    change: Change,
    define: Define | None = None,
    names: Collection[str] | None = None,
) -> Tensors:
    """The same with each step changed so, or those that have these names, each result and gradient
    too: as `result_NAME`; of another definition where one is given.
    """
    return in_own_dtypes(calls, change, _evaluated(calls, change, torch.float32, names, define))


def in_own_dtypes(calls: OperationCalls, change: Change, found: Tensors) -> Tensors:
    """Results changed as `result_NAME` and rounded to their dtypes."""
    dtypes = {name: kinds[0] for name, (_, kinds) in calls.expected().items()}
    return {
        name: change(f"result_{name}", x).to(dtypes.get(name, x.dtype)) for name, x in found.items()
    }


def _evaluated(
    calls: OperationCalls,
    change: Change,
    compute: torch.dtype,
    names: Collection[str] | None,
    define: Define | None = None,
) -> Tensors:
    stacked: dict[str, list[Tensor]] = {}
    for number in range(calls.count):
        given = given_to(calls, number, compute)
        for name, t in evaluated(calls, Steps(change, names), given, define).items():
            stacked.setdefault(name, []).append(t)
    return {name: torch.stack(parts) for name, parts in stacked.items()}


def given_to(calls: OperationCalls, number: int, compute: torch.dtype) -> Tensors:
    """What one of the calls is given, as it is computed with: operands and gradients."""
    return {
        name: t[number].to(compute) if t.is_floating_point() else t[number]
        for name, t in (calls.operands | calls.grads).items()
    }


def evaluated(
    calls: OperationCalls, step: Steps, given: Tensors, define: Define | None = None
) -> Tensors:
    """The results and gradients of the definition for what one of the calls is given."""
    operation = calls.operation
    leaves = [x.name for x in operation.differentiable] if calls.grads else []
    x = {name: given[name] for name in calls.operands}
    for name in leaves:
        x[name].requires_grad_()
    with torch.set_grad_enabled(bool(leaves)):
        results = (define or operation.define)(step, x, calls.options)
    if lacking := [r.name for r in operation.results if r.name not in results]:
        raise ValueError(
            f"op={operation.folder!r}: define gives {', '.join(results)}; expected"
            f" {', '.join(lacking)} too, as RESULTS says"
        )
    if leaves:
        outs = [results[name.removeprefix("grad_")] for name in calls.grads]
        reach = [given[n].to(out.dtype) for n, out in zip(calls.grads, outs, strict=True)]
        grads = gradients_of(outs, reach, [x[name] for name in leaves])
        for name, grad in zip(leaves, grads, strict=True):
            if grad is None:
                raise ValueError(f"{operation.name}: no result depends on {name}")
            results[f"grad_{name}"] = grad
    return {name: t.detach() for name, t in results.items()}


def first_calls(calls: OperationCalls, count: int) -> OperationCalls:
    """So many of them."""
    operands = {name: x[:count] for name, x in calls.operands.items()}
    return replace(calls, operands=operands, grads={n: x[:count] for n, x in calls.grads.items()})


def calls_at(calls: OperationCalls, numbers: list[int]) -> OperationCalls:
    """Those of these numbers, one as often as it is named."""
    operands = {name: x[numbers] for name, x in calls.operands.items()}
    return replace(calls, operands=operands, grads={n: x[numbers] for n, x in calls.grads.items()})


def sizes_of(calls: OperationCalls) -> dict[str, int]:
    """What each symbol stands for in these calls."""
    return {
        symbol: calls.operands[operand.name].shape[1 + place]
        for operand in calls.operation.operands
        for place, symbol in enumerate(operand.shape.split())
        if not symbol.isdigit()
    }
