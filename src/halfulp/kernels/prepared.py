"""A call of the native library made ready once: what is computed on tensors of the same shapes and
strides again and again fills in pointers and nothing else.

The checks of `kernels.cpu` are made when it is prepared. Whoever calls answers for it that the
tensors are those it was prepared for: on the CPU, strided, with those shapes, strides and dtypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.kernels import cpu
from halfulp.native import CCall, function


def _place(name: str) -> int:
    """Where a pointer stands in `CCall`, in words of 64 bits; of a tensor it is the first."""
    offset: int = getattr(CCall, name).offset
    assert offset % 8 == 0
    return offset // 8


QUERY, KEY, VALUE, OUT = map(_place, ("query", "key", "value", "out"))
LSE, ROW_MAX, ROW_SUM, OWN_LSE = map(_place, ("lse", "row_max", "row_sum", "own_lse"))
RESIDUAL, GRAD_OUT, GRAD_LSE = map(_place, ("residual", "grad_out", "grad_lse"))
GRAD_QUERY, GRAD_KEY, GRAD_VALUE = map(_place, ("grad_query", "grad_key", "grad_value"))


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `torch.empty_like` makes a contiguous tensor of: half the time of `torch.empty`, which
    reads its arguments first. It is one element wide.
    """
    blank = torch.empty((), dtype=dtype).expand(shape)
    assert torch.empty_like(blank).is_contiguous()
    return blank


class Copy(NamedTuple):
    """One copy of the C structure, which one call at a time uses."""

    structure: CCall
    words: Any  # a memoryview of it
    address: int


class Prepared:
    """A call without mask, sinks and dropout, for tensors like those of `call`."""

    def __init__(self, call: Call, recipe: str) -> None:
        """Raises ValueError for what `cpu.supports` refuses."""
        query, key, value = call.query, call.key, call.value
        self.numbers = call.flat().numbers
        self.template, _ = cpu.structure(call, recipe, None)
        self.rows = query[..., 0].numel()
        self.shape = (*query.shape[:3], value.shape[3])
        self.residual = self.rows * value.shape[3] * cpu.keeps_residual(recipe, query.dtype)
        shapes = self.shape, query.shape, key.shape, value.shape
        for name, x in zip(("out", "grad_query", "grad_key", "grad_value"), shapes, strict=True):
            setattr(self.template, name, cpu.contiguous(x))
        self.out, *self.gradients = (_blank(x, query.dtype) for x in shapes)
        self.lse = _blank(self.shape[:3], torch.float32)
        self.kept = _blank((12 * self.rows + self.residual,), torch.uint8)
        self.run_forward: Callable[[int], int] = function("halfulp_forward", "p", ctypes.c_int32)
        self.run_backward: Callable[[int], int] = function("halfulp_backward", "p", ctypes.c_int32)
        self.free: list[Copy] = []  # taken and given back in one step each, whatever thread asks

    def _take(self) -> Copy:
        try:
            return self.free.pop()
        except IndexError:
            structure = CCall.from_buffer_copy(self.template)
            words = memoryview(structure).cast("B").cast("Q")
            return Copy(structure, words, ctypes.addressof(structure))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """O alone, `[B, H, N, D_v]`."""
        out = torch.empty_like(self.out)
        copy = self._take()
        words = copy.words
        words[QUERY], words[KEY], words[VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
        words[OUT] = out.data_ptr()
        words[LSE] = words[ROW_MAX] = words[ROW_SUM] = words[OWN_LSE] = words[RESIDUAL] = 0
        failed = self.run_forward(copy.address)
        self.free.append(copy)
        if failed:
            raise MemoryError(f"halfulp_forward: no memory for a call of shape {self.shape}")
        return out

    def keep(
        self, query: Tensor, key: Tensor, value: Tensor, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """O, lse `[B, H, N]` if wanted, and what `backward` needs beside, as bytes."""
        out = torch.empty_like(self.out)
        lse = torch.empty_like(self.lse) if wants_lse else None
        kept = torch.empty_like(self.kept)
        copy = self._take()
        words = copy.words
        words[QUERY], words[KEY], words[VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
        words[OUT], words[LSE] = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        self._statistics(words, kept.data_ptr())
        failed = self.run_forward(copy.address)
        self.free.append(copy)
        if failed:
            raise MemoryError(f"halfulp_forward: no memory for a call of shape {self.shape}")
        return out, lse, kept

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        kept: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV, contiguous; `grad_out` of out's shape and dtype, `grad_lse` float32."""
        strides = grad_out.stride()
        if strides[3] != 1:
            grad_out = grad_out.contiguous()
            strides = grad_out.stride()
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        dq, dk, dv = map(torch.empty_like, self.gradients)
        copy = self._take()
        words = copy.words
        words[QUERY], words[KEY], words[VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
        words[OUT], words[GRAD_OUT] = out.data_ptr(), grad_out.data_ptr()
        words[GRAD_OUT + 1], words[GRAD_OUT + 2], words[GRAD_OUT + 3], _ = strides
        words[GRAD_LSE] = 0 if grad_lse is None else grad_lse.data_ptr()
        self._statistics(words, kept.data_ptr())
        words[GRAD_QUERY], words[GRAD_KEY] = dq.data_ptr(), dk.data_ptr()
        words[GRAD_VALUE] = dv.data_ptr()
        failed = self.run_backward(copy.address)
        self.free.append(copy)
        if failed:
            raise MemoryError(f"halfulp_backward: no memory for a call of shape {self.shape}")
        return dq, dk, dv

    def _statistics(self, words: Any, start: int) -> None:
        """The parts of what `keep` gives."""
        step = 4 * self.rows
        words[ROW_MAX], words[ROW_SUM], words[OWN_LSE] = start, start + step, start + 2 * step
        words[RESIDUAL] = start + 3 * step if self.residual else 0

    def statistics(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What lies in `kept`: residual, or an empty tensor, row_max, row_sum and own_lse."""
        rows = kept[: 12 * self.rows].view(torch.float32).view(3, *self.shape[:3])
        residual = kept[12 * self.rows :].view(torch.int8)
        return residual.view(*self.shape[:3], -1 if self.residual else 0), *rows
