"""Substitutions: plans say what cells hold, and every operation changes what it names and nothing
else.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfulp.formats import BF16, FP32
from halfulp.isolate.substitutions import (
    EXACT,
    OPERATIONS,
    Place,
    bits_of,
    cells_of,
    changed,
    halfulp_like,
    in_cells,
    only,
    places,
    places_text,
    plan_of,
    suspects,
    whole_blocks,
    with_bits,
)
from halfulp.recipes import (
    BF16_AUTHORS,
    BF16_FLASH2,
    BF16_HALFULP,
    BF16_STANDARD,
    RECIPES,
    TORCH_CPU_FLASH,
    Recipe,
    recipe_named,
    recipe_text,
)
from halfulp.recipes import (
    FP32 as FP32_RECIPE,
)
from halfulp.targets import emulations
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import Language, LayerTask, Pictures, RunConfig

BY_NAME = {one.name: one for one in OPERATIONS}


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_plan_says_what_the_cells_hold(layers: int, heads: int, data: st.DataObject) -> None:
    choices = st.sampled_from(["torch:fp32", "BF16_FLASH2", "BF16_FLASH2[out=fp32]"])
    cells: dict[Place, str] = {
        (i, j): data.draw(choices) for i in range(layers) for j in range(heads)
    }
    config = RunConfig(Language(layers=layers, heads=heads, width=heads), plan_of(cells))
    assert cells_of(config) == cells
    assert AttentionPlan.of(*str(config.attention).split("; ")) == config.attention


def test_a_plan_is_short() -> None:
    cells = dict.fromkeys(((i, j) for i in range(12) for j in range(12)), EXACT)
    assert str(plan_of(cells)) == EXACT
    cells |= {(1, 2): "BF16_FLASH2", (1, 5): "BF16_FLASH2"} | {
        (3, j): "BF16_FLASH2" for j in range(12)
    }
    assert str(plan_of(cells)) == "torch:fp32; layer 1 head 2,5: BF16_FLASH2; layer 3: BF16_FLASH2"


def test_what_is_suspect_and_what_is_left_of_it() -> None:
    cells = {(0, 0): "torch:flash", (0, 1): "fp32", (1, 0): "BF16_FLASH2", (1, 1): EXACT}
    assert suspects(cells) == {(0, 0), (1, 0)}
    assert only(cells, [(1, 0)]) == {
        (0, 0): EXACT,
        (0, 1): EXACT,
        (1, 0): "BF16_FLASH2",
        (1, 1): EXACT,
    }


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([(1, 0), (1, 1), (1, 2)], "layer 1"),
        ([(1, 2), (1, 0)], "heads 0 and 2 of layer 1"),
        (
            [(0, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)],
            "layers 2 and 4; head 1 of layer 0",
        ),
    ],
)
def test_places_in_words(found: list[Place], text: str) -> None:
    assert places_text(found, 3) == text


def test_pictures_have_two_attentions_a_layer() -> None:
    assert [
        places(w) for w in (LayerTask(), Language(layers=3, heads=4), Pictures(layers=2, heads=4))
    ] == [
        (1, 1),
        (3, 4),
        (4, 4),
    ]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("recipe", [BF16_FLASH2, BF16_AUTHORS], ids=lambda one: one.name)
def test_an_operation_changes_what_it_names_and_nothing_else(
    recipe: Recipe, operation: object
) -> None:
    result = changed(recipe, [operation])  # type: ignore[list-item]
    named = {name for name, _ in operation.fields}  # type: ignore[attr-defined]
    if result is None:
        assert recipe is BF16_FLASH2, "everything is rounded in the authors' recipe"
        assert all(getattr(recipe, name) != BF16 for name in named)
        return
    differing = {
        f.name for f in fields(Recipe) if getattr(recipe, f.name) != getattr(result, f.name)
    } - {"name"}
    assert differing
    assert differing <= named
    assert recipe_named(result.name) == result, "a run folder can say it"


def test_operations_stack_and_leave_alone_what_is_not_rounded() -> None:
    chosen = [BY_NAME[name] for name in ("residual", "row-sum", "weights", "integer")]
    found = changed(BF16_FLASH2, chosen)
    assert found is not None
    assert (
        found.delta_from,
        found.row_sum_from,
        found.backward_weights,
        found.shift.kind,
        found.base,
    ) == (
        "residual",
        "rounded",
        "rounded",
        "integer",
        "2",
    )
    assert changed(BF16_FLASH2, [BY_NAME["scores-fp32"]]) is None, "its scores are fp32 already"
    assert changed(BF16_FLASH2, [BY_NAME["residual"], BY_NAME["scores-fp32"]]) is None
    gradients = changed(TORCH_CPU_FLASH, [BY_NAME["gradients-fp32"]])
    assert gradients is not None
    assert gradients.grad_accumulator == FP32
    assert gradients.grad_block == TORCH_CPU_FLASH.grad_block


def test_what_an_algorithm_cannot_do_is_no_option() -> None:
    assert changed(TORCH_CPU_FLASH, [BY_NAME["delta-dP.P"]]) is None
    assert changed(TORCH_CPU_FLASH, [BY_NAME["residual"]]) is not None
    assert changed(BF16_STANDARD, [BY_NAME["residual"]]) is None, "its δ does not come from O"
    assert changed(BF16_STANDARD, [BY_NAME["row-sum"]]) is None


def test_only_recipes_that_round_are_changed() -> None:
    cells = {
        (0, 0): "torch:flash",
        (0, 1): "BF16_FLASH2",
        (0, 2): "FP32",
        (0, 3): "BF16_FLASH2[out=e8m1]",
    }
    found = in_cells(cells, lambda recipe: changed(recipe, [BY_NAME["O-fp32"]]))
    assert found == cells | {(0, 1): "BF16_FLASH2[out=fp32]", (0, 3): "BF16_FLASH2[out=fp32]"}
    assert in_cells({(0, 0): "torch:flash"}, lambda recipe: recipe) is None
    assert in_cells(cells, lambda recipe: None) is None


@pytest.mark.parametrize(
    ("choice", "device", "recipes"),
    [
        ("BF16_FLASH2[out=fp32]", "cpu", ("BF16_FLASH2[out=fp32]",)),
        (
            "torch:flash",
            "cpu",
            ("TORCH_CPU_FLASH", "BF16_FLASH2[block_query=32,block_key=512,grad_accumulator=bf16]"),
        ),
        ("torch:flash", "cuda:1", ("BF16_FLASH2",)),
        ("torch:math", "cpu", ("BF16_STANDARD_CPU", "BF16_STANDARD")),
        ("flash2", "cpu", ("BF16_FLASH2",)),
        ("halfulp", "cpu", ("BF16_HALFULP",)),
        ("halfulp:cpu:stock", "cpu", ("BF16_FLASH2",)),
        ("kernel.py:attention", "cpu", ("BF16_FLASH2",)),
    ],
)
def test_every_kernel_has_recipes_to_try(
    choice: str, device: str, recipes: tuple[str, ...]
) -> None:
    assert emulations(choice, device) == recipes
    assert all(recipe_named(recipe) for recipe in recipes)


def test_one_tile() -> None:
    found = whole_blocks(BF16_FLASH2)
    assert found is not None
    assert (found.block_query, found.block_key) == (None, None)
    assert whole_blocks(found) is None
    assert whole_blocks(BF16_STANDARD) is None


def test_halfulp_takes_the_tiles() -> None:
    found = halfulp_like(BF16_FLASH2.with_(block_key=16))
    assert found == BF16_HALFULP.with_(block_key=16)


def test_bits_move_the_mantissa_and_keep_the_rounding() -> None:
    base = recipe_named("BF16_FLASH2[out=e8m3/down]")
    for bits in (1, 5, 23):
        found = with_bits(base, "out", bits)
        assert found is not None
        assert (found.out.mantissa_bits, found.out.exponent_bits, found.out.rounding) == (
            bits,
            8,
            "down",
        )  # type: ignore[union-attr]
        assert recipe_named(recipe_text(found)).out == found.out
    assert with_bits(base, "out", 3) is base
    assert with_bits(base, "scores", 3) is None
    assert bits_of({(0, 0): "BF16_FLASH2", (0, 1): recipe_text(base), (0, 2): EXACT}, "out") == 3
    assert bits_of({(0, 0): "BF16_FLASH2"}, "scores") is None


def test_no_operation_makes_a_recipe_of_fp32_worse() -> None:
    """Formats only ever become wider: no operation but the residual's own names another format than
    fp32.
    """
    for one in OPERATIONS:
        for name, value in one.fields:
            assert value in (FP32, BF16) or not hasattr(value, "mantissa_bits")
            assert value != BF16 or name == "residual"
    assert all(
        changed(FP32_RECIPE, [BY_NAME[name]]) is None
        for name in ("O-fp32", "dS-fp32", "inputs-fp32")
    )
    assert len(BY_NAME) == len(OPERATIONS)
    assert set(RECIPES) >= {"BF16_HALFULP"}
