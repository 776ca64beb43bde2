"""Recipes as text: what is written is read back as the same recipe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfulp import formats
from halfulp.formats import custom, parse_format
from halfulp.recipes import BF16_FLASH2, RECIPES, STEPS, Matmul, Shift, recipe_named, recipe_text

FORMATS = st.one_of(
    st.sampled_from([*formats.FORMATS]),
    # e2m1 and its like name the OCP format of that width, not the IEEE-style one
    st.builds(custom, st.integers(2, 8), st.integers(1, 23)).filter(
        lambda fmt: parse_format(fmt.name) == fmt
    ),
    st.sampled_from(["stochastic", "toward_zero", "up"]).map(
        lambda mode: formats.BF16.with_(rounding=mode)
    ),
)
CHANGES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("scores", "out", "residual", "grad_scores", "delta"), FORMATS)
    | {
        "block_key": st.none() | st.integers(1, 512),
        "delta_from": st.sampled_from(
            ["out", "residual", "exact_out", "recomputed", "probabilities"]
        ),
        "row_sum_floor": st.floats(0, 1e-3),
        "seed": st.integers(0, 100),
        "shift": st.builds(
            Shift, st.just("stabilized"), st.floats(1.5, 8), unconditional=st.booleans()
        ),
        "matmul": st.builds(Matmul, st.just(formats.BF16), st.just("blocked"), st.integers(1, 64)),
    },
)


@given(st.sampled_from(sorted(RECIPES)), CHANGES)
def test_any_recipe_reads_back(name, changes) -> None:
    recipe = RECIPES[name].with_(**changes)
    again = recipe_named(recipe_text(recipe))
    assert again.with_(name=recipe.name) == recipe
    assert recipe_named(again.name) == again


def test_built_ins_are_their_names() -> None:
    for name, recipe in RECIPES.items():
        assert recipe_text(recipe) == name
        assert recipe_named(f" {name.lower()} ") == recipe


def test_parts_have_a_dot_or_stand_for_their_kind() -> None:
    short = recipe_named("BF16_FLASH2[shift=stabilized, shift.beta=4, matmul=sequential]")
    assert (short.shift.kind, short.shift.beta, short.matmul.order) == (
        "stabilized",
        4.0,
        "sequential",
    )
    assert recipe_named("BF16_FLASH2[out=bf16/stochastic]").out.rounding == "stochastic"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("BF16", "recipe='BF16': accepted are FP64"),
        ("BF16_FLASH2[", "accepted are"),
        ("BF16_FLASH2[out=bf17]", "format='bf17'"),
        ("BF16_FLASH2[out=bf16/often]", "rounding"),
        ("BF16_FLASH2[out=nvfp4/stochastic]", "takes no rounding mode"),
        ("BF16_FLASH2[block_key=many]", "block_key='many': accepted is an integer"),
        ("BF16_FLASH2[row_sum_floor=x]", "accepted is a number"),
        ("BF16_FLASH2[shift.unconditional=yes]", "accepted are true and false"),
        ("BF16_FLASH2[shift.size=3]", "size='3': not a field"),
        ("BF16_FLASH2[delta_from=luck]", "delta_from='luck'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        recipe_named(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_format_without_a_name_has_no_text() -> None:
    odd = formats.BF16.with_(name="odd", bias=100)
    with pytest.raises(ValueError, match="'odd' has no text form"):
        recipe_text(BF16_FLASH2.with_(out=odd))


def test_every_step_can_be_set() -> None:
    for name in STEPS:
        assert getattr(recipe_named(f"FP32[{name}=e5m7]"), name) == custom(5, 7)
