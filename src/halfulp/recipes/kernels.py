"""The arithmetics that kernels have: the one table that names them, numbers them and says what each
means for inputs of each dtype.

`halfulp.attention(recipe=...)` takes these names, and so does `halfulp.emulate`, which takes every
other recipe too. The format of the inputs decides: "stock" is BF16_FLASH2 for bfloat16 inputs and
FP16_FLASH2 for float16 ones. Compiled kernels keep their rows in base 2 whatever the recipe, since
hardware has 2^x; emulations keep them in `Recipe.base`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from halfulp.complaints import meant
from halfulp.formats import BF16, FP16, FP32, FP64, Format
from halfulp.recipes.named import BF16_FLASH2, BF16_HALFULP, RECIPES
from halfulp.recipes.recipe import STEPS, Matmul, Recipe, Shift
from halfulp.recipes.spelling import recipe_named

FORMATS: dict[torch.dtype, Format] = {
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float32: FP32,
    torch.float64: FP64,
}


@dataclass(frozen=True)
class KernelRecipe:
    """One arithmetic that the compiled kernels have."""

    name: str
    number: int  # `enum halfulp_recipe` of native/halfulp.h
    in_bf16: Recipe  # what emulates it, and what the backend "torch" runs

    @property
    def shift(self) -> str:
        """How a row is shifted: "maximum", "integer" or "stabilized"."""
        return self.in_bf16.shift.kind


KERNEL_RECIPES: dict[str, KernelRecipe] = {
    recipe.name: recipe
    for recipe in (
        KernelRecipe("halfulp", 0, BF16_HALFULP),
        KernelRecipe("stock", 1, BF16_FLASH2),
        KernelRecipe(
            "exact_delta",
            2,
            BF16_FLASH2.with_(name="BF16_EXACT_DELTA", delta_from="probabilities"),
        ),
        KernelRecipe(
            "published",
            3,
            BF16_FLASH2.with_(name="BF16_PUBLISHED", shift=Shift("stabilized", beta=7.0)),
        ),
    )
}


_CPU_FLASH = (
    "TORCH_CPU_FLASH",
    # the stock algorithm with the structure of PyTorch's CPU kernel: its block of keys and its bf16
    # gradient sums
    "BF16_FLASH2[block_query=32,block_key=512,grad_accumulator=bf16]",
)
_STANDARD = ("BF16_STANDARD", "BF16_STANDARD_CPU")
STAND_INS: dict[str, tuple[str, ...]] = {
    "sdpa": _CPU_FLASH,
    "sdpa:flash": _CPU_FLASH,
    "transformers:sdpa": _CPU_FLASH,
    "torch.nn.functional:scaled_dot_product_attention": _CPU_FLASH,
    "sdpa:math": _STANDARD[::-1],
    "eager": _STANDARD,
    "transformers:eager": _STANDARD,
}
"""Names of other people's kernels: the recipes that stand for them on a CPU, the likest first, that
of PyTorch's flash kernel bit by bit.
"""


@cache
def recipe_of(name: str, dtype: torch.dtype) -> Recipe:
    """The recipe that a kernel's recipe means for inputs of `dtype`: what is bf16 in it takes that
    dtype's format.

    float32 and float64 inputs are worked on in their own dtype, where nothing is rounded, no
    residual is left, and l is what every weight is over: lse would round it. Raises ValueError for
    a name that is no kernel's recipe.
    """
    if name not in KERNEL_RECIPES:
        accepted = f"accepted are {', '.join(KERNEL_RECIPES)}{meant(name, KERNEL_RECIPES)}"
        raise ValueError(f"recipe={name!r}: {accepted}")
    recipe, fmt = KERNEL_RECIPES[name].in_bf16, FORMATS[dtype]
    if fmt == BF16:
        return recipe
    changes: dict[str, Any] = {step: fmt for step in STEPS if getattr(recipe, step) == BF16}
    changes["name"] = recipe.name.replace("BF16", fmt.name.upper())
    if fmt in (FP32, FP64):
        changes |= {
            "residual_bits": None,
            "divisor_from": "row_sum",
            "grad_value_from": "probabilities",
        }
        if recipe.delta_from == "residual":
            changes["delta_from"] = "out"
    if fmt == FP64:
        changes |= {"compute": "float64", "matmul": Matmul(FP64)}
    return recipe.with_(**changes)


def recipe_for(recipe: Recipe | str, dtype: torch.dtype) -> Recipe:
    """A recipe by name, or as it is; a kernel's name means what it means for inputs of `dtype`.

    Raises ValueError for a name that nothing has.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise ValueError(f"recipe={recipe!r}: accepted is a Recipe or the name of a built-in one")
    if recipe in KERNEL_RECIPES:
        return recipe_of(recipe, dtype)
    try:
        return recipe_named(recipe)
    except ValueError as error:
        if recipe.strip().partition("[")[0].upper() in RECIPES:
            raise
        family, colon, rest = recipe.strip().partition(":")
        kernel = f"sdpa{colon}{rest}" if family == "torch" else recipe.strip()
        if kernel in STAND_INS:
            raise ValueError(
                f"recipe={recipe!r}: is a kernel, which runs and trains but cannot be emulated;"
                f" accepted is the recipe that stands for it on a CPU, {STAND_INS[kernel][0]}"
            ) from error
        known = f"{', '.join(KERNEL_RECIPES)}, {', '.join(RECIPES)}"
        raise ValueError(
            f"recipe={recipe!r}: accepted are {known}, the latter each with [field=value,…] if"
            f" wanted{meant(recipe.partition('[')[0], [*KERNEL_RECIPES, *RECIPES])}"
        ) from error


def kernel_recipe(recipe: Recipe | str, dtype: torch.dtype | None = None) -> str:
    """The kernels' name of a recipe: "halfulp" for BF16_HALFULP with bfloat16 inputs.

    Raises:
        ValueError: no kernel rounds as the recipe does on inputs of that dtype; or, where it is
            None, of any.
    """
    if isinstance(recipe, str) and recipe in KERNEL_RECIPES:
        return recipe
    accepted = f"accepted are {', '.join(KERNEL_RECIPES)}"
    try:
        wanted = recipe_for(recipe, dtype or torch.bfloat16)
    except ValueError:
        raise ValueError(f"recipe={recipe!r}: {accepted}") from None
    for known in FORMATS:
        for name in KERNEL_RECIPES:
            if recipe_of(name, known).with_(name=wanted.name) == wanted:
                if dtype in (known, None):
                    return name
                meant = f"it is {name!r} for inputs of {known}, and these are of {dtype}"
                raise ValueError(f"recipe={_text(recipe)}: {meant}; {accepted}")
    raise ValueError(
        f"recipe={_text(recipe)}: no kernel rounds like it; {accepted}, and halfulp.emulate"
        " computes every other"
    )


def _text(recipe: Recipe | str) -> str:
    return repr(recipe.name if isinstance(recipe, Recipe) else recipe)
