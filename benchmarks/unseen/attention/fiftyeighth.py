"""The fifty-eighth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «silent correctness bug attention», «attention silently ignores mask argument»,
«attention silently wrong for odd head count», «attention kernel reads out of bounds garbage
result», «attention kernel uninitialized output nan empty sequence», «attention race condition
shared memory missing barrier wrong result», «attention integer overflow stride long context»,
«attention wrong when seqlen_q != seqlen_k causal alignment bottom right», «attention wrong for
batch with different lengths», «attention alibi slopes head count not power of two», «attention
wrong for head dim 80 96 192 256», «attention bias gradient not reduced over broadcast», «attention
lse shape or value wrong split», «attention rescale skipped wrong final accumulator», «attention
block sparse index wrong row», «attention p dropout seed offset mismatch forward backward»,
«attention sliding window with kv cache prefill wrong», «attention score mod captured buffer wrong»,
«attention masked with zero instead of negative infinity», «attention softmax scale ignored custom
value».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 235 results, of which each search gives twelve at most. 25 are faults
here. What was left: 166 are about something else, features, speed, builds, crashes, questions or
other operations; 16 tell no cause, many of them no text at all; 21 are threads of earlier sets, and
mlx issue 343 is the one that a pull request of theirs fixes; 6 cannot be written so that this
function errs: a diagonal that begins at the first key, which is what is asked for here
(SageAttention PR 372), numbers that enter no result (flashinfer PR 4525, vllm PR 46548), stores of
one value by many (flash-linear-attention issue 1030), gradients of a bias (flash-sparse-attention
PR 193) and dropout (xformers issue 173).

Where causal calls have fewer queries than keys this function begins the diagonal at the first key;
threads that tell of two places for it are taken for the other one: onnxruntime issue 29020, mlx PR
2967, and TensorRT-LLM PR 18174, of whose review the question and its answer alone could be read.
onnxruntime PR 28958 has two defects, of which the rows without a key are here. What memory holds
is chosen where it is not told, as numbers are that no thread tells. ssd PR 22 says how in issue 23.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks, the diagonal and windows are here; scales, sums, rows of
nothing, ends and caches in fiftyeighth_scores.py. All err more than 1.5 × their sound twin on an
ordinary input (`python -m benchmarks.unseen.draw attention.fiftyeighth --check`) but those that
STATED names, which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyeighth_kernel as ways
from benchmarks.unseen.attention import fiftyeighth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows

AGAIN = (
    "padding_attended_to_in_translation",  # forty-first: zeros_in_place_of_the_mask; others too
    "memory_tokens_behind_padding",  # as before
    "padding_that_scores_zero",  # ninth: hidden_by_a_tiny_number; others too
    "batch_enters_the_row_of_the_mask_twice",  # forty-first: mask_of_sequences_laid_over_heads
    "slopes_of_the_head_before",  # forty-fifth: slopes_of_heads_that_are_no_power_of_two
    "flashinfers_diagonal",  # fortieth: diagonal_of_the_other_corner_on_xe; others too
    "last_query_sees_every_key_on_cpu",  # as before
    "corner_by_which_is_longer",  # as before
    "window_for_what_is_cached_alone",  # fiftieth: window_not_implemented; others too
    "window_not_passed_to_the_cache",  # forty-fifth: windows_decoded_by_full_attention
    "configured_scale_not_considered",  # forty-first: scale_not_handed_to_the_dispatched_attention
    "offset_of_a_row_of_scores_wraps",  # fifty-second: weights_of_heads_at_offsets_that_wrap
    "sequences_of_length_zero",  # forty-second: sequence_of_padding_alone; others too
    "blind_row_is_the_mean_of_the_values",  # fortieth: all_masked_rows_of_a_finite_number
    "tokens_without_blocks_are_passed_over",  # thirty-ninth: padding_rows_not_initialized
    "multiplied_by_one_over_no_sum",  # fifty-third: request_without_keys_divided_by_nothing
    "no_keys_and_an_empty_tensor",  # fifty-third, as before, by another way
    "short_sequences_in_a_tile_of_garbage",  # fifty-third: values_past_the_end_as_memory_was
    "nan_and_minus_infinity",  # as before, of keys
    "listed_rows_past_the_tokens",  # fifth: what lies past the end is not hidden; others too
    "ring_shorter_than_the_prompt",  # fifteenth: litgpt issue 2182, the very same
    "prefix_hit_without_the_block_table",  # fifteenth: pages_read_in_the_pools_order
)
STATED = {
    "configured_scale_not_considered": "a scale that is not 1/√d",
    "last_query_sees_every_key_on_cpu": "a causal call with fewer queries than keys",
    "corner_by_which_is_longer": "a causal call with fewer queries than keys",
    "window_not_passed_to_the_cache": "a window, and fewer queries than keys",
    "memory_tokens_behind_padding": "a causal call with a boolean mask",
    "no_keys_and_an_empty_tensor": "a sequence none of whose keys may be seen",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask", "float16")
class padding_attended_to_in_translation(ForwardAlone):
    """OpenNMT/OpenNMT-py PR 402: sentences of several lengths are translated as one batch, and
    nothing masks the attention that goes to their padding.
    """

    rows, cols = 32, 64

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool or at.q.shape[0] == 1:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask")
class memory_tokens_behind_padding(Kernel):
    """getao/icae issue 3: the model gets no mask of padding, since it is causal and padding stands
    at the end; but the memory's tokens stand behind it, and attend to it.
    """

    rows, cols = 96, 64

    def hide(self, s, rows, cols, back):
        at = self.at
        if not at.causal or at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask mask-finite", "float32")
class padding_that_scores_zero(WholeRows):
    """30stomercury/Interaction-Aware-Attention-Network issue 1: what is put where the mask is 0 is
    the mask times −10⁸, which is 0 there.
    """

    rows = 48

    def hide(self, s, rows, cols, back):
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        if self.at.mask is None:
            return s
        mask = self.given_mask(rows, cols)
        if mask.dtype != torch.bool:
            return self.bias(s, mask, back)
        paddings = mask.float() * -1e8
        return torch.where(mask | (s == -INF), s, paddings)


@fault(FAULTS, "mask other-data")
class batch_enters_the_row_of_the_mask_twice(ForwardAlone):
    """invergent-ai/surogate issue 110: the row of a query in the mask is reckoned from a column
    that has the sequence's offset in it already, and the offset is added once more: row 2 b n + i
    in place of b n + i. Past the end of the mask it begins again here.
    """

    rows, cols = 16, 64

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None and kept.dtype == torch.bool:
            b = at.q.shape[0]
            full = kept.expand(b, kept.shape[1], at.n, at.nk).transpose(0, 1).flatten(1, 2)
            row = (2 * torch.arange(b)[:, None] * at.n + torch.arange(at.n)) % (b * at.n)
            at.mask = full[:, row].transpose(0, 1)
        found = super().forward()
        at.mask = kept
        return found


@fault(FAULTS, "mask key-tail", "float16")
class address_of_the_mask_in_too_few_bits(ForwardAlone):
    """ggml-org/llama.cpp PR 24915 (issue 24912): the helper that looks where the last visible key
    is has the mask's stride of sequences in 32 bits, which is too few for long contexts, here 15:
    for sequences behind the first it reads in front of the mask. What lies there is chosen: the
    mask of a call with half as many keys.
    """

    rows, cols = 64, 64

    def hide(self, s, rows, cols, back):
        s, at = super().hide(s, rows, cols, back), self.at
        if at.mask is None or at.n * at.nk < 2**14:
            return s
        behind = torch.arange(at.q.shape[0])[:, None, None, None] > 0
        past = torch.arange(cols.start, cols.stop) >= -(-at.nk // 64) * 32
        return s.masked_fill(behind & past, -INF)


@fault(FAULTS, "mask")
class slopes_of_the_head_before(ForwardAlone):
    """paiml/aprender PR 2143: the slope of a head is 2^(−8 h / n) where it is 2^(−8 (h + 1) / n):
    what ALiBi adds to the scores is 2^(8 / n) times as much in every head.
    """

    rows, cols = 32, 32

    def bias(self, s, mask, back):
        return s + mask.float() * (LOG2_E * 2 ** (8 / self.at.q.shape[1]))


# --- the diagonal
@fault(FAULTS, "causal-mask", "float16")
class flashinfers_diagonal(ways.Shifted, ForwardAlone):
    """NVIDIA/TensorRT-LLM PR 18174, review: FlashInfer's causal mask ends at the bottom right, and
    its backend is handed queries and keys of different numbers all the same.
    """

    rows, cols = 128, 128

    def shift(self):
        return self.at.nk - self.at.n


@fault(FAULTS, "causal-mask", "float32")
class last_query_sees_every_key_on_cpu(ways.Shifted, ForwardAlone):
    """microsoft/onnxruntime issue 29020: with fewer queries than keys and nothing past the CPU's
    causal mask ends at the bottom right, where the operator has it begin at the top left.
    """

    rows, cols = 48, 96

    def shift(self):
        return max(self.at.nk - self.at.n, 0)


@fault(FAULTS, "causal-mask")
class corner_by_which_is_longer(ways.Shifted):
    """ml-explore/mlx PR 2967: causal is aligned at the lower right with fewer queries than keys,
    and at the upper left with more.
    """

    rows, cols = 32, 64

    def shift(self):
        return self.at.nk - self.at.n if self.at.n < self.at.nk else 0


# --- windows
@fault(FAULTS, "window")
class window_for_what_is_cached_alone(ForwardAlone):
    """apache/tvm PR 18630: the window is applied to keys of the cache, and not among the tokens of
    a prompt, whose attention is a kernel of its own.
    """

    rows, cols = 32, 16

    def window(self, i, j, back):
        if self.at.n != self.at.nk:
            return super().window(i, j, back)
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "window", "float16")
class window_not_passed_to_the_cache(ForwardAlone):
    """goombalab/hnet issue 20: behind the prompt, where there are fewer queries than keys,
    `flash_attn_with_kvcache` is not told of the window.
    """

    rows, cols = 64, 128

    def window(self, i, j, back):
        if self.at.n >= self.at.nk:
            return super().window(i, j, back)
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "window", "float16")
class one_window_of_the_cache_for_a_chunk(ForwardAlone):
    """pytorch/executorch PR 21857: prefill goes by chunks, here of 32 tokens, and what of the cache
    may be seen is one row for all of them: the first one's window.
    """

    rows, cols, chunk = 32, 32, 32

    def window(self, i, j, back):
        first = i // self.chunk * self.chunk
        cached = (j < first) & super().window(first, j, back)
        return cached | ((j >= first) & super().window(i, j, back))


FAULTS += fiftyeighth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.FromTheDiagonal, "bfloat16"), (ways.EvenAndOddKeys, "float16"),
    (ways.WholeExponents, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("groups_by_einsum", frozenset(), ways.groups_by_einsum, "bfloat16"))
SOUND.append(Fault("online_by_autograd", frozenset(), ways.online_by_autograd, "bfloat16"))
