"""The forty-first set's faults of scales, factors, merges and what is not finite (fortyfirst.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyfirst_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from torch.nn import functional

FAULTS: list[Fault] = []


# --- scales
@fault(FAULTS, "scale")
class scale_made_and_never_applied(ways.ScaleOfItsOwn):
    """lucidrains/x-transformers issue 352: the scale that normalized queries and keys are to have
    is made, and is not applied in the forward pass: here the scores stay as they are.
    """

    rows, cols = 64, 96

    def own(self):
        return 1.0


@fault(FAULTS, "scale", "float16")
class scale_put_into_the_query_upside_down(ways.ScaleOfItsOwn):
    """lucidrains/x-transformers issue 190: queries are multiplied by 1/√d over the scale, for the
    fused function's own 1/√d to be undone, which multiplies once more: scores are divided by the
    scale, and by d.
    """

    def own(self):
        return float(1 / (self.at.q.shape[-1] * self.at.scale))


@fault(FAULTS, "scale", "float16")
class scale_that_the_fused_runner_is_not_given(ForwardAlone):
    """NVIDIA/FasterTransformer PR 324 (Swin; issue 322, PR 323): `qk_scale` does not reach the
    fused kernel, which takes 1/√d.
    """

    rows, cols = 128, 64

    def scaled(self, s, rows, cols, back):
        return s * (self.at.q.shape[-1] ** -0.5 * LOG2_E)


@fault(FAULTS, "scale")
class root_of_a_root_undoes_the_scale(ways.ScaleOfItsOwn):
    """ReaLLMASIC/ReaLLM-Forge PR 447, review: `head_dim` is √d already, and queries are multiplied
    by its root for the fused 1/√d to be undone: scores are too small by the fourth root of d.
    """

    rows, cols = 48, 64

    def own(self):
        return float(self.at.scale * self.at.q.shape[-1] ** -0.25)


@fault(FAULTS, "scale")
class scale_not_handed_to_the_dispatched_attention(ways.ScaleOfItsOwn):
    """InternLM/xtuner PR 873 (DeepSeek-V2): attention is dispatched to flash-attn without
    `softmax_scale`, and it takes 1/√d.
    """

    rows, cols = 96, 96

    def own(self):
        return float(self.at.q.shape[-1] ** -0.5)


# --- factors
def norm_of_the_queries_put_upon_values(query, key, value, *, is_causal, scale, attn_mask=None,
                                        window=None, softcap=0.0, sinks=None):  # fmt: skip
    """kyegomez/MegaVIT issue 17: QK norm is LayerNorm of keys and values, in place of queries and
    keys; here those come normalized, and values are as well.
    """
    normed = functional.layer_norm(value.float(), value.shape[-1:]).to(value.dtype)
    return ways.sound(query, key, normed, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                      window=window, softcap=softcap, sinks=sinks)  # fmt: skip


FAULTS.append(
    Fault("norm_of_the_queries_put_upon_values", frozenset({"value-factor"}),
          norm_of_the_queries_put_upon_values, "bfloat16",
          frozenset({"elements", "out-unexplained"}))
)  # fmt: skip


@fault(FAULTS, "value-factor")
class gate_of_zeros_on_what_comes_out(ForwardAlone):
    """1bit-MONSTER/1bit-MONSTER issue 649: gates for each element do not fit the shape that is
    checked, are zeros, and O is multiplied by softplus(0) = ln 2 everywhere.
    """

    rows, cols = 16, 64

    def finish(self, m, l, acc, rows):
        return super().finish(m, l, acc * math.log(2), rows)


# --- keys that are left out
@fault(FAULTS, "tiles-skipped", "float16")
class lines_chosen_by_scores_without_their_scale(ForwardAlone):
    """microsoft/MInference issue 69: which columns and diagonals are attended to is reckoned from
    the last queries' softmax of Q Kᵀ, which is not divided by √d; here a quarter of either.
    """

    rows, cols = 64, 32

    def lines(self):
        at, last = self.at, min(16, self.at.n)
        i, j = torch.arange(at.n)[:, None], torch.arange(at.n)
        far = (i - j).clamp_min(0)
        s = (at.q[:, :, -last:] @ at.k.mT).masked_fill((j > i)[-last:], -INF)
        p, nothing = s.softmax(-1), torch.zeros(*s.shape[:2], at.n)
        column = p.sum(-2)
        slash = nothing.scatter_add(-1, far[-last:].expand_as(p).flatten(-2), p.flatten(-2))
        column[..., :4], slash[..., :8] = INF, INF
        column, slash = (
            (nothing > 0).scatter(-1, x.topk(max(at.n // 4, 8)).indices, True)
            for x in (column, slash)
        )
        return column[:, :, None] | slash[..., far]

    def forward(self):
        if self.at.causal and self.at.n == self.at.nk > 8:
            self.memory["lines"] = self.lines()
        return super().forward()

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        if "lines" not in self.memory:
            return s
        keep = self.memory["lines"][:, :, rows, cols]
        missing = (0, s.shape[-1] - keep.shape[-1], 0, s.shape[-2] - keep.shape[-2])
        return s.masked_fill(~functional.pad(keep, missing, value=False), -INF)


# --- what is not finite
@fault(FAULTS, "non-finite nan-escapes", "float16")
class codes_by_the_scale_of_nothing(ForwardAlone):
    """cubiq/ComfyUI_IPAdapter_plus PR 784: SageAttention's scale of a block of queries or keys is
    its largest number over 127, and what is all zeros is divided by 0. The codes themselves are
    not rounded here, so that this alone is wrong.
    """

    def coded(self, x):
        scale = x.abs().amax((-2, -1), keepdim=True) / 127
        return x / scale * scale

    def load_query(self, name, x, part):
        return self.coded(super().load_query(name, x, part))

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return self.coded(found) if name == "k" else found


@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class windows_that_hold_padding_alone(WholeRows):
    """idiap/fast-transformers issue 37: with a mask of lengths a query's window may hold nothing,
    and the softmax of −∞ alone is NaN.
    """

    rows = 32

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- merges
@fault(FAULTS, "split-merge masked-row non-finite nan-escapes")
class union_of_empty_states(ForwardAlone, ways.Cascade):
    """flashinfer-ai/flashinfer issue 4051: where two states that are merged are both empty, −∞ is
    taken off −∞, and NaN goes on to all states after them.
    """

    def merge(self, outs, lses):
        o, lse = outs[0], lses[0]
        for new, own in zip(outs[1:], lses[1:], strict=True):
            m = torch.maximum(lse, own)
            a, b = torch.exp2(lse - m), torch.exp2(own - m)
            o, lse = (o * a + new * b) / (a + b), m + (a + b).log2()
        return o, lse


@fault(FAULTS, "split-merge lse-other masked-row non-finite nan-escapes", "float16")
class plus_infinity_where_no_key_is_attended(ForwardAlone, ways.Cascade):
    """deepseek-ai/FlashMLA PR 77: lse of a query that attends to no key is +∞, by which parts that
    are merged are worth nothing, or NaN.
    """

    parts = 3

    def merge(self, outs, lses):
        return super().merge(outs, torch.where(lses == -INF, INF, lses))


@fault(FAULTS, "maximum split-merge non-finite nan-escapes")
class merged_by_exponentials_of_lse(ForwardAlone, Parts):
    """SHI-Labs/NATTEN PR 202: two attentions are merged by exp(lse) as it is, which overflows where
    lse is large, and is 0 for both where it is far below zero.
    """

    parts = 2

    def merge(self, outs, lses):
        w = torch.exp2(lses)
        total = w.sum(0)
        empty = (lses == -INF).all(0)
        o = (w * outs).sum(0) / torch.where(empty, 1.0, total)
        return o, total.log2()
