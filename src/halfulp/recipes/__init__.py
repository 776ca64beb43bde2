"""A recipe says which format every named intermediate of attention is rounded to, and the
structural choices around it.

The algorithms are written once; the arithmetic is a parameter. Every named intermediate passes
through a `Step`, which rounds it as the recipe says and shows it to observers. So one source gives
the fp64 truth, any kernel's arithmetic, and every measurement.
"""

from halfulp.recipes.kernels import (
    KERNEL_RECIPES,
    STAND_INS,
    KernelRecipe,
    kernel_recipe,
    recipe_for,
    recipe_of,
)
from halfulp.recipes.named import (
    BF16_AUTHORS,
    BF16_AUTHORS_STABILIZED,
    BF16_FLASH1,
    BF16_FLASH2,
    BF16_FLOOR,
    BF16_HALFULP,
    BF16_PAPER_STABILIZED,
    BF16_STANDARD,
    BF16_STANDARD_CPU,
    BF16_STANDARD_FP32,
    FP8_FLASH,
    FP16_FLASH2,
    FP16_FLOOR,
    FP32,
    FP64,
    RECIPES,
    TORCH_CPU_FLASH,
    flash2,
    floor,
    uniform,
)
from halfulp.recipes.recipe import STEPS, AnyFormat, Matmul, Recipe, Shift
from halfulp.recipes.spelling import recipe_named, recipe_text
from halfulp.recipes.step import Observer, Step, hash_seed

__all__ = [
    "BF16_AUTHORS",
    "BF16_AUTHORS_STABILIZED",
    "BF16_FLASH1",
    "BF16_FLASH2",
    "BF16_FLOOR",
    "BF16_HALFULP",
    "BF16_PAPER_STABILIZED",
    "BF16_STANDARD",
    "BF16_STANDARD_CPU",
    "BF16_STANDARD_FP32",
    "FP8_FLASH",
    "FP16_FLASH2",
    "FP16_FLOOR",
    "FP32",
    "FP64",
    "KERNEL_RECIPES",
    "RECIPES",
    "STAND_INS",
    "STEPS",
    "TORCH_CPU_FLASH",
    "AnyFormat",
    "KernelRecipe",
    "Matmul",
    "Observer",
    "Recipe",
    "Shift",
    "Step",
    "flash2",
    "floor",
    "hash_seed",
    "kernel_recipe",
    "recipe_for",
    "recipe_named",
    "recipe_of",
    "recipe_text",
    "uniform",
]
