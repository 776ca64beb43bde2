"""The forty-second set's faults of what hides by numbers, of rows of nothing, of the cache and of
codes (fortysecond.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortysecond_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch.nn import functional

FAULTS: list[Fault] = []


# --- what hides by numbers
@fault(FAULTS, "mask")
class truth_added_to_the_scores(Kernel):
    """Lightning-AI/litgpt issue 1672: where scores are capped the mask stays boolean and is added
    to them: + 1 for what is to be seen, + 0 for what is to be hidden, which is seen as well; here
    whether or not there is a cap.
    """

    rows, cols = 64, 48

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s + self.given_mask(rows, cols).float() * LOG2_E
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask mask-finite", "float16")
class keys_multiplied_by_their_mask(ways.HiddenAtZero):
    """HiDream-ai/HiDream-I1 issue 67: the mask is multiplied with the keys, and hides nothing by
    −∞: keys of zeros have a score of 0, and a weight.
    """

    rows, cols = 48, 64


@fault(FAULTS, "mask mask-finite")
class padded_peaks_keep_a_score_of_zero(ways.HiddenAtZero, ForwardAlone):
    """coleygroup/DiffMS PR 26 (issue 25): the mask of −∞ is made and never added to the scores:
    peaks of padding, which are zeros, go through the softmax with a score of 0.
    """

    rows, cols = 64, 32


def two_least_numbers_added(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                            softcap=0.0, sinks=None):  # fmt: skip
    """huggingface/transformers issue 18797 (CLIP): the causal mask and that of padding are added to
    the scores one after the other, each by the least number that there is: where both hide it is
    twice as far down, and a row of padding alone has weights, which are not even equal.
    """
    n, nk = query.shape[2], key.shape[2]
    s = ways.capped(query, key, scale, softcap)
    least = torch.finfo(torch.float32).min
    s = s + torch.where(visible(n, nk, is_causal, window), 0.0, least)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s + (torch.where(attn_mask, 0.0, least) if hides else attn_mask.float())
    return (softmax_of(s, sinks) @ repeated(value, query.shape[1])).to(query.dtype)


FAULTS.append(
    Fault("two_least_numbers_added", frozenset({"mask", "mask-finite", "masked-row"}),
          two_least_numbers_added, "float32", frozenset({"elements"}))
)  # fmt: skip


# --- rows of nothing
@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class sequence_of_padding_alone(WholeRows):
    """pytorch/pytorch issue 27968: a sequence of length 0 has all its keys hidden by −∞, and its
    weights are NaN.
    """

    rows = 48

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- the cache
@fault(FAULTS, "cache other-data")
class copy_of_a_page_runs_past_its_end(OtherOperands):
    """mlc-ai/mlc-llm PR 2644: the kernel that copies a part of a single page misses the predicate
    by which threads past its end do nothing. Heads lie before tokens in a page, and keys of the
    next page before anything else: there the first head's first keys become those behind the page
    that is copied. Here page 1 of 16 keys was copied to page 3, in the first sequence.
    """

    rows, cols = 32, 64

    def read(self, k, v):
        if k.shape[2] < 80:
            return k, v
        k, share = k.clone(), self.at.groups
        k[0, :share, 64:72] = k[0, :share, 32:40]
        return k, v


# --- codes of queries
@fault(FAULTS, "layout non-finite", "float16")
class codes_of_queries_read_as_another_format(ForwardAlone):
    """ikawrakow/ik_llama.cpp issue 363 (PR 364): queries are quantized to what belongs to keys of
    Q8_0, blocks of 34 bytes with a scale in fp16, and where heads share keys these are repacked to
    a format whose queries are blocks of 36 bytes, with a scale in bf16 and a sum: as such they are
    read. Keys are not quantized here.
    """

    rows, cols = 8, 64

    def load_query(self, name, x, part):
        q = super().load_query(name, x, part)
        if name != "q" or self.at.groups == 1 or q.shape[-1] % 32:
            return q
        values = q.unflatten(-1, (-1, 32))
        scale = (values.abs().amax(-1, keepdim=True) / 127).half()
        codes = (values / torch.where(scale == 0, 1.0, scale.float())).round().clamp(-127, 127)
        written = torch.cat([scale.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], -1)
        count = written.shape[2] * written.shape[3]
        read = functional.pad(written.flatten(2), (0, 2 * count)).unflatten(-1, (count, 36))
        scale = read[..., :2].contiguous().view(torch.bfloat16).float()
        codes = read[..., 4:].contiguous().view(torch.int8).float()
        return (scale * codes).view(q.shape)
