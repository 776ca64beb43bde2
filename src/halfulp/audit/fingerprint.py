"""Which recipe explains a kernel's bits best: rounded results are compared element by element with
emulated recipes.

The search walks one recipe choice at a time (forward choices by the bits of out, backward choices
by the bits of the gradients) and keeps a choice only if it explains more bits. Equal bits on nearly
all elements are strong evidence; the fraction is the figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halfulp import formats, recipes
from halfulp.attention import emulate
from halfulp.audit.figures import GRADIENTS, SHORT
from halfulp.audit.inputs import Case, Inputs
from halfulp.audit.probes import Shape
from halfulp.audit.references import STOCK, emulated
from halfulp.calls import Result
from halfulp.recipes import Recipe, Shift

FORWARD_CASE = ("gaussian", Shape(1, 4, 640, 640, 64))
BACKWARD_CASE = ("value_one_sign", Shape(1, 4, 640, 640, 64))
GAIN = 0.003  # a choice counts only if it explains this fraction of elements more


@dataclass(frozen=True)
class Fingerprint:
    """The recipe that explains most bits."""

    recipe: Recipe
    choices: dict[str, str]  # choice → what was found
    identical: dict[str, float]  # tensor → fraction of elements with the same bits
    accumulates: bool  # gradients are rounded between tiles

    def __str__(self) -> str:
        share = ", ".join(
            f"{SHORT[name]} {fraction:.1%}" for name, fraction in self.identical.items()
        )
        choices = "; ".join(self.choices.values())
        return f"behaves like {self.recipe.name}: {choices}; identical on {share}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "recipe": self.recipe.name,
            "choices": self.choices,
            "identical": self.identical,
            "text": str(self),
        }


@dataclass(frozen=True)
class Choice:
    """One recipe choice: alternatives, each a label and the fields it sets."""

    name: str
    options: tuple[tuple[str, dict[str, Any]], ...]


def _forward_choices(fmt: formats.Format) -> tuple[Choice, ...]:
    none = formats.FP64
    integer = {"base": "2", "shift": Shift("integer")}
    blocks: tuple[int | None, ...] = (None, 512, 256, 128, 64, 32)
    return (
        Choice(
            "algorithm",
            (
                ("divided by l after PV", {"algorithm": "flash2"}),
                ("divided by l before PV", {"algorithm": "standard"}),
            ),
        ),
        Choice(
            "weights",
            (
                ("weights rounded for PV", {"weights_operand": fmt}),
                ("weights not rounded for PV", {"weights_operand": none}),
            ),
        ),
        Choice(
            "row_sum",
            (
                ("l from exact weights", {"row_sum_from": "exact"}),
                ("l from rounded weights", {"row_sum_from": "rounded"}),
            ),
        ),
        Choice(
            "shift",
            (
                ("shifted by the row maximum", {"base": "e", "shift": Shift()}),
                ("shifted by an integer maximum in base 2", integer),
            ),
        ),
        Choice(
            "scores",
            (
                ("scores in fp32", {"scores": none, "product": none}),
                (f"scores in {fmt.name}", {"scores": fmt, "product": fmt}),
            ),
        ),
        Choice("block_key", tuple((f"key blocks of {b or 'N'}", {"block_key": b}) for b in blocks)),
    )


def _backward_choices(fmt: formats.Format) -> tuple[Choice, ...]:
    none = formats.FP64
    deltas: tuple[tuple[str, dict[str, Any]], ...] = (
        ("δ from the rounded O", {"delta_from": "out"}),
        ("δ from O plus its residual", {"delta_from": "residual", "residual_bits": 8}),
        ("δ from O before rounding", {"delta_from": "exact_out"}),
        ("δ = rowsum(dP ∘ P)", {"delta_from": "probabilities"}),
    )
    accumulated = tuple(
        (
            f"gradients accumulated in {fmt.name} over query blocks of {b}",
            {"grad_accumulator": fmt, "block_query": b},
        )
        for b in (256, 128, 64, 32)
    )
    return (
        Choice("delta", deltas),
        Choice(
            "accumulators",
            (("gradients accumulated in fp32", {"grad_accumulator": none}), *accumulated),
        ),
        _rounding("grad_scores", "dS rounded", "dS not rounded", fmt),
        _rounding("probabilities_operand", "P rounded for dV", "P not rounded for dV", fmt),
        _rounding("grad_probabilities", "dP in fp32", f"dP in {fmt.name}", fmt, stock_rounds=False),
        Choice(
            "backward_weights",
            (
                ("P from lse", {"backward_weights": "lse"}),
                ("P from the forward's rounded weights", {"backward_weights": "rounded"}),
            ),
        ),
    )


def _rounding(
    step: str, rounded: str, kept: str, fmt: formats.Format, *, stock_rounds: bool = True
) -> Choice:
    """Whether one step is rounded, the stock recipe's answer first."""
    options: list[tuple[str, dict[str, Any]]] = [
        (rounded, {step: fmt}),
        (kept, {step: formats.FP64}),
    ]
    if not stock_rounds:
        options = [(rounded, {step: formats.FP64}), (kept, {step: fmt})]
    return Choice(step, tuple(options))


