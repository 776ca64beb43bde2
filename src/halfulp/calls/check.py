"""What SDPA's callers may hand over, brought into the one form that all that computes attention
takes.

PyTorch's function takes any number of leading dimensions and broadcasts them, takes masks that
broadcast, and lets the key and value heads be fewer. All that is undone here, once, without copying
where a view does.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from halfulp.calls.call import Call
from halfulp.calls.dropout import Dropout, draw_seed
from halfulp.calls.sees import Sees

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Offsets and windows up to here are handed on as they are: operators take 64 bits, and sums of two
# stay far below.
_FAR = 2**40


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
    dropout_seed: int | None = None,
    *,
    draw: bool = True,
    emulated: bool = False,
) -> Call:
    """The call that these arguments, documented at `halfulp.attention`, ask for.

    Where there is dropout and no seed, one is drawn from torch's CPU generator, or is 0 if not
    `draw`. Kernels want operands of one dtype; what is `emulated` may mix them, and has no empty
    dimension.

    Raises:
        ValueError: for what does not fit, in one line.
    """
    _check_tensors(query, key, value, emulated)
    if not (_is_number(dropout_p) and 0 <= dropout_p <= 1):
        raise ValueError(f"dropout_p={dropout_p!r}: accepted are 0 to 1")
    if not (_is_number(softcap) and 0 <= softcap < math.inf):
        raise ValueError(f"softcap={softcap!r}: accepted is a finite number above 0, or 0 for none")
    lengths = (query.shape[-2], key.shape[-2])
    sees = sees_of(attn_mask, is_causal, window, causal_offset, lengths)
    dropout = None
    if dropout_p > 0:
        dropout = Dropout(float(dropout_p), _seed(dropout_seed, draw))
    elif dropout_seed is not None:
        _seed(dropout_seed, draw)
    alpha, cap = scale_of(scale, query.shape[-1]), float(softcap)

    dims = max(query.ndim, key.ndim, value.ndim)
    wide = max(dims, 3)
    q, k, v = (x if x.ndim >= wide else x[(None,) * (wide - x.ndim)] for x in (query, key, value))
    heads = _heads(q.shape[-3], k.shape[-3], v.shape[-3], enable_gqa)
    leading = _leading(q, k, v)
    full = (*leading, heads, *lengths)
    q = _flat(q, leading, heads)
    if k.shape[-3] != v.shape[-3]:  # both repeat theirs until there are as many
        key_heads = math.lcm(k.shape[-3], v.shape[-3])
        k, v = (x.repeat_interleave(key_heads // x.shape[-3], dim=-3) for x in (k, v))
    k, v = _flat(k, leading, k.shape[-3]), _flat(v, leading, v.shape[-3])
    if sees.mask is not None:
        _check_device("attn_mask", sees.mask, query)
        sees = Sees(sees.causal, sees.window, sees.offset, _mask(sees.mask, full))
    if sinks is not None:
        _check_sinks(sinks, q)
    shape = (*full[:-1], v.shape[-1])
    shape = shape[-dims:] if dims >= 3 else shape[-2:]
    return Call(q, k, v, sees, alpha, cap, sinks, dropout, shape)


def check_given(**tensors: Any) -> None:
    """Raise ValueError for what should be a tensor and is none."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} of type {type(x).__name__}: accepted is a tensor")


