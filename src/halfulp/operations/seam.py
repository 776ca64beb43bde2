"""The seam of an operation's definition: every named intermediate passes through it, and so does
its gradient on the way back.

One definition gives the fp64 value (nothing is rounded), the arithmetic of a kernel (what its
recipe names is rounded) and the noise that is natural (everything is off by a random part of
itself).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfulp.formats import BF16, FP16, FP32, BlockFormat, Format, round_to
from halfulp.recipes import hash_seed

OPERAND = "operand"
"""Stands in a `Rounding` for the format of the audited dtype."""

STOCHASTIC = "operand, stochastic"
"""The same, rounded stochastically."""

OF_DTYPE: dict[str, Format] = {"bfloat16": BF16, "float16": FP16, "float32": FP32}

PLACE = "_"
"""Begins the name of a step where nothing need be rounded and some kernel does: terms of a sum, a
value between two steps. There the reconstruction tries what kernels do; natural noise leaves it be.
"""

Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Rounding:
    """The recipe of an operation: which named steps of its definition are rounded to what.

    "grad_" and a step's name is the gradient that arrives there. All else is float32; results and
    gradients are rounded to their own dtype at the end, in every recipe.
    """

    name: str
    steps: Mapping[str, Format | BlockFormat | str] = field(default_factory=dict)

    def change(self, dtype: str, seed: int = 0) -> Change:
        """What happens at each step when operands are of that dtype."""
        own = OF_DTYPE[dtype]
        known = {OPERAND: own, STOCHASTIC: own.with_(rounding="stochastic")}
        formats = {n: known[f] if isinstance(f, str) else f for n, f in self.steps.items()}
        passed: dict[str, int] = {}

        def rounded(name: str, exact: Tensor) -> Tensor:
            fmt = formats.get(name)
            if fmt is None:
                return exact
            if isinstance(fmt, BlockFormat) and fmt.element.rounding != "stochastic":
                return _rounded_blocks(exact.detach(), fmt)
            passed[name] = passed.get(name, 0) + 1
            # by step and pass: no two stochastic roundings share their random numbers
            return round_to(exact.detach(), fmt, seed=hash_seed(seed, name, passed[name]))

        return rounded


_FEW = 2**15  # numbers, of a call that is computed so often
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_ROUNDED: deque[tuple[BlockFormat, Tensor, Tensor]] = deque(maxlen=64)


def _rounded_blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Rounded in blocks; a search computes one call in hundreds of ways that leave most operands as
    they are, and blocks are what takes its time: the last ones are kept.
    """
    if x.numel() > _FEW:
        return round_to(x, fmt)
    bits = x.view(_BITS[x.dtype])  # of zeros the sign too
    for kept in reversed(tuple(_ROUNDED)):
        known, own, found = kept
        if known == fmt and found.dtype == x.dtype and torch.equal(own, bits):
            break
    else:
        found = round_to(x, fmt)
        kept = (fmt, bits.clone(), found)
    # what is asked for stays: ways alter one operand after the other
    _ROUNDED.append(kept)
    return found.clone()


class Steps:
    """A seam that changes every step, and the gradient that comes back to it, by one function; or
    those of these names alone, since a node of autograd costs ten times what it computes here.
    """

    def __init__(self, change: Change, names: Collection[str] | None = None) -> None:
        self.change, self.names = change, names

    def __call__(self, name: str, exact: Tensor) -> Tensor:
        """The step's value as it is changed; a gradient passes as if it were not."""
        own = self.names
        if own is not None and name not in own and f"grad_{name}" not in own:
            return exact
        if not exact.requires_grad:
            return self.change(name, exact)
        changed: Tensor = _Changed.apply(exact, name, self.change)  # type: ignore[no-untyped-call]
        return changed


def exactly(_: str, exact: Tensor) -> Tensor:
    """The seam of the definition itself."""
    return exact


def disturbed(generator: torch.Generator, by: float) -> Change:
    """Every element off by a random part of itself, of standard deviation `by`; not at places where
    no kernel needs to round.
    """

    def change(name: str, exact: Tensor) -> Tensor:
        if name.removeprefix("grad_").startswith(PLACE):
            return exact.detach()
        noise = torch.randn(exact.shape, generator=generator, dtype=exact.dtype)
        return exact.detach() * (1 + by * noise)

    return change


Seen = Callable[[str, Tensor], Tensor]


def over_root(step: Seen, name: str, rows: Tensor, x: Tensor, eps: float) -> Tensor:
    """rows / √(x + eps) of a norm, the inverse of the root at its step, whose gradient takes the
    number that the step gave, as kernels do, which keep it for the backward pass.
    """
    kept = step(name, torch.rsqrt(x.detach() + eps))
    zero = (x - x.detach()).nan_to_num()  # where x has overflowed, too
    # for every element, so that the terms of its gradient, an inner product, are a gradient's
    zeros = step("_inner", zero.expand_as(rows))
    return rows * (kept - 0.5 * kept**3 * zeros)


def times_rsqrt(step: Seen, name: str, rows: Tensor, x: Tensor, eps: float) -> Tensor:
    """The same as eager code has it, with autograd's gradient."""
    return rows * step(name, torch.rsqrt(x + eps))


def over_sqrt(step: Seen, name: str, rows: Tensor, x: Tensor, eps: float) -> Tensor:
    """The same with a division."""
    return rows / step(name, torch.sqrt(x + eps))


def valued(value: Tensor, carrier: Tensor) -> Tensor:
    """The value of one, with the gradient of another that is equal where all are numbers: beside
    one that is none in a row, what is added to carry a gradient alone is no 0.
    """
    found: Tensor = _Valued.apply(value, carrier)  # type: ignore[no-untyped-call]
    return found


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: torch.autograd.function.FunctionCtx, value: Tensor, _carrier: Tensor):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(_ctx: torch.autograd.function.FunctionCtx, *grads: Tensor):  # type: ignore[no-untyped-def]
        return None, grads[0]


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, exact: Tensor, name: str, change: Change):  # type: ignore[no-untyped-def]
        ctx.name, ctx.change = name, change  # type: ignore[attr-defined]
        changed = change(name, exact)
        return changed.view_as(changed) if changed is exact else changed

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor):  # type: ignore[no-untyped-def]
        return ctx.change(f"grad_{ctx.name}", grads[0]), None, None  # type: ignore[attr-defined]


def running_maximum(rows: Tensor, block: int) -> Tensor:
    """Of each element the largest of its row up to the end of its block."""
    length = rows.shape[-1]
    ends = (torch.arange(length) // block * block + block - 1).clamp(max=length - 1)
    return rows.cummax(-1).values[..., ends]
