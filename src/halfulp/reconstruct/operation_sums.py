"""Sums that are kept short, as they run, of parts, or in a tree: of terms that are a step, of rows
that have the same number, of matrix products.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfulp.formats import BF16, FP16, FP64, Format, round_to, running_sums
from halfulp.operations import (
    OF_DTYPE,
    Change,
    OperationCalls,
    Recorded,
    Tensors,
    UnlikeError,
    changed,
    defined,
    exactly,
    first_calls,
)
from halfulp.reconstruct.operation_steps import said, shapes_of_steps
from halfulp.reconstruct.operation_ways import Way
from halfulp.runs.threads import threads_outside

_BLOCKS = (1, 2, 4, 8, 16, 32, 64)  # terms that are summed exactly before a sum is rounded
_RUNS = (2, 4, 8, 16)  # parts that may run beside each other, and as many as torch has threads
_LONGEST = 8320  # terms of a sum that is emulated one after the other


def sum_ways(calls: OperationCalls) -> Iterator[Way]:
    """Short sums over every step that does nothing but enter a sum, and of matrix products."""
    own = OF_DTYPE[calls.dtype] if calls.dtype != "float32" else BF16
    some = first_calls(calls, 1)
    exact, again = defined(some), _again(some)
    for name, shape in reversed(shapes_of_steps(calls).items()):
        for dim, length in enumerate(shape):
            if 4 <= length <= _LONGEST:
                index = _index_of(calls, length) if dim == 0 else None
                if index is not None:
                    yield from _sums_by(calls, name, said(name), own, index)
                if _is_summed(again, exact, name, dim):
                    yield from _sums(name, said(name), own, dim, length)
    yield from _of_products(calls)


_RUNNING: deque[tuple[tuple[Format, int, int, str], Tensor, Tensor]] = deque(maxlen=8)


def running(x: Tensor, fmt: Format, dim: int, block: int, how: str = "running") -> Tensor:
    """Terms whose exact sum is the sum that is rounded after every `block` of them: as it runs,
    each part for itself ("parts"), both ("both"), or parts and then sums of two ("tree"); or after
    every term of each of `block` parts, and of their sum, as threads have one each ("runs").

    A way that is tried beside others meets the same terms again and again, and a rounding for every
    term is what a search costs most: the last sums are kept.
    """
    asked = (fmt, dim, block, how)
    for known, terms, found in _RUNNING:
        if known == asked and terms.dtype == x.dtype and torch.equal(terms, x):
            return found.clone()
    found = _running(x, fmt, dim, block, how)
    _RUNNING.append((asked, x.clone(), found.clone()))
    return found


def _running(x: Tensor, fmt: Format, dim: int, block: int, how: str) -> Tensor:
    found = torch.zeros_like(x)
    if how == "runs":  # all parts at once, with zeros behind the last
        size = -(-x.shape[dim] // block)
        count = -(-x.shape[dim] // size)
        rest = x.new_zeros(*x.shape[:dim], count * size - x.shape[dim], *x.shape[dim + 1 :])
        each = torch.cat([x, rest], dim)
        each = each.view(*x.shape[:dim], count, size, *x.shape[dim + 1 :])
        sums = _running(each, fmt, dim + 1, 1, "running").sum(dim + 1)
        found.select(dim, 0).copy_(_running(sums, fmt, dim, 1, "running").sum(dim))
        return found
    ones = x.movedim(dim, 0)
    parts = ones if block == 1 else _in_blocks(ones, block)
    if how in ("tree", "parts", "both"):
        parts = round_to(parts, fmt)
    if how == "tree":
        while len(parts) > 1:
            pairs = parts[0:-1:2] + parts[1::2]
            parts = torch.cat([round_to(pairs, fmt), parts[2 * len(pairs) :]])
        found.select(dim, 0).copy_(parts[0])
        return found
    places = torch.arange(len(parts)) * block
    if how == "parts":
        return found.index_copy_(dim, places, parts.movedim(0, dim))
    # a sum that has overflowed stays so
    moved = running_sums(parts, fmt).diff(dim=0, prepend=torch.zeros_like(parts[:1]))
    moved = moved.nan_to_num(0.0, torch.inf, -torch.inf)
    return found.index_copy_(dim, places, moved.movedim(0, dim))


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Sums of so many rows each, of the rest in the last."""
    whole = x.shape[0] // block * block
    sums = x[:whole].reshape(-1, block, *x.shape[1:]).sum(1)
    return sums if whole == x.shape[0] else torch.cat([sums, x[whole:].sum(0, keepdim=True)])


