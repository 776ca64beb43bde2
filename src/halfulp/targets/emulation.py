"""Which recipes stand for a kernel whose operations cannot be replaced one by one."""

from __future__ import annotations

import torch

from halfulp.recipes import KERNEL_RECIPES, recipe_of, recipe_text
from halfulp.targets.dialect import canonical, recipe_in
from halfulp.targets.own_kernels import halfulp_named

# The stock kernel's algorithm with the structure of PyTorch's CPU kernel: its block of keys and its
# bf16 gradient sums.
_CPU_LIKE = "BF16_FLASH2[block_query=32,block_key=512,grad_accumulator=bf16]"
_STANDARD = ("BF16_STANDARD", "BF16_STANDARD_CPU")
_ALIKE = {
    "sdpa:math": ("BF16_STANDARD_CPU", "BF16_STANDARD"),
    "eager": _STANDARD,
    "transformers:eager": _STANDARD,
}
_CPU_FLASH = frozenset(
    {
        "sdpa",
        "sdpa:flash",
        "transformers:sdpa",
        "torch.nn.functional:scaled_dot_product_attention",
    }
)
"""Names of PyTorch's flash kernel on a CPU, which TORCH_CPU_FLASH emulates bit by bit."""


def emulations(name: str, device: str = "cpu") -> tuple[str, ...]:
    """Texts of the recipes to try in the place of a kernel, the likest first; a recipe stands for
    itself.

    A kernel that nobody knows is taken for FlashAttention-2's algorithm.
    """
    recipe = recipe_in(name)
    if recipe is not None:
        return (recipe_text(recipe),)
    spelled = canonical(name)
    if spelled in _CPU_FLASH and torch.device(device).type == "cpu":
        return "TORCH_CPU_FLASH", _CPU_LIKE
    family, colon, rest = spelled.partition(":")
    if family == "halfulp" and halfulp_named(rest.split(":") if colon else []) is not None:
        kernels = [part for part in rest.split(":") if part in KERNEL_RECIPES]
        return (recipe_text(recipe_of(kernels[0] if kernels else "halfulp", torch.bfloat16)),)
    return _ALIKE.get(spelled, ("BF16_FLASH2",))
