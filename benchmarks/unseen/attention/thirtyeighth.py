"""The thirty-eighth set of faults of attention: a sample of what public threads report, as they
come, and sound kernels.

Twenty searches, most of them by a model's or a machine's name, were fixed before any result was
seen, all in the corpus of issues and pull requests: «Gemma attention softcap or sliding window
wrong output», «gpt-oss attention sinks incorrect results kernel», «Llama long context flash
decoding wrong tokens fix», «DeepSeek MLA decode kernel accuracy wrong fix», «Qwen attention fp16
overflow NaN fix softmax», «ViT or CLIP attention kernel wrong result head dim 80 72», «Whisper
cross attention wrong output fix kernel», «T5 attention bias relative position wrong flash
attention», «BERT padding mask attention wrong result variable length», «diffusion model attention
black image NaN fp16 attention», «Mistral sliding window attention off by one», «GPT-2 GPT-J scale
attention upcast wrong result», «Falcon or MPT alibi attention incorrect», «multi-query attention
single kv head wrong result kernel», «WebGPU or Metal or Vulkan attention shader wrong output», «CPU
attention kernel avx512 amx wrong result bf16», «ring attention context parallel wrong gradients or
lse merge», «nested or jagged tensor attention wrong result gradient», «torch.compile or export
attention decomposition wrong numerics», «attention gradient check fails fp32 accumulate dk dv».
Their 223 results were gone through to the end, the first of every search, then the second of every
one, and so on: they gave 24 faults, and so the set has no more. Nothing that could be written was
left out. What was: 145 are about something else, features, builds, errors or questions; 37 tell no
cause, most of them no text at all; 10 are threads of earlier sets; 3 are on the very defect of one
that was taken; 4 cannot be written: random features in place of a softmax (xformers PR 98),
projections (episodic-transformer-memory-ppo PR 22), a result's shape (pytorch issue 130196), and a
last bit of fp32 in dS that no more than the twin's own shows (pytorch issue 152309). Of a thread
with several defects the first that an ordinary input shows is taken. Three threads tell the cause
in a line, and how it comes about is inferred: vllm-fork PR 682, HunyuanDiT issue 214 and kornia
issue 2186. The issue of vllm PR 56579 is one that the twenty-seventh set names, and left.

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form. Masks, windows, sinks, heads and keys are here; scores, scales and what is not
finite in thirtyeighth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.thirtyeighth --check`) but those that STATED names,
which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyeighth_kernel as ways
from benchmarks.unseen.attention import thirtyeighth_scores
from benchmarks.unseen.attention.eighth_kernel import Ring, fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.twentyseventh import EveryBlock

AGAIN = (
    "causal_mask_only_with_a_mask",  # fifth: causal_ignored_where_it_divides
    "window_of_bridge_one_key_wider",  # others: window_of_one_key_more
    "window_that_sdpa_has_not",  # twenty-fifth: window_lost_where_no_mask_is_made
    "window_that_gemma_3_was_missing",  # as before
    "ring_passes_the_full_mask_on",  # eighth: mask_not_read
    "sinks_never_bound",  # eighth: sinks_not_used
    "sinks_the_generic_kernel_has_not",  # eighth: sinks_not_used
    "cap_taken_out_for_now",  # eighth: softcap_dropped
    "bias_not_scaled_with_the_scores",  # ninth: bias_before_the_scale, the other way round
    "hidden_at_minus_ten_thousand",  # sixth: minus_ten_thousand; fourteenth
    "least_half_added_to_the_scores",  # twentieth: bias_added_in_16_bits
    "rows_of_minus_infinity",  # twenty-seventh: rows_of_nothing_divided_by_nothing; others
    "numbers_past_the_largest_half",  # twenty-fifth: products_past_the_largest_half
    "scaled_queries_products_in_half",  # thirty-fourth: query_scaled_and_product_summed_in_half
    "softmax_without_its_maximum",  # twenty-second: its docstring "does not take off the maximum"
    "scale_by_the_width_of_values",  # ninth, twenty-seventh: scales of other widths
    "scale_of_the_pattern_not_the_callers",  # eleventh: always_causal_and_not_scaled
)
STATED = {
    "scale_of_the_pattern_not_the_callers": "a scale that is not 1/√d",
    "tanh_of_two_overflowing_exponentials": "a cap that scores exceed more than 88 times",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask causal-mask")
class causal_mask_only_with_a_mask(EveryBlock):
    """huggingface/transformers issue 29946 (Falcon): where no mask is given, what SDPA is given is
    not causal.
    """

    def causal(self, i, j, back):
        return super().causal(i, j, back) | (self.at.mask is None)


def jagged_rows_see_other_sequences(query, key, value, *, is_causal, scale, attn_mask=None,
                                    window=None, softcap=0.0, sinks=None):  # fmt: skip
    """pytorch/pytorch issue 177378: without a mask of blocks of its own a jagged batch is one
    sequence to flex_attention, and queries attend to keys of the others.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q, k, v = (ways.repeated(x, heads) for x in (query, key, value))
    if attn_mask is None:
        q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))
        i, j = torch.arange(b * n)[:, None], torch.arange(b * nk)[None]
        same, earlier = i // n == j // nk, i // n > j // nk
        keep = visible(n, nk, is_causal, window).repeat(b, b)
        others = earlier if is_causal else ~same
        if window is not None:
            others = others & (j >= i - window[0])
        keep = torch.where(same, keep, others)
    else:
        keep = visible(n, nk, is_causal, window)
    s = logits(q, k, keep, attn_mask, scale, softcap)
    out = ways.softmax_of(s, sinks) @ v
    if attn_mask is None:
        out = out[0].unflatten(1, (b, n)).transpose(0, 1)
    return out.to(query.dtype)


