"""Many sequences of different lengths in one call of the native library.

They lie one after the other in operands `[1, H, T, D]`, best as views of `[T, H, D]`. Each has the
bits of a call of its own.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.calls import Call, Gradients, Saved
from halfulp.kernels import cpu
from halfulp.native import CCall, run


class Lengths(NamedTuple):
    """Where sequences start and the last one ends: int64 `[S + 1]` on the CPU, rising from 0."""

    queries: Tensor
    keys: Tensor
    seeds: Tensor | None = None  # int64 [S], of dropout in each


def forward(call: Call, recipe: str, lengths: Lengths) -> Saved:
    """`cpu.forward` of each sequence, results `[1, H, T, D_v]` and `[1, H, T]`.

    The call's causal offset counts from the bottom right of each sequence. Raises ValueError for
    what `cpu.supports` refuses, masks, and lengths that are not those of the operands.
    """
    c, held = _structure(call, recipe, lengths)
    _, h, t, _ = call.query.shape
    dv = call.value.shape[3]
    out = torch.empty(t, h, dv, dtype=call.query.dtype)
    kept = cpu.keeps_residual(recipe, call.query.dtype)
    residual = torch.empty(t, h, dv, dtype=torch.int8) if kept else None
    lse, row_max, row_sum, own_lse = (torch.empty(1, h, t) for _ in range(4))
    c.out = cpu.pointer(_heads_first(out))
    c.residual = None if residual is None else residual.data_ptr()
    c.lse, c.row_max = lse.data_ptr(), row_max.data_ptr()
    c.row_sum, c.own_lse = row_sum.data_ptr(), own_lse.data_ptr()
    run("halfulp_forward", c)
    del held
    whole = None if residual is None else _heads_first(residual)
    return Saved(_heads_first(out), whole, lse, row_max, row_sum, own_lse)


def backward(
    call: Call,
    recipe: str,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    lengths: Lengths,
) -> Gradients:
    """`cpu.backward` of each sequence, gradients `[1, H, T, D]`; the sinks' is the sum over them.

    `saved` must be what `forward` gave.
    """
    c, held = _structure(call, recipe, lengths)
    query, key, value, sinks = call.query, call.key, call.value, call.sinks
    _, h, t, _ = query.shape
    assert saved.own_lse is not None
    assert grad_out.shape == saved.out.shape == (1, h, t, value.shape[3])
    assert saved.row_max.shape == (1, h, t)
    grad_out = cpu.rows(grad_out.to(query.dtype))
    c.grad_out, c.out = cpu.pointer(grad_out), cpu.pointer(saved.out)
    c.residual = None if saved.residual is None else saved.residual.data_ptr()
    c.row_max, c.row_sum = saved.row_max.data_ptr(), saved.row_sum.data_ptr()
    c.own_lse = saved.own_lse.data_ptr()
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float32).contiguous()
        assert grad_lse.shape == (1, h, t)
        c.grad_lse = grad_lse.data_ptr()
    dq, dk, dv = (
        _heads_first(torch.empty(x.shape[2], x.shape[1], x.shape[3], dtype=x.dtype))
        for x in (query, key, value)
    )
    c.grad_query, c.grad_key, c.grad_value = map(cpu.pointer, (dq, dk, dv))
    of_sinks = None if sinks is None else torch.empty(h, dtype=torch.float32)
    c.grad_sinks = None if of_sinks is None else of_sinks.data_ptr()
    run("halfulp_backward", c)
    del held, grad_out, grad_lse
    return Gradients(
        dq, dk, dv, None if sinks is None or of_sinks is None else of_sinks.to(sinks.dtype)
    )


def _heads_first(x: Tensor) -> Tensor:
    """`[T, H, D]` as `[1, H, T, D]`."""
    return x.transpose(0, 1).unsqueeze(0)


def _structure(
    call: Call, recipe: str, lengths: Lengths
) -> tuple[CCall, tuple[Tensor | None, ...]]:
    """The call but for its results, and what it points into."""
    queries, keys, seeds = lengths
    for name, ends, total in (
        ("queries", queries, call.query.shape[2]),
        ("keys", keys, call.key.shape[2]),
    ):
        rising = ends.dtype == torch.int64 and ends.is_cpu and ends.ndim == 1 and len(ends) > 1
        if not (rising and ends[0] == 0 and ends[-1] == total and bool((ends.diff() >= 0).all())):
            raise ValueError(f"lengths.{name}: accepted are int64 that rise from 0 to {total}")
    count = len(queries) - 1
    if len(keys) != count + 1 or call.query.shape[0] != 1 or call.sees.mask is not None:
        raise ValueError("packed sequences: accepted are a batch of 1, no mask, as many of keys")
    if (call.dropout is not None) != (seeds is not None):
        raise ValueError("lengths.seeds: accepted are one a sequence where there is dropout")
    c, held = cpu.structure(call, recipe, None)
    queries, keys = queries.contiguous(), keys.contiguous()
    c.sequences, c.query_ends, c.key_ends = count, queries.data_ptr(), keys.data_ptr()
    if seeds is not None:
        assert seeds.shape == (count,)
        assert seeds.dtype == torch.int64
        seeds = seeds.contiguous()
        c.seeds = ctypes.c_void_p(seeds.data_ptr())
    return c, (*held, queries, keys, seeds)
