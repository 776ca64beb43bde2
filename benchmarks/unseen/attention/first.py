"""The first set of faults that `halfulp reconstruct` was not written against: the textbook's tiled
attention of the tests with one step replaced, or a wrapper around it.
"""

# ruff: noqa: ARG001, ARG005 - steps have the signatures of the kernel that they are put into

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from benchmarks.unseen import Fault
from tests.audit.zoo_kernel import TEXTBOOK, TEXTBOOK_PLAN, finite, keep_bits, kernel
from torch import Tensor

LOG2_E = math.log2(math.e)
SOUND: list[Fault] = []
FAULTS: list[Fault] = []


def planned(name: str, *right: str, **steps: Any) -> None:
    """The textbook with steps replaced."""
    FAULTS.append(Fault(name, frozenset(right), kernel(name, replace(TEXTBOOK_PLAN, **steps))))


def bits(count: int):
    return lambda p, low: keep_bits(p, count)


def half(x: Tensor) -> Tensor:
    return x.half().float()


def e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).float()


# Forward arithmetic.
planned("accumulator_fp16", "accumulator", accumulate=lambda a, r, pv, j, low: half(a * r + pv))
planned("accumulator_cut", "accumulator", accumulate=lambda a, r, pv, j, low: low.cut(a * r + pv))
planned("weights_e5m2", "weights", weights_operand=lambda p, low: e5m2(p))
planned("weights_3_bits", "weights", weights_operand=bits(3))
planned("row_sum_fp16", "row-sum",
        row_sum=lambda l, r, p, t, low: half(l * r + p.sum(-1, keepdim=True)))  # fmt: skip
planned("row_sum_of_cut_weights", "row-sum", "weights-disagree", "weights",
        row_sum=lambda l, r, p, t, low: l * r + low.cut(p).sum(-1, keepdim=True))  # fmt: skip
planned("scores_fp16", "scores", scores=lambda q, k, a, low: half(q @ k.mT * a))
planned("scores_9_bits", "scores", scores=lambda q, k, a, low: keep_bits(q @ k.mT * a, 9))


def quadratic(x: Tensor) -> Tensor:
    y = x * LOG2_E
    n = y.floor()
    f = y - n
    series = 1.0 + f * (0.6565 + 0.3435 * f)
    return torch.where(y == -math.inf, 0.0, torch.ldexp(series, n.clamp_min(-126)))


def coarse_log2e(x: Tensor) -> Tensor:
    return torch.exp2(x * float(torch.tensor(LOG2_E).bfloat16()))


planned("exp_quadratic", "exponential", exponential=quadratic)
planned("exp_coarse_log2e", "exponential", "scale", exponential=coarse_log2e)
planned("shifted_scores_low", "row-max", "exponential",
        exponential=lambda x: torch.exp(x.bfloat16().float()))  # fmt: skip
planned("reciprocal_fp16", "reciprocal", "row-sum", divide=lambda a, l, low: a * half(1 / l))
planned("reciprocal_6_bits", "reciprocal", "row-sum",
        divide=lambda a, l, low: a * keep_bits(1 / l, 6))  # fmt: skip
planned("out_up", "out", store=lambda out, low: low.cut(out * (1 + 2**-7)))
planned("value_5_bits", "operand", read_value=lambda v: keep_bits(v, 5))
planned("query_fp8", "operand", "scores",
        scores=lambda q, k, a, low: q.to(torch.float8_e4m3fn).float() @ k.mT * a)  # fmt: skip

# Backward arithmetic.
planned("lse_fp16", "lse", lse=lambda m, l, low: half(m + torch.log(l)))
planned("lse_cut", "lse", lse=lambda m, l, low: low.cut(m + torch.log(l)))
planned("delta_cut", "delta",
        delta=lambda do, out, x, low: low.cut((do * out).sum(-1, keepdim=True)))  # fmt: skip
planned("delta_products_low", "delta",
        delta=lambda do, out, x, low: low(do * out).sum(-1, keepdim=True))  # fmt: skip
planned("grad_scores_e5m2", "grad-scores", grad_scores=lambda p, dp, d, low: e5m2(p * (dp - d)))
planned("grad_scores_5_bits", "grad-scores",
        grad_scores=lambda p, dp, d, low: keep_bits(p * (dp - d), 5))  # fmt: skip
