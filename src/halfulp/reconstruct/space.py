"""What a kernel of attention may do otherwise: every rounding of a recipe in every likely format,
every structural choice, and the twists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from halfulp import recipes
from halfulp.formats import BF16, FP16, FP32, FP64, OCP_E4M3, OCP_E5M2, TF32, Format, custom
from halfulp.recipes import FP8_FLASH, RECIPES, Matmul, Recipe, Shift, recipe_named
from halfulp.reconstruct.emulating import FORWARD, GRADIENTS, TENSORS, Model, Twist, Way
from halfulp.reconstruct.twists import orders

STOCK: dict[torch.dtype, Recipe] = {
    torch.bfloat16: recipes.BF16_FLASH2,
    torch.float16: recipes.FP16_FLASH2,
    torch.float32: recipes.FP32,
}
STARTS = (
    "BF16_FLASH2", "BF16_HALFULP", "BF16_STANDARD", "BF16_STANDARD_CPU", "BF16_STANDARD_FP32",
    "BF16_AUTHORS", "BF16_FLASH1", "BF16_FLOOR", "TORCH_CPU_FLASH",
)  # fmt: skip
_ROUNDED = "FP32[delta_from=probabilities,out={0},grad_query={0},grad_key={0},grad_value={0}]"
"""A kernel in fp32 that rounds its results alone: what most plain ones are."""
_WEIGHTS = ("BF16_STANDARD_FP32[weights_operand={0},probabilities_operand={0},"
            "grad_probabilities={0}]").format("ocp_e4m3")  # fmt: skip
"""Plain code that casts P down before P V: autograd casts dP as well."""


Change = Callable[[Model], Model | None]

_SHARED = ("query", "key", "value", "product", "scores", "shifted_scores", "weights")
_FORWARD = (
    *_SHARED, "row_max", "weights_operand", "block_sum", "max_change", "rescale", "rescaled",
    "row_sum", "block_out", "accumulator", "out", "log_row_sum", "lse",
)  # fmt: skip
_BACKWARD = (
    *_SHARED, "grad_out", "delta_products", "delta", "probabilities", "probabilities_operand",
    "grad_probabilities", "grad_centered", "grad_scores", "grad_block", "grad_accumulator",
    "grad_query", "grad_key", "grad_value",
)  # fmt: skip
_LSE = ("lse", "log_row_sum", "row_sum", "row_max")
_WIDTHS: tuple[int | None, ...] = (None, 16, 32, 48, 64, 80, 96, 256, 512)

_OPERANDS = ("query", "key", "value", "grad_out")
_CUT = tuple(custom(8, bits).with_(rounding="toward_zero") for bits in (3, 4, 5, 6))
_PACKED = (BF16, BF16.with_(rounding="toward_zero"), FP16)  # what float32 is packed to
_STORED = ("out", "grad_query", "grad_key", "grad_value")  # in the kernel's dtype, as seen
DIVIDES = ("block_key", "block_query", "exp_degree", "division", "reciprocal", "algorithm",
           "weights_operand", "row_sum_from", "lse_from", "base", "shift", "weights", "row_sum",
           "accumulator", "out", "lse")  # fmt: skip
"""Fields that the backward pass often does not read, and then has as the forward pass has them."""

EVERY = frozenset(TENSORS)
BACKWARD = frozenset(GRADIENTS)


def field_text(name: str, value: Any) -> str:
    """A change of one field as a recipe's text has it."""
    if isinstance(value, Format):
        mode = "" if value.rounding == "nearest_even" else f"/{value.rounding}"
        return f"{name}={'exact' if value == FP64 else value.name + mode}"
    if isinstance(value, Shift):
        return f"{name}={value.kind}"
    if isinstance(value, Matmul):
        return f"products summed in {value.accumulate.name}"
    return f"{name}={'none' if value is None else value}"


def _formats(dtype: torch.dtype) -> tuple[Format, ...]:
    low = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: TF32}[dtype]
    other = {torch.bfloat16: FP16, torch.float16: BF16, torch.float32: BF16}[dtype]
    coarse = tuple(custom(8, bits) for bits in (2, 3, 4, 5, 6, 8, 9, 10))
    return (low, FP64, low.with_(rounding="toward_zero"), other, OCP_E4M3, OCP_E5M2, *coarse)


