"""The rounding noise that is natural on one case: what errors are beside, a scale per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.audit.inputs import Inputs, in_parts


@dataclass(frozen=True)
class Delta:
    """The error that rounding O by 1 (relative) leaves in gradients through δ, per head `[S]`."""

    grad_query: Tensor
    grad_key: Tensor
    row_sums: Tensor
    key_sum: Tensor  # of Σ_j dK_j
    # of the single element that gets the most: where keys share one feature it gets nearly all
    most_grad_query: Tensor
    most_grad_key: Tensor


@dataclass(frozen=True)
class Noise:
    """Per head `[S]`, the root sum of squares of the terms of each tensor: the error of rounding
    every term by 1 is about this.
    """

    out: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    row_sums: Tensor  # of dS, over rows
    delta: Delta  # what rounding O to nearest makes of δ, in the same tensors


def natural_noise(x: Inputs, out: Tensor) -> Noise:
    """The noise scales of one case in fp64, from its golden out: root sums over all pairs.

    With w = P(|dP| + |δ|): Σ P²v², Σ w²k², Σ w²q², Σ P²dO², Σ w². With e² = Σ_d (dO O)² a row, what
    O's rounding makes of δ: Σ e²(PK)², Σ e²P²q², Σ e², Σ e²q², and max e²(PK)²,
    max_j Σ_i e²P² max_d q².
    """
    scores = x.query.shape[:3].numel() * x.key.shape[2]

    def squares(part: Inputs, own: tuple[slice, slice]) -> dict[str, Tensor]:
        return _squares(part, out[own])

    whole = (slice(None), slice(None))
    # by two heads, which a core's cache holds; one alone would be multiplied in another way
    rows = squares(x, whole) if scores < 2**18 else in_parts(x, 2, squares)
    total = {
        name: part.amax(-1) if name.startswith("delta most") else part.sum(-1)
        for name, part in rows.items()
    }
    keyed = ("grad_key", "grad_value", "delta grad_key", "delta key_sum", "delta most_grad_key")
    roots = {
        n: per_sample(t.sqrt(), n in keyed and x.groups > 1, x.groups) for n, t in total.items()
    }
    of_delta = {
        n.removeprefix("delta "): roots.pop(n) for n in list(roots) if n.startswith("delta ")
    }
    return Noise(**roots, delta=Delta(**of_delta))


def _squares(x: Inputs, out: Tensor) -> dict[str, Tensor]:
    """What each row `[B, H, N]` adds to the sums that `natural_noise` takes roots of; of the most
    that an element of dK gets, what each key does `[B, H, N_k]`.
    """
    q, do = x.query.double(), x.grad_out.double()
    k, v = (t.double().repeat_interleave(x.groups, dim=1) for t in (x.key, x.value))
    cols = slice(0, k.shape[2])
    q2, k2, v2, do2 = (t.square().sum(-1) for t in (q, k, v, do))
    # O rounded to nearest, each element by itself, makes of δ a random sum of this size a row
    e2 = (do * out).square().sum(-1)
    found: list[dict[str, Tensor]] = []
    most_of_keys = k2.new_zeros(*k2.shape[:2], 1, k2.shape[2])
    # so many at once that a core's cache holds their matrices
    step = max(64, 2**17 // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        p, kept, slope = _weights(x, q[:, :, rows] @ k.mT * x.scale, rows, cols)
        dp = do[:, :, rows] @ v.mT
        dp = dp if kept is None else dp * kept
        # dP and δ at their own size: where they cancel, their roundings stay
        w = p * (dp.abs() + (p * dp).sum(-1, keepdim=True).abs())
        w2 = (w if slope is None else w * slope).square_()
        of_value = None if kept is None else (p * kept).square_()
        p = p if slope is None else p * slope
        attended = (p @ k).square()
        p2 = p.square_()
        of_value = p2 if of_value is None else of_value
        p2_rows, w2_rows, e2_rows, q2_rows = p2.sum(-1), w2.sum(-1), e2[:, :, rows], q2[:, :, rows]
        widest = q[:, :, rows].abs().amax(-1).square_()
        most_of_keys += (e2_rows * widest).unsqueeze(-2) @ p2
        found.append(
            {
                "out": (of_value @ v2.unsqueeze(-1)).squeeze(-1),
                "grad_value": of_value.sum(-1) * do2[:, :, rows],
                "grad_query": (w2 @ k2.unsqueeze(-1)).squeeze(-1) * x.scale**2,
                "grad_key": w2_rows * q2_rows * x.scale**2,
                "row_sums": w2_rows,
                "delta grad_query": e2_rows * attended.sum(-1) * x.scale**2,
                "delta most_grad_query": e2_rows * attended.amax(-1) * x.scale**2,
                "delta grad_key": e2_rows * p2_rows * q2_rows * x.scale**2,
                "delta row_sums": e2_rows,
                "delta key_sum": e2_rows * q2_rows * x.scale**2,
            }
        )
    joined = {name: torch.cat([part[name] for part in found], -1) for name in found[0]}
    return joined | {"delta most_grad_key": most_of_keys.squeeze(-2) * x.scale**2}


def _weights(
    x: Inputs, scores: Tensor, rows: slice, cols: slice
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """P of some rows of a call, what dropout multiplies it by, and the slope of its softcap."""
    kept = slope = None
    if x.softcap:
        t = torch.tanh(scores / x.softcap)
        scores, slope = t * x.softcap, 1 - t * t
    scores = x.sees.apply(scores, rows, cols, 1.0)
    if x.sinks is not None:
        sink = x.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    # softmax of a row that sees nothing is NaN, where the definition says 0; a sink has taken its
    # share when its column is cut off
    p = torch.softmax(scores, -1).nan_to_num_(0.0)[..., : cols.stop]
    if x.dropout is not None:
        batch, heads, queries = x.query.shape[:3]
        numbers = torch.arange(batch * heads, device=p.device).view(batch, heads)
        kept = x.dropout.keep(numbers, rows, cols, queries).double() * x.dropout.scale
    return p, kept, slope


def per_sample(x: Tensor, grouped: bool, groups: int) -> Tensor:
    """One number a sample: `[B·H]`, or `[B·H_k]` where query heads share a key head."""
    return (x.reshape(x.shape[0], -1, groups).square().sum(-1).sqrt() if grouped else x).flatten()
