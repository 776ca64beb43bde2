"""What one pass computed, operation by operation: results in a file, everything else as data in
memory.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfulp.interpose import Observe, Operation, leaves
from halfulp.interpose.operation import every, mapped


@dataclass(frozen=True)
class Slot:
    """Where a tensor stood among the arguments of an operation."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    constant: str | None  # the name of a parameter or buffer; None: computed from the batch

    def __repr__(self) -> str:
        held = f"={self.constant}" if self.constant else ""
        return f"<{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{held}>"


@dataclass(frozen=True)
class Ambience:
    """What else decides how an operation is computed."""

    autocast: torch.dtype | None
    attention: tuple[bool, ...]  # which kernels of scaled_dot_product_attention are allowed
    matmul: str  # torch.get_float32_matmul_precision

    @classmethod
    def now(cls, device: str) -> Ambience:
        """Of this thread."""
        on = torch.is_autocast_enabled(device)
        cuda: Any = torch.backends.cuda
        kernels = (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        )
        return cls(
            torch.get_autocast_dtype(device) if on else None,
            kernels,
            torch.get_float32_matmul_precision(),
        )


@dataclass(frozen=True)
class Entry:
    """One operation of a pass, without its numbers."""

    place: str
    kind: str
    name: str
    path: str
    order: int
    number: int  # in the order of the pass
    function: Callable[..., Any] = field(repr=False)
    arguments: Any  # args and kwargs with a Slot for each tensor
    ambience: Ambience
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def slots(self) -> list[Slot]:
        """Its tensors, in their order."""
        return list(every(self.arguments, Slot))

    @cached_property
    def asks(self) -> str:
        """What it was asked for, beside its tensors' sizes."""
        return repr(mapped(self.arguments, lambda x: "tensor" if isinstance(x, Slot) else x))

    @cached_property
    def coarsest(self) -> torch.dtype:
        """The narrowest format of what it takes and gives."""
        taken = [s.dtype for s in self.slots if s.dtype.is_floating_point]
        if self.ambience.autocast and self.kind in ("linear", "matmul", "attention", "conv"):
            taken.append(self.ambience.autocast)
        return max((self.dtype, *taken), key=lambda dtype: torch.finfo(dtype).eps)


_A_TENSOR = "a tensor"


def asked_otherwise(b: Entry, a: Entry) -> list[str]:
    """What B's operation is asked for and A's is not, such as "eps=1e-05 for 1e-06"."""
    mine, theirs = (dict(_options(x.arguments, ())) for x in (b, a))
    found = []
    for at in dict.fromkeys((*mine, *theirs)):
        b_has, a_has = mine.get(at), theirs.get(at)
        # None is the default of what has it; a tensor may be given by name or by position
        if b_has != a_has and {b_has, a_has} not in ({None, "None"}, {None, _A_TENSOR}):
            name = f"{at[-1]}=" if isinstance(at[-1], str) else ""
            found.append(f"{name}{b_has or 'nothing'} for {a_has or 'nothing'}")
    if b.name != a.name:
        found.insert(0, f"{b.name} for {a.name}")
    constants = zip(b.slots, a.slots, strict=False)
    for left, right in constants:
        if left.dtype != right.dtype and left.constant and right.constant:
            found.append(
                f"{left.constant} in {dtype_name(left.dtype)} for {dtype_name(right.dtype)}"
            )
    return found


def _options(tree: Any, at: tuple[int | str, ...]) -> Iterator[tuple[tuple[int | str, ...], str]]:
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from _options(item, (*at, name))
    elif isinstance(tree, (list, tuple)):
        for i, item in enumerate(tree):
            yield from _options(item, (*at, i))
    elif isinstance(tree, torch.dtype):
        yield at, dtype_name(tree)
    else:
        yield at, _A_TENSOR if isinstance(tree, Slot) else repr(tree)


def dtype_name(dtype: torch.dtype) -> str:
    """As users write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    named = [*model.named_buffers(remove_duplicate=False)]
    return dict([*named, *model.named_parameters(remove_duplicate=False)])


def constants(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters and buffers, by identity."""
    return {id(x): name for name, x in tensors_of(model).items()}


def entry_of(operation: Operation, result: Tensor, names: Mapping[int, str], number: int) -> Entry:
    """What is kept of an operation beside its numbers."""
    count = itertools.count()

    def slot(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return Slot(next(count), x.dtype, tuple(x.shape), names.get(id(x)))

    return Entry(
        operation.place, operation.kind, operation.name, operation.path, operation.order, number,
        operation.function, mapped((operation.args, dict(operation.kwargs)), slot),
        Ambience.now(result.device.type), tuple(result.shape), result.dtype,
    )  # fmt: skip


def each(look: Callable[[Operation, Tensor, int], None]) -> Observe:
    """An observer of one pass, which shows operations with a result of floating point, that result
    and their number in the pass; not what a checkpoint makes again.
    """
    count = itertools.count()

    def observe(operation: Operation, found: Any) -> None:
        result = result_of(found)
        if result is not None and not operation.recomputed:
            look(operation, result, next(count))

    return observe


def result_of(found: Any) -> Tensor | None:
    """The first tensor of floating point in what an operation gave."""
    return next((x for x in leaves(found) if x.is_floating_point()), None)


class Tape:
    """Tensors by name in a file that has no name and is gone with the tape."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, name = tempfile.mkstemp(dir=folder)
        weakref.finalize(self, os.close, self._file)
        # without a name the file is gone with its last handle, even after a kill
        Path(name).unlink()
        self._where: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        self._end = 0

    def write(self, name: str, x: Tensor) -> None:
        """Keep a tensor as it is now."""
        x = x.detach().to("cpu").contiguous()
        self._where[name] = self._end, x.dtype, x.shape
        self._end += self._all(os.pwritev, x, self._end)

    def read(self, name: str) -> Tensor | None:
        """The tensor of that name; None where there is none."""
        if name not in self._where:
            return None
        place, dtype, shape = self._where[name]
        found = torch.empty(shape, dtype=dtype)
        self._all(os.preadv, found, place)
        return found

    def clear(self) -> None:
        """Forget everything, on disk too."""
        self._where, self._end = {}, 0
        os.truncate(self._file, 0)

    def _all(self, move: Callable[..., int], x: Tensor, place: int) -> int:
        """Read or write all bytes of a contiguous tensor, and return how many they are."""
        data = x.flatten().view(torch.uint8).numpy().data
        done = 0
        # a call may move less than all: Linux stops at 2 GiB
        while done < len(data):
            done += move(self._file, [data[done:]], place + done)
        return done
