"""The seventy-ninth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «review attention scale should be», «review attention mask should be», «review
softmax dim should be», «review kv head index should be», «shouldn't the attention mask be», «why is
attention not scaled», «attention mask is never used», «attention mask has no effect», «scale
argument is ignored attention», «is_causal argument ignored», «window size argument ignored»,
«softcap argument ignored», «dropout scale attention wrong», «attention transposed twice»,
«attention missing transpose», «attention missing contiguous», «attention wrong broadcast heads»,
«attention uses wrong variable», «attention copy paste bug key value», «attention wrong dimension
normalization».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 239 results, of which each search gives twelve at most. 6 are faults
here. What was left, counted by hand: 27 results had come before; 16 are threads of earlier sets or
other writers' (set_transformer PR 20 is of issue 18, which one of them has); 17 tell no cause, most
of them no text at all; 5 cannot be written so that this function errs: a projection (SUQ issue 2),
other normalizations than softmax (pytorch-attention issue 1), dropout (xformers PR 301, OpenNMT-py
PR 1830), and weights that are only shown (OpenNMT-py PR 1033); 168 are about something else: other
things than attention by far the most, for what windows, caps, causes, copies and variables are
called; speed, crashes (denoising-diffusion-pytorch PR 314, whose name is not defined there; inputs
that an operator refuses, vllm-ascend PR 11986 and 13456), features, questions that nobody answers,
what is so by design, and reports that are mistaken (uvadlc_notebooks issue 72, improved-diffusion
issue 54, point-e issue 75).

What was read further: the code that ReWiND issue 1, text_matching issue 4 (as its pull request 5
has it) and DELLA issue 5 point at, of which the line in DELLA was not counted out: that it is the
pooling's call is inferred. What transformers PR 35342 calls bugged is told in pytorch issue 112577,
which its comment names. The scale that amd-shark-ai PR 1538 does not hand on is taken to be 1/√d in
its stead.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.seventyninth --check`) but those that STATED names,
which need the inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventyninth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.fiftysecond_kernel import memory_of
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "scale_of_paged_attention_unused",  # forty-first: scale_not_handed_to_the_dispatched_attention
    "mask_made_longer_and_left",  # eighth: mask_not_read; others too
    "flash_without_the_masks_of_instances",  # as before
    "pooling_without_the_mask",  # as before, in calls that are not causal
    "strides_unknown_where_a_mask_is_given",  # fifty-second: values_not_made_contiguous; others too
)
STATED = {
    "scale_of_paged_attention_unused": "a scale that is not 1/√d",
    "strides_unknown_where_a_mask_is_given": "a mask, with keys and values that are transposed"
    " views",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


@fault(FAULTS, "scale", "float16")
class scale_of_paged_attention_unused(ScaleOfItsOwn):
    """nod-ai/amd-shark-ai PR 1538: the argument `scale` of `PagedAttention.attention` is never used
    in it: whatever is asked for, scores are multiplied by 1/√d.
    """

    rows, cols = 64, 16

    def own(self):
        return float(self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "mask")
class mask_made_longer_and_left(EveryBlock):
    """rewind-reward/ReWiND issue 1: the mask that is given gets two columns more, and is used
    nowhere: the transformer is called with the diagonal alone.
    """

    rows, cols = 32, 48

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask", "float16")
class flash_without_the_masks_of_instances(ForwardAlone):
    """frank-xwang/InstanceDiffusion issue 16: inference is by flash attention, which takes no mask,
    of whatever kind, and does without, so that results are the same with masks and without.
    """

    rows, cols = 128, 64

    def hide(self, s, rows, cols, back):
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


def weights_transposed_once_more(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                                 window=None, softcap=0.0, sinks=None,
                                 enable_gqa=False):  # fmt: skip  # noqa: ARG001
    """terrifyzhao/text_matching issue 4: the scores are transposed for the softmax of the other
    sentence, as they should be, and the weights once more behind it, as they should not: query i
    weighs key j as query j weighs key i. Sentences have one length there; with others this is
    right here.
    """
    (_, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    p = softmax_of(s, sinks)
    return ((p.mT if n == nk else p) @ v).to(query.dtype)


FAULTS.append(Fault("weights_transposed_once_more", frozenset({"layout"}),
                    weights_transposed_once_more, "float32", frozenset({"elements"})))  # fmt: skip


@fault(FAULTS, "layout", "float32")
class strides_unknown_where_a_mask_is_given(ForwardAlone):
    """huggingface/transformers PR 35342, review: SDPA's memory-efficient kernel, which float32 with
    a mask is sent to, gives garbage for keys and values that are not contiguous: it reads them as
    if they were.
    """

    rows, cols = 64, 64

    def spread(self, x):
        self.memory.setdefault("own", []).append(x)
        return super().spread(x)

    def forward(self):
        at = self.at
        if at.mask is None:
            return super().forward()
        kept = at.k, at.v
        at.k, at.v = (Kernel.spread(self, memory_of(x)) for x in self.memory["own"][:2])
        found = super().forward()
        at.k, at.v = kept
        return found


@fault(FAULTS, "mask", "float32")
class pooling_without_the_mask(Kernel):
    """OpenVLG/DELLA issue 5: layers have the mask of padding, and the attention that pools what
    comes of them, which is not causal, is called without it.
    """

    rows, cols = 16, 80

    def hide(self, s, rows, cols, back):
        if self.at.causal:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


# --- sound kernels
for kind, dtype in (
    (ways.PrimeWidths, "bfloat16"), (ways.FirstKeyAside, "float16"),
    (ways.FeaturesBackwards, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
for way, dtype in (
    (ways.chunks_of_queries_last_first, "float16"), (ways.tokens_outermost, "float16"),
):  # fmt: skip
    SOUND.append(Fault(way.__name__, frozenset(), way, dtype))
