"""What runs in a `halfulp.patch()` block in the place of PyTorch's attention functions and
FlashAttention's: their arguments read, `halfulp.attention` called.

A stand-in takes what its function takes. Where halfulp cannot, it returns `Stock` with the reason,
and the stock function runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfulp.attention import open_blocks as blocks
from halfulp.attention.attend import attention
from halfulp.attention.varlen import attention_varlen
from halfulp.calls import is_causal_bias
from halfulp.ops import dispatch

Chosen = tuple[str, str | None]  # recipe and backend
STOCK_SDPA = torch.nn.functional.scaled_dot_product_attention


class Stock(NamedTuple):
    """The stock function is to run."""

    why: str


def stand_in(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `ours` where a block is open in the caller's context, and else `stock`."""

    traceable = ours in (scaled_dot_product_attention, multi_head_attention_forward)

    @functools.wraps(stock)
    def either(*args: Any, **kwargs: Any) -> Any:
        # what is asked in here stays in the graph as a constant, and is asked again where `newest`
        # is another: a block entered later, or left, traces the code anew
        if torch.compiler.is_compiling():
            chosen = blocks.choice(blocks.newest)
            if chosen is None or not traceable:
                blocks.compiled_past(blocks.newest, stock.__name__)
                return stock(*args, **kwargs)
            out = ours(chosen, stock, *args, **kwargs)
            return stock(*args, **kwargs) if isinstance(out, Stock) else out
        block = blocks.current()
        if block is None:
            return stock(*args, **kwargs)
        # or the kernel of an earlier call would be counted for one that runs none
        dispatch.last_run.name = None
        try:
            out = ours((block.recipe, block.backend), stock, *args, **kwargs)
        except ValueError:
            block.ran(stock.__name__, "refused")
            raise
        if isinstance(out, Stock):
            block.as_stock(stock.__name__, out.why)
            return stock(*args, **kwargs)
        ran = dispatch.last_run.name
        if ours is not multi_head_attention_forward:  # whose calls have been counted
            block.ran(stock.__name__, ran or block.backend or "none")
        return out

    return either


def stock_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function, whose causal biases know it by identity."""
    call = (query, key, value, attn_mask, dropout_p, is_causal)
    if isinstance(attn_mask, Tensor) and is_causal_bias(attn_mask):
        from torch.nn.attention.bias import CausalBias

        assert isinstance(attn_mask, CausalBias)
        return CausalBias._dispatch(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    return STOCK_SDPA(*call, scale=scale, enable_gqa=enable_gqa)


stock_sdpa.__name__ = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    chosen: Chosen,
    _stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | Stock:
    """As PyTorch's, with a mask and `is_causal` together, and with jagged tensors."""
    operands = (query, key, value)
    if not all(isinstance(x, Tensor) for x in operands):
        return Stock(f"query is a {type(query).__name__}, as in symbolic tracing, not a tensor")
    if not torch.compiler.is_compiling() and _only_math():
        return Stock("only PyTorch's math kernel is allowed, by sdpa_kernel or torch.backends.cuda")
    if any(x.is_nested for x in operands):
        return _jagged(chosen, query, key, value, attn_mask, dropout_p, is_causal, scale)
    if any(_is_distributed(x) for x in operands):
        return _distributed(chosen, query, key, value, attn_mask, dropout_p, is_causal, scale)
    if is_causal and attn_mask is not None and not is_causal_bias(attn_mask):
        shape = query.shape[-2], key.shape[-2]
        past = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        both = attn_mask.dtype == torch.bool
        attn_mask = attn_mask & past if both else attn_mask.masked_fill(~past, -torch.inf)
        is_causal = False
    return attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        recipe=chosen[0], backend=chosen[1],
    )  # fmt: skip


def _only_math() -> bool:
    """Whether whoever calls has asked for the kernel that is differentiable twice."""
    cuda: Any = torch.backends.cuda
    return cuda.math_sdp_enabled() and not (
        cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    )


