"""Recipes are data that every algorithm obeys: each field and each step changes bits, each observer
only looks.
"""

from __future__ import annotations

import math
import pydoc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from halfulp import emulate
from halfulp.formats import BF16, E2M1, FP16, FP32, MXFP8_E4M3, OCP_E4M3, custom, round_to
from halfulp.recipes import (
    BF16_FLASH2,
    BF16_HALFULP,
    BF16_PAPER_STABILIZED,
    FP64,
    RECIPES,
    STEPS,
    Matmul,
    Recipe,
    Shift,
    Step,
    flash2,
    floor,
    hash_seed,
    recipe_named,
    uniform,
)
from halfulp.recipes import FP32 as FP32_RECIPE
from halfulp.testing import Inputs, gaussian

ALGORITHMS = ("standard", "flash1", "flash2")
STOCHASTIC = BF16.with_(rounding="stochastic")
STRUCTURE = tuple(f.name for f in fields(Recipe) if f.name not in STEPS and f.name != "name")
INPUTS = gaussian(1, length=70, dim=24)
INPUTS.key[:, :, 1::2] = INPUTS.key[:, :, ::2]  # every maximum is repeated


def run(recipe: Recipe, inputs: Inputs = INPUTS, observers: Iterable[Any] = ()) -> list[Tensor]:
    """out, lse and the three gradients of a loss that uses both results."""
    q, k, v = (x.clone().requires_grad_() for x in inputs.operands)
    out, lse = emulate(
        q, k, v, is_causal=True, recipe=recipe, observers=tuple(observers), return_lse=True
    )
    ((out * inputs.grad_out).sum() + lse.sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit, a NaN equal to a NaN."""
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


# What every structural field is changed from and to; a new field without a line here fails a test.
TILED = FP32_RECIPE.with_(block_query=16, block_key=16)
HALFULP = BF16_HALFULP.with_(block_query=16, block_key=16)
TIED = Shift("stabilized", beta=2.0)
CHANGES: dict[str, list[tuple[Recipe, Any]]] = {
    "algorithm": [(TILED, "standard"), (TILED, "flash1")],
    "compute": [(TILED.with_(matmul=Matmul(order="sequential")), "float64")],
    "matmul": [
        (TILED, Matmul(BF16, "sequential")),
        (TILED.with_(matmul=Matmul(BF16, "blocked", 3)), Matmul(BF16, "blocked", 5)),
    ],
    "block_query": [(uniform(BF16, block_key=16), 5)],
    "block_key": [(TILED, 8), (TILED, None)],
    "base": [(TILED, "2")],
    "exponential": [(HALFULP, "split")],
    "exp_degree": [(TILED, 3), (TILED.with_(exp_degree=3), 2)],
    "scale_into": [(TILED.with_(scaled_operand=BF16), "query"), (uniform(BF16), "key")],
    "division": [(TILED, "multiply")],
    "shift": [
        (TILED.with_(base="2"), Shift("integer")),
        (TILED, Shift("offset", offset=0.3)),
        (uniform(BF16, shift=TIED), Shift("stabilized", beta=7.0)),
        (uniform(BF16, shift=TIED), Shift("stabilized", beta=2.0, gamma=0.5)),
        (uniform(BF16, shift=TIED), Shift("stabilized", beta=2.0, tie_tolerance=0.5)),
        (uniform(BF16, shift=TIED), Shift("stabilized", beta=2.0, unconditional=True)),
    ],
    "row_sum_from": [(BF16_FLASH2, "rounded")],
    "rescale_of": [(TILED.with_(rescale=BF16), way) for way in ("out", "row_sum")],
    "backward_weights": [(HALFULP, "lse"), (HALFULP, "maximum")],
    "delta_from": [
        (BF16_FLASH2, way) for way in ("residual", "exact_out", "recomputed", "probabilities")
    ],
    "residual_bits": [(HALFULP.with_(residual_bits=3), None), (HALFULP, 3)],
    "input_scaling": [(BF16_FLASH2.with_(value=OCP_E4M3), "tensor")],
    "weights_scale": [(BF16_FLASH2.with_(weights_operand=OCP_E4M3), 256.0)],
    "row_sum_floor": [(TILED, 20.0)],
    "lse_from": [(HALFULP, "row_sum")],
    "divisor_from": [(HALFULP, "lse"), (HALFULP.with_(divisor_from="lse"), "row_sum")],
    "grad_value_from": [(HALFULP, "probabilities")],
    "gradient_scale_at": [(uniform(BF16), "scores"), (uniform(BF16), "probabilities")],
    "seed": [(BF16_FLASH2.with_(out=STOCHASTIC), 1)],
}


def test_every_field_has_a_case() -> None:
    assert set(CHANGES) == set(STRUCTURE)


@pytest.mark.parametrize(
    ("field", "start", "value"),
    [(f, start, value) for f, cases in CHANGES.items() for start, value in cases],
)
def test_every_field_changes_bits(field: str, start: Recipe, value: Any) -> None:
    assert getattr(start, field) != value
    assert not same(run(start), run(start.with_(**{field: value})))


# Steps that an algorithm has no use for: standard attention rescales nothing, and FlashAttention-1
# alone renormalizes.
WITHOUT = {
    "standard": {"max_change", "rescale", "rescaled", "renormalized"},
    "flash1": set(),
    "flash2": {"renormalized"},
}
COARSE_BASES = {
    algorithm: [
        TILED.with_(algorithm=algorithm, **structure)
        for structure in (
            {
                "delta_from": "residual",
                "out": BF16,
                "shift": Shift("stabilized", beta=2.0, tie_tolerance=0.05),
            },
            {"gradient_scale_at": "scores"},
            {"gradient_scale_at": "probabilities"},
            {"backward_weights": "maximum"},
            {"scale_into": "query", "division": "multiply"},
        )
    ]
    for algorithm in ALGORITHMS
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_changes_bits(algorithm: str, step: str) -> None:
    """Rounding it to one mantissa bit changes a result or a gradient in every algorithm that has
    it.
    """
    coarse = custom(8, 1)
    changes = any(
        not same(run(base), run(base.with_(**{step: coarse}))) for base in COARSE_BASES[algorithm]
    )
    assert changes != (step in WITHOUT[algorithm])


class Recording(Recipe):
    """A recipe that notes which of its fields are read once it is made."""

    def __getattribute__(self, name: str) -> Any:
        if (read := object.__getattribute__(self, "__dict__").get("_read")) is not None:
            read.add(name)
        return object.__getattribute__(self, name)


def fields_read(base: Recipe, kind: type[Recipe] = Recording) -> set[str]:
    """The fields that an algorithm reads in a forward and a backward pass."""
    recipe = kind(**{f.name: getattr(base, f.name) for f in fields(base)})
    read: set[str] = set()
    hash(recipe)  # reads them all, once
    object.__setattr__(recipe, "_read", read)
    run(recipe)
    return read


def unread(kind: type[Recipe], bases: Iterable[Recipe]) -> set[str]:
    """Fields that no algorithm reads. Step names are read by `Step` itself, so they are not proof
    of anything here.
    """
    ignored = {"name", *STEPS}
    return (
        {f.name for f in fields(kind)}
        - ignored
        - set().union(*(fields_read(base, kind) for base in bases))
    )


SEEN = [
    *(base for bases in COARSE_BASES.values() for base in bases),
    HALFULP,
    BF16_FLASH2.with_(out=STOCHASTIC),
    BF16_FLASH2.with_(value=OCP_E4M3),
]


def test_every_field_is_read_by_an_algorithm() -> None:
    assert unread(Recording, SEEN) == set()


def test_a_planted_field_that_nothing_reads_is_caught() -> None:
    @dataclass(frozen=True, eq=False)  # with Recipe's own hash, which is read once
    class Planted(Recording):
        rounding_of_nothing: str = "never"

    assert unread(Planted, SEEN) == {"rounding_of_nothing"}


def passed(bases: Iterable[Recipe]) -> set[str]:
    """The names that the algorithms pass to `step`."""
    names: set[str] = set()
    for base in bases:
        run(base, observers=[lambda name, _, rounded: names.add(name)])
    return names


def test_every_step_is_passed_and_every_name_passed_is_a_step() -> None:
    assert passed(SEEN) == set(STEPS)
    for algorithm, bases in COARSE_BASES.items():
        assert set(STEPS) - passed(bases) == WITHOUT[algorithm]
    assert passed(RECIPES.values()) <= set(STEPS)
    with pytest.raises(AssertionError, match="wieghts"):
        Step(FP64)("wieghts", torch.zeros(1))


@pytest.mark.parametrize("name", RECIPES)
def test_observers_see_every_rounding_and_change_nothing(name: str) -> None:
    recipe, count = RECIPES[name], 0

    def watch(step: str, exact: Tensor, rounded: Tensor) -> None:
        nonlocal count
        count += 1
        assert exact.dtype == rounded.dtype == recipe.dtype
        assert torch.equal(rounded, round_to(exact, getattr(recipe, step)))

    assert same(run(recipe, observers=[watch]), run(recipe))
    assert count > 10


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_command_gives_the_same_bits(name: str) -> None:
    assert same(run(RECIPES[name]), run(RECIPES[name]))


def test_what_observers_keep_stays_as_it_was() -> None:
    """Tiles are worked on in place only where nobody looks."""
    kept: list[tuple[Tensor, Tensor]] = []
    run(
        HALFULP,
        observers=[lambda _, exact, rounded: kept.extend((x, x.clone()) for x in (exact, rounded))],
    )
    assert kept
    assert all(torch.equal(x, copy) for x, copy in kept)


@pytest.mark.parametrize(
    "change", [lambda e, r: r.zero_(), lambda e, r: e.add_(1), lambda e, r: r[..., :1].mul_(2)]
)
def test_an_observer_that_changes_something_is_refused(
    change: Callable[[Tensor, Tensor], Any],
) -> None:
    def meddle(name: str, exact: Tensor, rounded: Tensor) -> None:
        if name == "weights_operand":
            change(exact, rounded)

    with pytest.raises(RuntimeError, match=r"an observer changed step 'weights_operand'"):
        run(BF16_FLASH2, observers=[meddle])


def test_in_inference_mode_observers_get_copies() -> None:
    q, k, v, _ = INPUTS
    expected = emulate(q, k, v, recipe=BF16_FLASH2)
    with torch.inference_mode():
        out = emulate(
            q, k, v, recipe=BF16_FLASH2, observers=[lambda name, exact, rounded: rounded.zero_()]
        )
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "step", ["weights_operand", "scores", "grad_scores", "out", "grad_accumulator", "grad_query"]
)
def test_stochastic_recipes_repeat_by_seed(step: str) -> None:
    recipe = BF16_FLASH2.with_(**{step: STOCHASTIC}, block_query=16, block_key=16)
    assert same(run(recipe), run(recipe))
    assert not same(run(recipe), run(recipe.with_(seed=1)))


def test_stochastic_tiles_do_not_share_their_draws() -> None:
    """Two tiles of equal content are rounded differently; with one seed for all they would agree
    bit by bit.
    """
    inputs = INPUTS.map(lambda x: torch.cat([x[:, :, :16]] * 2, 2))
    seen: list[Tensor] = []
    recipe = BF16_FLASH2.with_(weights_operand=STOCHASTIC, block_query=16, block_key=16)
    watch = [lambda name, _, rounded: seen.append(rounded) if name == "weights_operand" else None]
    emulate(*inputs.operands, recipe=recipe, observers=watch)
    assert not torch.equal(seen[0], seen[1])
    assert (seen[0] - seen[1]).abs().max() <= 2**-7


def test_stochastic_rounding_of_a_block_format_is_stochastic() -> None:
    fmt = MXFP8_E4M3
    element = fmt.element.with_(rounding="stochastic")
    x = torch.rand(4, 64)
    recipe = FP32_RECIPE.with_(weights=type(fmt)("mx_sr", element, fmt.block_size, fmt.scale))
    step = Step(recipe)
    first, second = step("weights", x), step("weights", x)
    assert not torch.equal(first, second)
    assert torch.equal(Step(recipe)("weights", x), first)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert [hash_seed(0, "out", 1), hash_seed(1, "out", 1), hash_seed(0, "out", 2)] == [
        1346756576,
        142262455,
        1371923004,
    ]
    assert len(
        {hash_seed(s, n, c) for s in range(20) for n in STEPS for c in range(20)}
    ) == 400 * len(STEPS)


def test_named_recipes() -> None:
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert recipe_named(name.lower()) is recipe
    assert len(set(RECIPES.values())) == len(RECIPES)
    assert recipe_named("fp16_flash2") == flash2(FP16)
    assert floor(BF16) == RECIPES["BF16_FLOOR"]
    assert uniform(FP64.out).dtype == torch.float64
    assert uniform(FP16, "flash1").name == "FP16_UNIFORM_FLASH1"


def test_a_step_wider_than_the_arithmetic_is_no_step() -> None:
    step = Step(BF16_FLASH2)
    assert step.rounds("out")
    assert not step.rounds("scores")
    assert not Step(FP32_RECIPE.with_(scores=FP32)).rounds("scores")
    x = torch.rand(3)
    assert step("scores", x) is x


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: FP64.with_(block_query=0), r"block_query=0: accepted is an integer of at least 1"),
    (lambda: FP64.with_(block_key=2.5), r"block_key=2\.5: accepted is an integer of at least 1"),
    (lambda: FP64.with_(block_key=True), r"block_key=True: accepted is an integer"),
    (
        lambda: FP64.with_(algorithm="flash3"),
        r"algorithm='flash3': accepted are 'standard', 'flash1'",
    ),
    (
        lambda: FP64.with_(compute="bfloat16"),
        r"compute='bfloat16': accepted are 'float32', 'float64'",
    ),
    (lambda: FP64.with_(base=2), r"base=2: accepted are 'e', '2'"),
    (lambda: FP64.with_(row_sum_from="P"), r"row_sum_from='P': accepted are 'exact', 'rounded'"),
    (lambda: FP64.with_(delta_from="O"), r"delta_from='O': accepted are 'out', 'residual'"),
    (
        lambda: FP64.with_(weights_scale=0.0),
        r"weights_scale=0\.0: accepted is a finite number above 0",
    ),
    (lambda: FP64.with_(row_sum_floor=math.inf), r"row_sum_floor=inf: accepted is a finite number"),
    (lambda: FP64.with_(residual_bits=1), r"residual_bits=1: accepted are 2 to 16, or None"),
    (
        lambda: FP64.with_(residual_bits=8, out=MXFP8_E4M3),
        r"residual_bits=8: accepted is None where out is .* mxfp8_e4m3",
    ),
    (lambda: FP64.with_(scores="bf16"), r"scores='bf16': accepted is a format"),
    (
        lambda: FP64.with_(score=BF16),
        r"score=.*: not a recipe field; accepted are accumulator, algorithm",
    ),
    (
        lambda: FP64.with_(shift=Shift("integer")),
        r"base='e': an integer shift is exact only with base '2'",
    ),
    (
        lambda: FP64.with_(exponential="split"),
        r"exponential='split': accepted only with an integer shift",
    ),
    (
        lambda: FP64.with_(algorithm="standard", row_sum_from="rounded"),
        r"row_sum_from='rounded': .*; accepted is 'exact'",
    ),
    (lambda: FP32_RECIPE.with_(compute="float64"), r"matmul=fp32: .*; accepted is Matmul\(FP64\)"),
    (lambda: Matmul(BF16), r"accumulate=bf16: .*; accepted are FP32 and FP64"),
    (lambda: Matmul(MXFP8_E4M3), r"accumulate=mxfp8_e4m3: accepted is a scalar format"),  # type: ignore[arg-type]
    (lambda: Matmul(order="tree"), r"order='tree': accepted are 'native'"),  # type: ignore[arg-type]
    (lambda: Matmul(BF16, "blocked", 0), r"block=0: accepted is an integer of at least 1"),
    (lambda: Shift("median"), r"kind='median': accepted are 'maximum'"),  # type: ignore[arg-type]
    (lambda: Shift("stabilized", beta=1.0), r"beta=1\.0: accepted is a finite factor above 1"),
    (
        lambda: Shift("stabilized", gamma=-0.5),
        r"gamma=-0\.5: accepted is a finite factor of at least 0",
    ),
    (
        lambda: Shift(tie_tolerance=-1.0),
        r"tie_tolerance=-1\.0: accepted is a finite number of at least 0",
    ),
    (lambda: Shift("offset", offset=math.nan), r"offset=nan: accepted is a finite number"),
    (lambda: recipe_named("BF17"), r"recipe='BF17': accepted are FP64, FP32, BF16_STANDARD"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_errors_name_argument_value_and_what_is_accepted(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_narrow_format_reaches_the_result() -> None:
    out = run(BF16_FLASH2.with_(out=E2M1))[0]
    assert set(out.abs().unique().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert BF16_PAPER_STABILIZED.shift.beta == 7.0


def test_the_help_of_a_recipe_can_be_read():
    assert len(pydoc.plain(pydoc.render_doc(Recipe))) < 9000
