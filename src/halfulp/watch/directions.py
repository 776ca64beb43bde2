"""Where the error of dW_Q points: α Σ_T (δ_lp − δ_hp)[T] · (PK)[T]ᵀ X[T], and how alike its rank-1
terms are.

Qiu & Yao (equations 2 and 3, fig. 4) say that the terms (PK)[T]ᵀ X[T] resemble each other across
tokens and steps, so that their sum is one direction R, which only needs coefficients of one sign to
grow. Alikeness is a cosine, which means little without its null: each figure comes with the same
figure of a shuffled control.

What is shuffled: which feature holds which number. Across tokens, the features of every token's PK
and of every token's X are rolled by random amounts of their own. Across steps, the rows and the
columns of today's direction are permuted. Norms, values, their mean and, across steps, the singular
values stay; what goes is that a feature means the same thing in both. Were features exchangeable,
figure and control would have the same expectation. Shuffling whole tokens would be no control: a
mean over all pairs of tokens does not change.

The error of dW_Q (A8) has this form where query = X W_Qᵀ. Where a norm or rotary positions lie
between, the direction is that of a W_Q behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.watch.measures import Exact
from halfulp.watch.spectral import power_iteration
from halfulp.watch.taps import Observed

MOST_TERMS = 256
"""Rows of a head whose terms are compared with each other, evenly spread over batch entries and
tokens.
"""
SHUFFLES = 4
"""Controls of a comparison between steps."""


@dataclass(frozen=True)
class Direction:
    """What one call says about its layer's error direction, by head."""

    # R = Σ_T e[T] (PK)[T]ᵀ X[T]  [H, D, width], over batch entries and rows; dW_Q,hp − dW_Q,lp is
    # αR
    error: Tensor
    mean_term: Tensor  # mean of (PK)[T]ᵀ X[T], each of unit norm  [H, D, width]
    figures: dict[str, Tensor]  # [H] each


def error_direction(call: Observed, exact: Exact, error: Tensor) -> Tensor:
    """R = Σ_T e[T] (PK)[T]ᵀ X[T] `[H, D, width]` (A8), of e `[B, H, N]` and the call's inputs X."""
    terms = exact.weights @ call.key.to(error.dtype) * error.unsqueeze(-1)
    return terms.transpose(0, 1).flatten(1, 2).mT @ _inputs(call, error.dtype).flatten(0, 1)


