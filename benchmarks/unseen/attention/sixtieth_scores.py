"""The sixtieth set's faults of what is not finite and of precision (sixtieth.py has the others, and
says what they are for).
"""

# ruff: noqa: ARG001, ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, fp16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated

FAULTS: list[Fault] = []


def with_sinks(s: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Scores, and one column of sinks behind them."""
    if sinks is None:
        return s
    return torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)


# --- rows that may see nothing
def padding_blocks_that_hide_themselves(query, key, value, *, is_causal, scale, attn_mask=None,
                                        enable_gqa=False, window=None, softcap=0.0,
                                        sinks=None):  # fmt: skip
    """NVIDIA-NeMo/Automodel PR 2826: the rows of blocks that pad a batch are −∞ throughout in the
    mask that eager attention adds; its softmax makes them NaN, and on the way back all gradients.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    s = query.float() @ repeated(key, heads).mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    added = torch.zeros(n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        own = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF) if hides else None
        added = added + (attn_mask.float() if own is None else own)
    p = with_sinks(s + added, sinks).softmax(-1)[..., :nk]
    return (p @ repeated(value, heads)).to(query.dtype)


FAULTS.append(
    Fault("padding_blocks_that_hide_themselves",
          frozenset({"masked-row", "non-finite", "nan-escapes"}),
          padding_blocks_that_hide_themselves, "float32", frozenset({"elements"}))
)  # fmt: skip


def reference_without_a_guard(query, key, value, *, is_causal, scale, attn_mask=None,
                              enable_gqa=False, window=None, softcap=0.0,
                              sinks=None):  # fmt: skip
    """RL-Align/RL-Kernel PR 188, review: the mask of padding fills its columns with −∞; where it
    leaves a row no key the softmax is NaN, and nothing guards it. What is filled gets no gradient.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    keep = visible(n, nk, is_causal, window)
    s = logits(query, repeated(key, heads), keep, attn_mask, scale, softcap)
    p = with_sinks(s, sinks).softmax(-1)[..., :nk]
    return (p @ repeated(value, heads)).to(query.dtype)


FAULTS.append(
    Fault("reference_without_a_guard", frozenset({"masked-row", "non-finite", "nan-escapes"}),
          reference_without_a_guard, "bfloat16", frozenset({"elements"}))
)  # fmt: skip


# --- what memory holds
@fault(FAULTS, "nan-escapes non-finite", "float16")
class slope_of_zero_times_what_is_not_a_number(WholeRows, ForwardAlone):
    """ggml-org/llama.cpp issue 5571, whose fix is PR 5574: the softmax adds slope · pos[col] to
    every score, where the model has no ALiBi as well: the slope is 0 then, and nobody sets pos, so
    that 0 · NaN is NaN. Which numbers of it are NaN is chance: here those from the 384th column on.
    """

    rows = 32

    def hide(self, s, rows, cols, back):
        pos = torch.arange(cols.start, cols.stop).float()
        pos = pos.masked_fill(pos >= 384, torch.nan)
        return super().hide(s, rows, cols, back) + 0.0 * pos


@fault(FAULTS, "nan-escapes non-finite ragged", "float16")
class rows_of_k_past_the_end_not_cleared(ForwardAlone):
    """Dao-AILab/flash-attention issue 1395: of what lies past the last key V alone is cleared in
    shared memory; K is what was there, and if that is NaN so is O. Here it is, and −∞, which hides
    it, is added.
    """

    rows, cols = 128, 64

    def load_key(self, name, x, part):
        return load(x, part, torch.nan) if name == "k" else super().load_key(name, x, part)

    def hide(self, s, rows, cols, back):
        return s + super().hide(torch.zeros_like(s), rows, cols, back)


# --- precision
@fault(FAULTS, "scores non-finite", "float16")
class scores_of_many_candidates_in_half(Kernel):
    """facebookresearch/ParlAI issue 2586: the scores of multi-head attention are fp16, and with
    pretrained weights they are larger than that holds; O has NaN. A number past the largest is
    infinite here, and its row NaN.
    """

    rows, cols = 64, 96

    def scaled(self, s, rows, cols, back):
        return fp16(s * self.at.scale) * LOG2_E


@fault(FAULTS, "products scores", "float16")
class never_is_no_off_switch_above_the_threshold(ForwardAlone):
    """kekzl/imp issue 1676: «never» turns the kernel off that multiplies Q and K in f16, for short
    prompts alone; above a threshold, here of 160 tokens, another chain of kernels comes to the very
    same one. It adds up in f16 as well, sixteen features at a time (PR 673).
    """

    rows, cols = 64, 64

    def product(self, q, k, back):
        if self.at.n < 160:
            return super().product(q, k, back)
        total = torch.zeros(())
        for one, two in zip(q.split(16, -1), k.split(16, -1), strict=True):
            total = fp16(total + one @ two.mT)
        return total