def finer_formats(dtype: torch.dtype) -> tuple[Format, ...]:
    """Formats that are only tried where a step is known to round."""
    zero = FP16.with_(rounding="toward_zero")
    wide = tuple(custom(8, bits) for bits in (11, 12))
    modes = tuple(
        {torch.float16: FP16}.get(dtype, BF16).with_(rounding=mode)
        for mode in ("nearest_away", "up", "down")
    )
    return (TF32, zero, *wide, *modes, *_CUT)


def setting(tensors: frozenset[str], **fields: Any) -> Change:
    """The change that sets fields of the recipes of these results."""

    def way(old: Way) -> Way | None:
        try:
            return Way(old.recipe.with_(**fields), old.twists)
        except ValueError:
            return None

    return lambda model: model.with_ways(tensors, way)


def _steps(names: tuple[str, ...], tensors: frozenset[str], dtype: torch.dtype) -> Iterator[
    tuple[str, Change]]:  # fmt: skip
    for name in names:
        cut = _CUT if name in _OPERANDS else ()
        for fmt in (*_formats(dtype), *cut):
            if fmt != FP64 or name not in _STORED:
                yield field_text(name, fmt), setting(tensors, **{name: fmt})


def forward_changes(dtype: torch.dtype) -> Iterator[tuple[str, Change]]:
    """What the forward pass may do otherwise; the backward pass follows where it shares it."""
    low = _formats(dtype)[0]
    yield from _steps(_FORWARD, EVERY, dtype)
    yield from _whole(
        EVERY,
        *({"algorithm": name} for name in ("flash2", "standard", "flash1")),
        *({"block_key": width} for width in (128, *_WIDTHS)),
        {"row_sum_from": "rounded"},
        {"row_sum_from": "exact"},
        *(
            {"rescale": fmt, "rescale_of": of}
            for fmt in dict.fromkeys((low, BF16, FP16))
            for of in ("out", "row_sum")
        ),
        {"base": "2"},
        {"base": "e", "shift": Shift()},
        {"base": "2", "shift": Shift("integer")},
        {"lse_from": "exact"},
        {"division": "multiply", "reciprocal": low},
        {"division": "multiply", "reciprocal": FP16},
        *({"division": "multiply", "reciprocal": custom(8, bits)} for bits in (4, 5, 6, 8, 9, 10)),
        *({"exp_degree": degree} for degree in (1, 2, 3)),
        *_prescaled(low),
        {"weights_operand": OCP_E4M3, "weights_scale": 256.0},
        *_through(dtype, ("query", "key"), ("value", "weights_operand"),
                  ("query", "key", "value", "weights_operand")),
    )  # fmt: skip


def tiled_changes(dtype: torch.dtype, blocks: tuple[int, ...]) -> Iterator[tuple[str, Change]]:
    """What an online softmax rounds at every tile that only shows in base 2, or together: a row's
    maximum in one format makes other weights to round, and other sums.
    """
    low = _formats(dtype)[0]
    steps = (("scores",), ("row_max",), ("shifted_scores",), ("shifted_scores", "weights"),
             ("row_max", "row_sum"), ("row_max", "block_sum", "row_sum"),
             ("row_sum", "accumulator"), ("row_max", "row_sum", "accumulator"),
             ("block_sum", "block_out"))  # fmt: skip
    for width in blocks:
        formats = BF16, FP16, BF16.with_(rounding="toward_zero")
        for names, fmt in ((names, fmt) for names in steps for fmt in formats):
            yield from _whole(EVERY, {"base": "2", **dict.fromkeys(names, fmt), "block_key": width})
        yield from _whole(
            EVERY, {"block_sum": low, "row_sum_from": "rounded", "block_key": width})  # fmt: skip


def recipes_of(dtype: torch.dtype) -> Iterator[tuple[str, Change]]:
    """A forward pass in a named recipe, beside a backward pass that is another's."""
    for model in named(dtype):
        recipe = model.forward.recipe

        def way(old: Way, recipe: Recipe = recipe) -> Way:
            return Way(recipe, old.twists)

        yield recipe.name, partial(Model.with_ways, tensors=frozenset(FORWARD), change=way)


