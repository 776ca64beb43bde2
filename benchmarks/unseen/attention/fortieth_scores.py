"""The fortieth set's faults of numbers, of what is not finite and of the backward pass (fortieth.py
has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortieth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, e4m3, fp16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- rows of which all is hidden
def scores_at_finfo_min(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                        softcap=0.0, sinks=None):  # fmt: skip
    """ml-explore/mlx PR 2406, and issue 2395: the fallback hides by the least number of the type,
    and a row of which all is hidden is neither zero nor NaN: all of its weights are the same.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    s = query.float() @ ways.spread(key, heads).mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    least = torch.finfo(query.dtype).min
    s = torch.where(visible(n, nk, is_causal, window), s, least)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        s = torch.where(attn_mask, s, least) if boolean else s + attn_mask.float()
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1)], -1)
    return (s.softmax(-1)[..., :nk] @ ways.spread(value, heads)).to(query.dtype)


FAULTS.append(
    Fault("scores_at_finfo_min", frozenset({"mask", "mask-finite"}), scores_at_finfo_min,
          "bfloat16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask mask-finite", "float16")
class all_masked_rows_of_a_finite_number(ForwardAlone):
    """tracel-ai/cubecl PR 1070: on GPUs a hidden score is a finite number, here −6 · 10⁴, and rows
    of nothing else are not 0: every hidden key has the weight 1.
    """

    rows, cols = 32, 32

    def hide(self, s, rows, cols, back):
        hidden = super().hide(s, rows, cols, back)
        inside = self.inside(torch.arange(cols.start, cols.stop), back)
        return torch.where((hidden == -INF) & inside, -6e4 * LOG2_E, hidden)


@fault(FAULTS, "masked-row non-finite")
class softmax_of_rows_that_are_all_masked(ways.WholeRows, ForwardAlone):
    """robertknight/rten PR 1321: where all scores of a query are −∞ its softmax is NaN."""

    rows = 96


@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class masked_out_rows_divided_by_zero(Kernel):
    """pytorch/pytorch PR 131012 (FlexAttention): a row that is masked out has the sum 0, by which
    O is divided, and an lse of −∞, which is taken off −∞ on the way back.
    """

    rows, cols = 128, 128

    def finish(self, m, l, acc, rows):
        return self.at.low(acc / l), m + l.log2()

    def weights_again(self, s, lse):
        return torch.exp2(s - lse)


@fault(FAULTS, "masked-row non-finite", "float32")
class boolean_mask_decomposed_without_a_guard(ways.WholeRows, ForwardAlone):
    """openvinotoolkit/openvino PR 36016: the decomposed operator takes the softmax of rows of which
    a boolean mask has nothing but False.
    """

    rows = 64

    def online(self, m, l, acc, s, v, rows, cols):
        if self.at.mask is not None and self.at.mask.dtype == torch.bool:
            return super().online(m, l, acc, s, v, rows, cols)
        return Kernel.online(self, m, l, acc, s, v, rows, cols)


# --- numbers
@fault(FAULTS, "scores non-finite nan-escapes", "float16")
class products_before_their_scale_in_half(Kernel):
    """PaddlePaddle/Paddle PR 42032: Q is not scaled before Q Kᵀ, which lies in fp16, and may be
    infinite there.
    """

    rows, cols = 64, 128

    def product(self, q, k, back):
        s = fp16(q @ k.mT)
        return s.masked_fill((s == -INF).all(-1, keepdim=True), math.nan)


@fault(FAULTS, "scale value-factor operand")
class cache_of_codes_without_its_scales(ForwardAlone):
    """lightseekorg/tokenspeed PR 759, review: the cache has K and V divided by their scales, here 2
    and 1.5, in E4M3, and the path of FlashAttention-4 applies neither.
    """

    rows, cols = 32, 128

    def load_key(self, name, x, part):
        return load(e4m3((x / (2.0 if name == "k" else 1.5)).clamp(-448, 448)), part)


# --- the backward pass
@fault(FAULTS, "mask backward-mask")
class mask_mod_not_in_the_backward_pass(Kernel):
    """Dao-AILab/flash-attention PR 2101: `mask_mod` and the sparse blocks are not kept for the
    backward pass, which hides nothing that they hide; here a boolean mask.
    """

    rows, cols = 64, 80

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if not back or mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "grad-accumulator", "float16")
class gradients_not_accumulated_in_fp32(Kernel):
    """facebookresearch/xformers PR 455 ("accumulate in f32 for bw"): gradients are added up, block
    after block, in the operands' own type.
    """

    rows, cols = 32, 32

    def add(self, name, total, part, rows, cols):
        return self.at.low(super().add(name, total, part, rows, cols))