FAULTS.append(
    Fault("jagged_rows_see_other_sequences", frozenset({"mask", "other-data"}),
          jagged_rows_see_other_sequences, "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask", "float16")
class weights_in_the_biass_place(Kernel):
    """huggingface/transformers PR 4499 (T5): to the layers after the first the cross attention's
    weights are handed on in place of its bias.
    """

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype != torch.bool:
            keep = visible(at.n, at.nk, at.causal, at.window)
            s = logits(at.q, at.k, keep, at.mask, at.scale, at.softcap)
            at.mask = ways.softmax_of(s, at.sinks)
        return super().forward()


@fault(FAULTS, "mask")
class distances_between_two_sequences(Kernel):
    """huggingface/transformers issue 7323 (T5): the decoder's cross attention has a bias by the
    distance of positions, as self-attention does, where the model has none.
    """

    rows, cols = 64, 48

    def hide(self, s, rows, cols, back):
        at = self.at
        if not at.causal and at.n != at.nk:
            i = torch.arange(rows.start, rows.stop)[:, None]
            j = torch.arange(cols.start, cols.stop)[None]
            far = (i - j).clamp_min(0).float()
            later = 16 + (far.clamp_min(16) / 16).log() / 8**0.5 * 16
            bucket = torch.where(far < 16, far, later).floor().clamp_max(31)
            head = torch.arange(s.shape[1]).view(-1, 1, 1)
            s = s + torch.cos(bucket * 0.7 + head) * LOG2_E
        return super().hide(s, rows, cols, back)


@fault(FAULTS, "mask", "float16")
class bias_not_scaled_with_the_scores(ForwardAlone):
    """NVIDIA/TensorRT-Model-Connect PR 11 (Falcon): the model's bias belongs under the scale, and
    is added behind it: it is √d times too large.
    """

    def bias(self, s, mask, back):
        return s + mask.float() * (LOG2_E * self.at.q.shape[-1] ** 0.5)


@fault(FAULTS, "mask")
class ring_passes_the_full_mask_on(Ring, ForwardAlone):
    """NVIDIA/TensorRT-LLM PR 13821, review: every step of the ring calls the attention inside with
    no mask at all, and refuses none but a causal one.
    """

    def forward(self):
        kept, self.at.mask = self.at.mask, None
        found = super().forward()
        self.at.mask = kept
        return found


# --- windows
@fault(FAULTS, "window mask", "float16")
class every_layer_has_a_window(ForwardAlone):
    """cactus-compute/cactus issue 320 (Gemma): no window may be larger than 1024, here 64, and
    layers that attend to everything have that one.
    """

    rows, cols = 32, 32

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        near = (j > i - 64) | (not self.at.causal)
        return super().seen(rows, cols, back) & near


@fault(FAULTS, "window")
class window_of_bridge_one_key_wider(Kernel):
    """NVIDIA-NeMo/Megatron-Bridge PR 2656: the model's window counts the query's own key, the
    kernel's does not, and is given the same number.
    """

    rows, cols = 96, 64

    def window(self, i, j, back):
        left, right = self.at.window
        return (j >= i - left - 1) & (j <= i + max(right, 0))


@fault(FAULTS, "window", "float16")
class window_that_sdpa_has_not(Kernel):
    """stepfun-ai/Step-Audio2 issue 13: a window is switched on and not implemented for `sdpa`."""

    rows, cols = 64, 96

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "window")
class window_that_gemma_3_was_missing(ForwardAlone):
    """Comfy-Org/ComfyUI PR 11409: the sliding layers of Gemma 3 attend to everything."""

    rows, cols = 128, 32

    def seen(self, rows, cols, back):
        kept, self.at.window = self.at.window, None
        found = super().seen(rows, cols, back)
        self.at.window = kept
        return found


