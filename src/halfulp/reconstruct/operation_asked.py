"""`reconstruct_operation`: call a kernel of any operation on every probe, and find what errs as it
does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch

from halfulp.formats import dtype_named
from halfulp.operations import DTYPES, OperationCalls, OperationResult, operation_named
from halfulp.reconstruct.found import WELL, FoundWay
from halfulp.reconstruct.operation_called import panel
from halfulp.reconstruct.operation_reconstruction import of_operation
from halfulp.runs.threads import own_thread
from halfulp.targets import Target, device_named, run_operation, target_of


@dataclass(frozen=True)
class OperationReconstruction:
    """What a kernel of an operation does, and how much of its error that explains."""

    target: str
    operation: str
    dtype: str
    found: FoundWay | None  # None: nothing is off by more than both recipes make it
    recipes: dict[str, float]  # the mean share of the error, over all calls, that each explains
    calls: int
    seconds: float
    nonfinite: dict[str, int]  # calls with NaN or Inf where the exact value is finite, by tensor

    @property
    def understood(self) -> bool:
        """Whether nothing is worse than the recipes, or a way explains it."""
        return not self.nonfinite and (self.found is None or self.found.share >= WELL)

    @property
    def sentence(self) -> str:
        """One line: what it does."""
        broken = ", ".join(f"{name} in {n}" for name, n in self.nonfinite.items())
        first = f"NaN or Inf where exact values are finite: {broken} of {self.calls} calls; "
        if self.found is None:
            rest = f"errs by no more than its recipes on {self.calls} calls, one of every probe"
        else:
            rest = self.found.told
        return first * bool(broken) + rest

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "text": self.sentence, "understood": self.understood}

    def __str__(self) -> str:
        return f"{self.target}: {self.sentence}"


@own_thread()
def reconstruct_operation(
    target: str | Target | Callable[..., Any],
    op: str,
    *,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> OperationReconstruction:
    """Find what explains the errors of a kernel of an operation, as `reconstruct` does for
    attention.

    Args:
        target: a name, "file.py:function", or a function as `halfulp.audit` takes it.
        op: one of `halfulp ls operations` but attention, or a folder that defines another.
        dtype: bfloat16, float16 or float32, by name or as torch has it.
        device: where the target runs; ways are emulated on the CPU.
        seed: of the inputs.

    Raises:
        ValueError: for an unknown target, operation, dtype or device, or a kernel that gives no
            result on any probe.
    """
    dtype, device = dtype_named(dtype, DTYPES), device_named(device)
    operation, began, said = operation_named(op), time.perf_counter(), ["no reason given"]
    chosen = target_of(target, op)

    def run(calls: OperationCalls) -> OperationResult | None:
        outcome = run_operation(chosen, calls.to(device))
        if not isinstance(outcome.result, OperationResult):
            said.append(outcome.refusal or said[0])
            return None
        return OperationResult({n: x.cpu() for n, x in outcome.result.tensors.items()})

    trials = panel(run, operation, dtype, seed)
    if not trials:
        raise ValueError(
            f"target={chosen.name!r}: gives no result on any of the inputs ({said[-1]});"
            f" accepted is {operation.signature}"
        )
    found = of_operation(run, (), trials)
    errs = [
        replace(t, failing=n) for t in trials if (n := tuple(n for n in t.errors if t.errors[n]))
    ]
    recipes = {
        recipe.name: fmean(t.share(recipe, ()) for t in errs) if errs else 1.0
        for recipe in (operation.stock, operation.floor)
    }
    seconds = time.perf_counter() - began
    broken = Counter(name for t in trials for name in t.nonfinite)
    return OperationReconstruction(
        chosen.name, op, dtype, found, recipes, len(trials), seconds, dict(broken)
    )