def _again(some: OperationCalls) -> Callable[[Change, str], Tensors]:
    """The definition once more, with a change of one step."""
    try:
        recorded = Recorded(some, exactly, torch.float64)
    except UnlikeError:
        return lambda change, name: defined(some, change, (name,))
    return lambda change, name: recorded.again(some, change, (name,))


def _is_summed(
    again: Callable[[Change, str], Tensors], exact: Tensors, name: str, dim: int
) -> bool:
    """Whether all that becomes of a step is its sum along a dimension."""

    def gathered(own: str, exact: Tensor) -> Tensor:
        return running(exact, FP64, dim, 4, "parts") if own == name else exact

    other = again(gathered, name)
    return all(
        bool((((other[n] - x).abs() <= 1e-9 * x.abs() + 1e-12) | ~x.isfinite()).all())
        for n, x in exact.items()
    )


def _sums(name: str, step: str, own: Format, dim: int, length: int) -> Iterator[Way]:
    back = name.startswith("grad_")
    cause = "grad-sum-low" if back else "sum-low"
    for count in sorted({*_RUNS, threads_outside()} - {1}):
        if 2 * count <= length:
            text = f"sums over {count} parts of {step} are rounded to {own} after every term"
            runs = partial(running, fmt=own, dim=dim, block=count, how="runs")
            yield Way(cause, text, {name: runs})
    for fmt in (own, FP16 if own is not FP16 else BF16):
        for block in _BLOCKS:
            if block < length:
                each = "every term" if block == 1 else f"every {block} terms"
                text = f"the sum over {step} is rounded to {fmt} after {each}"
                low = partial(running, fmt=fmt, dim=dim, block=block)
                yield Way(cause, text, {name: low})
                if fmt is own:
                    of = f"{block} terms of {step}" if block > 1 else f"two of {step}"
                    if block > 1:
                        parts = f"sums of {of} are rounded to {fmt} before they are summed"
                        yield Way(cause, parts, {name: partial(low, how="parts")})
                        both = f"sums of {of} are rounded to {fmt}, and their sum as it runs"
                        yield Way(cause, both, {name: partial(low, how="both")})
                    tree = f"sums of {of}, and sums of these, are rounded to {fmt}"
                    yield Way(cause, tree, {name: partial(low, how="tree")})


def _index_of(calls: OperationCalls, length: int) -> Tensor | None:
    """Numbers of an operand by which rows may be summed."""
    some = [x[0] for x in calls.operands.values() if not x.is_floating_point()]
    return next((x for x in some if x.shape == (length,)), None)


def _by_number(alter: Callable[[Tensor], Tensor], x: Tensor, index: Tensor) -> Tensor:
    found = torch.empty_like(x)
    for number in torch.unique(index):
        found[index == number] = alter(x[index == number])
    return found


def _sums_by(
    calls: OperationCalls, name: str, step: str, own: Format, index: Tensor
) -> Iterator[Way]:
    """What may become of rows that are summed where their numbers are the same."""
    if len(torch.unique(index)) == len(index):  # sums of one row each
        return

    def regrouped(seen: str, exact: Tensor) -> Tensor:
        gather = partial(running, fmt=FP64, dim=0, block=4)
        return _by_number(gather, exact, index) if seen == name else exact

    exact, other = (defined(first_calls(calls, 1), change) for change in (exactly, regrouped))
    if not all(torch.allclose(other[n], x, rtol=1e-9, atol=1e-12) for n, x in exact.items()):
        return
    of = f"{step} of one number"
    rows: list[tuple[str, str, Callable[..., Tensor]]] = []
    for block in _BLOCKS:
        each = "every term" if block == 1 else f"every {block} of them"
        low = partial(_by_number, partial(running, fmt=own, dim=0, block=block))
        rows.append(("grad-sum-low", f"the sum over {of} is rounded to {own} after {each}", low))
        if block > 1:
            text = f"the sum over {of} is rounded to {own} after every {block} rows"
            rows.append(("grad-sum-low", text, partial(_sum_in_blocks, own=own, block=block)))
    last = partial(_by_number, lambda x: torch.cat([x[:-1] * 0, x[-1:]]))
    mean = partial(_by_number, lambda x: x / len(x))
    rows += [
        ("term-missing", f"all but the last {of} are left out", last),
        ("factor", f"{of} are averaged: 1 / count times what it should be", mean),
    ]
    for count in (1, *_RUNS):
        some = f"{count} {of}" if count > 1 else of
        first = partial(_by_number, partial(_first_of, count=count))
        rows.append(("term-missing", f"all but the first {some} are left out", first))
    for cause, text, alter in rows:
        yield Way(cause, text, of_calls=partial(_indexed, name, alter))


