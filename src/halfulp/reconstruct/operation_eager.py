"""Eager code in low precision: every operation of both passes rounds what it gives, or all from one
step on, before which operands are cast up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfulp.formats import Format
from halfulp.operations import DTYPES, OF_DTYPE, Define, OperationCalls
from halfulp.reconstruct.operation_mistakes import rounded
from halfulp.reconstruct.operation_steps import said, shapes_of_steps
from halfulp.reconstruct.operation_ways import TOLD, Way


def eager_ways(calls: OperationCalls) -> Iterator[Way]:
    """The definition as eager code, in the operands' format throughout."""
    if calls.dtype == "float32":
        return
    own = OF_DTYPE[calls.dtype]
    kept = f"what is kept for the backward pass is rounded to {own}"
    yield Way("grad-step-low", kept, within=partial(_kept, own))
    anew = "operands are cast up anew wherever they are used: the parts of their gradients are"
    yield Way("grad-sum-low", f"{anew} rounded to {own} before they are added",
              within=partial(_CastAnew, own))  # fmt: skip
    forms = _forms(calls)
    yield from (way for way, _, _ in forms)
    for told, (cause, define) in calls.operation.related.items() if forms else ():
        ran = _Ran(define, calls.dtype)
        yield Way(cause, f"{told}; {_BOTH} {_low(calls)}", eager=ran)


def eager_ways_from(calls: OperationCalls, share: Callable[[Way], float]) -> Iterator[Way]:
    """The same from each step on, of the form that explains the largest share."""
    forms = [] if calls.dtype == "float32" else _forms(calls)
    _, define, steps = max(forms, key=lambda form: share(form[0]), default=(None, None, []))
    for name in steps:
        text = f"{_BOTH} {_low(calls)}, from {said(name)} on"
        for leaves in (False, True) if calls.grads else (False,):  # they are of gradients
            ran = _Ran(define, calls.dtype, name, leaves)
            yield Way("step-low", text, eager=ran)


def _forms(calls: OperationCalls) -> list[tuple[Way, Define, list[str]]]:
    """Each way to write the definition, and its steps; none where what is low is its one sum."""
    operation = calls.operation
    forms: list[tuple[Way, Define, list[str]]] = []
    for define in operation.eager or (operation.define,):
        steps = [n for n in shapes_of_steps(calls, define) if not n.startswith("grad_")]
        if len(steps) == 1 and not operation.eager:
            return []
        names = ", ".join(map(said, steps[:TOLD])) + " …" * (len(steps) > TOLD)
        ran = _Ran(define, calls.dtype)
        forms.append(
            (Way("step-low", f"{_BOTH} ({names}) {_low(calls)}", eager=ran), define, steps)
        )
    return forms


_BOTH = "every step of both passes"


def _low(calls: OperationCalls) -> str:
    return f"is rounded to {OF_DTYPE[calls.dtype]}, as eager code does"


@dataclass(frozen=True)
class _Ran:
    """A form of eager code, equal to another that runs alike."""

    define: Any
    dtype: str
    since: str = ""
    leaves: bool = False

    def __call__(self) -> tuple[Any, Any]:
        """The definition, and what rounds while it runs."""
        return self.define, _Eager(self.dtype, self.since, self.leaves)


def _kept(fmt: Format) -> AbstractContextManager[Any]:
    """Autograd whose saved tensors are rounded, a result it takes its gradient from among them."""

    def low(x: Tensor) -> Tensor:
        return rounded(fmt)(x) if x.is_floating_point() else x

    return torch.autograd.graph.saved_tensors_hooks(low, lambda x: x)


class _Part(torch.autograd.Function):
    """One use of an operand, whose part of the gradient is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format) -> Tensor:
        ctx.fmt = fmt
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return rounded(ctx.fmt)(grads[0]), None


class _CastAnew(TorchFunctionMode):
    """Code that casts its operands up wherever it uses them."""

    def __init__(self, fmt: Format) -> None:
        super().__init__()
        self.fmt = fmt

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # a shape is no use
            args = tuple(
                _Part.apply(x, self.fmt)  # type: ignore[no-untyped-call]
                if isinstance(x, Tensor) and x.is_leaf and x.requires_grad
                else x
                for x in args
            )
        return func(*args, **(kwargs or {}))


def _as(dtype: torch.dtype, x: Any) -> Any:
    """An operator's argument or result in another dtype: a tensor, a list of them, or neither."""
    if isinstance(x, (list, tuple)):  # torch's tree_map took two thirds of the time
        return type(x)([_as(dtype, each) for each in x])
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class _Eager(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation in low precision, once the step `since` is passed and until a gradient
    arrives there; autograd's own operations as well. `leaves`: parts of an operand's gradient are
    low too, those of its wide copy among them.
    """

    def __init__(self, dtype: str, since: str, leaves: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.low, self.since, self.on = DTYPES[dtype], since, not since
        self.before: list[str] = []  # steps up to that one
        self.leaves, self.back = leaves, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper that keeps the compiler out of it would import the compiler first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # autograd adds what reaches an operand twice, and hardly anything else
        added = self.leaves and self.back and func is torch.ops.aten.add.Tensor
        if not (self.on or added) or any(r.alias_info for r in func._schema.returns):
            return func(*args, **(kwargs or {}))
        return _as(torch.float32, func(*_as(self.low, args), **(kwargs or {})))

    def __call__(self, name: str, exact: Tensor) -> Tensor:
        """What is kept of a step: all of it where nothing is low yet."""
        if self.since and not self.on and not name.startswith("grad_"):
            self.before.append(name)
            self.on = name == self.since
        elif name.removeprefix("grad_") in self.before:
            self.on, self.back = False, True
        low = _as(self.low, exact) if name.removeprefix("grad_") == self.since else exact
        return low.to(exact.dtype)
