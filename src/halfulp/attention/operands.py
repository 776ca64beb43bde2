"""What SDPA's callers may hand over, brought into the one form that kernels take: `[B, H, N, D]`,
checked.

PyTorch's function takes any number of leading dimensions and broadcasts them, takes masks that
broadcast, and lets the key and value heads be fewer. All that is undone here, once, without copying
where a view does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Operands(NamedTuple):
    """Operands and mask as kernels take them, and the shape that the result is to have."""

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, H_k, N_k, D], H_k a divisor of H
    value: Tensor  # [B, H_k, N_k, D_v]
    attn_mask: Tensor | None  # broadcasts to [B, H, N, N_k]
    shape: tuple[int, ...]  # of out


class Causal(NamedTuple):
    """Which diagonal hides the future, if any, and what is left of the mask."""

    is_causal: bool
    offset: int
    attn_mask: Tensor | None


def check_given(**tensors: Any) -> None:
    """Raise ValueError for what should be a tensor, or None where it may be left out, and is
    neither.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} of type {type(x).__name__}: accepted is a tensor")


def operands(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> Operands:
    """Bring SDPA's operands into the kernels' form; raises ValueError, in one line, for shapes that
    do not fit.
    """
    dims = max(query.ndim, key.ndim, value.ndim)
    given = (query, key, value)
    q, k, v = (x if x.ndim >= max(dims, 3) else x[(None,) * (max(dims, 3) - x.ndim)] for x in given)
    heads = _heads(q.shape[-3], k.shape[-3], v.shape[-3], enable_gqa)
    leading = _leading(q, k, v)
    full = (*leading, heads, q.shape[-2], k.shape[-2])
    q = _flat(q, leading, heads)
    if k.shape[-3] != v.shape[-3]:  # both repeat theirs until there are as many
        key_heads = math.lcm(k.shape[-3], v.shape[-3])
        k, v = (x.repeat_interleave(key_heads // x.shape[-3], dim=-3) for x in (k, v))
    k, v = (_flat(x, leading, x.shape[-3]) for x in (k, v))
    if attn_mask is not None:
        _check_device("attn_mask", attn_mask, query)
    mask = None if attn_mask is None else _mask(attn_mask, full)
    shape = (*full[:-1], v.shape[-1])
    return Operands(q, k, v, mask, shape[-dims:] if dims >= 3 else shape[-2:])


def causal(
    attn_mask: Tensor | None, is_causal: bool, lengths: tuple[int, int], offset: int
) -> Causal:
    """Take in PyTorch's `causal_lower_right` and `causal_upper_left`, which stand for a mask and
    hold none.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True: accepted is False where attn_mask is given")
    if attn_mask is not None:
        check_given(attn_mask=attn_mask)
    if attn_mask is None or not is_causal_bias(attn_mask):
        return Causal(is_causal, offset, attn_mask)
    lower = attn_mask.variant.name == "LOWER_RIGHT"  # type: ignore[attr-defined]
    return Causal(True, lengths[1] - lengths[0] if lower else 0, None)


def is_causal_bias(mask: Tensor) -> bool:
    """Whether it is one of `torch.nn.attention.bias`, whose import costs as much as the
    compiler's.
    """
    if type(mask) in (Tensor, torch.nn.Parameter):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def scale_of(scale: float | None, head_dim: int) -> float:
    """1/√D where no scale is given; raises ValueError for one that is not finite."""
    if scale is None:
        return 1 / math.sqrt(head_dim) if head_dim else 1.0
    if not (_is_number(scale) and math.isfinite(scale)):
        raise ValueError(f"scale={scale!r}: accepted is a finite number, or None for 1/√D")
    return float(scale)


def check_numbers(
    dropout_p: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    softcap: float,
    causal_offset: int,
) -> None:
    """Raise ValueError for a number or a switch that no kernel takes."""
    if not (_is_number(dropout_p) and 0 <= dropout_p <= 1):
        raise ValueError(f"dropout_p={dropout_p!r}: accepted are 0 to 1")
    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal={is_causal!r}: accepted are True and False")
    if window is not None and not _is_window(window):
        raise ValueError(
            f"window={window!r}: accepted is (left, right) of integers of at least 0, or -1 for no"
            " bound"
        )
    if not (_is_number(softcap) and 0 <= softcap < math.inf):
        raise ValueError(f"softcap={softcap!r}: accepted is a finite number above 0, or 0 for none")
    if not isinstance(causal_offset, (int, torch.SymInt)):
        raise ValueError(f"causal_offset={causal_offset!r}: accepted is an integer")


def _is_window(window: Any) -> bool:
    pair = isinstance(window, (tuple, list)) and len(window) == 2
    return pair and all(isinstance(side, (int, torch.SymInt)) and side >= -1 for side in window)


def _is_number(x: object) -> bool:
    """Whether it is a number, of another library too, rather than text or a list."""
    return isinstance(x, (int, float)) or hasattr(x, "__float__")


def check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    """Raise ValueError unless there is one floating-point number a head."""
    if sinks is None:
        return
    check_given(sinks=sinks)
    if sinks.shape != query.shape[1:2] or not sinks.is_floating_point():
        given = f"sinks of shape {tuple(sinks.shape)} and {sinks.dtype}"
        raise ValueError(
            f"{given}: accepted is one floating-point number a head, {tuple(query.shape[1:2])}"
        )
    _check_device("sinks", sinks, query)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError for dtypes, devices and shapes that no kernel takes, whatever the other
    arguments.
    """
    check_given(query=query, key=key, value=value)
    device = query.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested or x.layout != torch.strided:
            raise ValueError(
                f"{name} is nested or sparse: accepted is a dense tensor, or"
                " halfulp.attention_varlen"
            )
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{name} of dtype {x.dtype}: accepted are float64, float32, bfloat16 and float16"
            )
        # it casts no float64
        if x.dtype != query.dtype and not (cast and torch.float64 not in (x.dtype, query.dtype)):
            raise ValueError(f"{name} of dtype {x.dtype}: accepted is query's, {query.dtype}")
        if x.ndim < 2:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)}: accepted are 2 dimensions or more, [..., H,"
                " N, D]"
            )
        _check_device(name, x, query)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key of head dimension {key.shape[-1]}: accepted is query's, {query.shape[-1]}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value of length {value.shape[-2]}: accepted is key's, {key.shape[-2]}")


