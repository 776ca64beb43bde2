"""The thirty-ninth set of faults of attention: a sample of what public threads report, in the order
in which searches return them, and sound kernels.

Twenty searches, most of them by a symptom, were fixed by the task before any result was seen, all
in the corpus of issues and pull requests: «attention outputs differ between prefill and decode
fix», «loss spikes after switching to flash attention cause», «garbage output only when batch size
greater than one attention kernel», «attention kernel fails test tolerance root cause bug found»,
«NaN gradients scaled dot product attention masked rows», «training inference logprob mismatch
attention backend wrong», «attention output zeros for some heads kernel bug», «attention kernel
wrong for sequence length not multiple of 16», «different attention results on AMD and NVIDIA bug
fixed», «wrong results only with torch.compile fused attention», «cuda graph attention stale
sequence lengths wrong output», «perplexity regression after attention change fixed», «attention
test failure bisected to commit wrong result», «first token wrong output attention cache offset»,
«repetitive output for long prompt attention kernel bug», «beam search wrong attention cache indices
fix», «attention wrong when query heads not divisible by kv heads», «fp16 attention overflow
saturates fix», «gradient norm explodes attention backward bug fix», «attention weights do not sum
to one kernel bug».

Their 228 results were gone through to the end, the first of every search, then the second of every
one, and so on; they gave 27 faults, and so the set has no more. What was left: 143 are about
something else, features, builds, crashes, tests or questions, among them llm.c issue 795, whose
indices are another order of the same rows; 32 tell no cause, some of them no text at all; 13 are
threads of earlier sets, and one, rten PR 1321, one of a set that is drawn now; 5 had come before;
3 are on the very defect of one that was taken; 4 cannot be written so that this function errs:
heads that their groups do not divide, which it refuses (flash-linear-attention issue 1029), and
the positions by which RoPE has turned what it is given (its issues 477 and 766, tiny-llm PR 46).

Where an excerpt was clipped, its cause comes from the thread that mends it (llama.cpp PR 14916,
pytorch PR 122083, mlir-air PR 1428, vllm-ascend PR 3572, wenet PR 1635) or, of gpt-oss PR 230, from
the code that it changes. Inferred are NeuralDiffusionModel issue 1 (1.1111 is 1 / 0.9), the
infinity of transformers issue 382 and ggmlc PR 13, and which rows PR 368 of vllm-plugin-FL means.
What a thread has of a state, a graph or a compiled mask, is that of a fixed length or of the
sequence before, so that a call is not told by what went before it.

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form. Masks, what of the sequence is read and layouts are here; softmaxes, precision
and what is not finite in thirtyninth_scores.py. All err more than 1.5 × their sound twin on an
ordinary input (`python -m benchmarks.unseen.draw attention.thirtyninth --check`) but those that
STATED names, which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyninth_kernel as ways
from benchmarks.unseen.attention import thirtyninth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.twentyseventh import EveryBlock

AGAIN = (
    "infinity_added_to_hidden_scores",  # twenty-second: values_of_freed_pages_are_not_numbers
    "block_mask_of_stale_captures",  # first, sixth: mask_of_the_first_sequence
    "new_token_not_in_its_own_history",  # seventh: diagonal_hidden
    "counter_of_heads_wraps_too_late",  # its PR, sixteenth: blocks_counted_at_half_the_rate
    "loop_from_the_first_new_key",  # fifteenth: keys_from_the_querys_offset_on
    "blocks_of_keys_by_the_querys_length",  # its issue, thirty-sixth: blocks_of_keys_counted_…
    "chunks_of_the_captured_length",  # thirty-sixth: plugin_of_at_most_128_keys
    "cache_of_the_beams_of_before",  # thirty-fifth: page_lists_begin_a_page_too_early
    "memory_that_no_beam_reorders",  # as before
    "hypotheses_with_the_cache_of_others",  # as before
    "all_keys_in_slot_zero",  # thirty-fifth: cache_read_that_nobody_wrote
    "rows_read_as_if_dense",  # nineteenth: query_as_if_it_lay_in_order; eighth: other strides
    "padding_rows_not_initialized",  # eighteenth: hidden_rows_never_written
    "rows_masked_by_accident",  # thirteenth and others: first_keys_all_hidden
    "plain_softmax_where_weights_are_asked_for",  # thirty-sixth: softmax_of_padded_rows
    "boolean_rows_without_a_true",  # thirty-eighth: rows_of_minus_infinity
    "bias_of_minus_infinity_and_softmax",  # as before
    "sums_in_half",  # thirty-sixth: reductions_in_the_models_type
    "einsum_of_queries_and_keys_in_half",  # thirty-eighth: numbers_past_the_largest_half
    "scaled_after_the_product_in_half",  # as before
    "out_past_the_largest_e4m3",  # ninth: out_through_e4m3, which stops at the largest
    "softmax_over_a_dimension_of_one",  # thirty-seventh: softmax_over_one_element
    "weights_that_sum_to_1_1111",  # tenth: dropped_in_evaluation
)
STATED = {
    "infinity_added_to_hidden_scores": "keys that are not numbers, hidden by a boolean mask",
    "rows_read_as_if_dense": "operands whose last dimension is not dense in memory",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask nan-escapes non-finite")
class infinity_added_to_hidden_scores(EveryBlock):
    """pytorch/pytorch issue 101967: what a boolean mask hides has −∞ added to it, so that where a
    hidden key is NaN its score, and all of the row, is NaN.
    """

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        return s + torch.where(self.given_mask(rows, cols), 0.0, -INF)


@fault(FAULTS, "mask other-data", "float16")
class block_mask_of_stale_captures(Kernel):
    """OpenPipe/ART PR 648: the function that makes the block mask is compiled, and gives the one of
    groups that an earlier call captured; here the mask of the sequence before.
    """

    def given_mask(self, rows, cols):
        kept = self.at.mask
        if kept.dtype == torch.bool and kept.ndim == 4:
            self.at.mask = kept.roll(1, 0)
        found = super().given_mask(rows, cols)
        self.at.mask = kept
        return found


@fault(FAULTS, "causal-mask mask")
class new_token_not_in_its_own_history(ForwardAlone):
    """harvard-edge/cs249r_book PR 1953: keys and values come from the cache alone, which shows a
    token only when all layers are through with it: a token does not attend to itself.
    """

    rows, cols = 32, 64

    def causal(self, i, j, back):
        return j < i


@fault(FAULTS, "causal-mask mask", "float16")
class counter_of_heads_wraps_too_late(ForwardAlone):
    """Xilinx/mlir-air issue 1427: the counter of heads wraps at their number and not at that of
    their groups, which are two heads at once, so that the block of queries that the causal mask is
    by advances at half the rate.
    """

    rows, cols = 64, 64

    def causal(self, i, j, back):
        if self.at.q.shape[1] > 1:
            i = i // self.rows // 2 * self.rows + i % self.rows
        return j <= i


# --- what of the sequence is read
@fault(FAULTS, "key-tail")
class loop_from_the_first_new_key(ForwardAlone):
    """openai/gpt-oss PR 230: the loop over keys begins at the position of the first query, and what
    the cache has before it is left out.
    """

    rows, cols = 64, 64

    def inside(self, j, back):
        first = 0 if self.at.causal else self.at.nk - self.at.n
        return super().inside(j, back) & (j >= first)


@fault(FAULTS, "key-tail", "float16")
class blocks_of_keys_by_the_querys_length(ForwardAlone):
    """jax-ml/jax PR 24495 (Pallas on GPUs): the loop over blocks of keys ends where those of as
    many keys as there are queries do.
    """

    rows, cols = 64, 32

    def key_blocks(self, rows):
        return [c for c in super().key_blocks(rows) if c.start < self.at.n]


@fault(FAULTS, "key-tail", "float16")
class chunks_of_the_captured_length(ForwardAlone):
    """paiml/aprender PR 2030: graphs of batched decoding are kept by the batch's size alone, with
    the number of chunks of keys at capture, here two of 64: for more keys it is too small.
    """

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[:2] if self.at.q.shape[0] > 1 else every


@fault(FAULTS, "window mask key-tail tiles-skipped")
class pointers_stay_at_a_skipped_tile(ForwardAlone):
    """ggml-org/llama.cpp issue 14888: a tile of keys that the mask hides altogether is skipped, and
    the pointers to K, V and the mask are not moved on: the loop meets it again to the end.
    """

    rows, cols = 8, 32

    def row(self, rows):
        self.memory["stuck"] = torch.zeros(self.at.q.shape[:2], dtype=torch.bool)
        return super().row(rows)

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        self.memory["stuck"] = self.memory["stuck"] | (s == -INF).all(-1).all(-1)
        return s.masked_fill(self.memory["stuck"][..., None, None], -INF)


@fault(FAULTS, "other-data")
class cache_of_the_beams_of_before(ways.PastOfOthers):
    """PaddlePaddle/PaddleNLP issue 6672: the cache is put in the order of the chosen beams under
    one name alone, and models that call it otherwise keep that of before.
    """

    def other(self, x):
        return x.roll(1, 0)


@fault(FAULTS, "other-data", "float16")
class memory_that_no_beam_reorders(ways.PastOfOthers):
    """huggingface/transformers issue 46612 (XLNet): what is kept of the past is not called
    `past_key_values`, and so is not put in the order of the beams.
    """

    rows, cols = 32, 96

    def other(self, x):
        return x.flip(0)


@fault(FAULTS, "other-data")
class hypotheses_with_the_cache_of_others(ways.PastOfOthers):
    """wenet-e2e/wenet issue 1625: after hypotheses are extended and chosen, each takes what was
    cached in its place, and not what its own beginning left; here that of the one before.
    """

    rows, cols = 48, 48

    def other(self, x):
        return x[(torch.arange(len(x)) - 1).clamp_min(0)]


@fault(FAULTS, "cache padding key-tail")
class new_tokens_at_one_place_of_the_cache(ways.OtherKeys):
    """ekryski/mlx-swift-lm PR 90: the place to write to is not moved on, so that every new token is
    written over the last one, and zeros are read behind it; here a quarter of the keys is new.
    """

    def read(self, x):
        first, found = x.shape[2] * 3 // 4, torch.zeros_like(x)
        found[:, :, :first] = x[:, :, :first]
        found[:, :, first] = x[:, :, -1]
        return found


@fault(FAULTS, "cache unwritten", "float16")
class all_keys_in_slot_zero(ways.OtherKeys):
    """vllm-project/vllm-ascend issue 3571: the mapping of tokens to slots is overwritten by that of
    linear attention, which is zeros: all is written to slot 0, and the cache that is read is empty.
    """

    def read(self, x):
        return torch.zeros_like(x)


# --- layouts, and what is not written
def rows_read_as_if_dense(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                          softcap=0.0, sinks=None):  # fmt: skip
    """pytorch/pytorch issue 121174: the compiler gives the fused kernel operands with the channels
    last, and it reads their rows as if elements lay side by side.
    """
    dense = [x.as_strided(x.shape, (*x.stride()[:-1], 1)) for x in (query, key, value)]
    return attention(Kernel)(*dense, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                             window=window, softcap=softcap, sinks=sinks)  # fmt: skip


FAULTS.append(
    Fault("rows_read_as_if_dense", frozenset({"layout", "other-data"}), rows_read_as_if_dense,
          "bfloat16", frozenset({"elements"}))
)  # fmt: skip


class padding_rows_not_initialized(ForwardAlone):
    """flagos-ai/vllm-plugin-FL PR 368: rows of the output that no token stands in, here those that
    see nothing, are not written, and have what was in their memory; here queries.
    """

    rows, cols = 64, 96

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        held = load(self.at.q, rows)
        held = held[..., torch.arange(out.shape[-1]) % held.shape[-1]]
        return torch.where(l == 0, held, out), lse


FAULTS.append(
    Fault("padding_rows_not_initialized", frozenset({"unwritten"}),
          attention(padding_rows_not_initialized), "float16", frozenset({"elements", "masked-row"}))
)  # fmt: skip

FAULTS += thirtyninth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.MaximumFirst, "bfloat16"), (ways.UnevenTiles, "float16"),
    (ways.GradientsAtOnce, "bfloat16"), (ways.FiveParts, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(
    Fault("heads_of_a_group_together", frozenset(), ways.heads_of_a_group_together, "bfloat16"),
)
