"""The fifty-fifth set's faults of scales, softmaxes, splits and heads (fiftyfifth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG001, ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyfifth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, fp16
from benchmarks.unseen.attention.fortyfirst_kernel import Cascade, ScaleOfItsOwn, sound
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows

FAULTS: list[Fault] = []


# --- scales
@fault(FAULTS, "scale", "float32")
class root_of_the_channels_of_the_input(WholeRows, ScaleOfItsOwn):
    """karpathy/ng-video-lecture PR 6: scores are scaled by the number of channels of the input,
    which is as many times the head's size as there are heads.
    """

    rows = 64

    def own(self):
        return float(self.at.scale * self.at.q.shape[1] ** -0.5)


@fault(FAULTS, "scale", "float16")
class root_of_the_models_dim_not_of_dim_head(ScaleOfItsOwn):
    """lucidrains/vit-pytorch issue 65: the scale is `dim ** -0.5`, of the model's width, and not
    `dim_head ** -0.5`; here the width is 1024 whatever the heads are.
    """

    rows, cols = 64, 32

    def own(self):
        return float(self.at.scale * (self.at.q.shape[-1] / 1024) ** 0.5)


@fault(FAULTS, "scale")
class sixty_four_where_heads_have_sixteen(ScaleOfItsOwn):
    """Graylab/DL4Proteins-notebooks issue 12: scores are multiplied by C ** -0.5, with an embedding
    of 64, where heads have 16 features: by half of the scale.
    """

    rows, cols = 32, 96

    def own(self):
        return float((4 * self.at.q.shape[-1]) ** -0.5)


@fault(FAULTS, "scale", "float16")
class root_of_the_embedding_in_the_language_model(ScaleOfItsOwn):
    """FareedKhan-dev/train-llm-from-scratch PR 3: 1/√(embedding) in place of 1/√(head size)."""

    rows, cols = 128, 64

    def own(self):
        heads, width = self.at.q.shape[1], self.at.q.shape[-1]
        return float((heads * width) ** -0.5)


def weights_divided_by_the_root_of_the_embedding(query, key, value, *, is_causal, scale,
                                                 attn_mask=None, window=None, softcap=0.0,
                                                 sinks=None):  # fmt: skip
    """rezazad68/TMUnet issue 13: the scale is the embedding's and not a head's; the line that it is
    about divides by √(embedding) what comes out of the softmax, and scores have no scale at all.
    """
    found = sound(query, key, value, is_causal=is_causal, scale=1.0, attn_mask=attn_mask,
                  window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    return found / math.sqrt(query.shape[1] * query.shape[-1])


FAULTS.append(
    Fault("weights_divided_by_the_root_of_the_embedding", frozenset({"scale", "value-factor"}),
          weights_divided_by_the_root_of_the_embedding, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "scale")
class raw_attention_not_divided(ScaleOfItsOwn):
    """PAIR-code/tiny-transformers issue 71: raw attention is not divided by the root of the
    dimension.
    """

    rows, cols = 48, 80

    def own(self):
        return 1.0


# --- the softmax
@fault(FAULTS, "scores exponential row-sum weights-row-sum", "float16")
class pooled_attentions_softmax_in_half(WholeRows, ForwardAlone):
    """LibreYOLO/libreyolo PR 546, review (SigLIP 2): the attention that pools does not cast to
    float32 for its softmax, as the encoder's does, and in fp16 has scores, exponentials and their
    sum in fp16.
    """

    rows = 64

    def product(self, q, k, back):
        return fp16(super().product(q, k, back))

    def scaled(self, s, rows, cols, back):
        return fp16(s * self.at.scale) * LOG2_E

    def add_row(self, l, a, p):
        l = fp16(l * a)
        for part in p.split(8, -1):
            l = fp16(l + part.sum(-1, keepdim=True))
        return l

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -math.inf, 0.0, new)
        p, a = fp16(torch.exp2(s - safe)), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- hidden pairs with a number
@fault(FAULTS, "mask-finite", "float32")
class ignored_scores_at_minus_a_hundred_thousand(ways.HiddenAt):
    """TransformerLensOrg/TransformerLens PR 319 (issue 318): hidden scores are −10⁵, and pythia-70m
    has scores below that: it attends outside of its mask.
    """

    rows, number = 64, -1e5


@fault(FAULTS, "mask mask-finite", "float16")
class padding_at_minus_a_billionth(WholeRows):
    """Shujun-He/RibonanzaNet issue 5: hidden scores are set to −1e-9, which is 0, for −1e9."""

    rows = 48

    def hide(self, s, rows, cols, back):
        mask, self.at.mask = self.at.mask, None
        s = super().hide(s, rows, cols, back)
        self.at.mask = mask
        if mask is None:
            return s
        given = self.given_mask(rows, cols)
        hides = given.dtype == torch.bool
        return s.masked_fill(~given, -1e-9 * LOG2_E) if hides else self.bias(s, given, back)


@fault(FAULTS, "mask-finite mask")
class weights_not_multiplied_by_the_mask(ways.HiddenAt):
    """NVIDIA/Megatron-LM PR 731: torch's softmax of scores that are −10000 where they are hidden is
    not multiplied by the mask, and what a row that sees nothing hides keeps its weight.
    """

    rows, number = 128, -1e4


# --- what is not finite
@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class full_qk_attention_of_nothing(ways.NanOfNothing):
    """lucidrains/reformer-pytorch PR 26: the masks of full attention are −∞, and where the input's
    mask leaves nothing the softmax is NaN; the largest negative number takes its place.
    """

    rows = 64


@fault(FAULTS, "masked-row non-finite nan-escapes", "float32")
class infinities_for_a_sequence_of_padding(ways.NanOfNothing, ForwardAlone):
    """huggingface/transformers PR 15326 (DistilBert): scores are −∞ where the attention mask is 0,
    and those of a sequence whose mask is all zeros become NaN.
    """

    rows = 128


# --- splits
@fault(FAULTS, "split-merge lse-other unwritten", "float16")
class lse_of_splits_stored_only_where_asked_for(ForwardAlone, Cascade):
    """flashinfer-ai/flashinfer PR 50: where the caller wants no lse, none is stored, and the kernel
    that merges the splits needs it; here it finds zeros.
    """

    rows, cols, parts = 64, 32, 2

    def merge(self, outs, lses):
        return super().merge(outs, torch.zeros_like(lses))


@fault(FAULTS, "lse-other", "float16")
class base_2_not_forwarded_to_the_combine(Cascade):
    """NVIDIA/cudnn-frontend PR 931, review: splits keep their lse in nats, and the kernel that
    combines them is not told that base 2 is asked for: with more than one split lse comes out in
    nats. Here the backward pass reads it.
    """

    rows, cols, parts = 128, 64, 2

    def merge(self, outs, lses):
        o, lse = super().merge(outs, lses)
        return o, lse * math.log(2) if len(lses) > 1 else lse


# --- heads
@fault(FAULTS, "key-heads other-data")
class key_heads_one_group_after_the_other(Kernel):
    """apple/axlearn PR 842 (PR 837): key heads become 0 1 0 1 where they are to be 0 0 1 1."""

    rows, cols = 128, 128

    def spread(self, x):
        return x.repeat(1, self.at.groups, 1, 1)

    def group(self, grad):
        return grad.unflatten(1, (self.at.groups, -1)).sum(1)


@fault(FAULTS, "other-data layout cache", "float16")
class chunks_that_read_the_first_ones_input(ForwardAlone):
    """nntrainer/nntrainer issue 3808: the prompt comes in chunks, here of 64, and layers read their
    input from its beginning where a chunk begins further on: queries, keys and values of later
    chunks are the first one's.
    """

    rows, cols, chunk = 64, 32, 64

    def forward(self):
        at = self.at
        kept = at.q, at.k, at.v
        if at.n == at.nk > self.chunk:
            read = torch.arange(at.n) % self.chunk
            at.q, at.k, at.v = (x[:, :, read] for x in kept)
        found = super().forward()
        at.q, at.k, at.v = kept
        return found
