"""Attention forward and backward on CPU at the speed of its matrix instructions, in the native
library.

Everything that could make the library read beyond a tensor is checked here, before the call.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from halfulp.calls import Call, Gradients, Saved
from halfulp.native import CCall, CTensor, Isa, function, isa_number, missing, run
from halfulp.recipes import KERNEL_RECIPES

MAX_HEAD_DIM = 256
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_LOG2_E = math.log2(math.e)
_LARGEST = 2e38  # its product with log₂e is a float32


def supports(call: Call, recipe: str) -> str | None:
    """None if the library computes this call; else the reason in words."""
    return (
        missing()
        or _operand_refused(call.query, call.key, call.value)
        or _shape_refused(call.query, call.key, call.value)
        or _mask_refused(call)
        or _option_refused(call, recipe)
    )


def _operand_refused(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    for x in (query, key, value):
        if not x.is_cpu:
            return f"{x.device.type} tensors"
        if x.layout != torch.strided:
            return "tensors that are not strided"
        if x.ndim != 4:
            return "tensors that are not [B, H, N, D]"
    if query.dtype not in _DTYPES:
        return f"dtype {query.dtype}"
    return (
        None
        if query.dtype == key.dtype == value.dtype
        else "query, key and value of different dtypes"
    )


def _shape_refused(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    (b, h, _, d), (bk, hk, nk, dk), (bv, hv, nv, dv) = query.shape, key.shape, value.shape
    if not (b == bk == bv and hk == hv and nk == nv and d == dk):
        return "shapes that do not fit each other"
    if (hk == 0 and h > 0) or (hk > 0 and h % hk):
        return f"{h} query heads over {hk} key heads"
    if not (1 <= d <= MAX_HEAD_DIM and 1 <= dv <= MAX_HEAD_DIM):
        return f"head dimensions {d} and {dv}: accepted are 1 to {MAX_HEAD_DIM}"
    return None


def _mask_refused(call: Call) -> str | None:
    mask, shape = call.sees.mask, call.scores_shape
    if mask is None:
        return None
    if mask.device.type != "cpu" or mask.layout != torch.strided:
        return f"an attention mask on {mask.device} ({mask.layout})"
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        return f"an attention mask of {mask.dtype}"
    given = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(given) != 4 or any(g not in (1, n) for g, n in zip(given, shape, strict=True)):
        return f"an attention mask of shape {tuple(mask.shape)} for scores of {shape}"
    return None


def _option_refused(call: Call, recipe: str) -> str | None:
    heads, sinks = call.query.shape[1], call.sinks
    if recipe not in KERNEL_RECIPES:
        return f"recipe {recipe!r}"
    if not (math.isfinite(call.scale) and abs(call.scale) <= _LARGEST):
        return "a scale that is not a finite float32"
    if call.softcap != 0 and not 1 / _LARGEST < call.softcap < _LARGEST:
        return f"a softcap of {call.softcap}: accepted are 0 and {1 / _LARGEST:g} to {_LARGEST:g}"
    if call.softcap and call.scale:
        ratio = abs(call.scale) / call.softcap  # what tanh takes is this times q·k
        if not 1 / _LARGEST < ratio < _LARGEST:
            return f"scale / softcap of {ratio:g}: accepted are {1 / _LARGEST:g} to {_LARGEST:g}"
    if not 0 <= call.dropout_p <= 1:
        return f"a dropout_p of {call.dropout_p}: accepted are 0 to 1"
    if sinks is not None and not (
        tuple(sinks.shape) == (heads,) and sinks.is_floating_point() and sinks.is_cpu
    ):
        found = f"sinks of shape {tuple(sinks.shape)} and {sinks.dtype} on {sinks.device}"
        return f"{found}: accepted is one floating-point number a head on the CPU, ({heads},)"
    return None


def forward(call: Call, recipe: str, *, isa: Isa | None = None) -> Saved:
    """Attention of bf16, fp16 or fp32 tensors; float32 statistics in base 2, a residual for
    "halfulp" in 16 bits.

    Runs on `torch.get_num_threads()` threads with bits that do not depend on it. `isa` forces an
    instruction set. Raises ValueError for what `supports` refuses, and for an `isa` that this
    machine lacks.
    """
    c, operands = structure(call, recipe, isa)
    b, h, n, dv = *call.query.shape[:3], call.value.shape[3]
    out = torch.empty(b, h, n, dv, dtype=call.query.dtype)
    keeps = keeps_residual(recipe, call.query.dtype)
    residual = torch.empty(b, h, n, dv, dtype=torch.int8) if keeps else None
    lse, row_max, row_sum, own_lse = (torch.empty(b, h, n, dtype=torch.float32) for _ in range(4))
    c.out = pointer(out)
    c.residual = None if residual is None else residual.data_ptr()
    c.lse, c.row_max = lse.data_ptr(), row_max.data_ptr()
    c.row_sum, c.own_lse = row_sum.data_ptr(), own_lse.data_ptr()
    run("halfulp_forward", c)
    del operands  # kept until the library is done with them
    return Saved(out, residual, lse, row_max, row_sum, own_lse)


def backward(
    call: Call,
    recipe: str,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    mask_gradient: bool = False,
    isa: Isa | None = None,
) -> Gradients:
    """Gradients of `forward`'s out `[B, H, N, D_v]` and lse `[B, H, N]`, contiguous, in the inputs'
    dtype; if asked for, that of an additive mask, in its shape.

    `saved` must be this module's own: its row statistics are in base 2. Errors as `forward`.
    """
    c, operands = structure(call, recipe, isa)
    query, key, value, sinks = call.query, call.key, call.value, call.sinks
    b, h, n, dv = *query.shape[:3], value.shape[3]
    if grad_out.shape != (b, h, n, dv):
        raise ValueError(
            f"grad_out of shape {tuple(grad_out.shape)}: accepted is out's shape {(b, h, n, dv)}"
        )
    if grad_out.device.type != "cpu":
        raise ValueError(f"grad_out on {grad_out.device}: accepted is the CPU")
    grad_out = rows(grad_out.to(query.dtype))
    c.grad_out = pointer(grad_out)
    own_lse = saved.lse * _LOG2_E if saved.own_lse is None else saved.own_lse
    out = _checked("saved.out", saved.out, (b, h, n, dv), query.dtype)
    statistics = {"row_max": saved.row_max, "row_sum": saved.row_sum, "own_lse": own_lse}
    held = [
        _checked(f"saved.{name}", x, (b, h, n), torch.float32) for name, x in statistics.items()
    ]
    c.out, (c.row_max, c.row_sum, c.own_lse) = pointer(out), (x.data_ptr() for x in held)
    if saved.residual is not None:
        held.append(_checked("saved.residual", saved.residual, (b, h, n, dv), torch.int8))
        c.residual = held[-1].data_ptr()
    if grad_lse is not None:
        held.append(_checked("grad_lse", grad_lse.to(torch.float32), (b, h, n), torch.float32))
        c.grad_lse = held[-1].data_ptr()
    dq, dk, dv_ = (torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
    c.grad_query, c.grad_key, c.grad_value = map(pointer, (dq, dk, dv_))
    of_sinks = None if sinks is None else torch.empty(h, dtype=torch.float32)
    c.grad_sinks = None if of_sinks is None else of_sinks.data_ptr()
    mask, of_mask = call.sees.mask, None
    if mask_gradient and mask is not None:
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        of_mask = torch.zeros(shape, dtype=torch.float64)
        c.mask_shape[:], c.grad_mask = shape, of_mask.data_ptr()
    run("halfulp_backward", c)
    del operands, held
    return Gradients(
        dq,
        dk,
        dv_,
        None if sinks is None or of_sinks is None else of_sinks.to(sinks.dtype),
        None if mask is None or of_mask is None else of_mask.to(mask.dtype).view(mask.shape),
    )


def round_out(
    exact: Tensor, dtype: torch.dtype, *, isa: Isa | None = None
) -> tuple[Tensor, Tensor]:
    """O in `dtype` (bfloat16 or float16) and its residual int8, as `forward` rounds `exact`
    (contiguous float32).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype={dtype}: accepted are torch.bfloat16 and torch.float16")
    exact = _checked("exact", exact, tuple(exact.shape), torch.float32)
    out, residual = (
        torch.empty(exact.shape, dtype=dtype),
        torch.empty(exact.shape, dtype=torch.int8),
    )
    pointers = (x.data_ptr() for x in (exact, out, residual))
    call = function("halfulp_round_out", "iipppl", ctypes.c_int32)
    call(isa_number(isa), _DTYPES[dtype], *pointers, exact.numel())
    return out, residual


