"""The ladder's questions as data: which attention runs in which head, and what may be changed in
its recipe.

A substitution is another text of the same run configuration. Where: attention in fp32 everywhere,
or everywhere but in some layers and heads. What: an operation of the recipe replaced by one that
rounds less or is consistent with the others. Operations that a kernel could afford are called
repairs; the others (an O of fp32, a δ by another pass over all tiles) only say where the error
comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from halfulp.attention import emulate
from halfulp.formats import BF16, FP32, FP64, Format
from halfulp.recipes import BF16_HALFULP, Recipe, Shift, recipe_text
from halfulp.targets import canonical, recipe_in
from halfulp.training.attention import AttentionPlan
from halfulp.training.config import (
    Language,
    LayerTask,
    Pictures,
    RunConfig,
    UserModel,
    WorkloadConfig,
)

Place: TypeAlias = tuple[int, int]
"""Layer and head, from 0."""
Cells: TypeAlias = Mapping[Place, str]
"""The attention of every head of every layer."""

EXACT = "torch:fp32"
_EXACT = {"sdpa:fp32", "recipe:FP32", "recipe:FP64"}  # canonical names


def places(workload: WorkloadConfig) -> tuple[int, int]:
    """Return layers and heads, as `AttentionPlan` counts them."""
    match workload:
        case LayerTask():
            return 1, 1
        case Language():
            return workload.layers, workload.heads
        case Pictures():
            return 2 * workload.layers, workload.heads  # self-attention, then cross-attention
        case UserModel():
            raise AssertionError("a user's model is looked at (`sites.layout_of`)")


def cells_of(config: RunConfig) -> dict[Place, str]:
    """Return the attention of every head that a configuration's plan names."""
    layers, heads = places(config.workload)
    return {(i, j): config.attention.choice(i, j) for i in range(layers) for j in range(heads)}


def suspects(cells: Cells) -> frozenset[Place]:
    """Return the heads whose attention is not in fp32 or better."""
    return frozenset(place for place, choice in cells.items() if canonical(choice) not in _EXACT)


def plan_of(cells: Cells) -> AttentionPlan:
    """Return the shortest plan with that attention in every head."""
    base = Counter(cells.values()).most_common(1)[0][0]
    by_choice: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for layer in sorted({layer for layer, _ in cells}):
        heads = sum(of == layer for of, _ in cells)
        for choice in dict.fromkeys(cells[layer, head] for head in range(heads)):
            if choice != base:
                members = tuple(head for head in range(heads) if cells[layer, head] == choice)
                whole = () if len(members) == heads else members
                by_choice.setdefault(choice, {}).setdefault(whole, []).append(layer)
    texts = [base]
    for choice, groups in by_choice.items():
        for members, layers in groups.items():
            texts.append(f"{place_text(layers, members)}: {choice}")
    return AttentionPlan.of(*texts)


def place_text(layers: Iterable[int], heads: Iterable[int] = ()) -> str:
    """Return "layer 0,1" or "layer 0,1 head 2", as a plan has it."""
    named = ",".join(map(str, heads))
    return f"layer {','.join(map(str, layers))}" + (f" head {named}" if named else "")