def fingerprint(run: Callable[[Inputs], Result | None], dtype: str) -> Fingerprint | None:
    """Find the recipe for a kernel that `run` calls; None where the kernel fails on the two small
    inputs used.
    """
    forward_x, backward_x = (
        Case(probe, shape, 0, dtype).inputs() for probe, shape in (FORWARD_CASE, BACKWARD_CASE)
    )
    forward_bits, backward_bits = run(forward_x), run(backward_x)
    if forward_bits is None or backward_bits is None:
        return None
    fmt = STOCK[dtype].out
    assert isinstance(fmt, formats.Format)
    whole = _whole_recipes(dtype)
    scored = [
        (
            _score(forward_x, forward_bits, r, ("out",))
            + _score(backward_x, backward_bits, r, GRADIENTS),
            r,
        )
        for r in whole
    ]
    best_whole = max(scored, key=lambda pair: pair[0])
    base, labels = _walk(
        STOCK[dtype], _forward_choices(fmt), lambda r: _score(forward_x, forward_bits, r, ("out",))
    )
    offered = tuple(name for name in GRADIENTS if getattr(backward_bits, name) is not None)
    if offered:
        base, more = _walk(
            base, _backward_choices(fmt), lambda r: _score(backward_x, backward_bits, r, offered)
        )
        labels |= more
    walked = _score(forward_x, forward_bits, base, ("out",)) + _score(
        backward_x, backward_bits, base, GRADIENTS
    )
    recipe = base
    if best_whole[0] > walked + GAIN:
        recipe = best_whole[1]
        labels = {"whole": "as a whole"}
    identical = _identical(forward_x, forward_bits, recipe, ("out",)) | _identical(
        backward_x, backward_bits, recipe, offered
    )
    rounded = (
        isinstance(recipe.grad_accumulator, formats.Format)
        and recipe.grad_accumulator == fmt
        and recipe.algorithm != "standard"
    )
    return Fingerprint(recipe, labels, identical, bool(offered) and rounded and fmt != formats.FP32)


def _whole_recipes(dtype: str) -> list[Recipe]:
    """Recipes that differ from the stock one in many places at once."""
    if dtype == "bfloat16":
        return [
            recipes.TORCH_CPU_FLASH,
            recipes.BF16_STANDARD,
            recipes.BF16_AUTHORS,
            recipes.BF16_HALFULP,
            recipes.BF16_FLASH1,
        ]
    return [STOCK[dtype]]


def _walk(
    recipe: Recipe, choices: tuple[Choice, ...], score: Callable[[Recipe], float]
) -> tuple[Recipe, dict[str, str]]:
    """Coordinate search, twice over the choices; the first option of each is the stock one and
    stays unless another explains more.
    """
    labels: dict[str, str] = {choice.name: choice.options[0][0] for choice in choices}
    for choice in choices:
        recipe = recipe.with_(**choice.options[0][1])
    best = score(recipe)
    for _ in range(2):
        before = best
        for choice in choices:
            for label, fields in choice.options:
                trial = _tried(recipe, fields)
                if trial is None or trial == recipe:
                    continue
                value = score(trial)
                if value > best + GAIN:
                    recipe, best, labels[choice.name] = trial, value, label
        if best == before:
            break
    return recipe, labels


def _tried(recipe: Recipe, fields: dict[str, Any]) -> Recipe | None:
    """The recipe with fields changed; None for a combination that no algorithm offers."""
    try:
        return recipe.with_(**fields)
    except ValueError:
        return None


def _identical(
    x: Inputs, bits: Result, recipe: Recipe, tensors: tuple[str, ...]
) -> dict[str, float]:
    if tensors == ("out",):
        with torch.no_grad():
            emulation = Result(emulate(x.query, x.key, x.value, recipe=recipe, **x.options()))
    else:
        emulation = emulated(x, recipe)
    pairs = {name: (getattr(bits, name), getattr(emulation, name)) for name in tensors}
    return {
        name: float((a == b).double().mean()) for name, (a, b) in pairs.items() if a is not None
    }


def _score(x: Inputs, bits: Result, recipe: Recipe, tensors: tuple[str, ...]) -> float:
    shares = _identical(x, bits, recipe, tensors)
    return sum(shares.values()) / max(1, len(shares))
