"""The fifty-seventh set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «注意力 掩码 错误 padding mask 修复», «注意力 精度 问题 fp16 溢出», «flash attention
结果 不一致 精度», «多头注意力 维度 错误 reshape», «因果 掩码 错误 causal mask», «注意力 分数 缩放
sqrt d_k 忘记», «KV cache 结果 不正确 注意力», «softmax 维度 错误 attention dim», «attention mask が
間違っている», «어텐션 마스크 버그», «máscara de atención error softmax», «masque d'attention erreur
calcul», «Attention Maske Fehler Berechnung», «ошибка маски внимания softmax», «variable length
attention unpad 错误 cu_seqlens», «分组查询注意力 GQA 头 映射 错误», «滑动窗口 注意力 错误», «量化
kv cache 注意力 误差», «交叉注意力 mask 错误 cross attention», «反向传播 注意力 梯度 错误».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 235 results, of which each search gives twelve at most. 18 are faults
here. What was left: 114 are about something else, features, speed, crashes, questions, or other
operations; 24 had come before; 39 are threads of earlier sets; 32 tell no cause, most of them no
text at all; of 3 it is disputed whether there is a mistake (GPT-SoVITS issue 965,
self-critical.pytorch issue 89, wenet issue 2031); 5 cannot be written as a call of this function:
head counts that do not divide each other (flash-linear-attention issue 1029, PR 1032), the mask of
another sequence in cross attention (SeekDeeper issue 3, diffusers PR 2656), and a second softmax
that belongs to the model (DisKT issue 6). The counts of the first three are by hand.

Where a thread tells the cause in a line, what it was before was looked up in public copies of the
code: d2l-java PR 186. What grouped-query-attention-pytorch issue 5 sums is known from its code;
that all heads of a group get the result is chosen, as is what lies where flash-attention issue 1228
does not write, the size of a group of tokens for octo issue 75, and that pairs which every head
hides weigh nothing in attention-is-all-you-need-pytorch issue 52. It and candle PR 937, LLaMA
Factory issue 7063 and rsarxiv/seq2seq-attention issue 7, a question that nobody answers, are taken
at their word. Of a thread with several defects one is taken.

What is right was set down before anything was measured by halfulp. `AGAIN` names every fault whose
mistake an earlier set has in some form. Masks, windows and rows are here; scores, scales, heads and
the way back in fiftyseventh_scores.py. All err more than 1.5 × their sound twin on an ordinary
input (`python -m benchmarks.unseen.draw attention.fiftyseventh --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyseventh_kernel as ways
from benchmarks.unseen.attention import fiftyseventh_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.fiftysixth_kernel import OtherMask
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "hidden_scores_times_zero",  # sixteenth: scores_times_the_mask; others too
    "mixformer_without_its_triangle",  # forty-seventh: no_mask_taken_for_a_causal_one; others too
    "rows_of_padding_not_masked",  # fifty-first: mask_of_keys_for_padded_queries
    "rows_past_the_last_length_not_written",  # eighteenth: hidden_rows_never_written
    "window_not_implemented_for_sdpa",  # fortieth: window_never_consulted; others too
    "padding_told_by_an_id_that_is_not_its_own",  # forty-second: padding_left_out_of_the_loss_alone
    "embeddings_zeroed_in_place_of_a_mask",  # forty-second: keys_multiplied_by_their_mask
    "newest_key_not_counted_yet",  # thirty-ninth: new_token_not_in_its_own_history; others too
    "softmax_across_the_heads_and_sequences",  # thirty-seventh: of PyTorch-NLP issue 2, dimension 0
    "cached_scores_without_their_root",  # forty-first: scale_made_and_never_applied; others too
    "divided_by_the_root_of_two",  # eighth: scale_of_one_half, another constant
    "temper_of_the_whole_model",  # forty-seventh: root_of_the_features_of_all_heads; others too
    "weights_scaled_and_not_the_scores",  # twenty-sixth: scaled_after_the_softmax
    "products_in_half_before_a_late_scale",  # twenty-second: dot_products_added_up_in_half
)
STATED: dict[str, str] = {}
"""Inputs on which alone a fault shows: none has such."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- what masks hide
@ways.eager(FAULTS, "mask mask-finite", "float16")
class hidden_scores_times_zero(ways.Eager):
    """XiangMochu/RnG issue 2: the formula has the mask, of ones and zeros, multiply the logits
    before the softmax, to which 0 is a score as any other.
    """

    def masked(self, s):
        return s * self.at.attn_mask.float() if self.hides else super().masked(s)


@fault(FAULTS, "causal-mask mask", "float16")
class mixformer_without_its_triangle(EveryBlock):
    """huggingface/candle PR 937: the model (Mixformer, phi) has no causal mask."""

    rows, cols = 32, 64

    def forward(self):
        self.at.causal = False
        return super().forward()


