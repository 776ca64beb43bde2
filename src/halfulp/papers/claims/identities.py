"""Claims that exact arithmetic guarantees: the two gradient identities, and that FlashAttention-1
is attention.

They are measured all the same, since they hold this package's own algorithms to the papers'
formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.attention import emulate, golden
from halfulp.formats import BF16
from halfulp.papers.claim import Claim, Lab, Measured, Rule, generator, relative
from halfulp.recipes import BF16_FLASH1, BF16_FLASH2, Recipe
from halfulp.recipes import FP64 as FP64_RECIPE

_SEEDS = 10
_EXACT = f"an identity, which has to hold in each of {_SEEDS} seeds"
_SHAPE = (1, 2, 75, 32)  # tokens that are no multiple of the tiles below
_TILES = {"block_query": 16, "block_key": 24}
# in fp64, whose own rounding lies far below the term that the identities are of
_HIGH = FP64_RECIPE.with_(name="hp", **_TILES)
_LOW = _HIGH.with_(name="lp", out=BF16)  # δ from the rounded O, and nothing else rounded


def _query_gradient(lab: Lab) -> Measured:
    """A7: the difference of dQ under δ_hp and δ_lp against α diag(δ_lp − δ_hp) P K."""
    worst, size = 0.0, 0.0
    for seed in range(_SEEDS):
        for is_causal in (False, True):
            q, k, v, do = _problem(seed)
            high, delta_hp = _gradient(_HIGH, q, k, v, do, is_causal)
            low, delta_lp = _gradient(_LOW, q, k, v, do, is_causal)
            predicted = (
                _SHAPE[3] ** -0.5 * (delta_lp - delta_hp) * (_probabilities(q, k, is_causal) @ k)
            )
            worst = max(worst, float((high - low - predicted).abs().max() / high.abs().max()))
            size = max(size, relative(low, high))
        lab.report((seed + 1) / _SEEDS, "dQ identity")
    text = (
        f"off by at most {worst:.1e} of dQ, {2 * _SEEDS} cases; the term itself is up to {size:.1e}"
        " of dQ"
    )
    figures = {"relative_difference": worst, "gradient_difference": size}
    return Measured(figures, text, exact=_EXACT)


def _weight_gradient(lab: Lab) -> Measured:
    """A8: the difference of dW_Q against α Σ_T (δ_lp − δ_hp)[T] (PK)[T]ᵀ X[T]."""
    worst, size = 0.0, 0.0
    d = _SHAPE[3]
    for seed in range(_SEEDS):
        q, k, v, do = _problem(seed)
        x = torch.randn(_SHAPE, generator=generator(1000 + seed), dtype=torch.float64)
        w = torch.linalg.solve(x[0, 0, :d], q[0, 0, :d]).mT  # any W_Q will do
        query = x @ w.mT
        high, delta_hp = _gradient(_HIGH, query, k, v, do, True)
        low, delta_lp = _gradient(_LOW, query, k, v, do, True)
        found = ((high - low).mT @ x).sum((0, 1))
        terms = (delta_lp - delta_hp) * (_probabilities(query, k, True) @ k)
        predicted = d**-0.5 * torch.einsum("bhti,bhtj->ij", terms, x)
        worst = max(
            worst, float((found - predicted).abs().max() / (high.mT @ x).sum((0, 1)).abs().max())
        )
        size = max(size, float(predicted.norm() / (high.mT @ x).sum((0, 1)).norm()))
        lab.report((seed + 1) / _SEEDS, "dW_Q identity")
    text = (
        f"off by at most {worst:.1e} of dW_Q, {_SEEDS} cases; the sum itself is up to {size:.1e} of"
        " dW_Q"
    )
    figures = {"relative_difference": worst, "gradient_difference": size}
    return Measured(figures, text, exact=_EXACT)


def _flash1(lab: Lab) -> Measured:
    """C1: FlashAttention-1 against FlashAttention-2 and the plain definition in fp64, and what each
    rounds in bf16.
    """
    flash1 = _HIGH.with_(algorithm="flash1")
    standard = _HIGH.with_(algorithm="standard", block_key=None)
    same, errors = 0.0, {"flash1": 0.0, "flash2": 0.0}
    for seed in range(_SEEDS):
        q, k, v, do = _problem(seed)
        truth = golden(q, k, v, do, is_causal=True)
        wanted = (truth.out, truth.grad_query, truth.grad_key, truth.grad_value)
        for recipe in (flash1, _HIGH, standard):
            found = _out_and_gradients(recipe, q, k, v, do)
            same = max(
                same, *(relative(a, b) for a, b in zip(found, wanted, strict=True) if b is not None)
            )
        half = [x.bfloat16() for x in (q, k, v, do)]
        exact = golden(*half, is_causal=True)
        for name, recipe in (("flash1", BF16_FLASH1), ("flash2", BF16_FLASH2)):
            out = _out_and_gradients(recipe.with_(**_TILES), *half)[0]
            errors[name] += relative(out, exact.out) / _SEEDS
        lab.report((seed + 1) / _SEEDS, "FlashAttention-1 in fp64")
    text = (
        f"fp64: O, dQ, dK, dV within {same:.1e} of the definition for FlashAttention-1, -2,"
        f" standard, {_SEEDS} seeds; bf16 error of O {errors['flash1']:.2e} (FlashAttention-1) and"
        f" {errors['flash2']:.2e} (FlashAttention-2)"
    )
    return Measured(
        {"fp64_difference": same, "bf16_flash1": errors["flash1"], "bf16_flash2": errors["flash2"]},
        text,
        exact=_EXACT,
    )


def _problem(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, do = torch.randn((4, *_SHAPE), generator=generator(seed), dtype=torch.float64)
    return q, k, v, do


def _gradient(
    recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """dQ, and the δ `[B, H, N, 1]` it was computed with."""
    seen: list[Tensor] = []

    def watch(name: str, _exact: Tensor, rounded: Tensor) -> None:
        if name == "delta":
            seen.append(rounded)

    query = q.clone().requires_grad_()
    out = emulate(query, k, v, is_causal=is_causal, recipe=recipe, observers=(watch,))
    (dq,) = torch.autograd.grad(out, query, do)
    return dq, seen[0]


def _probabilities(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
        )
    return torch.softmax(scores, -1)


def _out_and_gradients(
    recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = emulate(*inputs, is_causal=True, recipe=recipe)
    return out.detach(), *torch.autograd.grad(out, inputs, do)


_ROUNDING = Rule(
    "the two sides differ by at most 1e-13 of the gradient, in fp64, and the error term is at least"
    " 1e-6 of it",
    lambda f: f["relative_difference"] <= 1e-13 and f["gradient_difference"] >= 1e-6,
)

CLAIMS = (
    Claim(
        "A7",
        "dQ_hp − dQ_lp = α diag(δ_lp − δ_hp)(P K)",
        "an identity, equation before (2)",
        _query_gradient,
        _ROUNDING,
    ),
    Claim(
        "A8",
        "dW_Q,hp − dW_Q,lp = α Σ_T (δ_lp − δ_hp)[T] · (PK)[T]ᵀ X[T]",
        "an identity, equation (2)",
        _weight_gradient,
        _ROUNDING,
    ),
    Claim(
        "C1",
        "FlashAttention-1 (key blocks outside, O renormalized in every step) is the standard form"
        " and FlashAttention-2",
        "FlashAttention-1, Algorithm 1 and theorem 1",
        _flash1,
        Rule(
            "relative L2 difference of O, dQ, dK, dV at most 1e-12 in fp64, and the bf16 errors of"
            " the two differ",
            lambda f: f["fp64_difference"] <= 1e-12 and f["bf16_flash1"] != f["bf16_flash2"],
        ),
    ),
)
