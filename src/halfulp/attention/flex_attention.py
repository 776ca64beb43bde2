"""`torch.nn.attention.flex_attention` inside `halfulp.patch()`.

A mask is a function of indices and the score modification one of scores, both closures; what they
mean is not guessed from their code but asked: the mask is evaluated once and compared with the
plain diagonals, the modification at a few scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfulp.attention.attend import attention
from halfulp.attention.stand_ins import Chosen, Stock

# a bias and a slope show at 0 and 1, what treats signs unlike below 0, and a cap at 17
_PROBES = (0.0, 1.0, -2.5, 17.0)
_known: dict[int, tuple[weakref.ref[Any], tuple[bool, tuple[int, int] | None, Tensor | None]]] = {}


def flex_attention(
    chosen: Chosen,
    _stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """As PyTorch's: any mask, and score modifications that add a bias or cap the scores.

    The mask is held as booleans `[B or 1, H or 1, N, N_k]` unless it is causal or a window.
    """
    del kernel_options
    if return_aux is not None and return_aux.max_scores:
        return Stock("max_scores are asked for, which halfulp does not have")
    if query.ndim != 4 or any(x.is_nested for x in (query, key, value)):
        return Stock("operands that are nested or not [B, H, N, D]")
    causal, window, mask = (False, None, None)
    if block_mask is not None:
        causal, window, mask = _meaning(block_mask, query, key)
    softcap = 0.0
    if score_mod is not None:
        found = _modification(score_mod, query, key)
        if found is None:
            return Stock("a score_mod that neither adds a bias nor caps scores")
        softcap, bias = found
        if bias is not None:
            if causal or window is not None:
                mask = _dense(block_mask, query, key)
            mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
            causal, window = False, None
    out, lse = attention(
        query, key, value, mask, 0.0, causal, scale, enable_gqa, return_lse=True, window=window,
        softcap=softcap, recipe=chosen[0], backend=chosen[1],
    )  # fmt: skip
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _meaning(
    block_mask: Any, query: Tensor, key: Tensor
) -> tuple[bool, tuple[int, int] | None, Tensor | None]:
    """Whether the mask is causal, a window, or what it is; kept for as long as it lives."""
    # a mask is evaluated whole, and as a rule every layer of a model is given the same one
    held = _known.get(id(block_mask))
    if held is not None and held[0]() is block_mask:
        return held[1]
    mask = _dense(block_mask, query, key)
    meaning: tuple[bool, tuple[int, int] | None, Tensor | None] = (False, None, mask)
    rows, columns = (
        torch.arange(n, dtype=torch.int32, device=mask.device) for n in mask.shape[-2:]
    )
    # a mask is a window if it is all of the band between its outermost diagonals
    offsets = columns - rows.unsqueeze(1)
    seen = offsets[mask.flatten(0, -3).any(0)]
    if seen.numel():
        left, right = int(-seen.min()), int(seen.max())
        if left >= 0 <= right and bool((mask == (offsets >= -left) & (offsets <= right)).all()):
            left = -1 if left >= len(rows) - 1 else left
            right = -1 if right >= len(columns) - 1 else right
            window = None if (left, right) in ((-1, 0), (-1, -1)) else (left, right)
            meaning = ((left, right) == (-1, 0), window, None)
    number = id(block_mask)
    # forgotten with the mask, so that another object of its number is not taken for it
    _known[number] = (weakref.ref(block_mask, lambda _: _known.pop(number, None)), meaning)
    return meaning


def _dense(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """`[B or 1, H or 1, N, N_k]`: what its function allows, inside its blocks."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = block_mask.shape[:2]
    rows, columns = query.shape[-2], key.shape[-2]
    with torch.no_grad():
        inside = create_mask(block_mask.mask_mod, batch, heads, rows, columns, query.device)
        partial = _spread(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask, inside)
        allowed = inside & partial
        if block_mask.full_kv_num_blocks is not None:
            full = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
            allowed = allowed | _spread(*full, block_mask, inside)
    return allowed


def _spread(counts: Tensor, indices: Tensor, block_mask: Any, like: Tensor) -> Tensor:
    """The listed blocks as booleans for every query and key."""
    tall, wide = block_mask.BLOCK_SIZE
    columns = -(-like.shape[-1] // wide)
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    # lists are padded: what is beyond a row's count goes to a column that is cut off
    kept = torch.where(listed, indices, columns).long()
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    blocks = blocks.scatter(-1, kept, True)[..., :columns]
    spread = blocks.repeat_interleave(tall, -2).repeat_interleave(wide, -1)
    return spread[..., : like.shape[-2], : like.shape[-1]]


def _modification(
    score_mod: Callable[..., Tensor], query: Tensor, key: Tensor
) -> tuple[float, Tensor | None] | None:
    """(cap, None) or (0, bias), or None for another function of the scores."""
    shape = (*query.shape[:3], key.shape[2])
    places = [torch.arange(n, device=query.device) for n in shape]

    def of(score: float) -> Tensor:
        given = torch.full(shape, score, dtype=torch.float64, device=query.device)
        grid = torch.meshgrid(*places, indexing="ij")
        return score_mod(given, *grid)

    try:
        bias = of(0.0)  # with its gradient, if it has parameters
    except Exception:  # whatever somebody else's function raises, given all scores at once
        return None
    with torch.no_grad():
        # vmap is the definition, but outside of a compiler it loses the gradients of what a
        # function captures (docs/log.md): all scores at once serve where both have the same values
        one_by_one = _one_by_one(score_mod, torch.zeros_like(bias, dtype=torch.float64), places)
        if bias.shape != shape or not torch.allclose(bias.double(), one_by_one, equal_nan=True):
            return None
        plain = all(
            torch.allclose(of(score), bias + score, rtol=1e-6, atol=1e-6, equal_nan=True)
            for score in _PROBES
        )
    if plain:
        return 0.0, bias if query.dtype == torch.float64 else bias.float()
    with torch.no_grad():
        # tanh is 1 there, so what comes back is the cap
        cap = float(of(1e30).flatten()[0]) if bias.numel() else 0.0
        if not 0 < cap < 1e29:
            return None
        capped = all(
            torch.allclose(
                of(score), cap * torch.tanh(torch.full_like(bias, score) / cap), rtol=1e-5
            )
            for score in _PROBES
        )
    return (cap, None) if capped else None


def _one_by_one(score_mod: Callable[..., Tensor], scores: Tensor, places: list[Tensor]) -> Tensor:
    """What the modification makes of each score by itself, which is its definition; its gradient is
    lost on the way.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    with TransformGetItemToIndex():
        out: Tensor = _vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places)
    return out.double()