def direction_of(
    call: Observed, exact: Exact, error: Tensor, generator: torch.Generator
) -> Direction:
    """The error direction of a call and how alike its terms are (A9).

    Figures: terms_cosine, the mean cosine of two terms over all pairs of different rows, and
    terms_cosine_shuffled, its control. terms_rank1: of the stack of terms, each of unit norm and
    written out as one row, top singular value² / Frobenius². direction_rank1: of R itself, the same
    share: 1 where R is one rank-1 matrix (equation 3).
    """
    terms = exact.weights @ call.key.to(error.dtype)  # PK
    inputs = _inputs(call, error.dtype)
    flat = terms.transpose(0, 1).flatten(1, 2)
    errors = error.transpose(0, 1).flatten(1).unsqueeze(-1)
    direction = (flat * errors).mT @ inputs.flatten(0, 1)
    rows = inputs.shape[0] * inputs.shape[1]
    picked = torch.arange(0, rows, -(-rows // MOST_TERMS), device=flat.device)
    a, x = _unit(flat[:, picked]), _unit(inputs.flatten(0, 1)[picked])
    total = a.mT @ x
    shuffled = _rolled(a, generator).mT @ _rolled(x, generator)
    count = len(picked)
    figures = {
        "terms_cosine": _mean_pair(total, count),
        "terms_cosine_shuffled": _mean_pair(shuffled, count),
        "terms_rank1": _stack_share(a, x),
        "direction_rank1": rank1_share(direction),
    }
    return Direction(direction, total / count, figures)


def rank1_share(matrix: Tensor) -> Tensor:
    """Top singular value² / Frobenius² of `[H, D, width]`, `[H]`; NaN for a matrix of zeros."""
    scaled = matrix.double() / matrix.abs().amax((1, 2), keepdim=True)
    gram = scaled @ scaled.mT
    start = gram[torch.arange(len(gram)), gram.diagonal(dim1=1, dim2=2).nan_to_num().argmax(-1)]
    top = power_iteration(lambda y: (gram @ y.unsqueeze(-1)).squeeze(-1), start)
    return top.value / gram.diagonal(dim1=1, dim2=2).sum(-1)


def step_figures(
    now: Direction, errors: Tensor | None, means: Tensor | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """Cosines of this step with the last measured ones, each `[H]` (A9); NaN where there are none.

    direction_cosine: of R with the mean of the last R, each of unit norm. terms_step_cosine: of a
    term now with a term then, the mean over all pairs. `_shuffled`: root mean square of the same
    over `SHUFFLES` controls.

    Args:
        now: this step's.
        errors: R of the last steps, each of unit norm `[K, H, D, width]`, or None.
        means: `mean_term` of the last steps `[K, H, D, width]`, or None.
        generator: of the controls, on the CPU.
    """
    pairs = {
        "direction_cosine": (unit_matrix(now.error), errors),
        "terms_step_cosine": (now.mean_term, means),
    }
    found: dict[str, Tensor] = {}
    for name, (matrix, past) in pairs.items():
        if past is None:
            found |= dict.fromkeys(
                (name, f"{name}_shuffled"), torch.full_like(matrix[:, 0, 0], torch.nan)
            )
            continue
        mean = past.to(matrix.dtype).mean(0)
        # a control's sign is chance, so that its size is told: root mean square, not mean
        controls = [(_permuted(matrix, generator) * mean).sum((1, 2)) for _ in range(SHUFFLES)]
        found[name] = (matrix * mean).sum((1, 2))
        found[f"{name}_shuffled"] = torch.stack(controls).square().mean(0).sqrt()
    return found


def unit_matrix(matrix: Tensor) -> Tensor:
    """`[H, D, width]` of Frobenius norm 1 a head; zeros stay zeros."""
    least = torch.finfo(matrix.dtype).tiny
    # by the largest element first: gradients shrink as a run learns, and squares underflow in fp32
    scaled = matrix / matrix.abs().amax((1, 2), keepdim=True).clamp_min(least)
    length: Tensor = scaled.norm(dim=(1, 2), keepdim=True)
    return scaled / length.clamp_min(least)


def _inputs(call: Observed, dtype: torch.dtype) -> Tensor:
    if call.inputs is None:
        raise ValueError("call.inputs=None: accepted is a call with X [B, N, width]")
    return call.inputs.to(dtype)


def _unit(x: Tensor) -> Tensor:
    """Rows of unit length; a row of zeros stays."""
    length: Tensor = x.norm(dim=-1, keepdim=True)
    return x / length.clamp_min(torch.finfo(x.dtype).tiny)


def _mean_pair(total: Tensor, count: int) -> Tensor:
    """The mean product of two different ones among `count` unit matrices, from their sum: ‖Σ‖² =
    count + Σ of pairs.
    """
    return (total.square().sum((1, 2)) - count) / max(count * (count - 1), 1)


def _stack_share(a: Tensor, x: Tensor) -> Tensor:
    """Of the stack of aₜᵀxₜ `[n, D·width]` top singular value² / Frobenius², by its Gram matrix."""
    # two rank-1 terms have the product (aₛ·aₜ)(xₛ·xₜ): none of D·width numbers is written out
    gram = (a @ a.mT).mul_(x @ x.mT)  # [H, n, n]
    top = power_iteration(lambda y: (gram @ y.unsqueeze(-1)).squeeze(-1), gram.sum(-1))
    # the terms have unit norm, so that Frobenius² is their number
    return top.value / a.shape[1]


def _rolled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every row's features moved on by a random number of places, cyclically."""
    features = x.shape[-1]
    by = torch.randint(features, (*x.shape[:-1], 1), generator=generator).to(x.device)
    return x.gather(-1, (torch.arange(features, device=x.device) + by) % features)


def _permuted(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Rows and columns in random orders, the same in every head."""
    rows, columns = (
        torch.randperm(n, generator=generator).to(matrix.device) for n in matrix.shape[1:]
    )
    return matrix[:, rows][:, :, columns]
