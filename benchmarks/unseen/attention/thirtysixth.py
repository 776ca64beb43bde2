"""The thirty-sixth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

It is drawn as the twenty-seventh was. Searches were fixed by the task before any result was seen,
and all sent to the corpus of issues and pull requests: 1 «attention output differs from eager
reference, cause found in kernel», 2 «model generates garbage with flash attention, root cause
wrong index», 3 «accuracy drop after enabling attention kernel, fixed by computing in float32», 4
«attention NaN for padded batch rows fix», 5 «attention results depend on batch size or sequence
length bug fix», 6 «long context attention wrong output int32 overflow or position», 7 «decode
attention split-k reduce wrong merge of partial results fix», 8 «kv cache quantization scale wrong
attention output fix», 9 «attention with different query and key length gives wrong mask fix», 10
«attention head dimension not power of two wrong result padding fix», 11 «attention stride
non-contiguous tensor wrong output fix», 12 «cross attention wrong result kv length fix», 13
«attention dropout or scale applied wrong in backward fix», 14 «gradient of attention bias or key
value wrong accumulate race fix», 15 «loss diverges bf16 attention training root cause», 16 «chunked
prefill or prefix caching attention incorrect output fix», 17 «tree attention speculative decoding
custom mask wrong output fix», 18 «MLA multi-head latent attention kernel wrong result fix», 19
«linear layout or fused qkv attention reading wrong head values fix», 20 «varlen attention
cu_seqlens wrong sequence boundary fix».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were 28 faults: the seventh of the nineteenth, 138 results. A thread was taken if it
tells a numerical mistake of an attention computation and its cause, or lets one infer it; one was
not taken only because it is about something else, a feature, a question, a crash or a result that
had come before (73), tells no cause (21), is named by an earlier set (14), or cannot be written so
that this function errs: a gradient of the bias, and dropout where none is asked for (2). An issue
whose pull request an earlier set names, or the other way round, was taken: `AGAIN` says «its PR» or
«its issue». Where the thread's library lays the diagonal in the other corner than this function
does, its mistake is mirrored. Where a thread tells the cause and not the numbers, as with scales,
numbers were chosen. None has special inputs.

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form. Masks, what of the sequence is read and heads are here; precision, codes, what
is not finite, splits and the backward pass in thirtysixth_scores.py. All err more than 1.5 × their
sound twin on an ordinary input (`python -m benchmarks.unseen.draw attention.thirtysixth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtysixth_kernel as ways
from benchmarks.unseen.attention import thirtysixth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch.nn import functional

AGAIN = (
    "segments_ignored_in_vanilla_mode",  # eighth: mask_not_read; others too
    "padding_marked_as_valid",  # eighth: mask_not_read; others too
    "pad_mask_along_the_queries",  # ninth: mask_along_the_other_axis
    "custom_mask_replaced_by_the_causal_one",  # thirty-second: causal_where_a_mask_is_given
    "diagonal_where_lengths_differ",  # sixth: causal_from_the_end; others too
    "decode_masks_from_the_bottom_right",  # sixth: causal_from_the_end; others too
    "causal_option_of_the_other_library",  # its issue, twenty-third: diagonal_from_the_last_key
    "spans_wrap_in_a_short_integer",  # its issue, twenty-third: positions_in_eight_bits
    "keys_cut_to_as_many_as_queries",  # fifth: keys_as_many_as_queries, which leaves zeros
    "blocks_of_keys_counted_by_queries",  # fifth and others: keys_as_many_as_queries
    "cached_prefix_not_attended",  # fifteenth: keys_from_the_querys_offset_on
    "plugin_of_at_most_128_keys",  # others leave last keys out for other reasons
    "placeholders_of_the_static_cache",  # thirty-second: key_of_zeros_that_no_mask_hides; others
    "row_number_taken_for_a_condition",  # its PR, thirty-second: first_query_taken_for_one_past_…
    "dot_of_the_tutorial_in_tf32",  # sixteenth: products_in_tf32_by_default; others too
    "logits_cast_before_their_dot_with_v",  # thirteenth: exponentials_and_quotients_in_place
    "reductions_in_the_models_type",  # fifth: einsum_in_bf16; nineteenth: row_summed_key_by_key_…
    "multiplied_in_fp16_then_cast",  # ninth: products_in_fp16, the same text in mlc-llm
    "calibrated_scales_silently_one",  # nineteenth: operands_cast_to_e4m3_at_scale_one
    "float_scales_never_set",  # twenty-fourth: layers_that_share_a_cache_at_scale_one; others too
    "host_scales_of_before_the_refit",  # the same, by a scale that is not 1
    "softmax_of_padded_rows",  # thirteenth and others: first_keys_all_hidden
    "fallback_without_a_finite_maximum",  # thirteenth and others: first_keys_all_hidden
    "padding_of_length_zero_over_zero",  # twenty-seventh: rows_of_nothing_divided_by_nothing
    "combined_in_a_race",  # thirteenth: parts_merged_past_a_barrier
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that are given
@fault(FAULTS, "mask")
class segments_ignored_in_vanilla_mode(Kernel):
    """Tencent-Hunyuan/HunyuanVideo PR 310: without FlashAttention `cu_seqlens` is not read, so that
    every token attends to what is hidden, padding and other segments; here a boolean mask.
    """

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask", "float16")
class padding_marked_as_valid(Kernel):
    """yg211/bert_nli PR 3: masks are made with 1 everywhere, padding included."""

    rows, cols = 64, 32

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return torch.ones_like(found) if found.dtype == torch.bool else found


@fault(FAULTS, "mask mask-finite")
class pad_mask_along_the_queries(Kernel):
    """hyunwoongko/transformer PR 40: what should hide keys is laid along the queries, (b, 1, n, 1)
    in place of (b, 1, 1, n), and hides by −10000.
    """

    def given_mask(self, rows, cols):
        kept, at = self.at.mask, self.at
        if kept.dtype == torch.bool and at.n == at.nk:
            at.mask = kept.expand(*kept.shape[:-2], at.n, at.nk).mT
        found = super().given_mask(rows, cols)
        at.mask = kept
        return found

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.given_mask(rows, cols), -10000 * LOG2_E)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask causal-mask")
class custom_mask_replaced_by_the_causal_one(ways.EveryBlock):
    """huggingface/transformers issue 29525: a mask that is given in four dimensions is replaced by
    the causal one that the model makes.
    """

    def hide(self, s, rows, cols, back):
        keep = self.seen(rows, cols, back)
        if self.at.mask is not None:
            i = torch.arange(rows.start, rows.stop)[:, None]
            keep = keep & (torch.arange(cols.start, cols.stop)[None] <= i)
        return s.masked_fill(~keep, -INF)


@fault(FAULTS, "mask unwritten", "float16")
class queries_unpadded_by_the_mask_of_keys(ForwardAlone):
    """vllm-project/vllm-omni issue 5865: the mask of padded keys unpads the queries as well: those
    rows alone are computed whose own number is visible among keys, and the others are 0.
    """

    def forward(self):
        o, lse = super().forward()
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool or self.at.n != self.at.nk:
            return o, lse
        own = mask.expand(*mask.shape[:-2], self.at.n, self.at.nk).diagonal(dim1=-2, dim2=-1)
        return o * own[..., None], lse


# --- diagonals and windows
class LastMeetsLast(ways.EveryBlock):
    """The last query's diagonal is the last key."""

    def causal(self, i, j, back):
        return j <= i + self.at.nk - self.at.n