planned("dp_fp16", "delta", "grad-scores",
        grad_scores=lambda p, dp, d, low: low(p * (half(dp * 64) / 64 - d)))  # fmt: skip
planned("dp_6_bits", "delta", "grad-scores",
        grad_scores=lambda p, dp, d, low: low(p * (keep_bits(dp, 6) - d)))  # fmt: skip
planned("grad_scores_of_low_p", "grad-scores", "probabilities", "backward-scores",
        grad_scores=lambda p, dp, d, low: low(low(p) * (dp - d)))  # fmt: skip
planned("dv_weights_cut", "probabilities", probabilities_operand=lambda p, low: low.cut(p))
planned("dv_weights_5_bits", "probabilities", probabilities_operand=bits(5))


def summed(names: tuple[str, ...], to):
    return lambda name, total, block, low: (
        to(total + block, low) if name in names else total + block
    )


planned("dq_sums_fp16", "grad-accumulator", add_grad=summed(("dq",), lambda x, low: half(x)))
planned("dk_sums_low", "grad-accumulator", add_grad=summed(("dk",), lambda x, low: low(x)))
planned("grad_sums_cut", "grad-accumulator",
        add_grad=summed(("dq", "dk", "dv"), lambda x, low: low.cut(x)))  # fmt: skip
planned("backward_query_fp16", "backward-scores",
        scores_again=lambda q, k, a, low: half(q * a) @ k.mT)  # fmt: skip
planned("backward_scores_8_bits", "backward-scores",
        scores_again=lambda q, k, a, low: keep_bits(q @ k.mT * a, 8))  # fmt: skip
planned("backward_exp_quadratic", "backward-scores", "exponential",
        probabilities=lambda s, lse: quadratic(s - finite(lse)))  # fmt: skip
planned("no_delta", "no-delta", "delta", grad_scores=lambda p, dp, d, low: low(p * dp))

# Structure.
planned("tail_of_48_dropped", "key-tail", "ragged", block_key=48,
        keys_visited=lambda n, b: n if n < b else n // b * b)  # fmt: skip
planned("causal_off_from_64", "causal-mask", visible=lambda i, j: j <= i + (i >= 64))
planned("causal_first_key", "causal-mask", "key-tail",
        visible=lambda i, j: (j <= i) & ((j > 0) | (i == 0)))  # fmt: skip
planned("causal_window", "causal-mask", visible=lambda i, j: (j <= i) & (i - j < 100))
planned("mask_of_first_sequence", "mask", mask_head=lambda mask: mask[:1].expand_as(mask))
planned("padded_alpha_of_96", "scale", alpha=lambda a, width, low: (width + 8) ** -0.5)
planned("alpha_1_percent", "scale", alpha=lambda a, width, low: a * 1.01)
planned("rescaled_twice", "rescale", "accumulator",
        accumulate=lambda a, r, pv, j, low: a * r * r + pv)  # fmt: skip
planned("row_sum_of_last_tile", "unnormalized", "row-sum", "rescale",
        row_sum=lambda l, r, p, t, low: p.sum(-1, keepdim=True))  # fmt: skip
planned("accumulator_of_last_tile", "rescale", "key-tail", "accumulator",
        accumulate=lambda a, r, pv, j, low: pv + a * r * (r == 1))  # fmt: skip
planned("block_16_weights_max", "row-max", "weights-disagree", "weights", "rescale",
        block_key=16, weights_operand=lambda p, low: low(p * 0.999))  # fmt: skip


def wrapped(name: str, *right: str):
    """A function around the textbook, given its arguments."""

    def keep(change):
        def attention(query, key, value, *, is_causal, scale=None, attn_mask=None,
                      enable_gqa=False):  # fmt: skip
            def ask(q, k, v, **other):
                options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask}
                return TEXTBOOK(q, k, v, **(options | other))

            return change(ask, query, key, value, is_causal, attn_mask)

        FAULTS.append(Fault(name, frozenset(right), attention))
        return attention

    return keep