def _first_of(x: Tensor, count: int) -> Tensor:
    return torch.cat([x[:count], x[count:] * 0])


def _indexed(name: str, alter: Callable[..., Tensor], calls: OperationCalls) -> Way:
    def altered(x: Tensor) -> Tensor:
        index = _index_of(calls, len(x))
        return x if index is None else alter(x, index=index)

    return Way("", "", {name: altered})


def _sum_in_blocks(x: Tensor, index: Tensor, own: Format, block: int) -> Tensor:
    """Rows summed exactly in blocks of all of them, and the blocks in `own`."""
    found, totals = torch.zeros_like(x), torch.zeros(int(index.max()) + 1, *x.shape[1:])
    for start in range(0, len(x), block):
        rows = x[start : start + block].float()
        # the totals of all other numbers, of which a vocabulary has many, stay as they are
        numbers, at = torch.unique(index[start : start + block], return_inverse=True)
        before = totals[numbers]
        risen = round_to(before + torch.zeros_like(before).index_add(0, at, rows), own)
        for number in range(len(numbers)):
            place = start + int((at == number).nonzero()[0])
            found[place] = risen[number] - before[number]
        totals[numbers] = risen
    return found


_SUMS = (BF16, FP16, replace(BF16, name="14 bits, cut", mantissa_bits=13, rounding="toward_zero"),
         replace(BF16, name="bf16, cut", rounding="toward_zero"))  # fmt: skip
_TERMS = (1, 8, 16, 32, 64, 128)  # of a product, between two roundings of its sum


def _of_products(calls: OperationCalls) -> Iterator[Way]:
    """Sums of matrix products that are short, where the definition has such products: as they run,
    or of parts.
    """
    seen: list[int] = []
    with _ShortSums(None, 0, False, seen):
        changed(first_calls(calls, 1), lambda _, x: x.detach())
    for fmt in _SUMS if seen else ():
        for terms in _TERMS:
            if terms < max(seen):
                each = f"every {terms} terms" if terms > 1 else "every term"
                text = f"sums of products are rounded to {fmt.name} after {each}"
                yield Way("sum-low", text, within=partial(_ShortSums, fmt, terms, False))
                if terms > 1:
                    text = f"sums of {terms} products are rounded to {fmt.name} before the last sum"
                    yield Way("sum-low", text, within=partial(_ShortSums, fmt, terms, True))

    for terms in _TERMS if seen else ():
        if terms < max(seen):
            of = f"{terms} terms" if terms > 1 else "one term"
            for last, which in ((True, "last"), (False, "first")):
                text = f"of sums of products only the {which} {of} are kept: parts overwrite others"
                yield Way("term-missing", text, within=partial(_PartSums, terms, last))


class _PartSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Matrix products over the first or last part of so many terms alone."""

    def __init__(self, terms: int, last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.terms, self.last = terms, last

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mm.default:
            return func(*args, **(kwargs or {}))
        a, b = args
        start = (a.shape[1] - 1) // self.terms * self.terms if self.last else 0
        part = slice(start, start + self.terms)
        return a[:, part] @ b[part]


class _ShortSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the sums of matrix products after so many terms; `seen` is told how long they are."""

    def __init__(
        self, fmt: Format | None, terms: int, parts: bool, seen: list[int] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fmt, self.terms, self.parts, self.seen = fmt, terms, parts, seen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper that keeps the compiler out of it would import the compiler first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mm.default:
            return func(*args, **(kwargs or {}))
        a, b = args
        if self.seen is not None:
            self.seen.append(int(a.shape[1]))
        if self.fmt is None:
            return a @ b
        total = torch.zeros(a.shape[0], b.shape[1])
        for x, y in zip(a.split(self.terms, 1), b.split(self.terms, 0), strict=True):
            part = x.float() @ y.float()
            total = total + round_to(part, self.fmt) if self.parts else round_to(
                total + part, self.fmt)  # fmt: skip
        return total.to(a.dtype)
