"""The golden value: attention and its gradients in fp64, by the plain definition, in O(N)
memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.algorithms.problem import Mask, divisor_of, shift_of

# fp64 scores of one head held at once: 4 MiB a matrix, a handful of matrices in the cache
CHUNK_ELEMENTS = 2**19


@dataclass(frozen=True)
class AttentionResult:
    """What one attention call gives; None where a kernel does not offer it.

    out `[B, H, N_q, D_v]`, lse `[B, H, N_q]` (natural logarithm), gradients shaped as their inputs.
    """

    out: Tensor
    lse: Tensor | None = None
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None


def golden(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> AttentionResult:
    """Attention of `[B, H, N, D]` tensors (key and value may have fewer heads); with `grad_out`,
    its gradients too.

    δ is rowsum(dP ∘ P), free of O's rounding. Fully masked rows: out 0, lse −inf, gradients 0.
    Inputs are taken as they are (any float dtype) and results are float64. Memory beside inputs and
    results: a few blocks of 2¹⁹ scores.
    """
    alpha = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    groups = query.shape[1] // max(key.shape[1], 1)
    q, k, v = query.double(), key.double(), value.double()
    do = None if grad_out is None else grad_out.double()
    mask = Mask(is_causal, attn_mask)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_zeros(q.shape[:3])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    rows_at_once = max(1, CHUNK_ELEMENTS // max(1, k.shape[2]))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head = (b, h // groups)
            head_mask = Mask(
                is_causal, None if mask.attn_mask is None else _head_mask(mask.attn_mask, b, h)
            )
            for start in range(0, q.shape[2], rows_at_once):
                rows = slice(start, min(start + rows_at_once, q.shape[2]))
                cols = slice(0, min(rows.stop, k.shape[2]) if is_causal else k.shape[2])
                seen = (
                    q[b, h, rows],
                    k[head][cols],
                    v[head][cols],
                    None if do is None else do[b, h, rows],
                )
                chunk = _chunk(*seen, head_mask, rows, alpha)
                out[b, h, rows], lse[b, h, rows] = chunk[0], chunk[1]
                if do is not None:
                    dq[b, h, rows] = chunk[2]
                    dk[head][cols] += chunk[3]
                    dv[head][cols] += chunk[4]
    return AttentionResult(out, lse) if do is None else AttentionResult(out, lse, dq, dk, dv)


def _head_mask(mask: Tensor, b: int, h: int) -> Tensor:
    """The `[N_q or 1, N_k or 1]` mask of one head."""
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    return mask[min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1)]


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, mask: Mask, rows: slice, alpha: float
) -> tuple[Tensor, ...]:
    """A block of query rows of one head and all the keys that it sees; out, lse and, with `do`, dQ,
    dK and dV.
    """
    cols = slice(0, k.shape[0])
    p = mask.apply((q @ k.mT).mul_(alpha), rows, cols, 1.0)
    m = p.amax(-1, keepdim=True)
    p = p.sub_(shift_of(m)).exp_()
    l = p.sum(-1, keepdim=True)
    lse = (m + l.log()).squeeze(-1)
    p /= divisor_of(l, m)
    out = p @ v
    if do is None:
        return out, lse
    dv = p.mT @ do
    dp = do @ v.mT
    delta = (dp * p).sum(-1, keepdim=True)
    ds = dp.sub_(delta).mul_(p)
    return out, lse, (ds @ k).mul_(alpha), (ds.mT @ q).mul_(alpha), dv
