"""The fifty-first set's faults of causal masks, scores, layouts and what is never written
(fiftyfirst.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyfirst_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import fp16
from benchmarks.unseen.attention.fortyfirst_kernel import ScaleOfItsOwn
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- keys behind the query
@fault(FAULTS, "causal-mask mask", "float16")
class relative_attention_that_nothing_masks(ways.FutureSeen):
    """magenta/magenta issue 1486: the relative attention of the Music Transformer means to look
    back alone, and nothing but the bias that it is given hides what lies ahead: Q Kᵀ is not masked
    itself.
    """

    rows, cols = 64, 32

    def open(self):
        return self.at.mask is None


@fault(FAULTS, "causal-mask mask")
class flag_that_no_mask_is_made_of(ways.FutureSeen):
    """FGA-DIKU/BONSAI issue 343: `is_causal` does nothing; the method that makes a mask of it is
    not called by newer versions of transformers.
    """

    rows, cols = 48, 96


# --- scores
@fault(FAULTS, "scale")
class divided_by_the_scaling(ScaleOfItsOwn):
    """dmlc/dgl PR 5100, the third of its points (BiasedMHA): queries are divided by `scaling`,
    which is 1/√d already, where they are to be multiplied by it.
    """

    rows, cols = 32, 64

    def own(self):
        return float(1 / self.at.scale)


@fault(FAULTS, "products scores non-finite nan-escapes", "float16")
class products_without_their_precision_set(ForwardAlone):
    """ggml-org/llama.cpp PR 11446 (MLA): attention as it was asks for fp32 in Q Kᵀ, which is in
    fp16 otherwise, sums as well, and is infinite past 65504; here sixteen features after sixteen.
    """

    rows, cols = 64, 64

    def product(self, q, k, back):
        total = 0.0
        for a, b in zip(q.split(16, -1), k.split(16, -1), strict=True):
            total = fp16(total + fp16(a @ b.mT))
        return total


# --- layouts
def frames_viewed_among_the_channels(query, key, value, *, is_causal, scale, attn_mask=None,
                                     window=None, softcap=0.0, sinks=None):  # fmt: skip
    """PKU-YuanGroup/Open-Sora-Plan issue 171 (AttnBlock3D): what lies as [B, C, T, H W] is reshaped
    to [B T, C, H W] without a transposition of C and T, and O is reshaped back; heads are T here.
    """
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    parts = (ways.features_first(x) for x in (query, key, value))
    out = ways.sound(*parts, is_causal=is_causal, scale=scale, attn_mask=attn_mask, window=window,
                     softcap=softcap, sinks=sinks)  # fmt: skip
    return ways.features_first_again(out)


def output_viewed_as_channels_by_frames(query, key, value, *, is_causal, scale, attn_mask=None,
                                        window=None, softcap=0.0, sinks=None):  # fmt: skip
    """huggingface/diffusers PR 5496 (transformer_temporal): what comes out has its frames before
    its channels, is reshaped as if channels came first, and both are exchanged; what is projected
    in between is left out here, and frames are queries.
    """
    out = ways.sound(query, key, value, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                     window=window, softcap=softcap, sinks=sinks)  # fmt: skip
    n, wide = out.shape[-2:]
    return out.flatten(2).unflatten(2, (wide, n)).mT


FAULTS += [
    Fault("frames_viewed_among_the_channels", frozenset({"layout", "other-data"}),
          frames_viewed_among_the_channels, "bfloat16", frozenset({"elements"})),
    Fault("output_viewed_as_channels_by_frames", frozenset({"layout"}),
          output_viewed_as_channels_by_frames, "float16", frozenset({"elements"})),
]  # fmt: skip


# --- what is never written
@fault(FAULTS, "unwritten")
class output_of_the_tuner_not_taken(ForwardAlone):
    """tracel-ai/burn PR 4702: the tuner does not always use the right output: what the kernel that
    it chose gives back is dropped, and the tensor made for the result is returned, which the
    fallback does not write. Here the fallback is chosen up to 100 queries, and the tensor was 0.
    """

    rows, cols = 128, 64

    def forward(self):
        o, lse = super().forward()
        return (torch.zeros_like(o) if self.at.n <= 100 else o), lse
