"""The sixty-first set's faults of lse and the cap (sixtyfirst.py has the others, and says what they
are for).
"""

# ruff: noqa: ARG001, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyfirst_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- lse
def natural_lse_times_ln_2_once_more(query, key, value, *, is_causal, scale, attn_mask=None,
                                     enable_gqa=False, window=None, softcap=0.0,
                                     sinks=None):  # fmt: skip
    """pytorch/pytorch issue 181645: flex attention takes what its FLASH backend returns for base 2,
    and multiplies it by ln 2, where it is natural: the lse that callers get is 0.69 × what it ought
    to be. Here they have the halves of the keys put together by it.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    half = -(-key.shape[2] // 2)
    outs, lses = ways.shards(query, key, value, half, **options)
    return ways.together(outs, [lse * math.log(2) for lse in lses]).to(query.dtype)


FAULTS.append(
    Fault("natural_lse_times_ln_2_once_more", frozenset({"lse-other", "split-merge"}),
          natural_lse_times_ln_2_once_more, "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "split-merge lse-other")
class lse_of_shards_in_base_2_merged_as_natural(ForwardAlone, Parts):
    """vllm-project/vllm PR 43919: ranks hold keys in turn, here sixteen at a time of four, and what
    they give is weighed by e to their lse, which is in base 2.
    """

    rows, cols, parts = 16, 16, 4

    def merge(self, outs, lses):
        top = lses.amax(0)
        w = torch.exp(lses - torch.where(top == -INF, 0.0, top))
        total = w.sum(0)
        whole = torch.where(total == 0, 1.0, total)
        return (w * outs).sum(0) / whole, top + total.log()


# --- the cap
@fault(FAULTS, "softcap mask-finite padding", "float16")
class capped_behind_the_mask(ForwardAlone):
    """Dao-AILab/flash-attention PR 1025, first draft: scores are capped behind the mask, and what
    was hidden, later keys and those past the end, scores −c: a little of it leaks, much where c is
    small. A mask that is added comes behind the cap.
    """

    rows, cols = 128, 64

    def scores(self, q, k, rows, cols, back):
        at = self.at
        if not at.softcap:
            return super().scores(q, k, rows, cols, back)
        s = self.scaled(self.product(q, k, back), rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        if at.mask is None:
            return self.cap(s, back)
        mask = self.given_mask(rows, cols)
        if mask.dtype == torch.bool:
            return self.cap(s.masked_fill(~mask, -INF), back)
        return self.bias(self.cap(s, back), mask, back)
