"""The third set of faults that `halfulp reconstruct` was not written against: mixed indices, rows
and heads that alone are wrong, and roundings of the backward pass, on the second set's attention.
"""

# ruff: noqa: ARG001, ARG005 - steps have the signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.second import (
    INF,
    LOG2_E,
    Dense,
    attention,
    bf16,
    e4m3,
    e5m2,
    fp16,
    seen,
    tf32,
    tiles,
)

FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(name: str, *right: str, dtype: str = "bfloat16", **steps) -> None:
    kernel = type(name, (Dense,), steps)()
    FAULTS.append(Fault(name, frozenset(right), attention(kernel), dtype))


def again(change):
    """Scores that are recomputed from changed operands."""
    return lambda self, q, k, at: self.scores(*change(q, k), at)


def hot_head(self, q, k, scale):
    s = q @ k.mT * scale
    return torch.cat([s[:, :1] * 1.05, s[:, 1:]], 1)


def largest(self, p, low):
    if p.shape[-1] <= 64:
        return low(p)
    least = p.topk(64, -1).values[..., -1:]
    return low(p.masked_fill(p < least, 0.0))


def summed(width, to):
    def sum_values(self, p, v, low):
        total = 0.0
        for cols in tiles(p.shape[-1], width):
            total = to(total + low(p[..., cols]) @ v[:, :, cols])
        return total

    return sum_values


def keys(last):
    def visible(self, n, nk, causal, window):
        return seen((n, nk), causal, window) & (torch.arange(nk) < last(n, nk))

    return visible


