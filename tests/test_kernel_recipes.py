"""One table of the kernels' recipes: the C header, the kernels and the public functions say what it
says.
"""

import re
from pathlib import Path

import pytest
import torch

import halfulp
from halfulp.attention import patch
from halfulp.kernels import cpu
from halfulp.recipes import (
    BF16_FLASH2,
    BF16_HALFULP,
    FP16_FLASH2,
    KERNEL_RECIPES,
    RECIPES,
    Recipe,
    kernel_recipe,
    recipe_for,
    recipe_of,
)

HEADER = Path(__file__).parents[1] / "native" / "halfulp.h"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def numbers(header: str) -> dict[str, int]:
    """The recipes of `enum halfulp_recipe`, by name."""
    body = re.search(r"enum halfulp_recipe \{(.*?)\}", header, re.DOTALL)
    assert body is not None
    found = re.findall(r"HALFULP_RECIPE_(\w+)\s*=\s*(\d+)", body[1])
    return {name.lower(): int(number) for name, number in found}


def test_the_c_header_has_the_tables_numbers():
    header = HEADER.read_text(encoding="utf-8")
    told = {name: recipe.number for name, recipe in KERNEL_RECIPES.items()}
    assert numbers(header) == told
    assert numbers(header.replace("STOCK = 1", "STOCK = 4")) != told


def test_every_kernel_takes_every_recipe_of_the_table_and_no_other():
    q = torch.randn(1, 1, 4, 8)
    call = halfulp.calls.Call(q, q, q)
    for name, recipe in KERNEL_RECIPES.items():
        assert name == recipe.name
        assert cpu.supports(call, name) is None
    assert cpu.supports(call, "BF16_HALFULP") == "recipe 'BF16_HALFULP'"


@pytest.mark.parametrize("name", KERNEL_RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recipe_and_the_name_it_has_in_kernels_are_one_thing(name, dtype):
    recipe = recipe_of(name, dtype)
    assert recipe_for(name, dtype) == recipe
    assert kernel_recipe(name, dtype) == name
    # in float32 and float64 nothing is rounded, and one recipe may be what two names mean
    assert recipe_of(kernel_recipe(recipe, dtype), dtype).with_(name="") == recipe.with_(name="")


def test_the_format_of_the_inputs_decides():
    assert recipe_of("halfulp", torch.bfloat16) == BF16_HALFULP
    assert recipe_of("stock", torch.bfloat16) == BF16_FLASH2
    assert recipe_of("stock", torch.float16) == FP16_FLASH2
    assert kernel_recipe("bf16_halfulp", torch.bfloat16) == "halfulp"
    q = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for recipe in ("BF16_FLASH2", BF16_FLASH2, "bf16_flash2[delta_from=out]"):
        assert torch.equal(
            halfulp.attention(q, q, q, recipe=recipe), halfulp.attention(q, q, q, recipe="stock")
        )


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("BF16_HALFULP", "it is 'halfulp' for inputs of torch.bfloat16, and these are of torch.fl"),
        ("BF16_FLASH1", "no kernel rounds like it; accepted are halfulp.*halfulp.emulate computes"),
        ("BF16_FLASH2[out=e8m2]", "no kernel rounds like it"),
        ("stok", "accepted are halfulp, stock, exact_delta, published"),
        (7, "recipe=7: accepted are halfulp"),
    ],
)
def test_what_no_kernel_computes_says_why_and_what_would(recipe, text):
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=text) as caught:
        halfulp.attention(q, q, q, recipe=recipe)
    assert "\n" not in str(caught.value)


def test_every_named_recipe_is_emulated_by_its_name_and_patch_knows_which_it_can_run():
    for name, recipe in RECIPES.items():
        assert recipe_for(name, torch.float16) is recipe
    with patch(recipe="FP16_FLASH2"):
        q = torch.randn(1, 1, 4, 8).half()
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == torch.float16
    with pytest.raises(ValueError, match="no kernel rounds like it"), patch(recipe="BF16_FLASH1"):
        pass
    with pytest.raises(ValueError, match=r"recipe='BF61': accepted are halfulp.*FP64"):
        recipe_for("BF61", torch.float32)
    assert isinstance(recipe_for("stock", torch.float64), Recipe)