def keeps_residual(recipe: str, dtype: torch.dtype) -> bool:
    """Whether the forward pass keeps what is lost where O is rounded."""
    return recipe == "halfulp" and dtype != torch.float32


def rows(x: Tensor) -> Tensor:
    """`x`, copied where its rows are not of neighboring elements."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def pointer(x: Tensor) -> CTensor:
    """A tensor of four dimensions as the library reads it."""
    return CTensor(x.data_ptr(), *x.stride()[:3])


def _mask(call: Call) -> tuple[int, Tensor]:
    """What kind of mask there is, and the mask as bool or float32 whose rows are neighboring
    elements.
    """
    mask, shape = call.sees.mask, call.scores_shape
    if mask is None:
        return 0, torch.empty(0)
    mask = mask if mask.dtype == torch.bool else mask.to(torch.float32)
    if mask.ndim == 0 or mask.shape[-1] != shape[3]:
        mask = mask.expand(*mask.shape[:-1], shape[3])
    return (1 if mask.dtype == torch.bool else 2), rows(mask).expand(shape)


def _checked(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`x`, contiguous; ValueError unless it is what the library will read."""
    if tuple(x.shape) != shape or x.dtype != dtype or x.device.type != "cpu":
        found = f"{tuple(x.shape)}, {x.dtype} on {x.device}"
        raise ValueError(f"{name} is {found}: accepted is {shape}, {dtype} on the CPU")
    return x.contiguous()


