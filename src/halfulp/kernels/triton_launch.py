"""What is launched for one call: kernel, grid, arguments.

Planned here and run by `triton_attention`; compiled for other chips by
`benchmarks/triton_compile.py` from the same plan, so that what is measured there is what runs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.language import constexpr

from halfulp.calls import Call, Gradients, Saved
from halfulp.formats.counter import least_kept, seed_word
from halfulp.kernels.triton_arguments import (
    Axes,
    Kept,
    Numbers,
    Rows,
    Strides,
    Switches,
    Tiles,
)
from halfulp.kernels.triton_backward import key_kernel, query_kernel, rows_kernel
from halfulp.kernels.triton_configs import Config, config_for
from halfulp.kernels.triton_forward import INTEGER, MAXIMUM, STABILIZED, forward_kernel
from halfulp.kernels.triton_scores import ADDITIVE, BOOLEAN, NO_MASK
from halfulp.recipes import KERNEL_RECIPES

LOG2_E = math.log2(math.e)
SHIFTS = {"maximum": MAXIMUM, "integer": INTEGER, "stabilized": STABILIZED}


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


class _Plan(NamedTuple):
    """What all kernels of one call share."""

    q: Tensor
    k: Tensor
    v: Tensor
    shared: dict[str, Any]  # arguments of every kernel that makes products
    numbers: Numbers
    options: int  # how many of mask, softcap and dropout there are
    causal: bool
    rounded: bool
    residual: bool
    widths: tuple[int, int]  # D and D_v, padded

    def config(self, kind: str, target: Target) -> Config:
        """Tile sizes from the table."""
        size, width = self.q.element_size(), max(self.widths)
        return config_for(kind, target.capability, width, self.causal, size, options=self.options)

    def tiles(self, config: Config, target: Target, *others: Tensor) -> Tiles:
        """How a kernel cuts the call; `others` are tensors that it reads beside Q, K and V."""
        described = config.descriptors and all(map(describable, (self.q, self.k, self.v, *others)))
        sizes = (self.q.shape[3], self.v.shape[3], *self.widths, config.block_m, config.block_n)
        return Tiles(*map(constexpr, (*sizes, described, target.emulated)))

    def blocks(self, length: int, block: int, heads: int) -> tuple[int]:
        """The grid: blocks of one head, heads, batches."""
        return (-(-length // block) * heads * self.q.shape[0],)


def forward_launch(
    call: Call, recipe: str, target: Target, config: Config | None = None
) -> tuple[Launch, Saved]:
    """The forward kernel and the tensors that it will fill; `config` overrides the table."""
    plan, query = _plan(call, recipe), call.query
    batch, heads, length, _ = query.shape
    shape = (batch, heads, length, call.value.shape[3])
    out = query.new_empty(shape)
    residual = query.new_empty(shape, dtype=torch.int8) if plan.residual else None
    statistics = (query.new_empty(shape[:3], dtype=torch.float32) for _ in range(3))
    saved = Saved(out, residual, *statistics)
    config = config or plan.config("forward", target)
    arguments = plan.shared | {
        "saved": _kept(saved),
        "Sinks": saved.lse if call.sinks is None else _base_2(call.sinks),
        "SINKS": call.sinks is not None,
        "SHIFT": SHIFTS[KERNEL_RECIPES[recipe].shift].value,
        "ROUNDED": plan.residual,
        "RESIDUAL": plan.residual,
        "tiles": plan.tiles(config, target),
    }
    grid = plan.blocks(length, config.block_m, heads)
    return Launch(forward_kernel, grid, arguments, config), saved


def backward_launches(
    call: Call,
    recipe: str,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    target: Target,
    configs: dict[str, Config] | None = None,
) -> tuple[dict[str, Launch], Gradients]:
    """The backward kernels by name, in their order, and the gradients that they will fill.

    "rows" are the rows' numbers; "delta" their δ = rowsum(dP ∘ P), where the recipe has that one,
    and "delta_lse" subtracts dLSE from it; "key" are dK and dV, "query" is dQ. `configs` overrides
    the table for "key" and "query".
    """
    plan, configs = _plan(call, recipe), configs or {}
    heads, length = call.query.shape[1:3]
    do = _dense(grad_out.to(call.query.dtype))
    stats = Rows(*(torch.empty_like(saved.lse) for _ in range(4)))
    gradients = Gradients(*(x.new_empty(x.shape) for x in (call.query, call.key, call.value)))
    strides = plan.shared["strides"]._replace(Grad_out=_axes(do))
    products = plan.shared | {
        "Grad_out": do,
        "stats": stats,
        "strides": strides,
        "ROUNDED": plan.rounded,
        "PACKED": plan.residual and target.packs,
    }

    def rows(**changes: bool) -> Launch:
        config = Config(16 if max(plan.widths) > 128 else 32, 1, 4, 1)
        arguments = {
            "saved": _kept(saved),
            "Grad_out": do,
            "Grad_lse": saved.lse if grad_lse is None else grad_lse.to(torch.float32).contiguous(),
            "stats": stats,
            "strides": strides,
            "call": plan.numbers,
            "tiles": plan.tiles(config, target),
            "ROUNDED": plan.rounded,
            "RESIDUAL": plan.residual,
            "FROM_OUT": True,
            "HAS_GRAD_LSE": grad_lse is not None,
        }
        grid = plan.blocks(length, config.block_m, heads)
        return Launch(rows_kernel, grid, arguments | changes, config)

    def over_queries(sum_delta: bool) -> Launch:
        config = configs.get("query") or plan.config("query", target)
        # where it sums δ, the gradient's pointer is not used
        arguments = products | {
            "Grad_query": stats.delta if sum_delta else gradients.query,
            "SUM_DELTA": sum_delta,
            "tiles": plan.tiles(config, target),
        }
        grid = plan.blocks(length, config.block_m, heads)
        return Launch(query_kernel, grid, arguments, config)

    launches = {}
    if KERNEL_RECIPES[recipe].in_bf16.delta_from == "probabilities":
        launches["rows"] = rows(HAS_GRAD_LSE=False)
        launches["delta"] = over_queries(sum_delta=True)
        if grad_lse is not None:
            launches["delta_lse"] = rows(FROM_OUT=False)
    else:
        launches["rows"] = rows()
    config = configs.get("key") or plan.config("key", target)
    arguments = products | {
        "Grad_key": gradients.key,
        "Grad_value": gradients.value,
        "tiles": plan.tiles(config, target, do),
    }
    grid = plan.blocks(call.key.shape[2], config.block_n, call.key.shape[1])
    launches["key"] = Launch(key_kernel, grid, arguments, config)
    launches["query"] = over_queries(sum_delta=False)
    return launches, gradients


def grad_sinks(launches: dict[str, Launch], sinks: Tensor) -> Tensor:
    """The gradient of the sinks, once the kernels ran: a sink's value is 0, so its dS is −p (δ −
    dLSE).
    """
    stats: Rows = launches["rows"].arguments["stats"]
    weights = torch.exp2(_base_2(sinks)[:, None] - stats.shift)
    products: Tensor = weights * stats.delta
    return -products.sum((0, 2)).to(sinks.dtype)


def _plan(call: Call, recipe: str) -> _Plan:
    q, k, v = (_dense(x) for x in (call.query, call.key, call.value))
    least, greatest = call.bounds
    mask, kind = _mask(call)
    mask_axes = Axes(0, 0, 0, 0) if mask is None else Axes(*mask.stride())
    dropout, least_word = call.dropout, least_kept(call.dropout_p)
    dropped = dropout is not None and least_word > 0  # below 2⁻³² nothing is dropped
    capped = call.softcap > 0
    numbers = Numbers(
        heads=q.shape[1],
        groups=call.groups,
        N_q=q.shape[2],
        N_k=k.shape[2],
        left=-(least or 0),
        right=greatest or 0,
        scale=(call.softcap or call.scale) * LOG2_E,
        alpha=float(call.scale),
        cap_scale=call.scale / call.softcap if capped else 0.0,
    )
    bounded = (least is not None, greatest is not None)
    shared = {
        "Q": q,
        "K": k,
        "V": v,
        "Mask": q if mask is None else mask,  # a pointer that is never read
        "strides": Strides(_axes(q), _axes(k), _axes(v), None, mask_axes),
        "call": numbers,
        "dropout_start": _int32(seed_word(dropout.number)) if dropout and dropped else 0,
        "last_dropped": _int32(least_word - 1) if dropped else 0,
        "kept_scale": dropout.scale if dropout else 1.0,
        "switches": Switches(*map(constexpr, (*bounded, kind, capped, dropped))),
    }
    rounded = KERNEL_RECIPES[recipe].in_bf16.backward_weights == "rounded"
    dim, value_dim = (max(16, 1 << (x.shape[3] - 1).bit_length()) for x in (q, v))
    return _Plan(
        q,
        k,
        v,
        shared,
        numbers,
        options=(mask is not None) + capped + dropped,
        causal=greatest is not None,
        rounded=rounded,
        residual=rounded and q.dtype != torch.float32,
        widths=(dim, value_dim),
    )


def _axes(x: Tensor) -> Axes:
    return Axes(*x.stride()[:3])


def _kept(saved: Saved) -> Kept:
    """Where no residual is kept, a pointer that is never read."""
    residual = saved.out if saved.residual is None else saved.residual
    return Kept(saved.out, residual, saved.lse, saved.row_max, saved.row_sum)


def _mask(call: Call) -> tuple[Tensor | None, int]:
    """The mask as kernels read it, and its kind."""
    mask = call.sees.mask
    if mask is None:
        return None, NO_MASK.value
    kind = BOOLEAN if mask.dtype == torch.bool else ADDITIVE
    mask = mask.detach().to(torch.float32) if mask.dtype == torch.float64 else mask.detach()
    mask = (mask.view(torch.int8) if kind is BOOLEAN else mask).expand(call.scores_shape)
    return mask, kind.value


def _int32(word: int) -> int:
    """A 32-bit word as the signed number of the same bits: every word has then one type, and one
    compiled kernel.
    """
    return word - 2**32 if word >= 2**31 else word


def _base_2(sinks: Tensor) -> Tensor:
    return (sinks.detach().to(torch.float32) * LOG2_E).contiguous()


def describable(x: Tensor) -> bool:
    """Whether tensor descriptors can read it: addresses and row strides in multiples of 16
    bytes.
    """
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return aligned and all(s * x.element_size() % 16 == 0 for s in x.stride()[:3])


def _dense(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
