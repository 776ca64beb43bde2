"""Which recipes stand for a kernel whose operations cannot be replaced one by one."""

from __future__ import annotations

import torch

from halfulp.recipes import KERNEL_RECIPES, STAND_INS, recipe_of, recipe_text
from halfulp.targets.dialect import canonical, recipe_in
from halfulp.targets.own_kernels import halfulp_named


def emulations(name: str, device: str = "cpu") -> tuple[str, ...]:
    """Texts of the recipes to try in the place of a kernel, the likest first; a recipe stands for
    itself.

    A kernel that nobody knows is taken for FlashAttention-2's algorithm.
    """
    recipe = recipe_in(name)
    if recipe is not None:
        return (recipe_text(recipe),)
    spelled = canonical(name)
    known = STAND_INS.get(spelled, ("BF16_FLASH2",))
    if known[0] == "TORCH_CPU_FLASH" and torch.device(device).type != "cpu":
        return ("BF16_FLASH2",)
    family, colon, rest = spelled.partition(":")
    if family == "halfulp" and halfulp_named(rest.split(":") if colon else []) is not None:
        kernels = [part for part in rest.split(":") if part in KERNEL_RECIPES]
        return (recipe_text(recipe_of(kernels[0] if kernels else "halfulp", torch.bfloat16)),)
    return known