class _Changed(torch.autograd.Function):
    """A value that goes through, and a gradient that is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


@wrapped("dq_unscaled", "grad-scale")
def _(ask, q, k, v, causal, mask):
    return ask(_Changed.apply(q, lambda g: g * 8), k, v)


@wrapped("dk_log2e", "grad-scale")
def _(ask, q, k, v, causal, mask):
    return ask(q, _Changed.apply(k, lambda g: g * LOG2_E), v)


@wrapped("dv_10_percent", "grad-scale")
def _(ask, q, k, v, causal, mask):
    return ask(q, k, _Changed.apply(v, lambda g: g * 1.1))


@wrapped("last_head_of_neighbor", "other-data")
def _(ask, q, k, v, causal, mask):
    if q.shape[1] != k.shape[1]:
        return ask(q, k, v)
    index = torch.arange(k.shape[1])
    index[-1] = max(len(index) - 2, 0)
    return ask(q, k[:, index], v[:, index])


@wrapped("last_sequence_of_before", "other-data")
def _(ask, q, k, v, causal, mask):
    index = torch.arange(k.shape[0])
    index[-1] = max(len(index) - 2, 0)
    return ask(q, k[index], v[index])


@wrapped("odd_heads_unwritten", "unwritten")
def _(ask, q, k, v, causal, mask):
    out = ask(q, k, v)
    kept = torch.ones(q.shape[1], dtype=out.dtype)
    kept[1::2] = 0
    return out * kept[:, None, None]


@wrapped("last_rows_unwritten", "unwritten", "query-tail")
def _(ask, q, k, v, causal, mask):
    out = ask(q, k, v)
    kept = torch.ones(q.shape[2], dtype=out.dtype)
    kept[q.shape[2] // 64 * 64 :] = 0
    return out * kept[:, None]


@wrapped("two_halves_averaged", "split-merge")
def _(ask, q, k, v, causal, mask):
    if causal or mask is not None:
        return ask(q, k, v)
    n = k.shape[2] // 2
    return (ask(q, k[:, :, :n], v[:, :, :n]) + ask(q, k[:, :, n:], v[:, :, n:])) / 2


@wrapped("features_ignored", "ragged", "scores", "scale")
def _(ask, q, k, v, causal, mask):
    d = q.shape[-1] // 32 * 32
    keep = (torch.arange(q.shape[-1]) < d).to(q.dtype)
    return ask(q * keep, k, v)


@wrapped("value_features_unwritten", "unwritten", "ragged")
def _(ask, q, k, v, causal, mask):
    d = v.shape[-1] // 32 * 32
    keep = (torch.arange(v.shape[-1]) < d).to(v.dtype)
    return ask(q, k, v) * keep


@wrapped("one_noisy_head", "other-data")
def _(ask, q, k, v, causal, mask):
    out = ask(q, k, v)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    where = torch.zeros(q.shape[1], dtype=out.dtype)
    where[0] = 0.05
    return out + noise * where[:, None, None] * out.detach().std()


@wrapped("one_element_in_a_thousand", "elements")
def _(ask, q, k, v, causal, mask):
    out = ask(q, k, v)
    hit = torch.zeros(out.numel(), dtype=out.dtype)
    hit[977 :: max(1, out.numel() // 6)] = 1.0
    return out + hit.view(out.shape) * 4 * out.detach().std()


@wrapped("grad_out_fp16", "operand", "grad-scores")
def _(ask, q, k, v, causal, mask):
    return _Changed.apply(ask(q, k, v), lambda g: g.half().to(g.dtype))


@wrapped("grouped_dk_of_first", "group-sum")
def _(ask, q, k, v, causal, mask):
    g = q.shape[1] // k.shape[1]
    if g == 1:
        return ask(q, k, v)
    first = torch.zeros(g, 1, 1, dtype=k.dtype)
    first[0] = 1.0
    k, v = (
        _Changed.apply(x.repeat_interleave(g, 1), lambda d: d * first.repeat(d.shape[1] // g, 1, 1))
        for x in (k, v)
    )
    return ask(q, k, v)


@wrapped("backward_without_causal", "backward-mask", "causal-mask")
def _(ask, q, k, v, causal, mask):
    if not causal:
        return ask(q, k, v)
    with torch.no_grad():
        seen = ask(q, k, v)
    whole = ask(q, k, v, is_causal=False)
    return whole + (seen - whole).detach()