def _reversed(width: int) -> Change:
    (twist,) = orders()

    def way(old: Way) -> Way | None:
        if twist in old.twists:
            return None
        return Way(old.recipe.with_(block_key=width), (*old.twists, twist))

    return lambda model: model.with_ways(EVERY, way)


def reversed_changes(blocks: tuple[int, ...] = ()) -> Iterator[tuple[str, Change]]:
    """Keys from the last to the first, in likely blocks; other blocks that were revealed."""
    for width in (32, 64, 128):
        text = f"keys are visited from the last to the first, block_key={width}"
        yield text, _reversed(width)
    yield from _whole(EVERY, *({"block_key": w} for w in blocks if w not in (128, *_WIDTHS)))


def backward_changes(dtype: torch.dtype, tensors: frozenset[str]) -> Iterator[tuple[str, Change]]:
    """What the backward pass may do otherwise, for some of the gradients or all."""
    low = _formats(dtype)[0]
    yield from _steps(_BACKWARD, tensors, dtype)
    yield from _whole(
        tensors,
        *({"delta_from": way} for way in ("out", "exact_out", "probabilities", "recomputed")),
        {"delta_from": "residual", "residual_bits": 8},
        {"delta_from": "residual", "residual": low, "residual_bits": None},
        *({"backward_weights": way} for way in ("lse", "maximum", "rounded")),
        *({"divisor_from": way} for way in ("row_sum", "lse", "balanced")),
        {"grad_value_from": "lse"},
        {"gradient_scale_at": "scores"},
        {"gradient_scale_at": "scores", "scaled_grad_scores": low},
        {"gradient_scale_at": "probabilities"},
        {"gradient_scale_at": "probabilities", "scaled_probabilities": low},
        {"probabilities_operand": low, "delta_products": low},
        *({"block_query": width} for width in (128, *_WIDTHS)),
        *({"block_key": width} for width in (128, *_WIDTHS)),
        *(
            {"grad_accumulator": fmt, "block_query": b, "block_key": b}
            for fmt in (low, low.with_(rounding="toward_zero"))
            for b in (None, 32, 64, 128)
        ),
        *(
            {
                "grad_accumulator": low,
                "block_query": b,
                "block_key": b,
                "gradient_scale_at": "scores",
            }
            for b in (32, 64, 128)
        ),
        dict.fromkeys(GRADIENTS, low.with_(rounding="toward_zero")),
        {"exp_degree": None},
        *({"exp_degree": degree} for degree in (1, 2, 3)),
        {"scale_into": "product"},
        *_prescaled(low),
        {"delta": low, "delta_products": low},
        *_through(dtype, ("grad_out", "value"), ("grad_out", "probabilities_operand"),
                  ("grad_scores", "key"), ("grad_scores", "query"),
                  ("query", "key", "value", "grad_out", "probabilities_operand", "grad_scores")),
    )  # fmt: skip


def _prescaled(low: Format) -> Iterator[dict[str, Any]]:
    """The scale folded into an operand that is rounded again, with log₂ e or without it."""
    for into in ("query", "key"):
        for fmt in dict.fromkeys((low, FP16, BF16)):
            fields = {"scale_into": into, "scaled_operand": fmt}
            yield fields
            yield fields | {"base": "2", "shift": Shift()}


