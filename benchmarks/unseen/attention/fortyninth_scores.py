"""The forty-ninth set's faults of scores, formats and gradients (fortyninth.py has the others, and
says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyninth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, fp16
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of

FAULTS: list[Fault] = []


# --- scores in half precision
def products_in_half_before_their_scale(query, key, value, *, is_causal, scale, attn_mask=None,
                                        window=None, softcap=0.0, sinks=None):  # fmt: skip
    """pytorch/pytorch issue 40497, comments: under autocast Q Kᵀ is a half that is not divided by
    √d yet, infinite where numbers are large, and the softmax in fp32 makes NaN of that.
    """

    def scores(q, k):
        return ways.half(ways.half(q @ k.mT) * scale)

    return ways.eager(query, key, value, scores, lambda p: p.to(query.dtype).float(),
                      is_causal=is_causal, attn_mask=attn_mask, window=window, softcap=softcap,
                      sinks=sinks)  # fmt: skip


ways.put(FAULTS, products_in_half_before_their_scale, "scores non-finite nan-escapes", "float16")


def cast_to_half_where_bfloat16_was_asked(query, key, value, *, is_causal, scale, attn_mask=None,
                                          window=None, softcap=0.0, sinks=None):  # fmt: skip
    """SHI-Labs/NATTEN PR 94: functions cast what they are given under autocast to fp16, and the
    user may be doing bf16: queries, times the scale, keys, scores, weights and values are halves.
    """

    def scores(q, k):
        return ways.half(ways.half(q * scale) @ ways.half(k).mT)

    found = ways.eager(query, key, ways.half(value), scores, ways.half, is_causal=is_causal,
                       attn_mask=attn_mask, window=window, softcap=softcap,
                       sinks=sinks)  # fmt: skip
    return ways.half(found).to(query.dtype)


ways.put(FAULTS, cast_to_half_where_bfloat16_was_asked, "scores operand non-finite")


def similarities_and_weights_in_half(query, key, value, *, is_causal, scale, attn_mask=None,
                                     window=None, softcap=0.0, sinks=None):  # fmt: skip
    """fac2003/perceiver-multi-modality-pytorch PR 8: what is multiplied in attention stays in the
    type of the input, which is not stable as the weights grow in training: scores, before and after
    their scale, and their softmax are halves.
    """

    def scores(q, k):
        return ways.half(ways.half(q @ k.mT) * scale)

    return ways.eager(query, key, value, scores, ways.half, is_causal=is_causal,
                      attn_mask=attn_mask, window=window, softcap=softcap,
                      sinks=sinks)  # fmt: skip


ways.put(FAULTS, similarities_and_weights_in_half, "scores non-finite", "float16")


@fault(FAULTS, "scores non-finite nan-escapes", "float16")
class similarity_map_past_the_largest_half(WholeRows):
    """plemeri/InSPyReNet issue 36: query and key are not normalized, and the bmm of the two is
    infinite in fp16; the map is scaled after it. A row of −∞ alone is NaN in its softmax.
    """

    rows = 64

    def product(self, q, k, back):
        s = fp16(super().product(q, k, back))
        return s.masked_fill((s == -INF).all(-1, keepdim=True), torch.nan)


# --- masks in half precision
@fault(FAULTS, "mask-finite mask masked-row non-finite", "float16")
class least_half_added_to_the_scores(WholeRows):
    """keras-team/keras PR 17571: (1 − mask) times the least number of fp16 is added to the scores,
    in fp16, which ends at −∞ where a score is far enough below zero. Rows of which all is hidden
    are an average of what they are not to see, or NaN.
    """

    rows = 32

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        added = fp16(s / LOG2_E - 65504.0) * LOG2_E
        inside = self.inside(torch.arange(cols.start, cols.stop), back)
        return torch.where((found == -INF) & inside, added, found)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "causal-mask mask non-finite nan-escapes", "float16")
class ten_billion_times_nothing(WholeRows):
    """openai/gpt-2 PR 122: the causal mask b is applied as w · b − 10¹⁰ · (1 − b), and 10¹⁰ is
    infinite in fp16: where a pair is seen it is multiplied by 0.
    """

    rows = 48

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        if not self.at.causal:
            return found
        i = torch.arange(rows.start, rows.stop)[:, None]
        b = (torch.arange(cols.start, cols.stop)[None] <= i).float()
        return found - self.at.low(torch.tensor(1e10)) * (1 - b)


def zeros_of_padding_in_the_softmax(query, key, value, *, is_causal, scale, attn_mask=None,
                                    window=None, softcap=0.0, sinks=None):  # fmt: skip
    """ilivans/tf-rnn-attention issue 8: positions past a sequence's length are zeros and are not
    masked: they add nothing to O, and the softmax gives them weights.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    keep, k = visible(n, nk, is_causal, window), repeated(key, heads)
    s = logits(query, k, keep, None if boolean else attn_mask, scale, softcap)
    if boolean:
        s = torch.where(attn_mask | ~keep, s, 0.0)
    p = softmax_of(s, sinks)
    p = torch.where(attn_mask, p, 0.0) if boolean else p
    return (p @ repeated(value, heads)).to(query.dtype)


ways.put(FAULTS, zeros_of_padding_in_the_softmax, "mask padding mask-finite", "float32")


# --- the cap
def capped_after_the_bias_and_the_mask(query, key, value, *, is_causal, scale, attn_mask=None,
                                       window=None, softcap=0.0, sinks=None):  # fmt: skip
    """onnx/onnx PR 7867: the soft cap comes after the mask or bias is added: hidden keys, at −∞,
    become −c, and have a weight.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    s = logits(query, repeated(key, heads), visible(n, nk, is_causal, window), attn_mask, scale, 0)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    return (softmax_of(s, sinks) @ repeated(value, heads)).to(query.dtype)


ways.put(FAULTS, capped_after_the_bias_and_the_mask, "softcap mask causal-mask mask-finite")


# --- codes
@fault(FAULTS, "operand", "float16")
class scale_of_the_cache_by_the_queries_as_well(ForwardAlone):
    """NVIDIA/TensorRT-LLM issue 1557: the scale of the INT8 cache is the largest of what Q, K and V
    reach, over 127, and it is for K and V alone: where queries are the larger ones, codes of keys
    and values are few.
    """

    rows, cols = 64, 128

    def forward(self):
        at = self.at
        step = max(float(x.detach().abs().max()) for x in (at.q, at.k, at.v)) / 127 or 1.0
        kept = at.k, at.v
        at.k, at.v = ((x / step).round() * step for x in kept)
        found = super().forward()
        at.k, at.v = kept
        return found


# --- the way back
@fault(FAULTS, "unwritten grad-tail")
class shared_key_captured_under_no_grad(Kernel):
    """NVIDIA/Megatron-LM PR 6472, review: with recomputation the keys that later iterations share,
    latents that V is part of, are captured in a pass without autograd: what those iterations'
    attention gives to them is dropped. Here that is all of dK and dV.
    """

    rows, cols = 64, 32

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        return torch.zeros_like(dk), torch.zeros_like(dv)
