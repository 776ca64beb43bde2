"""Another arithmetic for an operation, in the forward and in the backward pass.

Autograd differentiates what is run in an operation's place. So an operation whose operands are
widened to fp32 before it has a backward pass in fp32 as well: the gradient that comes back is
widened, and what leaves is rounded once, to the operand's own dtype, by the backward pass of the
widening. Results stay wide from one such operation to the next and are rounded to the dtype that
the model expects where an operation takes them that was not chosen; meanwhile `x.dtype` answers
what the model expects, and its own casts to less round nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfulp.complaints import meant
from halfulp.formats import Format, parse_format, round_to
from halfulp.interpose.named_kernels import kernel_named
from halfulp.interpose.operation import Operation, leaves, mapped
from halfulp.recipes import RECIPES

Into = Callable[[Operation], Any]
"""Runs something in an operation's place; its arguments are what the model handed over, and with an
attribute `takes_wide` what another wide operation gave."""

_TAG = "_halfulp_stands_for"
_CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
WIDE = {"fp32": torch.float32, "fp64": torch.float64}
QK_NORM = "qk-norm"
ACCEPTED = (
    "'fp32', 'fp64', a format to round every result and gradient to ('e8m4', `halfulp ls"
    " formats`), for attention qk-norm or a kernel or recipe of `halfulp ls targets`, for other"
    " named kinds one of `halfulp ls operations`, 'file.py:function', or a function of the"
    " operation"
)


def arithmetic(into: str | Into | Format, kinds: tuple[str, ...] = ()) -> Into:
    """The arithmetic of that name.

    Args:
        into: "fp32" or "fp64": operands widened, computed outside of autocast, results wide until
            an operation that was not chosen takes them, backward alike; a format or its name:
            results, and in the backward pass their gradients, rounded to it once more (a planted
            fault); a kernel or a recipe by its name (`interpose.named_kernels`); or a function
            that takes the `Operation` and returns what the model gets.
        kinds: that it is to run, which a kernel's name is looked up by; none: of a kernel,
            attention.

    Raises:
        ValueError: nothing has that name.
    """
    if isinstance(into, Format):
        return _Rounded(into)
    if callable(into):
        return into
    if into in WIDE:
        return Wide(WIDE[into])
    if into == QK_NORM:
        return _query_key_normed
    if isinstance(into, str):
        try:
            found = parse_format(into)
        except ValueError:
            return _kernel(into, kinds)
        assert isinstance(found, Format)
        return _Rounded(found)
    raise ValueError(f"into={into!r}: accepted is {ACCEPTED}")


def _kernel(name: str, kinds: tuple[str, ...]) -> Into:
    try:
        return kernel_named(name, kinds)
    except ValueError as error:
        if name.partition("[")[0].upper() in RECIPES or ":" in name:
            raise
        hint = meant(name, [*WIDE, "bf16", "fp16", "sdpa:math"])
        said = f"accepted is {ACCEPTED}"
        if kinds:
            own = str(error).removeprefix(f"into={name!r}: ")
            said = f"{own}; of every kind accepted are 'fp32', 'fp64' and a format such as 'e8m4'"
        raise ValueError(f"into={name!r}: {said}{hint}") from error


def _query_key_normed(operation: Operation) -> Any:
    """PyTorch's attention of queries and keys that are divided by their root mean square (Henry et
    al. 2020, arXiv 2010.04245, without a learned gain): scores of at most √D, natural units.
    """
    if operation.name != "scaled_dot_product_attention":
        return operation.run()
    given = dict(zip(("query", "key", "value"), operation.args, strict=False))
    given |= operation.kwargs
    for name in ("query", "key"):
        given[name] = functional.rms_norm(given[name], given[name].shape[-1:])
    operands = (given.pop(name) for name in ("query", "key", "value"))
    return operation.function(*operands, *operation.args[3:], **given)


class _Rounded:
    """The operation's own results and their gradients, rounded once more."""

    def __init__(self, fmt: Format) -> None:
        self._format = fmt

    def __call__(self, operation: Operation) -> Any:
        return mapped(operation.run(), self._round)

    def _round(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return _RoundBothWays.apply(x, self._format)  # type: ignore[no-untyped-call]


class _RoundBothWays(torch.autograd.Function):
    """Rounds the value on its way forward and the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format) -> Tensor:
        ctx.fmt = fmt
        return _rounded(x, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rounded(grad, ctx.fmt), None


def _rounded(x: Tensor, fmt: Format) -> Tensor:
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    rounded = round_to(wide.detach(), fmt).to(x.dtype)
    return rounded.clone() if rounded is x else rounded


class Wide:
    """The operation on wider operands.

    Args:
        dtype: that they are computed in.
        noted: whether results carry a note of the dtype that the model expects, which is learned by
            running each operation once.
    """

    takes_wide = True

    def __init__(self, dtype: torch.dtype, noted: bool = True) -> None:
        self.dtype, self._noted = dtype, noted
        self._stock: dict[Any, list[torch.dtype]] = {}
        self.refused: dict[str, str] = {}  # what has no kernel for this dtype stays as it is

    def __call__(self, operation: Operation) -> Any:
        """What the model gets: wide, with a note of the dtype that it expects."""
        if operation.name in _CASTS and operation.kind != "other":
            return self._cast(operation)
        expected = self._expected(operation) if self._noted else []
        wide = operation.changed(self._widened)
        device = next((x.device.type for x in leaves(wide.args)), "cpu")
        try:
            # autocast would narrow what was just widened
            with torch.autocast(device, enabled=False):
                found = wide.run()
        except (RuntimeError, TypeError) as error:
            self.refused[operation.name] = str(error).partition("\n")[0]
            return operation.changed(expected_by_model).run()
        for x, dtype in zip(leaves(found) if self._noted else (), expected, strict=True):
            tag(x, dtype)
        return found

    def _widened(self, x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return self.dtype if self._narrow(x) else x
        if isinstance(x, Tensor) and self._narrow(x.dtype):
            return x.to(self.dtype)
        return x

    def _narrow(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize

    def _cast(self, operation: Operation) -> Any:
        x, *rest = operation.args
        # an empty tensor tells what a cast asks for, in any of its spellings, and costs nothing
        stands = torch.empty(0, dtype=stand_in(x), device=x.device)
        asked = operation.function(stands, *rest, **operation.kwargs)
        if not isinstance(asked, Tensor) or not asked.is_floating_point():
            return operation.function(expected_by_model(x), *rest, **operation.kwargs)
        wide = self.dtype if self._narrow(asked.dtype) else asked.dtype
        found = x.to(device=asked.device, dtype=wide)
        return tag(found.view_as(found), asked.dtype)  # x itself may stand for another dtype

    def _expected(self, operation: Operation) -> list[torch.dtype]:
        """The dtypes that the operation itself would give, learned once a combination of dtypes."""
        every = list(leaves((operation.args, operation.kwargs)))
        kind = every[0].device.type if every else "cpu"
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        dtypes = mapped((operation.args, dict(operation.kwargs)), _dtype_of)
        key = (operation.function, autocast, repr(dtypes))
        if key not in self._stock:
            # run for its dtypes alone: numbers that it draws are drawn again by the real run
            with torch.no_grad(), torch.random.fork_rng(devices=_current(kind)):
                found = operation.changed(expected_by_model).run()
            self._stock[key] = [x.dtype for x in leaves(found)]
        return self._stock[key]


def _current(kind: str) -> Sequence[int]:
    return [torch.cuda.current_device()] if kind == "cuda" else []


def _dtype_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        # a tensor without dimensions does not widen others (PyTorch's promotion): another case
        return stand_in(x), x.dim() == 0
    return x if isinstance(x, torch.dtype) else type(x)


def tag(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Note the dtype that the model expects of a wide tensor."""
    if x.is_floating_point() and x.dtype != dtype:
        setattr(x, _TAG, dtype)
    return x


def stand_in(x: Tensor) -> torch.dtype:
    """The dtype that the model expects of a tensor."""
    found: torch.dtype = getattr(x, _TAG, None) or x.dtype
    return found


def is_wide(x: Any) -> bool:
    """Whether a tensor is wider than the model expects."""
    return isinstance(x, Tensor) and getattr(x, _TAG, None) is not None


def expected_by_model(x: Any) -> Any:
    """A wide tensor rounded to the dtype that the model expects, anything else as it is."""
    return x.to(getattr(x, _TAG)) if is_wide(x) else x