def _jagged(
    chosen: Chosen,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor | Stock:
    """Jagged `[B, H, j, D]` as packed sequences."""
    operands: tuple[Any, ...] = (query, key, value)
    whole = all(
        x.is_nested and x.layout == torch.jagged and x.ndim == 4 and x.lengths() is None
        for x in operands
    )
    if not whole or attn_mask is not None:
        return Stock("a nested tensor that is not jagged and whole, or has a mask")
    packed = [x.transpose(1, 2) for x in operands]  # the heads after the ragged dimension
    if any(x._ragged_idx != 1 for x in packed):
        return Stock("a jagged tensor whose lengths are not its second-last dimension")
    ends, key_ends = packed[0].offsets(), packed[1].offsets()
    # one diagonal for all only where lengths agree; identity first, since comparing reads the data
    if is_causal and ends is not key_ends and not torch.equal(ends, key_ends):
        return Stock("is_causal with jagged queries and keys of different lengths")
    q, k, v = (x.values() for x in packed)
    out = attention_varlen(
        q, k, v, ends, key_ends, dropout_p=dropout_p, is_causal=is_causal,
        scale=scale, recipe=chosen[0], backend=chosen[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return torch.nested.nested_tensor_from_jagged(out, ends).transpose(1, 2)


def _is_distributed(x: Tensor) -> bool:
    # by its name, so that torch.distributed.tensor need not be imported to ask
    return type(x).__name__ == "DTensor"


def _distributed(
    chosen: Chosen,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor | Stock:
    """DTensors split over the batch or the heads alike, each part by itself."""
    operands = (query, key, value)
    if not all(_is_distributed(x) for x in operands) or attn_mask is not None or dropout_p:
        return Stock("DTensors with a mask, with dropout or beside other tensors")
    placements = query.placements
    alike = all(x.placements == placements and x.ndim == 4 for x in operands)
    if not alike or not all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in placements):
        return Stock(
            f"DTensors of placements {placements}, as in context parallelism, and no kernel here"
            " that is split over the sequence"
        )
    q, k, v = (x.to_local() for x in operands)
    local = attention(
        q, k, v, None, 0.0, is_causal, scale, True,
        recipe=chosen[0], backend=chosen[1],
    )  # fmt: skip
    shape = (*query.shape[:-1], value.shape[-1])
    # of the whole: from this part alone an uneven split would be taken for an even one
    strides = torch.empty(shape, device="meta").stride()
    out: Tensor = type(query).from_local(
        local, query.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )
    return out


def multi_head_attention_forward(
    chosen: Chosen, stock: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result without weights, which calls `scaled_dot_product_attention`; weights, where they
    are asked for, from the stock function beside it.
    """
    del chosen
    given = inspect.signature(stock).bind(*args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    if not named["need_weights"]:
        return stock(**named)
    # `strict` is not to report them: stock weights are asked for, beside halfulp's result
    before, blocks.excused.on = blocks.excused.on, True
    try:
        weights = stock(**named)[1]
    finally:
        blocks.excused.on = before
    return stock(**(named | {"need_weights": False}))[0], weights


# Arguments of FlashAttention 2, 3 and 4 that say how a kernel is to run, not what it computes.
_HOW = (
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "max_seqlen_q", "max_seqlen_k"),
    "max_seqlen",
)
_WHAT = (
    *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "learnable_sink"),
    *("return_attn_probs", "return_lse", "num_heads_q", "cu_seqlens", "cu_seqlens_q"),
    *("cu_seqlens_k", "q", "k", "v", "qkv", "kv"),
)


def flash(chosen: Chosen, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """FlashAttention's functions, whichever arguments their version takes: separate or packed
    operands, of one length `[B, N, H, D]` or of many `[T, H, D]`, causal at the bottom right.
    """
    parameters = inspect.signature(stock).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return Stock(f"{stock.__name__} has a signature that is not known")
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    given = defaults | dict(zip(parameters, args, strict=False)) | kwargs
    unknown = [
        name
        for name, value in given.items()
        if name not in (*_HOW, *_WHAT)
        and (isinstance(value, Tensor) or value != defaults.get(name))
    ]
    operands = _flash_operands(given)
    if unknown or operands is None:
        return Stock(f"{', '.join(unknown) or 'packed qkv'} is given, which halfulp does not take")
    q, k, v = operands
    options: dict[str, Any] = {
        "window": _window(given["window_size"]),
        "softcap": given.get("softcap") or 0.0,
        "sinks": given.get("learnable_sink"),
        "recipe": chosen[0],
        "backend": chosen[1],
    }
    scale, dropout, causal = given["softmax_scale"], given.get("dropout_p", 0.0), given["causal"]
    ends = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    if ends is not None:
        out, lse = attention_varlen(
            q, k, v, ends, given.get("cu_seqlens_k", ends),
            dropout_p=dropout, is_causal=causal, scale=scale, return_lse=True, **options,
        )  # fmt: skip
    else:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        # FlashAttention's diagonal ends at the last key, PyTorch's begins at the first
        offset = key.shape[2] - query.shape[2]
        out, lse = attention(
            query, key, value, None, dropout, causal, scale, True,
            return_lse=True, causal_offset=offset, **options,
        )  # fmt: skip
        out = out.transpose(1, 2)
    if "return_lse" in given:  # FlashAttention 4
        return out, (lse if given["return_lse"] else None)
    if not given["return_attn_probs"]:
        return out
    # FlashAttention 2 gives the dropped weights as a third, which none asks for here; 3 gives two
    return (out, lse, None) if "dropout_p" in given else (out, lse)


def _flash_operands(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Query, key and value, packed or not; None for a form that is not known."""
    if "qkv" in given:
        heads = given.get("num_heads_q")
        if heads is not None:  # [B, N, H + 2 H_k, D]
            rest = (given["qkv"].shape[-2] - heads) // 2
            q, k, v = given["qkv"].split([heads, rest, rest], dim=-2)
            return q, k, v
        q, k, v = given["qkv"].unbind(-3)
        return q, k, v
    if "kv" in given:
        k, v = given["kv"].unbind(-3)
        return given["q"], k, v
    return (given["q"], given["k"], given["v"]) if {"q", "k", "v"} <= given.keys() else None


def _window(sides: tuple[int | None, int | None] | None) -> tuple[int, int] | None:
    left, right = (-1 if side is None or side < 0 else side for side in sides or (-1, -1))
    return None if left < 0 and right < 0 else (left, right)


def varlen_attn(
    chosen: Chosen,
    _stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
    **more: Any,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn`: packed sequences `[T, H, D]`; lse is `[H, T]`."""
    del max_q, max_k, enable_gqa, num_splits
    asked = [name for name, value in more.items() if value is not None]
    if asked:
        return Stock(f"{', '.join(asked)} is given, which halfulp does not take")
    out, lse = attention_varlen(
        query, key, value, cu_seq_q, cu_seq_k, scale=scale, window=_window(window_size),
        recipe=chosen[0], backend=chosen[1], return_lse=True,
    )  # fmt: skip
    return (out, lse) if return_aux is not None and return_aux.lse else out
