"""PyTorch's FlexAttention, uncompiled and compiled."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfulp.targets.target import BOTH, Target, installed, many_graphs

_UNSEEN = "its masks and changes of scores are code, which no figure can be computed from"


def flex_targets() -> tuple[Target, ...]:
    """FlexAttention both ways."""
    plain = (
        "torch FlexAttention, uncompiled: the reference that holds all scores in fp32 (no gradients"
        " on a CPU)"
    )
    compiled = (
        "torch FlexAttention through torch.compile: some seconds for every new shape (no gradients,"
        " no lse on a CPU)"
    )
    here = no_gradients()
    return (
        Target("flex", _flex, BOTH, plain, forward_only=here, unseen=_UNSEEN),
        Target(
            "flex:compiled",
            _flex_compiled,
            BOTH,
            compiled,
            _cannot_compile(),
            forward_only=here,
            unseen=_UNSEEN,
        ),
    )


def no_gradients() -> str | None:
    """Why FlexAttention gives no gradients here; None: it does."""
    return None if torch.cuda.is_available() else "FlexAttention has no backward pass on a CPU"


def _flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return _flex_with(flex_attention, True, query, key, value, **options)


def _flex_compiled(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: past its limit of recompilations torch would else run the uncompiled function and
    # say so only in a log.
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return _flex_with(compiled, query.device.type != "cpu", query, key, value, **options)


def _flex_with(
    function: Callable[..., Any],
    offers_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> Any:
    """FlexAttention's form of the arguments."""
    from torch.nn.attention.flex_attention import AuxRequest

    query, key, value, block_mask = for_flex(query, key, value, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "block_mask": block_mask}
    if attn_mask is not None:
        options["score_mod"] = _score_mod(attn_mask.expand(*query.shape[:3], key.shape[2]))
    if offers_lse:
        options["return_aux"] = AuxRequest(lse=True)
    with many_graphs(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        returned = function(query, key, value, **options)
    return (returned[0], returned[1].lse) if offers_lse else returned


def for_flex(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """What FlexAttention takes: on a CPU no tensors that require gradients, and a causal mask as a
    BlockMask.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if query.device.type == "cpu":
        query, key, value = query.detach(), key.detach(), value.detach()
    if not is_causal:
        return query, key, value, None
    lengths = query.shape[2], key.shape[2]
    return (
        query,
        key,
        value,
        create_block_mask(_causal, None, None, *lengths, device=query.device.type),
    )


def _causal(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001  # FlexAttention's signature
    return i >= j


def _score_mod(mask: Tensor) -> Callable[..., Tensor]:
    def add(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + mask[batch, head, i, j]

    def choose(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(mask[batch, head, i, j], score, -math.inf)

    return choose if mask.dtype == torch.bool else add


def _cannot_compile() -> str | None:
    if torch.cuda.is_available():
        return None if installed("triton") else "needs triton"
    return (
        None
        if any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        else "needs a C++ compiler"
    )