# --- sinks
@fault(FAULTS, "sinks unnormalized", "float16")
class sinks_never_bound(ForwardAlone):
    """vllm-project/vllm-metal PR 550: the paged kernel knows sinks, and its caller says that there
    are none: what comes out is the plain softmax.
    """

    rows, cols = 16, 32

    def begin(self, q, first=True):
        return super().begin(q, False)


@fault(FAULTS, "sinks unnormalized")
class sinks_the_generic_kernel_has_not(ForwardAlone):
    """modular/modular issue 6198 (SM120): the kernel that is no machine's own leaves the sink out
    of the row sum.
    """

    rows, cols = 128, 64

    def row(self, rows):
        kept, self.at.sinks = self.at.sinks, None
        found = super().row(rows)
        self.at.sinks = kept
        return found


# --- heads and keys
def heads_in_one(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                 sinks=None):  # fmt: skip
    """kornia/kornia issue 2186: features are never split into heads: one head of them all has the
    scores, by the scale of a single one, and every head's values get its weights.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q, k, v = (ways.repeated(x, heads) for x in (query, key, value))
    q, k = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (q, k))
    s = logits(q, k, visible(n, nk, is_causal, window), None, scale, softcap)
    s = s.expand(b, heads, n, nk)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if boolean else s + attn_mask.float()
    return (ways.softmax_of(s, sinks) @ v).to(query.dtype)


FAULTS.append(
    Fault("heads_in_one", frozenset({"layout", "other-data"}), heads_in_one, "bfloat16",
          frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "other-data key-tail causal-mask", "float16")
class first_keys_once_more_for_the_last(ForwardAlone):
    """vllm-project/vllm PR 38321 (Whisper): the kernel of several tokens takes new keys for its
    queries' own: behind what it holds for the past come the first keys once more, one more for
    each query, and as many last ones are missed.
    """

    def __init__(self, **at):
        super().__init__(**at)
        self.cross = False

    def forward(self):
        at = self.at
        self.cross = not at.causal and 1 < at.n < at.nk
        kept = at.k, at.v
        if self.cross:
            at.k, at.v = (torch.cat([x[:, :, : -at.n], x[:, :, : at.n]], 2) for x in kept)
        found = super().forward()
        at.k, at.v = kept
        return found

    def seen(self, rows, cols, back):
        found = super().seen(rows, cols, back)
        if not self.cross:
            return found
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        return found & (j <= i + self.at.nk - self.at.n)


FAULTS += thirtyeighth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.WiderAndWider, "bfloat16"), (ways.RangesOfKeys, "float16"),
    (ways.OddTilesLast, "float16"), (ways.DeltaOfTheWeights, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(
    Fault("values_weighed_first", frozenset(), ways.values_weighed_first, "bfloat16"),
)
