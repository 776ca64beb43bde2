"""FlashAttention's own packages, versions 2 to 4."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from halfulp.targets.target import NO_CUDA, Target, UnsupportedError, installed

# Name of the target: what it is, and the modules that may hold its flash_attn_func.
FLASH_ATTN = {
    "flash_attn": ("flash_attn_func of the package flash_attn", ("flash_attn",)),
    "flash_attn:3": (
        "FlashAttention-3; fa3-fwd has its forward pass alone",
        ("flash_attn_interface", "fa3_fwd_interface"),
    ),
    "flash_attn:4": ("FlashAttention-4, of the package flash-attn-4", ("flash_attn.cute",)),
}


def flash_attn_target(name: str) -> Target:
    """A version of flash_attn: `[B, N, H, D]`, heads grouped by itself, a causal mask aligned at
    the bottom right.
    """
    text, modules = FLASH_ATTN[name]

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool = False,
    ) -> Any:
        del enable_gqa  # its heads group themselves
        function = importlib.import_module(next(filter(installed, modules))).flash_attn_func
        same_lengths(query, key, is_causal)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        wants = (
            {"return_attn_probs": True} if name == "flash_attn" else {}
        )  # the others give lse, or none, by themselves
        returned = function(q, k, v, softmax_scale=scale, causal=is_causal, **wants)
        if isinstance(returned, Tensor):
            return returned.transpose(1, 2)
        out, lse, *_ = returned
        if lse is not None and name != "flash_attn:4":  # it is documented as ignoring its gradient
            lse = lse.detach()
        return out.transpose(1, 2) if lse is None else (out.transpose(1, 2), lse)

    return Target(name, call, frozenset({"enable_gqa"}), text, no_flash_attn(modules))


def no_flash_attn(modules: tuple[str, ...] = ("flash_attn",)) -> str | None:
    """Why none of these modules can run here; None: one can."""
    if not any(map(installed, modules)):
        return f"{' or '.join(modules)} is not installed"
    return None if torch.cuda.is_available() else NO_CUDA


def same_lengths(query: Tensor, key: Tensor, is_causal: bool) -> None:
    """Raise where FlashAttention would put the diagonal elsewhere than SDPA does."""
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "aligns a causal mask of unequal lengths at the bottom right, not at the top left"
        )