def packed(self, n, nk, causal, window):
    return seen((n, nk), False, window) & (
        (torch.arange(nk) <= torch.arange(n)[:, None] // 2 * 2) if causal else True)  # fmt: skip


def lse_heads(self, m, l, at):
    return (m + l.log()).roll(1, 1)


def lse_rows(self, m, l, at):
    return (m + l.log()).roll(1, 2)


def dv_tail(self, p, do, low):
    dv = low(p).mT @ do
    if dv.shape[2] % 16:
        dv[:, :, dv.shape[2] // 16 * 16 :] = 0
    return dv


def dk_atomic(self, ds, q, scale):
    total = 0.0
    for rows in tiles(q.shape[2], 32):
        total = fp16(total + ds[:, :, rows].mT @ q[:, :, rows] * scale)
    return total


def stored(self, o, low):
    rows = torch.arange(o.shape[2])
    o = low(o)
    return torch.where((rows % 64 == 63)[:, None], o.roll(1, 2), o)


fault("hot_first_head", "scale", "other-data", product=hot_head)
fault("largest_64_keys", "weights", "tiles-skipped", weights=largest)
fault("sum_fp16_tiles_of_32", "accumulator", sum_values=summed(32, fp16))
fault("keys_beyond_256", "key-tail", visible=keys(lambda n, nk: 256))
fault("keys_by_queries", "key-tail", "ragged", "query-tail", visible=keys(lambda n, nk: n))
fault("causal_by_pairs", "causal-mask", visible=packed)
fault("last_row_of_tile_repeated", "query-tail", "other-data", "layout", "causal-mask", out=stored)
fault("weights_cut", "weights", "weights-disagree",
      weights=lambda self, p, low: low(p * (1 - 2**-8)))  # fmt: skip
fault("values_descaled_wrongly", "unnormalized", "operand", "weights-disagree", "out",
      sum_values=lambda self, p, v, low: low(p) @ v * 1.02)  # fmt: skip
fault("weights_normalized_bf16", "weights-normalized", "weights",
      sum_values=lambda self, p, v, low: low(p / p.sum(-1, keepdim=True).clamp_min(1e-30)) @ v
      * p.sum(-1, keepdim=True))  # fmt: skip
fault("lse_of_previous_head", "lse", "lse-other", "other-data", lse=lse_heads)
fault("lse_of_previous_row", "lse", "lse-other", "backward-scores", lse=lse_rows)
fault("lse_in_base_2", "lse-other", "lse",
      lse=lambda self, m, l, at: (m + l.log()) * LOG2_E)  # fmt: skip
fault("backward_key_fp8", "backward-scores", "operand", scores_again=again(lambda q, k: (
    q, e4m3(k))))  # fmt: skip
fault("delta_of_half_the_features", "delta", "no-delta",
      delta=lambda self, do, o: (do * o)[..., : o.shape[-1] // 2].sum(-1, keepdim=True)
)  # fmt: skip
fault("dp_bf16", "delta", "grad-scores", grad_weights=lambda self, do, v: bf16(do @ v.mT))
fault("dk_scaled_twice_off_64", "grad-scale", "ragged",
      grad_key=lambda self, ds, q, scale: ds.mT @ q * scale * (
          1 if q.shape[3] % 64 == 0 else scale))  # fmt: skip
fault("dv_tail_of_16", "grad-tail", "unwritten", grad_value=dv_tail)
fault("dq_through_e5m2", "grad-stored", grad_query=lambda self, ds, k, scale: e5m2(ds @ k * scale))
fault("dk_sums_fp16", "grad-accumulator", grad_key=dk_atomic)
fault("half_query_prescaled", "prescaled", "operand", "scores", dtype="float16",
      product=lambda self, q, k, scale: fp16(q * scale) @ k.mT)  # fmt: skip
fault("half_keys_by_queries", "key-tail", "ragged", "query-tail", dtype="float16",
      visible=keys(lambda n, nk: n))  # fmt: skip
fault("half_dk_sums", "grad-accumulator", dtype="float16", grad_key=dk_atomic)
fault("half_out_bf16", "out", dtype="float16", out=lambda self, o, low: low(bf16(o)))
fault("single_values_bf16", "operand", dtype="float32",
      sum_values=lambda self, p, v, low: p @ bf16(v))  # fmt: skip
fault("single_dp_tf32", "delta", "grad-scores", dtype="float32",
      grad_weights=lambda self, do, v: tf32(do) @ tf32(v).mT)  # fmt: skip
fault("single_ds_bf16", "grad-scores", dtype="float32",
      grad_scores=lambda self, p, dp, d, s, low: bf16(p * (dp - d) * s))  # fmt: skip


def eager(query, key, value, *, is_causal, scale):
    scores = query.float() @ key.float().mT * scale
    if is_causal:
        scores = scores.masked_fill(~seen(scores.shape[-2:], True, None), -INF)
    return torch.softmax(scores, -1).to(query.dtype) @ value


def halves(query, key, value, *, is_causal, scale):
    """Two halves of the keys, merged as they must be."""
    scores = query.float() @ key.float().mT * scale
    if is_causal:
        scores = scores.masked_fill(~seen(scores.shape[-2:], True, None), -INF)
    middle = key.shape[2] // 2
    lse = [s.logsumexp(-1, keepdim=True) for s in (scores[..., :middle], scores[..., middle:])]
    whole = torch.logaddexp(*lse)
    low = query.dtype
    first, second = (
        (torch.exp(s - torch.where(x == -INF, 0.0, x)).to(low).float() @ v.float())
        for s, x, v in zip((scores[..., :middle], scores[..., middle:]), lse,
                           (value[:, :, :middle], value[:, :, middle:]), strict=True)
    )  # fmt: skip
    weights = [torch.exp(x - whole) for x in lse]
    return (first * weights[0] + second * weights[1]).to(low)


SOUND += [
    Fault("halves_merged", frozenset(), halves),
    Fault("eager_fp32", frozenset(), eager, "float32"),
    *(Fault(name, frozenset(), name, dtype) for name, dtype in (
        ("sdpa:flash", "float32"), ("sdpa:math", "float32"),
        ("recipe:BF16_FLASH2[block_key=48]", "bfloat16"),
        ("recipe:FP16_FLASH2[delta_from=probabilities]", "float16"))),
]  # fmt: skip
