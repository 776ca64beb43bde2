"""The thirty-eighth set's faults of scores, scales and what is not finite (thirtyeighth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyeighth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, fp16
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.twentyseventh import EveryBlock

FAULTS: list[Fault] = []


class ScaleOfItsOwn(Kernel):
    """The scale is not the caller's, on the way there and back."""

    def own(self) -> float:
        raise NotImplementedError

    def forward(self):
        self.at.scale = self.own()
        return super().forward()


# --- scales and caps
@fault(FAULTS, "scale", "float16")
class scale_by_the_width_of_values(ScaleOfItsOwn):
    """openai/gpt-2 issue 49: scores are scaled by the width of values, in place of keys'."""

    rows, cols = 96, 48

    def own(self):
        at = self.at
        return float(at.scale * (at.q.shape[-1] / at.v.shape[-1]) ** 0.5)


@fault(FAULTS, "scale")
class scale_of_the_pattern_not_the_callers(ScaleOfItsOwn):
    """pytorch/pytorch issue 151098: attention written out is recognized and replaced by the fused
    one, without its scale: 1/√d is taken, whatever was there.
    """

    def own(self):
        return float(self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "softcap", "float16")
class cap_taken_out_for_now(ForwardAlone):
    """vllm-project/vllm PR 5908 (Gemma 2): no kernel caps scores yet, and they go without."""

    rows, cols = 64, 32

    def cap(self, s, back):
        return s


@fault(FAULTS, "softcap non-finite nan-escapes")
class tanh_of_two_overflowing_exponentials(ForwardAlone):
    """vllm-project/vllm PR 56579: the cap's tanh is made of eˣ and e⁻ˣ, both of which overflow: ∞
    over ∞ is NaN.
    """

    def cap(self, s, back):
        c = self.at.softcap * LOG2_E
        if not c:
            return s
        one, two = torch.exp(s / c), torch.exp(-s / c)
        return c * (one - two) / (one + two)


# --- masks of numbers
@fault(FAULTS, "mask mask-finite", "float32")
class hidden_at_minus_ten_thousand(EveryBlock):
    """huggingface/transformers issue 3181 (GPT-2): hidden scores are −10⁴, which scores of those
    that are seen may be close to, or below.
    """

    def hide(self, s, rows, cols, back):
        j = torch.arange(cols.start, cols.stop)
        hidden = super().hide(s, rows, cols, back)
        return torch.where((hidden == -INF) & self.inside(j, back), -1e4 * LOG2_E, hidden)


@fault(FAULTS, "scores mask mask-finite masked-row non-finite nan-escapes", "float16")
class least_half_added_to_the_scores(ways.WholeRows):
    """huggingface/transformers PR 17437 (OPT): the mask is the least number of fp16, added to
    scores of fp16: with a score below −16 it is −∞, and a padded row of nothing else is NaN.
    """

    def hide(self, s, rows, cols, back):
        s = fp16(s / LOG2_E)
        least = torch.finfo(torch.float16).min
        s = fp16(s + torch.where(self.seen(rows, cols, back), 0.0, least))
        if self.at.mask is not None:
            mask = self.given_mask(rows, cols)
            own = torch.where(mask, 0.0, least) if mask.dtype == torch.bool else mask.float()
            s = fp16(s + own)
        j = torch.arange(cols.start, cols.stop)
        return (s * LOG2_E).masked_fill(~self.inside(j, back), -INF)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "masked-row non-finite nan-escapes")
class rows_of_minus_infinity(ways.WholeRows, ForwardAlone):
    """HabanaAI/vllm-fork PR 682: what is hidden is −∞, and the softmax of a row of that is NaN."""

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- what overflows
class ProductsInHalf(ways.WholeRows):
    """Q Kᵀ lies in fp16; a row of nothing but −∞ there has no softmax."""

    def product(self, q, k, back):
        s = fp16(self.before(q) @ k.mT)
        return s.masked_fill((s == -INF).all(-1, keepdim=True), math.nan)

    def before(self, q):
        return q


@fault(FAULTS, "scores non-finite nan-escapes", "float16")
class numbers_past_the_largest_half(ProductsInHalf, ForwardAlone):
    """Tencent-Hunyuan/HunyuanDiT issue 214: within the attention of fp16 numbers overflow, and the
    image is black; here Q Kᵀ before its scale.
    """


@fault(FAULTS, "scores prescaled non-finite nan-escapes", "float16")
class scaled_queries_products_in_half(ProductsInHalf):
    """pytorch/pytorch issue 60939: queries are scaled and multiplied with keys in fp16, and what is
    infinite there is NaN behind the softmax.
    """

    def before(self, q):
        return fp16(q * self.at.scale)

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


@fault(FAULTS, "maximum non-finite nan-escapes")
class softmax_without_its_maximum(ForwardAlone):
    """NVIDIA/FasterTransformer issue 43: nothing is taken off the scores before the exponential."""

    rows, cols = 64, 96

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return torch.zeros_like(m), l * torch.exp2(torch.where(m == -INF, 0.0, m)), acc

    def maximum(self, m, s):
        return torch.zeros_like(m)