@fault(FAULTS, "causal-mask")
class diagonal_where_lengths_differ(LastMeetsLast):
    """Dao-AILab/flash-attention issue 481: where queries are not as many as keys the causal mask
    is laid from the wrong corner; mirrored.
    """

    rows, cols = 128, 64


@fault(FAULTS, "causal-mask window", "float16")
class decode_masks_from_the_bottom_right(LastMeetsLast):
    """ROCm/flash-attention issue 158: masks, causal ones and windows, are made as `b:`, from the
    bottom right, where `t:` is meant; forwards and backwards.
    """

    def window(self, i, j, back):
        return super().window(i + self.at.nk - self.at.n, j, back)


@fault(FAULTS, "causal-mask")
class causal_option_of_the_other_library(LastMeetsLast, ForwardAlone):
    """pytorch/executorch PR 22443: PyTorch's causal attention is handed to MLX, which lays the mask
    from the bottom right.
    """

    rows, cols = 32, 96


@fault(FAULTS, "window causal-mask", "float16")
class spans_wrap_in_a_short_integer(ForwardAlone):
    """vllm-project/tpu-inference PR 2756: where there is a window the spans of queries and keys are
    int16, which 32K tokens exceed; here int8.
    """

    def wrap(self, x):
        return (x + 128) % 256 - 128

    def causal(self, i, j, back):
        if self.at.window is None:
            return super().causal(i, j, back)
        return self.wrap(j) <= self.wrap(i)

    def window(self, i, j, back):
        left, right = self.at.window
        keep = self.wrap(i) < self.wrap(self.wrap(j) + left + 1) if left >= 0 else j >= 0
        return keep & (j <= i + right) if right >= 0 else keep & (i >= 0)


