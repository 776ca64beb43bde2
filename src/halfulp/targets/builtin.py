"""The attention kernels that a machine already has: PyTorch's, FlashAttention's, transformers', and
our own recipes.

A target that cannot run here says why instead of falling back to another kernel: an audit of the
wrong kernel is worse than none.
"""

from __future__ import annotations

from halfulp.recipes import RECIPES
from halfulp.targets.flash_attention import FLASH_ATTN, flash_attn_target
from halfulp.targets.flex import flex_targets
from halfulp.targets.own_kernels import halfulp_targets, recipe_target
from halfulp.targets.sdpa import sdpa_targets
from halfulp.targets.target import Target
from halfulp.targets.transformers_layer import TRANSFORMERS, transformers_target


def builtin_targets() -> tuple[Target, ...]:
    """Every built-in target, those that cannot run here too (their `missing` says why)."""
    return (
        *sdpa_targets(),
        *flex_targets(),
        *map(flash_attn_target, FLASH_ATTN),
        *halfulp_targets(),
        *map(transformers_target, TRANSFORMERS),
        *(recipe_target(recipe) for recipe in RECIPES.values()),
    )