@fault(FAULTS, "mask")
class rows_of_padding_not_masked(OtherMask):
    """jadore801120/attention-is-all-you-need-pytorch issue 57: the mask of padding is one of keys,
    spread over all queries: [A 1] where it is to be [B 1 // 1 1]. Queries of padding, which are to
    see nothing, see every key that is a token.
    """

    rows, cols = 64, 48

    def changed(self, mask):
        tokens = mask.any(-2, keepdim=True)
        return torch.where(mask.any(-1, keepdim=True), mask, tokens)


@fault(FAULTS, "mask", "float32")
class keys_hidden_by_the_mask_of_queries(OtherMask):
    """Decem-Y/sohu_text_matching_Rank2 issue 2: cross attention of Q and KV gets Q's mask of
    padding, where it is to get that of KV: a key is hidden where the query of its number is
    padding. Where there are not as many keys as queries it would not fit.
    """

    rows, cols, square = 32, 32, True

    def changed(self, mask):
        return mask.any(-1).unsqueeze(-2).expand_as(mask)


@fault(FAULTS, "mask")
class padding_told_by_an_id_that_is_not_its_own(OtherMask):
    """yewzz/EAGER issue 7: items are compared with 2 · `item_num`, and padding has the number
    `item_num`: the mask is all ones.
    """

    rows, cols = 80, 64

    def changed(self, mask):
        return torch.ones_like(mask)


@fault(FAULTS, "mask", "float16")
class last_token_counted_with_the_next_group(OtherMask):
    """octo-models/octo issue 75: the function that tells to which group a token belongs is off at
    a group's end: token 656, the last of a camera's, is taken for one of the readout's, as 657 is,
    and sees it. Groups have 16 tokens here, and the last one of each has the mask of the next.
    """

    rows, cols = 64, 64

    def changed(self, mask):
        n, nk = mask.shape[-2:]
        i, j = ((x + (x % 16 == 15)).clamp_max(x.shape[0] - 1) for x in map(torch.arange, (n, nk)))
        return mask[..., i, :][..., j]


@ways.eager(FAULTS, "mask mask-finite unnormalized")
class embeddings_zeroed_in_place_of_a_mask(ways.Eager):
    """ostris/ai-toolkit issue 161: embeddings of padding are multiplied by the mask, and attention
    gets none: keys of zeros are attended to, with a score of 0, and add nothing to O.
    """

    def masked(self, s):
        return s.masked_fill(~self.at.attn_mask, 0.0) if self.hides else super().masked(s)

    def weights(self, s):
        p = super().weights(s)
        return p.masked_fill(~self.at.attn_mask, 0.0) if self.hides else p


@fault(FAULTS, "window")
class window_not_implemented_for_sdpa(Kernel):
    """hiyouga/LLaMA-Factory issue 7063: "Sliding Window Attention is enabled but not implemented
    for `sdpa`": the window is not there, and what else hides keys is.
    """

    rows, cols = 128, 64

    def forward(self):
        self.at.window = None
        return super().forward()


# --- rows and keys that are not reached
@fault(FAULTS, "unwritten masked-row non-finite")
class rows_past_the_last_length_not_written(Kernel):
    """Dao-AILab/flash-attention issue 1228: where `cu_seqlens` ends before the padding does, what
    belongs to no sequence, and here sees nothing, is not computed: O there, and dQ on the way back,
    is what memory held, NaN and Inf among it.
    """

    rows, cols = 128, 32

    def held(self, x):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return x
        none = ~at.mask.expand(*at.mask.shape[:-2], at.n, at.nk).any(-1, keepdim=True)
        memory = torch.randn(x.shape, generator=torch.Generator().manual_seed(1228))
        memory = torch.where(memory > 2, torch.nan, memory)
        return torch.where(none, memory, x)

    def forward(self):
        self.own, lse = super().forward()
        return self.held(self.own), lse

    def backward(self):
        self.at.o = self.own
        dq, dk, dv = super().backward()
        return self.held(dq), dk, dv


@fault(FAULTS, "key-tail causal-mask", "float32")
class newest_key_not_counted_yet(ForwardAlone):
    """paiml/aprender PR 2029, the first finding: `append` counts a new position in the last layer
    alone, so that in earlier ones a token that is decoded sees the keys before it and not its own.
    """

    rows, cols = 16, 64

    def causal(self, i, j, back):
        return j < i

    def inside(self, j, back):
        return j < self.at.nk - (not self.at.causal)


FAULTS += fiftyseventh_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.RunningMean, "bfloat16"), (ways.WeightsInTwoPieces, "float16"),
    (ways.TilesByDiagonals, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("every_seventh_query", frozenset(), ways.every_seventh_query, "float16"))
SOUND.append(Fault("keys_in_two_halves", frozenset(), ways.keys_in_two_halves, "bfloat16"))