# --- what of the sequence is read
@fault(FAULTS, "key-tail")
class keys_cut_to_as_many_as_queries(ways.OtherOperands):
    """alibaba/MNN PR 4898: without a cache as many keys are taken as there are queries."""

    def read(self, k, v):
        return k[:, :, : self.at.n], v[:, :, : self.at.n]


@fault(FAULTS, "key-tail", "float16")
class blocks_of_keys_counted_by_queries(ForwardAlone):
    """jax-ml/jax issue 24491 (Pallas on GPUs): how many blocks of keys there are is reckoned from
    the length of the queries.
    """

    def key_blocks(self, rows):
        return [c for c in super().key_blocks(rows) if c.start < self.at.n]


@fault(FAULTS, "key-tail")
class cached_prefix_not_attended(ForwardAlone):
    """xLLM-AI/xllm PR 2161: on a hit of the prefix cache the length of keys is that of the new
    tokens, and there is no table of blocks: what was cached before them is not attended to.
    """

    def inside(self, j, back):
        before = max(self.at.nk - self.at.n, 0)
        return super().inside(j, back) & (back | (j >= before))


@fault(FAULTS, "key-tail", "float16")
class plugin_of_at_most_128_keys(ForwardAlone):
    """NVIDIA/TensorRT issue 2541: the plugin for cross attention is for 128 keys at most, and takes
    more without a word; what comes after those is not there.
    """

    def inside(self, j, back):
        return super().inside(j, back) & (back | (j < 128))


@fault(FAULTS, "padding")
class placeholders_of_the_static_cache(ways.OtherOperands):
    """huggingface/transformers issue 32309: Gemma 2's cache has a fixed length, and what of it is
    not filled yet, zeros, is attended to where no mask says otherwise.
    """

    def read(self, k, v):
        more = 64 if self.at.mask is None else 0
        return functional.pad(k, (0, 0, 0, more)), functional.pad(v, (0, 0, 0, more))


@fault(FAULTS, "query-tail", "float16")
class row_number_taken_for_a_condition(ForwardAlone):
    """ggml-org/llama.cpp issue 7903: `ic0 + j` is asked in place of `ic0 + j < ne01`, so that query
    0 alone counts as past the end, and zeros are loaded for it.
    """

    rows, cols = 32, 128

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        row = torch.arange(part.start, part.stop)[:, None]
        return torch.where(row == 0, 0.0, found) if name == "q" else found


@fault(FAULTS, "other-data layout")
class keys_and_values_mixed_up(ways.OtherOperands):
    """tenstorrent/tt-mlir issue 8958: the fusion for decoding takes values for keys and keys for
    values.
    """

    def read(self, k, v):
        return (v, k) if k.shape == v.shape else (k, v)


FAULTS += thirtysixth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.BackToFront, "bfloat16"), (ways.TwoParts, "float16"), (ways.SumFirst, "bfloat16"),
    (ways.HalvesOfFeatures, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND.append(Fault("keys_by_queries", frozenset(), ways.keys_by_queries, "bfloat16"))