def structure(call: Call, recipe: str, isa: Isa | None) -> tuple[CCall, tuple[Tensor, ...]]:
    """The call as the library reads it, but for its results, and the tensors that it points into.

    Raises ValueError for what `supports` refuses, and for an `isa` that this machine lacks.
    """
    refused = supports(call, recipe)
    if refused is not None:
        raise ValueError(f"the native library does not take {refused}")
    query, dropout = call.query, call.dropout
    operands = tuple(rows(x) for x in (query, call.key, call.value))
    (b, h, n, d), (hk, nk, dv) = query.shape, call.value.shape[1:]
    kind, held = _mask(call)
    sinks = None if call.sinks is None else call.sinks.detach().to(torch.float32).contiguous()
    c = CCall(
        isa_number(isa),
        _DTYPES[query.dtype],
        KERNEL_RECIPES[recipe].number,
        torch.get_num_threads(),
        *(b, h, hk, n, nk, d, dv, *_window(call), call.scale),
        mask_kind=kind,
        softcap=call.softcap,
        # of p = 1 one weight in 2³² is left, times 0
        drop_below=min(int(call.dropout_p * 2**32), 2**32 - 1),
        kept_scale=1.0 if dropout is None else dropout.scale,
        seed=0 if dropout is None else dropout.number % 2**64,
        stat_batch=h * n,
        stat_head=n,
        sinks=None if sinks is None else sinks.data_ptr(),
    )
    c.query, c.key, c.value = map(pointer, operands)
    if kind:
        c.mask = pointer(held)
    return c, (*operands, held) if sinks is None else (*operands, held, sinks)


def _window(call: Call) -> tuple[int, int, int]:
    """left, right and offset of native/halfulp.h: a negative side is no bound."""
    least, greatest = call.bounds
    if least is None:
        return (-1, -1, 0) if greatest is None else (-1, 0, greatest)
    return 0, -1 if greatest is None else greatest - least, least
