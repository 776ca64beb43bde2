"""The sixty-eighth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests, by titles of repairs: «fix attention off by one», «fix attention nan», «fix attention
mask dtype», «fix head dim stride attention», «fix kv head index mapping», «fix attention scaling
factor», «fix wrong sequence length attention», «fix stale kv cache attention», «fix uninitialized
attention output», «fix softmax max initialization attention», «fix missing synchronization
attention kernel», «fix lse layout attention», «fix gqa attention ratio wrong», «fix mqa broadcast
attention», «fix transposed key attention», «fix attention dimension permute heads», «fix softmax
axis attention», «fix attention padding tokens», «fix numerical stability attention», «fix attention
accumulate fp32».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 240 results. 22 are faults here. What was left: 145 are about something
else, features, speed, builds, crashes, questions, other operations or a result that had come
before; 28 tell no cause, most of them a title alone that names no mistake; 38 are threads of
earlier sets, or of other ones that were written at the same time; 3 are on the very defect of one
that an earlier set has (burn PR 5168; Transformer-Neural-Network issues 1 and 8); 4 cannot be
written so that this function errs: query heads that key heads do not divide (1bit-MONSTER issue
645), linear attention (gpt-neo PRs 192 and 205) and the weights of the step before, from which an
aligner begins (Automatic-Speech-Recognition issue 18).

Where a title names the part that is repaired, how was read in the public history of its repository:
chatglm.cpp PR 322, bert-chainer PR 5, toynlp PR 52, tinygrad PR 14025, torchTextClassifiers PR 96;
and what the threads dl4mt-tutorial 31, imagen-pytorch 69, mistral 75, Self-Attention-GAN 11, ESIM 5
and tilelang 1269 tell, there as well. Titles alone that name an attention, or its mask, stride or
cache, and no mistake, are among those that tell no cause. aprender issue 559 says which ratios of
heads go wrong and not how, onnxruntime PR 27464 how masks are broadcast since, and not before, and
of what nobody wrote no thread says what it was: these are chosen, as numbers are that none tells.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks are here; softmaxes, sums, lse, heads and caches in
sixtyeighth_scores.py. All err more than 1.5 × their sound twin on an ordinary input (`python -m
benchmarks.unseen.draw attention.sixtyeighth --check`) but those that STATED names, which need the
inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyeighth_kernel as ways
from benchmarks.unseen.attention import sixtyeighth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows

AGAIN = (
    "visible_positions_lowered",  # forty-first: mask_that_says_what_to_hide; others too
    "real_tokens_filled_in_place_of_padding",  # as before
    "padding_of_the_target_along_its_queries",  # ninth: mask_along_the_other_axis
    "heads_of_the_mask_taken_for_sequences",  # tenth: masks_of_sequences_by_heads, the other way
    # round
    "every_token_has_a_one_in_the_mask",  # forty-fifth: lengths_of_the_sources_not_passed; others
    # too
    "padding_attended_to_in_decoding",  # as before
    "scaled_behind_the_product",  # thirty-ninth: of flashlight PR 448, the same
    "neither_reordered_nor_upcast",  # as before
    "softmax_at_the_precision_of_training",  # fifty-fifth: pooled_attentions_softmax_in_half
    "attention_softmax_not_stabilized",  # forty-seventh: exponentials_without_their_maximum
    "maximum_not_kept_across_blocks",  # thirty-fourth: maximum_so_far_not_asked
    "softmax_over_the_sequences",  # forty-third: softmax_along_the_batch
    "no_fp32_accumulate_in_the_sdpa_family",  # fourth: o_in_memory_bf16; others too
    "weights_times_values_right_onto_the_output",  # twelfth: of SageAttention issue 287, the same
    "lse_with_heads_behind_tokens",  # thirteenth: lse_by_tokens_read_by_heads
    "reshaped_into_heads_without_a_permute",  # forty-sixth:
    # heads_by_a_view_without_a_transposition
    "history_joined_to_itself",  # thirty-third: last_key_twice_in_the_cache
)
STATED = {
    "heads_of_the_mask_taken_for_sequences": "a mask with its own numbers for every head, and one "
    "for all sequences",
    "padding_attended_to_in_decoding": "a boolean mask, and fewer queries than keys",
    "maximum_not_kept_across_blocks": "a block of keys whose scores are all a hundred below those "
    "of a block before",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "mask", "float32")
class visible_positions_lowered(WholeRows):
    """soskek/bert-chainer PR 5: the mask is taken from 1 twice, and what is added is −10000 where
    it is 1, and 0 where it is 0: what is to be seen is hidden, and nothing else.
    """

    rows = 64

    def hide(self, s, rows, cols, back):
        at, kept = self.at, self.at.mask
        if kept is None or kept.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        adder = (1.0 - (1.0 - self.given_mask(rows, cols).float())) * -10000.0
        at.mask = None
        found = super().hide(s + adder * LOG2_E, rows, cols, back)
        at.mask = kept
        return found


@fault(FAULTS, "mask")
class real_tokens_filled_in_place_of_padding(WholeRows, ways.OtherMask):
    """InseeFrLab/torchTextClassifiers PR 96: where the matrix of labels and tokens is made, scores
    are −∞ where the mask is true, which is where tokens are real.
    """

    rows = 48

    def read(self, mask):
        return ~mask


@fault(FAULTS, "mask", "float16")
class padding_of_the_target_along_its_queries(ways.OtherMask):
    """ai-glimpse/toynlp PR 52: the mask of the target's padding is broadcast over keys where it has
    to be over queries: a token of padding sees nothing, and everyone sees it. A mask with as many
    queries as keys is read with the two exchanged.
    """

    rows, cols = 64, 64

    def read(self, mask):
        return mask.mT if self.at.n == self.at.nk else mask


@fault(FAULTS, "mask other-data")
class heads_of_the_mask_taken_for_sequences(ForwardAlone):
    """microsoft/onnxruntime PR 27464: the first of three dimensions of a mask are its heads, and
    whether it is broadcast over sequences is told by it: a sequence has the mask of the head of its
    number, for all heads. Past the last it begins again here.
    """

    rows, cols = 128, 32

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None and kept.ndim > 2 and kept.shape[-3] > 1:
            heads = kept.reshape(-1, *kept.shape[-2:])
            if len(heads) == kept.shape[-3]:
                at.mask = heads[torch.arange(at.q.shape[0]) % len(heads)][:, None]
        found = super().forward()
        at.mask = kept
        return found


@fault(FAULTS, "mask")
class every_token_has_a_one_in_the_mask(ways.OtherMask):
    """tloen/alpaca-lora PR 107: the attention mask is [1] × the length, that of padding too."""

    rows, cols = 32, 64

    def read(self, mask):
        return torch.ones_like(mask)


@fault(FAULTS, "mask", "float32")
class source_seen_up_to_its_longest_length(ways.OtherMask):
    """THUDM/GLM issue 70: what says how far all may see is the length of the source once it is
    padded: tokens see the source's padding. Half of the keys are the source here.
    """

    rows, cols = 128, 64

    def read(self, mask):
        return mask | (torch.arange(self.at.nk) < self.at.nk // 2)


@fault(FAULTS, "mask", "float16")
class padding_attended_to_in_decoding(ways.OtherMask):
    """pytorch/translate PR 226: padding is in the attention while decoding, which is where there
    are fewer queries than keys.
    """

    rows, cols = 16, 32

    def read(self, mask):
        return mask if self.at.n >= self.at.nk else torch.ones_like(mask)


FAULTS += sixtyeighth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.WeightsInTwoParts, "float16"), (ways.EachTileBeginsElsewhere, "float16"),
    (ways.GradientsBySixteenFeatures, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("by_running_logarithms", frozenset(), ways.by_running_logarithms, "float16"))
SOUND.append(
    Fault("batched_products_with_alpha", frozenset(), ways.batched_products_with_alpha, "float16")
)