def _check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(f"{name} on {x.device}: accepted is query's device, {query.device}")


def _heads(query: int, key: int, value: int, enable_gqa: bool) -> int:
    """Heads of the result."""
    for name, count in (("key", key), ("value", value)):
        fits = (
            count in (1, query) or query == 1 or (enable_gqa and count > 0 and query % count == 0)
        )
        if not fits:
            accepted = f"accepted are query's {query}, 1, or a divisor of it with enable_gqa=True"
            raise ValueError(f"{name} of {count} heads: {accepted}")
    heads = max(query, key, value) if 0 not in (query, key, value) else 0
    if query == 1 and not all(count in (1, heads) for count in (key, value)):
        raise ValueError(f"value of {value} heads: accepted are 1 and key's, {key}")
    return heads


def _leading(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """All dimensions before the heads, broadcast."""
    leading = tuple(query.shape[:-3])
    # broadcast_shapes costs more than a small kernel
    if key.shape[:-3] == leading == value.shape[:-3]:
        return leading
    try:
        return tuple(torch.broadcast_shapes(leading, key.shape[:-3], value.shape[:-3]))  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        message = (
            f"query, key and value of shapes {shapes}: their leading dimensions do not broadcast"
        )
        raise ValueError(message) from None


def _flat(x: Tensor, leading: tuple[int, ...], heads: int) -> Tensor:
    """`[..., H or 1, N, D]` as `[B, H, N, D]`."""
    # even to its own shape: compiled torch.func needs the view
    x = x.expand(*leading, heads, *x.shape[-2:])
    if len(leading) == 1:
        return x
    return x.reshape(math.prod(leading), *x.shape[-3:])


def _mask(mask: Tensor, full: tuple[int, ...]) -> Tensor:
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"attn_mask of dtype {mask.dtype}: accepted are bool and floating point")
    shape = tuple(mask.shape)
    if len(shape) > len(full) or any(
        m not in (1, n) for m, n in zip(shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"attn_mask of shape {shape}: accepted is what broadcasts to {full}")
    if len(full) <= 4:
        return mask[(None,) * (2 - mask.ndim)] if mask.ndim < 2 else mask
    inner = (*(1,) * (3 - len(shape)), *shape[-3:])
    return mask.expand(*full[:-3], *inner).reshape(math.prod(full[:-3]), *inner)
