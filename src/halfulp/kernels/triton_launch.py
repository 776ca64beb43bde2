"""What is launched for one call: kernel, grid, arguments.

Planned here and run by `triton_attention`; compiled for other chips by `triton_compile` from the
same plan, so that what is measured there is what runs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.calls import Call, Gradients, Saved
from halfulp.formats.counter import least_kept, seed_word
from halfulp.kernels.triton_backward import key_kernel, query_kernel, rows_kernel
from halfulp.kernels.triton_configs import Config, config_for
from halfulp.kernels.triton_forward import INTEGER, MAXIMUM, STABILIZED, forward_kernel
from halfulp.kernels.triton_scores import ADDITIVE, BOOLEAN, NO_MASK
from halfulp.recipes import KERNEL_RECIPES

LOG2_E = math.log2(math.e)
_SHIFTS = {"maximum": MAXIMUM, "integer": INTEGER, "stabilized": STABILIZED}


class Launch(NamedTuple):
    """One kernel launch."""

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    config: Config


class Target(NamedTuple):
    """What is compiled for."""

    capability: int  # 90: sm_90; 0: AMD
    emulated: bool = False  # Triton's interpreter with bf16
    packs: bool = False  # NVIDIA's packed rounding, by inline PTX


class _Call(NamedTuple):
    """What all kernels of one call share."""

    shared: dict[str, Any]  # arguments by name
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    rounded: bool
    residual: bool
    dim: int


def forward_launch(
    asked: Call, recipe: str, target: Target, config: Config | None = None
) -> tuple[Launch, Saved]:
    """The forward kernel and the tensors that it will fill; `config` overrides the table."""
    call, query, value, sinks = _call(asked, recipe), asked.query, asked.value, asked.sinks
    batch, heads, length, _ = query.shape
    saved = Saved(
        torch.empty(batch, heads, length, value.shape[3], dtype=query.dtype, device=query.device),
        (
            torch.empty(batch, heads, length, value.shape[3], dtype=torch.int8, device=query.device)
            if call.residual
            else None
        ),
        *(
            torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
            for _ in range(3)
        ),
    )
    config = config or _config("forward", call, target)
    shift = _SHIFTS[KERNEL_RECIPES[recipe].shift]
    arguments = {
        "Q": call.q, "K": call.k, "V": call.v, "Out": saved.out,
        "Residual": saved.out if saved.residual is None else saved.residual,
        "Lse": saved.lse, "Row_max": saved.row_max, "Row_sum": saved.row_sum, **call.shared,
        "Sinks": saved.lse if sinks is None else _base_2(sinks), "SINKS": sinks is not None,
        "SHIFT": shift.value, "ROUNDED": call.residual, "RESIDUAL": call.residual, **_tiles(config, call, target),
    }  # fmt: skip
    grid = (-(-length // config.block_m) * batch * heads,)
    return Launch(forward_kernel, grid, arguments, config), saved


def backward_launches(
    asked: Call,
    recipe: str,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    target: Target,
    configs: dict[str, Config] | None = None,
) -> tuple[list[Launch], Gradients]:
    """The backward kernels in order and the gradients that they will fill; `configs` overrides the
    table by kind.
    """
    query, key, value = asked.query, asked.key, asked.value
    call, configs = _call(asked, recipe), configs or {}
    query_config = configs.get("query") or _config("query", call, target)
    key_config = configs.get("key") or _config("key", call, target)
    do = _dense(grad_out.to(query.dtype))
    shift, inverse, inverse_value, delta = (torch.empty_like(saved.lse) for _ in range(4))
    gradients = Gradients(
        *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    )
    batch, heads, length, _ = query.shape
    do_strides = dict(zip(("do_b", "do_h", "do_n"), do.stride(), strict=False))
    operands = {
        "Q": call.q,
        "K": call.k,
        "V": call.v,
        "Grad_out": do,
        "Shift": shift,
        "Inverse": inverse,
    }
    shared = call.shared | do_strides | {
        "alpha": float(asked.scale), "ROUNDED": call.rounded, "PACKED": call.residual and target.packs
    }  # fmt: skip
    query_grid = (-(-length // query_config.block_m) * batch * heads,)

    def over_queries(sum_delta: bool) -> Launch:
        out = delta if sum_delta else gradients.query
        # δ = rowsum(dP ∘ P) is a pass of its own, with dQ's tiles; the gradient's pointer is not
        # used there.
        named = operands | {"Delta": delta, "Grad_query": out} | shared | {"SUM_DELTA": sum_delta}
        return Launch(
            query_kernel, query_grid, named | _tiles(query_config, call, target), query_config
        )

    exact = KERNEL_RECIPES[recipe].in_bf16.delta_from == "probabilities"
    rows_config = Config(16 if call.dim > 128 else 32, 1, 4, 1)
    rows = {
        "Out": saved.out, "Residual": saved.out if saved.residual is None else saved.residual, "Grad_out": do,
        "Grad_lse": saved.lse if grad_lse is None else grad_lse.to(torch.float32).contiguous(), "Lse": saved.lse,
        "Row_max": saved.row_max, "Row_sum": saved.row_sum, "Shift": shift, "Inverse": inverse,
        "Inverse_value": inverse_value, "Delta": delta, **do_strides, "heads": heads, "N_q": length,
        "D_v": value.shape[3], "VALUE_DIM": call.shared["VALUE_DIM"], "BLOCK_M": rows_config.block_m,
        "ROUNDED": call.rounded, "RESIDUAL": call.residual, "FROM_OUT": not exact,
        "HAS_GRAD_LSE": grad_lse is not None, "EMULATED": target.emulated,
    }  # fmt: skip
    rows_grid = (-(-length // rows_config.block_m) * batch * heads,)
    launches = [Launch(rows_kernel, rows_grid, rows, rows_config)]
    if exact:  # the shift first, then δ, then once more if there is a dLSE to subtract
        first = rows | {"FROM_OUT": True, "HAS_GRAD_LSE": False}
        subtract = launches if grad_lse is not None else []
        launches = [
            Launch(rows_kernel, rows_grid, first, rows_config),
            over_queries(True),
            *subtract,
        ]
    named = operands | {
        "Inverse_value": inverse_value, "Delta": delta, "Grad_key": gradients.key, "Grad_value": gradients.value
    } | shared  # fmt: skip
    key_grid = (-(-key.shape[2] // key_config.block_n) * batch * key.shape[1],)
    tiles = _tiles(key_config, call, target, do)
    launches.append(Launch(key_kernel, key_grid, named | tiles, key_config))
    launches.append(over_queries(False))
    return launches, gradients


def _call(asked: Call, recipe: str) -> _Call:
    query, key, value = asked.query, asked.key, asked.value
    q, k, v = (_dense(x) for x in (query, key, value))
    least, greatest = asked.bounds
    strides = {f"{name}_{axis}": x.stride(i) for name, x in zip("qkv", (q, k, v), strict=True)
               for i, axis in enumerate("bhn")}  # fmt: skip
    dim, value_dim = (max(16, 1 << (x.shape[3] - 1).bit_length()) for x in (query, value))
    shared = strides | _optional(asked, q) | {
        "heads": query.shape[1], "groups": query.shape[1] // key.shape[1],
        "N_q": query.shape[2], "N_k": key.shape[2],
        "left": -(least or 0), "right": greatest or 0,
        "scale": (asked.softcap or asked.scale) * LOG2_E, "D": query.shape[3], "D_v": value.shape[3],
        "HEAD_DIM": dim, "VALUE_DIM": value_dim, "HAS_LEFT": least is not None, "HAS_RIGHT": greatest is not None,
    }  # fmt: skip
    rounded = KERNEL_RECIPES[recipe].in_bf16.backward_weights == "rounded"
    return _Call(
        shared,
        q,
        k,
        v,
        greatest is not None,
        rounded,
        rounded and query.dtype != torch.float32,
        max(dim, value_dim),
    )


def _optional(asked: Call, unused: Tensor) -> dict[str, Any]:
    """The arguments of masks, softcap and dropout; what a call does not use is a number and a
    pointer never read.
    """
    mask, kind, dropout = asked.sees.mask, NO_MASK, asked.dropout
    if mask is None:
        strides: tuple[int, ...] = (0,) * 4
    else:
        kind = BOOLEAN if mask.dtype == torch.bool else ADDITIVE
        mask = mask.detach().to(torch.float32) if mask.dtype == torch.float64 else mask.detach()
        mask = (mask.view(torch.int8) if kind is BOOLEAN else mask).expand(asked.scores_shape)
        strides = mask.stride()
    least = least_kept(asked.dropout_p)
    dropped = least > 0  # below 2⁻³² nothing is dropped
    return dict(zip(("mask_b", "mask_h", "mask_m", "mask_n"), strides, strict=True)) | {
        "Mask": unused if mask is None else mask, "MASK": kind.value,
        "CAPPED": bool(asked.softcap), "cap_scale": asked.scale / asked.softcap if asked.softcap else 0.0,
        "DROPPED": dropped, "dropout_start": _int32(seed_word(dropout.number)) if dropout and dropped else 0,
        "last_dropped": _int32(least - 1) if dropped else 0,
        "kept_scale": 1.0 if dropout is None else dropout.scale,
    }  # fmt: skip


def _int32(word: int) -> int:
    """A 32-bit word as the signed number of the same bits: every word has then one type, and one
    compiled kernel.
    """
    return word - 2**32 if word >= 2**31 else word


def grad_sinks(launches: list[Launch], sinks: Tensor) -> Tensor:
    """The gradient of the sinks, once the kernels ran: a sink's value is 0, so its dS is −p (δ −
    dLSE).
    """
    rows = launches[0].arguments
    weights = torch.exp2(_base_2(sinks)[:, None] - rows["Shift"])
    products: Tensor = weights * rows["Delta"]
    return -products.sum((0, 2)).to(sinks.dtype)


def _base_2(sinks: Tensor) -> Tensor:
    return (sinks.detach().to(torch.float32) * LOG2_E).contiguous()


def _config(kind: str, call: _Call, target: Target) -> Config:
    options = (
        (call.shared["MASK"] != NO_MASK.value) + call.shared["CAPPED"] + call.shared["DROPPED"]
    )
    return config_for(
        kind, target.capability, call.dim, call.causal, call.q.element_size(), options=options
    )


def _tiles(config: Config, call: _Call, target: Target, *others: Tensor) -> dict[str, Any]:
    described = config.descriptors and all(map(describable, (call.q, call.k, call.v, *others)))
    return {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "DESCRIPTORS": described, "EMULATED": target.emulated,
    }  # fmt: skip


def describable(x: Tensor) -> bool:
    """Whether tensor descriptors can read it: addresses and row strides in multiples of 16
    bytes.
    """
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return aligned and all(s * x.element_size() % 16 == 0 for s in x.stride()[:3])


def _dense(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
