"""The fifty-second set's faults of formats, overflow, logarithms and merges (fiftysecond.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftysecond_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, e4m3, fp16
from benchmarks.unseen.attention.fortyfirst_kernel import Cascade
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated

FAULTS: list[Fault] = []


# --- formats, and what is too large for them
@fault(FAULTS, "products accumulator scores non-finite", "float16")
class both_accumulators_of_a_metal_kernel_in_half(ForwardAlone):
    """philipturner/metal-flash-attention PR 13: the accumulators are fp16, after every eight
    features and keys, and some models are NaN by that.
    """

    rows, cols = 32, 32

    def product(self, q, k, back):
        total = torch.zeros(*q.shape[:3], k.shape[2])
        for a, b in zip(q.split(8, -1), k.split(8, -1), strict=True):
            total = fp16(total + a @ b.mT)
        return total

    def add_values(self, acc, a, p, v):
        acc = fp16(acc * a)
        for part, own in zip(self.at.low(p).split(8, -1), v.split(8, 2), strict=True):
            acc = fp16(acc + part @ own)
        return acc


@fault(FAULTS, "scores products accumulator non-finite", "float16")
class dots_that_keep_the_type_of_their_operands(ForwardAlone):
    """ROCm/aotriton PR 179 (gfx1151): no type is asked of `tl.dot`, and for some sizes of blocks
    the product lies in the operands' before it is scaled, where it may be infinite; so does that
    with the values.
    """

    rows, cols = 64, 32

    def product(self, q, k, back):
        return self.at.low(super().product(q, k, back))

    def add_values(self, acc, a, p, v):
        return acc * a + self.at.low(self.at.low(p) @ v)


@fault(FAULTS, "operand non-finite")
class half_written_down_for_the_models_type(ForwardAlone):
    """Tencent-Hunyuan/HunyuanDiT PR 247: `.half()` is written down before attention and behind its
    softmax, also for models in bf16, whose range fp16 has not.
    """

    rows, cols = 128, 64

    def load_query(self, name, x, part):
        return fp16(super().load_query(name, x, part))

    def load_key(self, name, x, part):
        return fp16(super().load_key(name, x, part))


@fault(FAULTS, "weights weights-row-sum weights-normalized")
class shift_of_the_codes_before_the_maximum(ForwardAlone, WholeRows):
    """iree-org/iree issue 21857: what should spread weights over all of fp8's range is added to
    scores before their maximum is taken off, which undoes it: weights, divided by their sum
    already, are cast to e4m3 as they are. Queries, keys and values keep their format here.
    """

    rows = 64

    def online(self, m, l, acc, s, v, rows, cols):
        s = s + 1 / 448
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.exp2(s - safe)
        l = self.add_row(l, torch.exp2(m - safe), p)
        return new, l, e4m3(p / torch.where(l == 0, 1.0, l)) @ v * l


@fault(FAULTS, "maximum non-finite", "float32")
class shader_without_a_maximum(ForwardAlone, WholeRows):
    """pytorch/executorch PR 18407 (Vulkan): the softmax is exp(x) over the sum of them, which is
    infinite where a score is larger than 88.7; nothing is left of them far below zero.
    """

    rows = 32

    def online(self, m, l, acc, s, v, rows, cols):
        p = torch.exp2(s)
        l = l * torch.where(m == -INF, 0.0, torch.exp2(m)) + p.sum(-1, keepdim=True)
        return self.maximum(m, s), l, p @ v

    def finish(self, m, l, acc, rows):
        found = acc / torch.where(m == -INF, 1.0, l)
        return self.at.low(found), m


def exponentials_of_raw_scores(query, key, value, **options):
    """ggml-org/llama.cpp PR 2665 (CUDA): exponentials of the scores themselves, to which a bias of
    some 2000 may have been added, overflow, and O is NaN; all of them may be 0 as well.
    """
    s, keep, own = ways.eager(query, key, **options)
    seen = keep & own
    p = torch.exp(ways.with_sinks(s.masked_fill(~seen, -INF), options.get("sinks")))
    total = p.sum(-1, keepdim=True)
    total = total.masked_fill(~seen.any(-1, keepdim=True) & (total == 0), 1.0)
    p = (p / total)[..., : s.shape[-1]]
    return (p @ repeated(value, query.shape[1])).to(query.dtype)


FAULTS.append(
    Fault("exponentials_of_raw_scores", frozenset({"maximum", "non-finite"}),
          exponentials_of_raw_scores, "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "maximum mask-finite")
class sentinel_that_products_fall_below(ForwardAlone):
    """flashinfer-ai/flashinfer PR 4401: −∞ is −5 · 10⁴, and the maximum is that of products before
    their scale: where all of a row's lie below it, its weights are all 0, and O is.
    """

    rows, cols = 128, 64

    def per_unit(self) -> float:
        return self.at.scale * LOG2_E

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return (m / self.per_unit()).clamp_min(-5e4), l, acc

    def online(self, m, l, acc, s, v, rows, cols):
        raw = (s / self.per_unit()).masked_fill(s == -INF, -5e4)
        new = self.maximum(m, raw)
        p = torch.exp2((raw - new) * self.per_unit())
        a = torch.exp2((m - new) * self.per_unit())
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return torch.where(m <= -5e4, 0.0, o), lse


@fault(FAULTS, "non-finite nan-escapes ragged", "float16")
class weights_of_zero_times_what_is_no_number(ForwardAlone):
    """vllm-project/vllm PR 936: all values of a block of 16 are weighed, also those behind the
    context's end, whose weight is 0; what memory holds there may be NaN, and is here.
    """

    rows, cols = 16, 16

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v":
            return found
        past = torch.arange(part.start, part.stop) >= self.at.nk
        return found.masked_fill(past[:, None], math.nan)


# --- logarithms of sums
@fault(FAULTS, "split-merge lse-other")
class prefill_stores_what_exp2_left(ForwardAlone, Cascade):
    """lightseekorg/tokenspeed PR 571: the softmax of prefill runs in base 2, and so does the lse
    that it stores; who reads it takes it for natural, as documented: here what merges two parts.
    """

    rows, cols, parts = 64, 64, 2

    def merge(self, outs, lses):
        m = lses.amax(0)
        w = torch.exp(lses - torch.where(m == -INF, 0.0, m))
        total = w.sum(0)
        return (w * outs).sum(0) / torch.where(total == 0, 1.0, total), m + total.log()


@fault(FAULTS, "split-merge lse-other", "float16")
class ranks_corrected_by_e_instead_of_2(ForwardAlone, Parts):
    """vllm-project/vllm PR 28840: FlashInfer gives lse in base 2, and the outputs of the ranks of a
    parallel context are corrected by powers of e: O times exp(lse − lse of all).
    """

    rows, cols, parts = 64, 16, 4

    def merge(self, outs, lses):
        whole = lses.logsumexp(0)
        w = torch.exp(lses - torch.where(whole == -INF, 0.0, whole))
        return (w * outs).sum(0), whole


@fault(FAULTS, "split-merge lse-other")
class shards_weighed_by_powers_of_2(ForwardAlone, Parts):
    """sgl-project/sglang issue 33064: FlashMLA gives the natural lse, and what puts the shards of
    a parallel context together takes `exp2` and `log2` of it.
    """

    rows, cols, parts = 32, 32, 2

    def merge(self, outs, lses):
        return super().merge(outs, lses * math.log(2))


@fault(FAULTS, "lse-other", "float16")
class lse_divided_by_ln_2_on_the_way_out(Kernel):
    """flashinfer-ai/flashinfer-bench PR 390, review: lse is divided by ln 2 where the natural one
    is expected, here by the backward pass.
    """

    rows, cols = 64, 96

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse / math.log(2)


# --- sinks
def one_that_is_not_shifted(query, key, value, **options):
    """kyegomez/AttentionIsOFFByOne issue 2: the maximum is taken off the scores, and what is added
    to the sum of their exponentials, here the sinks', stays as it was.
    """
    sinks = options.get("sinks")
    s, keep, own = ways.eager(query, key, **options)
    s = s.masked_fill(~(keep & own), -INF)
    top = s.detach().amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(top == -INF, 0.0, top))
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1, 1))
    p = p / torch.where(total == 0, 1.0, total)
    return (p @ repeated(value, query.shape[1])).to(query.dtype)


FAULTS.append(
    Fault("one_that_is_not_shifted", frozenset({"sinks"}), one_that_is_not_shifted, "bfloat16",
          frozenset({"elements"}))
)  # fmt: skip