def places_text(found: Iterable[Place], heads: int) -> str:
    """Return "layer 1", "heads 2 and 5 of layer 1" or "layer 0; head 1 of layer 2"."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(found):
        by_layer.setdefault(layer, []).append(head)
    whole = [layer for layer, members in by_layer.items() if len(members) == heads]
    parts = [_plural("layer", whole)] if whole else []
    parts += [f"{_plural('head', by_layer[i])} of layer {i}" for i in by_layer if i not in whole]
    return "; ".join(parts)


def _plural(word: str, numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{word}s {', '.join(most)} and {last}" if most else f"{word} {last}"


def only(cells: Cells, kept: Iterable[Place]) -> dict[Place, str]:
    """Return the cells with attention in fp32 everywhere but in some heads."""
    left = set(kept)
    return {place: choice if place in left else EXACT for place, choice in cells.items()}


def is_recipe(choice: str) -> bool:
    """Whether a choice of attention is the text of a recipe."""
    try:
        return recipe_in(choice) is not None
    except ValueError:
        return False


@dataclass(frozen=True)
class Operation:
    """One change of a recipe."""

    name: str  # part of a folder's name
    change: str
    blames: str  # what is to blame if a run is saved by this alone
    fields: tuple[tuple[str, Any], ...]
    kind: str = ""  # of several operations of one kind a recipe takes only one
    repair: bool = False  # a kernel can afford it
    tensor: str | None = None  # the step whose mantissa bits matter then

    @property
    def replaces_delta(self) -> bool:
        """Whether it is about a δ that is computed from the rounded O."""
        return any(name == "delta_from" for name, _ in self.fields)


def _fp32(*names: str) -> tuple[tuple[str, Format], ...]:
    """Each of these fields of a recipe in fp32."""
    return tuple((name, FP32) for name in names)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "delta-exact-O",
        "δ from O before it is rounded",
        "δ from the rounded O",
        (("delta_from", "exact_out"),),
        "δ",
        tensor="out",
    ),
    Operation(
        "residual",
        "δ from O and its residual",
        "δ from the rounded O",
        (("delta_from", "residual"), ("residual", BF16)),
        "δ",
        repair=True,
        tensor="out",
    ),
    Operation(
        "O-fp32", "O stored in fp32", "the rounding of O", (("out", FP32),), "δ", tensor="out"
    ),
    Operation(
        "delta-dP.P",
        "δ = rowsum(dP ∘ P)",
        "δ = rowsum(dO ∘ O), which is not the sum of the dP ∘ P that the backward pass uses",
        (("delta_from", "probabilities"),),
        "δ",
        tensor="out",
    ),
    Operation(
        # from the weights of the backward pass itself, which saves the one-layer task; an O of the
        # forward pass does in no width (docs/log.md)
        "delta-recomputed-O",
        "δ from O recomputed as P V in the backward pass, in fp32",
        "an O in δ that the backward pass's own weights do not give",
        (("delta_from", "recomputed"),),
        "δ",
        tensor="out",
    ),
    Operation(
        "accumulator-fp32",
        "Ō accumulated in fp32",
        "the rounding of Ō",
        _fp32("block_out", "rescaled", "accumulator", "renormalized"),
        repair=True,
        tensor="accumulator",
    ),
    Operation(
        "row-sum",
        "l summed from the rounded weights",
        "l from the weights before rounding",
        (("row_sum_from", "rounded"), ("lse_from", "exact")),
        repair=True,
        tensor="weights_operand",
    ),
    Operation(
        "weights",
        "the backward pass on the forward's rounded weights",
        "weights recomputed otherwise than they were used",
        (("backward_weights", "rounded"),),
        repair=True,
        tensor="weights_operand",
    ),
    Operation(
        # then every rescale is a power of two, with which rounding commutes
        "integer",
        "the row maximum rounded up to an integer, base 2",
        "a rescale that is not exact",
        (("base", "2"), ("shift", Shift("integer"))),
        "shift",
        repair=True,
    ),
    Operation(
        # the paper has β in [2, 8] (arXiv 2510.04212)
        "softmax",
        "Qiu & Yao's softmax shift, β = 7",
        "weights of exactly 1 at repeated maxima",
        (("shift", Shift("stabilized", beta=7.0)),),
        "shift",
        repair=True,
    ),
    Operation(
        "scores-fp32",
        "scores, maximum and weights in fp32 up to the product",
        "the rounding of the scores",
        _fp32("product", "scores", "row_max", "shifted_scores", "weights", "lse"),
        repair=True,
        tensor="scores",
    ),
    Operation(
        "row-sum-fp32",
        "l accumulated in fp32",
        "the rounding of l",
        _fp32("block_sum", "row_sum", "max_change", "rescale", "log_row_sum"),
        repair=True,
        tensor="row_sum",
    ),
    Operation(
        "delta-fp32",
        "δ and its terms in fp32",
        "the rounding of δ",
        _fp32("delta_products", "delta"),
        repair=True,
        tensor="delta",
    ),
    Operation(
        "operands-fp32",
        "P̄ and P in fp32 as they enter products",
        "the rounding of P̄ and P",
        _fp32("weights_operand", "probabilities_operand", "probabilities"),
        tensor="weights_operand",
    ),
    Operation(
        "dS-fp32",
        "dS not rounded",
        "the rounding of dS",
        _fp32("grad_probabilities", "grad_centered", "grad_scores", "scaled_grad_scores"),
        tensor="grad_scores",
    ),
    Operation(
        "gradients-fp32",
        "dQ, dK and dV accumulated and stored in fp32",
        "the rounding of dQ, dK and dV",
        _fp32("grad_block", "grad_accumulator", "grad_query", "grad_key", "grad_value"),
        repair=True,
        tensor="grad_accumulator",
    ),
    Operation(
        "inputs-fp32",
        "Q, K, V and dO read in fp32",
        "the rounding of Q, K, V and dO",
        _fp32("query", "key", "value", "grad_out"),
        tensor="query",
    ),
)
"""In the order in which they are tried; where several alone save a run, the first names the cause.
"""


def changed(recipe: Recipe, operations: Iterable[Operation]) -> Recipe | None:
    """Return `replaced` if the algorithm can do it, else None."""
    result = replaced(recipe, operations)
    return result if result is not None and _runs(result) else None


def replaced(recipe: Recipe, operations: Iterable[Operation]) -> Recipe | None:
    """Return the recipe with operations replaced, in the order of `OPERATIONS`.

    A step that the recipe does not round is left as it is. None: one of them changes nothing here,
    or they do not go together.
    """
    chosen = set(operations)
    fields: dict[str, Any] = {}
    for operation in (known for known in OPERATIONS if known in chosen):
        if operation.replaces_delta and recipe.delta_from != "out":
            return None
        own = {
            name: value
            for name, value in operation.fields
            if value is not FP32 or _rounds(recipe, name)
        }
        if all(getattr(recipe, name) == value for name, value in own.items()):
            return None
        fields |= own
    try:
        result = recipe.with_(**fields)
        return result.with_(name=_text(result))
    except ValueError:
        return None


def _rounds(recipe: Recipe, step: str) -> bool:
    fmt = getattr(recipe, step)
    return not isinstance(fmt, Format) or fmt not in (FP32, FP64)


@lru_cache(maxsize=512)
def _named(choice: str) -> Recipe:
    recipe = recipe_in(choice)
    assert recipe is not None
    return recipe


@lru_cache(maxsize=512)
def _text(recipe: Recipe) -> str:
    return recipe_text(recipe)


@lru_cache(maxsize=512)
def _runs(recipe: Recipe) -> bool:
    """Whether the algorithm accepts the recipe: two tokens, forward and backward."""
    query, key, value = (torch.ones(1, 1, 2, 4, requires_grad=True) for _ in range(3))
    try:
        torch.autograd.backward(emulate(query, key, value, is_causal=True, recipe=recipe).sum())
    except ValueError:
        return False
    return True


def in_cells(cells: Cells, change: Callable[[Recipe], Recipe | None]) -> dict[Place, str] | None:
    """The cells with `change(recipe)` where one runs that is not exact; None: it changes none."""
    found: dict[str, str] = {}
    for choice in {cells[place] for place in suspects(cells)}:
        if is_recipe(choice):
            result = change(_named(choice))
            if result is not None:
                found[choice] = _text(result)
    return {place: found.get(choice, choice) for place, choice in cells.items()} if found else None


def whole_blocks(recipe: Recipe) -> Recipe | None:
    """Return the recipe with one tile for everything; None where it has no tiles already."""
    if recipe.algorithm == "standard" or (recipe.block_query is None and recipe.block_key is None):
        return None
    result = recipe.with_(block_query=None, block_key=None)
    return result if _runs(result) else None


def halfulp_like(recipe: Recipe) -> Recipe:
    """Return halfulp's recipe with another's tiles."""
    return BF16_HALFULP.with_(block_query=recipe.block_query, block_key=recipe.block_key)


def with_bits(recipe: Recipe, step: str, bits: int) -> Recipe | None:
    """The recipe with so many mantissa bits in one step; None if not rounded, or to blocks."""
    fmt = getattr(recipe, step)
    if not isinstance(fmt, Format) or not _rounds(recipe, step):
        return None
    if bits == fmt.mantissa_bits:
        return recipe
    wider = Format(f"e{fmt.exponent_bits}m{bits}", fmt.exponent_bits, bits, rounding=fmt.rounding)
    return recipe.with_(**{step: wider})


def bits_of(cells: Cells, step: str) -> int | None:
    """The fewest mantissa bits of a step in the recipes that run; None: none rounds it."""
    recipes = [_named(cells[place]) for place in suspects(cells) if is_recipe(cells[place])]
    formats = [getattr(recipe, step) for recipe in recipes if _rounds(recipe, step)]
    return min((fmt.mantissa_bits for fmt in formats if isinstance(fmt, Format)), default=None)