def is_causal_bias(mask: Tensor) -> bool:
    """Whether it is one of `torch.nn.attention.bias`, whose import costs as much as the
    compiler's.
    """
    if type(mask) in (Tensor, torch.nn.Parameter):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def sees_of(
    attn_mask: Tensor | None,
    is_causal: bool,
    window: Any,
    causal_offset: Any,
    lengths: tuple[int, int],
) -> Sees:
    """What these arguments let so many queries and keys see, the mask's shape not looked at.

    PyTorch's `causal_lower_right` and `causal_upper_left` are taken in, which stand for a mask and
    hold none. Raises ValueError, in one line.
    """
    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal={is_causal!r}: accepted are True and False")
    if attn_mask is not None:
        check_given(attn_mask=attn_mask)
        if is_causal:
            raise ValueError("is_causal=True: accepted is False where attn_mask is given")
        if is_causal_bias(attn_mask):
            lower = attn_mask.variant.name == "LOWER_RIGHT"  # type: ignore[attr-defined]
            is_causal, causal_offset = True, lengths[1] - lengths[0] if lower else 0
            attn_mask = None
    if window is None and type(causal_offset) is int and -_FAR < causal_offset < _FAR:
        return Sees(is_causal, None, causal_offset, attn_mask)
    offset = _integer(causal_offset)
    if offset is None:
        raise ValueError(f"causal_offset={causal_offset!r}: accepted is an integer")
    sides = None if window is None else _window(window)
    sees = Sees(is_causal, sides, offset, attn_mask)
    numbers = (offset, *(sides or ()))
    far = any(type(x) is int and not -_FAR < x < _FAR for x in numbers)
    return sees.within(*lengths) if far else sees


def _window(window: Any) -> tuple[int, int]:
    if isinstance(window, (tuple, list)) and len(window) == 2:
        left, right = _integer(window[0]), _integer(window[1])
        if left is not None and right is not None and left >= -1 and right >= -1:
            return left, right
    raise ValueError(
        f"window={window!r}: accepted is (left, right) of integers of at least 0, or -1 for no"
        " bound"
    )


def _integer(x: Any) -> int | None:
    """`x` as a Python integer, of another library's too, or one that PyTorch traces; else None."""
    if type(x) is int or isinstance(x, torch.SymInt):
        return x  # type: ignore[return-value]  # a traced one stands for an integer
    if isinstance(x, (bool, Tensor)) or not hasattr(x, "__index__"):
        return None
    return operator.index(x)


def _seed(seed: Any, draw: bool) -> int | Tensor:
    if seed is None:
        return draw_seed() if draw else 0
    number = _integer(seed)
    if number is None:
        raise ValueError(f"dropout_seed={seed!r}: accepted is an integer, or None to draw one")
    # as 64 bits: the mask is a function of the seed modulo 2⁶⁴
    return torch.tensor((number + 2**63) % 2**64 - 2**63, dtype=torch.int64, device="cpu")


def scale_of(scale: float | None, head_dim: int) -> float:
    """The scale, 1/√D for None; raises ValueError for one that is not finite."""
    if scale is None:
        return 1 / math.sqrt(head_dim) if head_dim else 1.0
    if not (_is_number(scale) and math.isfinite(scale)):
        raise ValueError(f"scale={scale!r}: accepted is a finite number, or None for 1/√D")
    return float(scale)


def _is_number(x: object) -> bool:
    """Whether it is a number, of another library too, rather than text or a list."""
    return isinstance(x, (int, float)) or hasattr(x, "__float__")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, emulated: bool) -> None:
    """Raise ValueError for dtypes, devices and shapes that nothing takes, whatever the other
    arguments.
    """
    check_given(query=query, key=key, value=value)
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
        if x.dtype != query.dtype and not emulated and not _cast(x, query):
            raise ValueError(f"{name} of dtype {x.dtype}: accepted is query's, {query.dtype}")
        if x.ndim < 2:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)}: accepted are 2 dimensions or more, [..., H,"
                " N, D]"
            )
        if emulated and 0 in x.shape:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)}: accepted are dimensions of at least 1"
            )
        _check_device(name, x, query)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key of head dimension {key.shape[-1]}: accepted is query's, {query.shape[-1]}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value of length {value.shape[-2]}: accepted is key's, {key.shape[-2]}")


def _cast(x: Tensor, query: Tensor) -> bool:
    """Whether autocast will give both one dtype; it casts no float64."""
    device = query.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return False
    return torch.float64 not in (x.dtype, query.dtype)


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    check_given(sinks=sinks)
    if sinks.shape != query.shape[1:2] or not sinks.is_floating_point():
        given = f"sinks of shape {tuple(sinks.shape)} and {sinks.dtype}"
        raise ValueError(
            f"{given}: accepted is one floating-point number a head, {tuple(query.shape[1:2])}"
        )
    _check_device("sinks", sinks, query)


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