def _through(dtype: torch.dtype, *products: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Both operands of some products in fewer bits than float32's, as tensor cores take them; P
    before its division by the row sum, or after.
    """
    if dtype == torch.float32:
        for names in products:
            for fmt in (TF32, TF32.with_(rounding="toward_zero"), *_PACKED):
                fields = dict.fromkeys(names, fmt)
                yield fields
                if "weights_operand" in names:
                    yield fields | {"algorithm": "standard"}


def hidden_changes(dtype: torch.dtype) -> Iterator[tuple[str, Change]]:
    """What the forward pass hands on and only gradients show, where no lse is returned."""
    forward = frozenset({"out"})
    for name in _LSE:
        for fmt in _formats(dtype):
            yield f"forward {field_text(name, fmt)}", setting(forward, **{name: fmt})
    yield "forward lse_from=exact", setting(forward, lse_from="exact")
    yield "forward lse_from=row_sum", setting(forward, lse_from="row_sum")


def product_changes(dtype: torch.dtype, tensors: frozenset[str]) -> Iterator[tuple[str, Change]]:
    """Products that are not summed in fp32: slow to emulate, so tried last."""
    for fmt in {torch.bfloat16: (BF16, FP16), torch.float16: (FP16,)}.get(dtype, (TF32,)):
        for order in ("sequential", "blocked"):
            matmul = Matmul(fmt, order)
            yield field_text("matmul", matmul), setting(tensors, matmul=matmul)


def _whole(tensors: frozenset[str], *every: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    for fields in every:
        text = ", ".join(field_text(name, value) for name, value in fields.items())
        yield text, setting(tensors, **fields)


def twisted(twist: Twist, tensors: frozenset[str]) -> Change:
    """The change that puts a twist into the ways of these results."""

    def way(old: Way) -> Way | None:
        if twist in old.twists or len(old.twists) >= 4:
            return None
        return Way(old.recipe, (*old.twists, twist))

    return lambda model: model.with_ways(tensors, way)


def untwisted(twist: Twist, tensors: frozenset[str]) -> Callable[[Model], Model]:
    """The change that takes it out again."""

    def way(old: Way) -> Way:
        return Way(old.recipe, tuple(t for t in old.twists if t != twist))

    return lambda model: model.with_ways(tensors, way)


def twist_changes(twists: Sequence[Twist], tensors: frozenset[str]) -> Iterator[
    tuple[str, Change]]:  # fmt: skip
    """Twists put in, for some results or all."""
    for twist in twists:
        yield twist.text, twisted(twist, tensors)


def refined(model: Model, stock: Recipe, dtype: torch.dtype, tensors: frozenset[str]) -> Iterator[
    tuple[str, Change]]:  # fmt: skip
    """Other formats for the steps that were found to round otherwise than the stock recipe's."""
    found = {
        name
        for tensor in tensors
        for name in recipes.STEPS
        if getattr(model.way(tensor).recipe, name) not in (getattr(stock, name), FP64, FP32)
    }
    for name in sorted(found):
        for fmt in finer_formats(dtype):
            scope = EVERY if tensors & {"out", "lse"} else tensors
            yield field_text(name, fmt), setting(scope, **{name: fmt})


def starts(dtype: torch.dtype) -> list[Model]:
    """Recipes to start from, the stock one first; float16's are bfloat16's in its format."""
    if dtype == torch.float32:
        return [Model.of(RECIPES[name]) for name in ("FP32", "FP64")]
    if dtype == torch.bfloat16:
        names: tuple[str, ...] = (*STARTS, "FP32", _ROUNDED.format("bf16"))
        return [Model.of(recipe_named(name)) for name in names]
    names = ("FP16_FLASH2", "FP16_FLOOR", "FP32", _ROUNDED.format("fp16"))
    others = (_in_fp16(RECIPES[name]) for name in STARTS[1:])
    return [*(Model.of(recipe_named(name)) for name in names),
            *(Model.of(recipe) for recipe in others if recipe.name not in RECIPES)]  # fmt: skip


def named(dtype: torch.dtype) -> list[Model]:
    """These, and the rarer ones that no mistake is looked for in."""
    low = [r for name, r in RECIPES.items() if "BF16" in name and name not in STARTS]
    rarer = () if dtype == torch.float32 else (recipe_named(_WEIGHTS), *low, FP8_FLASH)
    own = (r if dtype == torch.bfloat16 else _in_fp16(r) for r in rarer)
    return [*starts(dtype), *map(Model.of, own)]


def _in_fp16(recipe: Recipe) -> Recipe:
    own = recipe.name.replace("BF16", "FP16") if "BF16" in recipe.name else f"{recipe.name}_FP16"
    changes: dict[str, Any] = {s: FP16 for s in recipes.STEPS if getattr(recipe, s) == BF16}
    return recipe.with_(name=own, **changes)
