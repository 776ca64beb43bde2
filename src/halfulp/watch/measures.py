"""What one attention call tells: scores, where the weights lie, and what the rounding of O does to
δ.

Functions take an `Observed` call and its exact value, and return a number a head. Nothing here
knows which algorithm ran: O, dO and dK are what it gave, everything else is computed again from
query, key and value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from halfulp.watch.taps import Observed

Figures: TypeAlias = dict[str, Tensor]
UNIT_SCORE = math.log1p(-(2.0**-9))
"""Scores at least this close to the row maximum have P̄ = exp(S − m) rounded to 1 in bf16 (the tie
goes to even: 1).
"""


@dataclass(frozen=True)
class Exact:
    """Attention of one call by its definition, in fp64 or fp32; hidden pairs have score −inf and
    weight 0.
    """

    scores: Tensor  # S = α QKᵀ [B, H, N, N_k]
    row_max: Tensor  # [B, H, N, 1]
    lse: Tensor  # [B, H, N, 1]
    weights: Tensor  # P = exp(S − lse) [B, H, N, N_k]
    out: Tensor  # PV [B, H, N, D_v]
    # pairs that are not hidden, of one head of one batch entry, or their mean over these [H]
    visible: int | Tensor


def exact_call(call: Observed, dtype: torch.dtype = torch.float64) -> Exact:
    """A call by the definition, of its query, key and value as they are; each row sees a key."""
    query, key, value = (x.to(dtype) for x in call.operands)
    scores = (query @ key.mT).mul_(call.scale)
    n, n_k = scores.shape[-2:]
    scores = call.sees.apply(scores, slice(0, n), slice(0, n_k), 1.0)
    visible: int | Tensor = call.sees.pairs(n, n_k)
    if call.sees.mask is not None:
        visible = (scores > -math.inf).sum((0, 2, 3)).double() / len(scores)
    row_max = scores.amax(-1, keepdim=True)
    weights = (scores - row_max).exp_()
    row_sum = weights.sum(-1, keepdim=True)
    weights /= row_sum
    return Exact(scores, row_max, row_max + row_sum.log(), weights, weights @ value, visible)


def figures_of(exact: Exact) -> dict[str, Tensor]:
    """`score_figures`, `weight_figures` and `repetition_figures`."""
    return score_figures(exact) | weight_figures(exact) | repetition_figures(exact)


def score_figures(exact: Exact) -> dict[str, Tensor]:
    """mean_score and max_score `[H]` of pairs that a query may see, scaled by α, natural units."""
    seen = exact.scores.masked_fill(exact.scores == -math.inf, 0)
    total = seen.sum((0, 2, 3)) / (len(seen) * exact.visible)
    return {"mean_score": total, "max_score": exact.row_max.amax((0, 2, 3))}


def weight_figures(exact: Exact) -> dict[str, Tensor]:
    """Where attention goes, each `[H]` (A20).

    entropy: nats, mean over rows. sink_first: share of the weights on the first key. sink_largest:
    on the key that has the largest share, in each batch entry.
    """
    seen = exact.scores.masked_fill(exact.scores == -math.inf, 0)
    # −Σ P log P = lse − Σ P S; a hidden pair's 0 · −inf, which is NaN, was filled with 0
    entropy = exact.lse.squeeze(-1) - (seen.mul_(exact.weights)).sum(-1)
    shares = exact.weights.mean(2)  # [B, H, N_k]
    return {
        "entropy": entropy.mean((0, 2)),
        "sink_first": shares[..., 0].mean(0),
        "sink_largest": shares.amax(-1).mean(0),
    }


def repetition_figures(exact: Exact) -> dict[str, Tensor]:
    """How often the condition of Qiu & Yao's bias is met, each `[H]` (A20; D5).

    tied_rows: rows whose maximum is repeated, with scores rounded to fp32, as stock kernels hold
    them. tied_rows_bf16: with these rounded on to bf16, as the paper's official code has them.
    unit_weights: entries of P̄ = exp(S − m) a row that are 1 once rounded to bf16; the maximum is
    one of them. repeated_unit_rows: rows with more than one of these.
    """
    single = exact.scores.float()
    half, units = single.bfloat16(), exact.scores >= exact.row_max + UNIT_SCORE
    counts = units.sum(-1)
    return {
        "tied_rows": _tied(single),
        "tied_rows_bf16": _tied(half),
        "unit_weights": counts.double().mean((0, 2)),
        "repeated_unit_rows": (counts > 1).double().mean((0, 2)),
    }


def _tied(scores: Tensor) -> Tensor:
    return ((scores == scores.amax(-1, keepdim=True)).sum(-1) > 1).double().mean((0, 2))


def delta_error(call: Observed, exact: Exact) -> Tensor:
    """Return e = δ_lp − δ_hp = rowsum(dO ∘ (O − O_hp)) `[B, H, N]` (A7, A10).

    O is the call's own and O_hp exact. An attention that takes δ from elsewhere, from a residual or
    from dP ∘ P, has this error in its O and not in its gradient; `key_gradient_sum` reads the
    gradient.
    """
    return (_grad_out(call, exact) * (call.out.to(exact.out.dtype) - exact.out)).sum(-1)


def delta_error_in_gradient(call: Observed) -> Tensor:
    """Σ_i w_i e_i `[B, H]` of the error e that the gradient really has, read from dK, with weights
    of mean 1.

    Σ_j dK_j = α Σ_i (Σ_j dS_ij) q_i, and a row sum of dS is −e_i plus the rounding of dS. Along q̄,
    the mean query of the head, that gives w_i = q_i · q̄ / ‖q̄‖². Whatever the attention takes δ
    from, this is what reaches the weights; it is read well where queries have a common direction,
    as in a run that fails. NaN without grad_key.
    """
    query = call.query.double()
    if call.grad_key is None:
        return torch.full(query.shape[:2], math.nan, dtype=torch.float64, device=query.device)
    # over batch entries and rows, so that the weights w_i have mean 1 over both
    mean = query.mean((0, 2))
    # Σ_j dK_j cancels to nothing in exact arithmetic: what is left is the figure, and a sum in fp32
    # would add its own rounding to it
    along = (call.grad_key.double().sum(2) * mean).sum(-1)
    return -along / (call.scale * mean.square().sum(-1))


def exact_gradients(call: Observed, exact: Exact) -> tuple[Tensor, Tensor, Tensor]:
    """dQ `[B, H, N, D]`, dK `[B, H, N_k, D]` and dV `[B, H, N_k, D_v]` by the definition, of the
    call's dO.
    """
    grad_out = _grad_out(call, exact)
    grad_scores = grad_out @ call.value.to(grad_out.dtype).mT
    grad_scores.sub_((grad_out * exact.out).sum(-1, keepdim=True)).mul_(exact.weights).mul_(
        call.scale
    )
    query, key = (x.to(grad_out.dtype) for x in (call.query, call.key))
    return grad_scores @ key, grad_scores.mT @ query, exact.weights.mT @ grad_out


def relative_error(given: Tensor, golden: Tensor) -> Tensor:
    """‖given − golden‖ / ‖golden‖ `[H]` of `[B, H, N, D]`, over batch entries and rows; NaN where
    golden is 0.
    """
    error, size = (x.square().sum((0, 2, 3)) for x in (given.to(golden.dtype) - golden, golden))
    return error.div(size).sqrt()


def delta_error_in_query_gradient(
    call: Observed, exact: Exact, grad_query: Tensor, golden: Tensor
) -> Tensor:
    """Σ_i w_i e_i `[B, H]` as `delta_error_in_gradient`, read from dQ, for heads that share a key
    and so a dK.

    An error e of δ changes row i of dQ by −α e_i (PK)_i. Along (PK)_i that gives w_i = ‖(PK)_i‖²
    over its mean.

    Args:
        call: its query, key and value.
        exact: the same call's.
        grad_query: dQ as the attention gave it `[B, H, N, D]`.
        golden: its exact value, of `exact_gradients`.
    """
    means = exact.weights @ call.key.to(golden.dtype)  # PK
    # unlike Σ dK, dQ is not 0 in exact arithmetic: its exact value has to be taken away first
    along = ((grad_query.to(golden.dtype) - golden) * means).sum((2, 3))
    return -along / (call.scale * means.square().sum(-1).mean((0, 2)))


def row_sum_figures(call: Observed, exact: Exact, error: Tensor) -> dict[str, Tensor]:
    """Row sums of dS, 0 in exact arithmetic, each `[H]`.

    row_sum_grad_scores: Σ_i |Σ_j dS_ij| / Σ_ij |dS_ij| of dS = P ∘ (dP − δ_lp), with δ_lp from the
    call's O and all else exact. key_gradient_sum: ‖Σ_j dK_j‖ / (α Σ_i Σ_j |dS_ij| ‖q_i‖), from the
    dK that the attention gave, since Σ_j dK_j = α Σ_i (Σ_j dS_ij) q_i: what is left of the sum, of
    its terms' size. NaN without grad_key.
    """
    grad_out = _grad_out(call, exact)
    grad_scores = grad_out @ call.value.to(grad_out.dtype).mT
    # δ_lp = δ_hp + e
    delta = (grad_out * exact.out).sum(-1) + error
    grad_scores.sub_(delta.unsqueeze(-1)).mul_(exact.weights)
    sums, sizes = grad_scores.sum(-1), grad_scores.abs_().sum(-1)
    found = {"row_sum_grad_scores": sums.abs().sum((0, 2)) / sizes.sum((0, 2))}
    if call.grad_key is None:
        return found | {"key_gradient_sum": torch.full_like(found["row_sum_grad_scores"], math.nan)}
    key_sum = call.grad_key.to(grad_out.dtype).sum(2).norm(dim=-1)  # [B, H]
    norms = call.query.to(grad_out.dtype).norm(dim=-1)
    most = abs(call.scale) * (sizes * norms).sum(2)
    return found | {"key_gradient_sum": key_sum.sum(0) / most.sum(0)}


def feature_signs(call: Observed, exact: Exact) -> tuple[Tensor, Tensor]:
    """Per feature: how often dO and O − O_hp have the same sign, and what the feature adds to Σe
    (A11; fig. 5b, c).

    Returns:
        agreement `[H, D_v]`, the share of (batch entry, row) pairs of one sign among those where
        neither is 0, NaN where there are none; and contribution `[H, D_v]`, Σ dO (O − O_hp) over
        batch entries and rows.
    """
    products = _grad_out(call, exact) * (call.out.to(exact.out.dtype) - exact.out)
    same, other = (products > 0).sum((0, 2)).double(), (products < 0).sum((0, 2)).double()
    return same / (same + other), products.sum((0, 2))


def sign_figures(call: Observed, exact: Exact) -> dict[str, Tensor]:
    """sign_agreement `[H]`: the mean of `feature_signs` over features; guilty_feature: the one that
    adds most to |Σe|; guilty_sign_agreement and guilty_share: its agreement, and its part of Σ over
    features of |contribution|.
    """
    agreement, contribution = feature_signs(call, exact)
    size = contribution.abs()
    guilty = size.argmax(-1, keepdim=True)
    return {
        "sign_agreement": agreement.nanmean(-1),
        "guilty_feature": guilty.squeeze(-1).double(),
        "guilty_sign_agreement": agreement.gather(-1, guilty).squeeze(-1),
        "guilty_share": (size.gather(-1, guilty) / size.sum(-1, keepdim=True)).squeeze(-1),
    }


def activation_figures(call: Observed) -> dict[str, Tensor]:
    """Root mean squares of query, key, value, out and dO, and of X where it is known, with X's
    largest |x|; each `[H]`, X's alike in all heads (A19).
    """
    named = {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "out": call.out,
        "grad_out": call.grad_out,
    }
    found = {
        f"{name}_rms": x.double().square().mean((0, 2, 3)).sqrt()
        for name, x in named.items()
        if x is not None
    }
    if call.inputs is not None:
        x = call.inputs.double()
        ones = torch.ones(call.query.shape[1], dtype=torch.float64, device=x.device)
        found |= {"input_rms": x.square().mean().sqrt() * ones, "input_max": x.abs().amax() * ones}
    return found


def joined(chunks: Sequence[tuple[Figures, Figures]]) -> tuple[Figures, Figures]:
    """Figures `[h]` and parts by batch entry `[B, h]` of some heads at a time, as those of all."""
    figures, parts = (
        {name: torch.cat([chunk[i][name] for chunk in chunks], i) for name in chunks[0][i]}
        for i in (0, 1)  # where the heads are
    )
    return figures, parts


def _grad_out(call: Observed, exact: Exact) -> Tensor:
    if call.grad_out is None:
        raise ValueError("call.grad_out=None: accepted is a call whose backward pass has run")
    return call.grad_out.to(exact.out.dtype)
