"""The forty-ninth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «gradient of attention wrong after recompute checkpointing», «attention backward dk
dv wrong accumulation», «sequence parallel attention gradients mismatch», «context parallel loss
differs attention», «ring attention lse merge incorrect», «tensor parallel attention heads wrong
split kv», «packed sequences cu_seqlens attention leak across documents», «attention loss nan after
padding only batch fully masked rows», «mixed precision attention softmax fp16 overflow loss nan»,
«autocast attention dtype precision lost», «attention bias gradient wrong», «speculative decoding
tree attention mask wrong», «prefix caching chunked prefill attention wrong output», «kv cache
quantization wrong scale attention output», «paged attention block table wrong output», «sliding
window off by one attention», «attention sink wrong softmax denominator», «logit softcap attention
missing or wrong order», «beam search cache reorder attention wrong», «cross attention kv cache
encoder stale wrong».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 234 results, of which each search gives twelve at most. 21 are faults
here. What was left: 149 are about something else, features, speed, builds, crashes, questions or
other operations; 28 tell no cause, most of them no text at all; 28 are threads of earlier sets; 4
are on the very defect of one that was taken (llama.cpp PR 66 of GenerelSchwerz, tensorflow PR
59657, transformers PRs 46672 and 46735); 4 cannot be written so that this function errs: gradients
of a bias (flash-sparse-attention PR 193, jax issue 27184), slopes of ALiBi that a module's cast
rounds (flash-attention PR 846), and a state space in place of a softmax (transformers issue 29730).

Nothing was read but what the searches showed of the threads themselves, for those that did not tell
enough a second search for the same thread, and the code of memory-efficient-attention issue 8,
which was left: a wrong shape ends in an error there. Threads that are taken at their word: gpt-2 PR
122 speaks of an overflow, and what 10¹⁰ is in fp16 and what comes of it is reckoned here; CoMPM
issue 2, TensorRT-LLM issue 1557 and fairseq2 issue 307 ask whether what they see is right;
Megatron-LM PR 6472 and vllm PR 28346 are reviews that say what would come of a change. What memory
holds where nothing is written, how many ranks or devices there are and which sequence's keys
another one has was chosen. Of a thread with several defects one is taken.

What is right was set down before anything was measured by halfulp. `AGAIN` names every fault whose
mistake an earlier set has in some form. Packed rows, masks, heads and caches are here; scores,
formats and gradients in fortyninth_scores.py. All err more than 1.5 × their sound twin on an
ordinary input (`python -m benchmarks.unseen.draw attention.fortyninth --check`) but those that
STATED names, which need the inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyninth_kernel as ways
from benchmarks.unseen.attention import fortyninth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock, OtherOperands
from torch.nn import functional

AGAIN = (
    "positions_begin_again_and_no_mask_is_made",  # forty-first: documents_packed_without_a_mask
    "packed_rows_off_the_flash_path",  # as before
    "samples_behind_each_other_in_a_causal_row",  # as before
    "packed_responses_under_a_mask_of_ones",  # forty-second: documents_seen_through_a_mask_of_ones
    "padded_batch_without_its_mask",  # eighth: mask_not_read; others too
    "rows_of_every_rank_at_the_top_of_the_mask",  # forty-seventh:
    # mask_of_queries_read_as_one_of_keys, which has one row for all; others of local numbers
    "queries_numbered_anew_and_keys_mirrored",  # ninth: queries_renumbered_on_each_device
    "memory_not_reordered_for_as_many_beams",  # thirty-ninth: cache_of_the_beams_of_before
    "state_of_another_name_keeps_its_order",  # thirty-ninth: memory_that_no_beam_reorders
    "products_in_half_before_their_scale",  # fortieth: products_before_their_scale_in_half
    "cast_to_half_where_bfloat16_was_asked",  # eighth: keys_and_queries_in_fp16, from fp32
    "similarities_and_weights_in_half",  # as products_in_half_before_their_scale
    "similarity_map_past_the_largest_half",  # as before
    "least_half_added_to_the_scores",  # forty-second: two_least_numbers_added; others too
    "ten_billion_times_nothing",  # thirty-ninth: ten_billion_times_the_mask_in_half
    "zeros_of_padding_in_the_softmax",  # forty-fifth: padding_of_zeros_keeps_its_weight
    "capped_after_the_bias_and_the_mask",  # ninth: capped_after_the_mask, bias_within_the_cap
    "shared_key_captured_under_no_grad",  # thirty-fourth: graph_severed_before_the_attention
)
STATED = {
    "cast_to_half_where_bfloat16_was_asked": "queries, keys, values or scores past 65504",
}
"""Inputs on which alone a fault shows: of what is smaller a half keeps more than bf16 does, and
scores alone, which stock keeps in fp32, are a little coarser.
"""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- packed rows
class Tiles96(Kernel):
    """A sound kernel of other tiles."""

    rows, cols = 96, 48


class Tiles32(Kernel):
    """As before."""

    rows, cols = 32, 96


wide, narrow = attention(Tiles96), attention(Tiles32)


def positions_begin_again_and_no_mask_is_made(query, key, value, *, is_causal, scale,
                                              attn_mask=None, window=None, softcap=0.0,
                                              sinks=None):  # fmt: skip
    """alex-hh/profam issue 495: documents are put together to a batch of one, and positions that
    begin again at each are to make the model mask them, which it does not: tokens attend to the
    documents before their own.
    """
    return ways.end_to_end(wide, query, key, value, is_causal=is_causal, scale=scale,
                           attn_mask=attn_mask, window=window, softcap=softcap,
                           sinks=sinks)  # fmt: skip


ways.put(FAULTS, positions_begin_again_and_no_mask_is_made, "mask other-data")


def packed_rows_off_the_flash_path(query, key, value, *, is_causal, scale, attn_mask=None,
                                   window=None, softcap=0.0, sinks=None):  # fmt: skip
    """PrimeIntellect-ai/prime-rl PR 2944: where FlashAttention is not what attends, boundaries of a
    packed row are not read, and its documents silently attend across each other; here that is where
    numbers are fp32.
    """

    def scores(q, k):
        return q @ k.mT * scale

    def written_out(q, k, v, **rest):
        del rest["scale"]
        return ways.eager(q, k, v, scores, lambda p: p, **rest)

    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    if query.dtype != torch.float32:
        return ways.sound(query, key, value, **options)
    return ways.end_to_end(written_out, query, key, value, **options)


ways.put(FAULTS, packed_rows_off_the_flash_path, "mask other-data", "float32")


def samples_behind_each_other_in_a_causal_row(query, key, value, *, is_causal, scale,
                                              attn_mask=None, window=None, softcap=0.0,
                                              sinks=None):  # fmt: skip
    """huggingface/nanoVLM PR 204: samples are packed into one row, whose causal attention knows
    nothing of them: a later one attends to those before it. Here the last one comes first.
    """
    return ways.end_to_end(narrow, query, key, value, turned=True, is_causal=is_causal,
                           scale=scale, attn_mask=attn_mask, window=window, softcap=softcap,
                           sinks=sinks)  # fmt: skip


ways.put(FAULTS, samples_behind_each_other_in_a_causal_row, "mask other-data", "float16")


# --- masks that are given
@fault(FAULTS, "mask")
class packed_responses_under_a_mask_of_ones(EveryBlock):
    """mit-han-lab/fastrl issue 14: responses are packed into one row, and the mask that goes with
    it is ones everywhere.
    """

    rows, cols = 128, 32

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            at.mask = torch.ones_like(at.mask)
        return super().forward()


@fault(FAULTS, "mask", "float32")
class padded_batch_without_its_mask(Kernel):
    """rungjoo/CoMPM issue 2: no mask is given to the encoder, which takes one of ones: in a batch
    of more than one the padding of shorter samples is attended to.
    """

    rows, cols = 48, 80

    def forward(self):
        at = self.at
        if at.q.shape[0] > 1 and at.mask is not None and at.mask.dtype == torch.bool:
            at.mask = None
        return super().forward()


@fault(FAULTS, "mask causal-mask window")
class rows_of_every_rank_at_the_top_of_the_mask(EveryBlock):
    """cornstarch-org/Cornstarch PR 38: queries lie on ranks, here two, in equal parts, all of which
    have every key, and each rank attends as the top portion of the mask says.
    """

    rows, cols = 64, 64

    def row_of_the_mask(self, i):
        ranks = 2
        return i if self.at.n % ranks else i % (self.at.n // ranks)

    def seen(self, rows, cols, back):
        i = self.row_of_the_mask(torch.arange(rows.start, rows.stop)[:, None])
        j = torch.arange(cols.start, cols.stop)[None]
        keep = self.inside(j, back).expand(i.shape[0], -1)
        if self.at.causal:
            keep = keep & self.causal(i, j, back)
        return keep & self.window(i, j, back) if self.at.window is not None else keep

    def given_mask(self, rows, cols):
        mask = self.at.mask
        i = self.row_of_the_mask(torch.arange(rows.start, min(rows.stop, self.at.n)))
        full = mask.expand(*mask.shape[:-2], self.at.n, self.at.nk)[..., i, :][..., cols]
        missing = (0, cols.stop - cols.start - full.shape[-1], 0, rows.stop - rows.start - len(i))
        return functional.pad(full, missing, value=False if mask.dtype == torch.bool else 0.0)


# --- heads
@fault(FAULTS, "key-heads", "float16")
class queries_numbered_anew_and_keys_mirrored(Kernel):
    """GenerelSchwerz/llama.cpp PR 57: a cache in the host's memory is not split by heads, and of
    two devices each has all key heads and half of the query heads, which it numbers anew: they
    attend to the other's keys. Where its heads are no multiple of the key heads it aborts; here
    that is right.
    """

    rows, cols = 32, 64

    def pairs(self, heads):
        number, own = torch.arange(heads), heads // 2
        shared = heads // self.at.groups
        if heads % 2 or own % shared:
            return number // self.at.groups
        return number % own // (own // shared)

    def spread(self, x):
        return x[:, self.pairs(x.shape[1] * self.at.groups)]

    def group(self, grad):
        b, heads, *rest = grad.shape
        total = grad.new_zeros(b, heads // self.at.groups, *rest)
        return total.index_add(1, self.pairs(heads), grad)


def fused_projection_split_as_one_tensor(query, key, value, *, is_causal, scale, attn_mask=None,
                                         window=None, softcap=0.0, sinks=None):  # fmt: skip
    """predibase/lorax PR 120 (Qwen): Q, K and V of all heads are one tensor, which is split among
    ranks, here two, as if it were one thing, and not each of the three: what a rank takes for its
    queries, keys and values are thirds of its half.
    """
    options = {"is_causal": is_causal, "scale": scale, "window": window, "softcap": softcap}
    heads = query.shape[1]
    if not query.shape == key.shape == value.shape or heads % 2:
        return ways.sound(query, key, value, attn_mask=attn_mask, sinks=sinks, **options)
    done = []
    for rank, part in enumerate(torch.cat([query, key, value], 1).chunk(2, 1)):
        own = slice(rank * heads // 2, (rank + 1) * heads // 2)
        mask = attn_mask
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, own]
        done.append(ways.sound(*part.chunk(3, 1), attn_mask=mask,
                               sinks=None if sinks is None else sinks[own], **options))  # fmt: skip
    return torch.cat(done, 1)


ways.put(FAULTS, fused_projection_split_as_one_tensor, "layout other-data", "float16")


# --- caches
@fault(FAULTS, "other-data cache")
class memory_not_reordered_for_as_many_beams(OtherOperands):
    """facebookresearch/fairseq2 issue 307: the keys and values of the encoder are not reordered
    where there are as many sequences as before, which they may be although they are others; here
    where queries and keys are not of one length and nothing is causal.
    """

    rows, cols = 16, 64

    def read(self, k, v):
        if self.at.causal or self.at.n == self.at.nk:
            return k, v
        return k.flip(0), v.flip(0)


@fault(FAULTS, "other-data cache", "float16")
class state_of_another_name_keeps_its_order(OtherOperands):
    """huggingface/transformers PR 46615: what is kept under another name than `past_key_values`,
    as XLNet's memory is, stays in the order of beams of the step before; here what lies before the
    new tokens' keys, of the next beam.
    """

    rows, cols = 32, 32

    def read(self, k, v):
        past = max(self.at.nk - self.at.n, 0)
        return tuple(torch.cat([x[:, :, :past].roll(-1, 0), x[:, :, past:]], 2) for x in (k, v))


@fault(FAULTS, "cache key-tail unwritten")
class encoders_keys_in_the_decoders_slots(OtherOperands):
    """vllm-project/vllm PR 28346, review: keys and values of the encoder are put into the cache by
    the mapping of slots of the decoder's tokens, which are fewer: those past their number are not
    written, and are here what an empty cache holds, zeros.
    """

    rows, cols = 16, 128

    def read(self, k, v):
        if self.at.causal or self.at.n >= self.at.nk:
            return k, v
        written = (torch.arange(self.at.nk) < self.at.n)[:, None]
        return k * written, v * written


FAULTS += fortyninth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.WholeNumberMaxima, "bfloat16"), (ways.Halving, "float16"),
    (ways.FromTheMiddle, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("root_of_the_scale_on_both", frozenset(), ways.root_of_the_scale_on_both,
                   "bfloat16"))  # fmt: skip
SOUND.append(Fault("keys_in_strides_of_seven", frozenset(), ways.keys_in_strides_of_seven,
                   "float16"))  # fmt: skip
