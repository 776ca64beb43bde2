"""The fifty-first set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «multi head attention from scratch exercise solution bug», «course notebook attention
implementation error», «nanoGPT minGPT attention mask bug», «transformer tutorial attention wrong
dimension softmax», «self attention Keras layer mask bug wrong», «attention layer JAX flax haiku
mask wrong», «Rust transformer attention implementation wrong output», «C++ ggml attention
implementation wrong result», «Julia attention implementation mask bug», «MATLAB or Swift attention
wrong output», «time series transformer informer attention mask bug», «protein folding attention
gating mask bug», «molecule or graph transformer attention bias bug», «video transformer temporal
attention reshape bug», «music transformer relative attention bug», «reinforcement learning
transformer attention memory mask bug», «machine translation attention padding mask bug», «OCR or
detection transformer deformable attention bug», «recommendation sequential transformer causal mask
bug», «text to speech attention mask length bug».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 239 results, of which each search gives twelve at most. 17 are faults
here. What was left: 148 are about something else, features, crashes, questions, courses, other
operations (deformable attention and a Tanimoto similarity, ceecnet issue 6, among them) or a result
that had come before; 34 tell no cause, most of them no text at all; 28 are threads of earlier sets
or on their defect; 2 are on the very defect of one that was taken (Open-Sora-Plan PR 172, diffusers
issue 5633); in 4 the code is right as far as can be told, and the asker is not, or it was meant so
(attention-is-all-you-need-pytorch issue 52, annotated_deep_learning_paper_implementations issue
282, Informer2020 issue 38, TransformerTranslation issue 6); 6 cannot be written so that this
function errs: weights of projections split or left out (neetcode issue 5130, Motionformer PR 6),
a gate's sigmoid (alphafold2 issue 84), another architecture (OpenTau issue 270), a flag by which
no number changes (fairseq2 PR 59) and lengths that nothing uses yet (sockeye PR 282).

Where a thread tells the cause in a line, how it comes about was read in the public code of its
repository: vigg_ribonanza issue 1, burn PR 4702, transformers issue 25908 (in copies of that code),
hyunwoongko/transformer PR 14; that burn's fallback does not write the given tensor is inferred. Of
ggml PR 143, keras PR 20488 and dgl PR 5100 the code before the change was not found: it is written
down as remembered. transformers-bart-pretrain PR 11 and NeMo PR 671 tell no more than their titles,
MNN PR 3508 not what a mask of another length does: it is read by the scores' pitch here. magenta
issue 1486 is taken at its word. Of a thread with several defects one is taken. Numbers that no
thread tells were chosen.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks that are given are here; causal masks, scores, layouts and what
is never written in fiftyfirst_scores.py. All err more than 1.5 × their sound twin on an ordinary
input (`python -m benchmarks.unseen.draw attention.fiftyfirst --check`) but those that STATED names,
which need the inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyfirst_kernel as ways
from benchmarks.unseen.attention import fiftyfirst_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch.nn import functional

AGAIN = (
    "padding_of_the_corpus_attended_to",  # eighth: mask_not_read; others too
    "mask_taken_and_not_used",  # as before
    "mask_of_ones_while_speech_is_made",  # as before; forty-first: zeros_in_place_of_the_mask
    "mask_lost_in_a_rewritten_graph",  # as before
    "raw_mask_on_later_stages",  # forty-fifth: mask_of_ones_and_zeros_added
    "mask_of_keys_for_padded_queries",  # forty-first: padding_attends_to_padding, which is padding
    "padding_looked_for_by_the_sources_number",  # as before
    "relative_attention_that_nothing_masks",  # forty-seventh: no_mask_taken_for_a_causal_one
    "flag_that_no_mask_is_made_of",  # forty-seventh: decoder_called_without_its_mask; others too
    "divided_by_the_scaling",  # ninth: divided_by_the_scale
    "products_without_their_precision_set",  # thirteenth: scores_added_up_in_half; others too
    "output_of_the_tuner_not_taken",  # forty-fourth: window_that_was_not_launched; others too
)
STATED = {
    "shared_mask_expanded_at_the_wrong_axis": "a mask that several sequences and their heads share",
    "mask_one_short_for_odd_lengths": "a mask over an odd number of keys",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that are not read
@fault(FAULTS, "mask")
class padding_of_the_corpus_attended_to(ways.MaskOfNothing):
    """cosmoquester/transformers-bart-pretrain PR 11: the model is called without an attention mask,
    and attends to padding.
    """

    rows, cols = 64, 48


@fault(FAULTS, "mask", "float16")
class mask_taken_and_not_used(ways.MaskOfNothing):
    """NVIDIA-NeMo/Speech PR 671: attention has a mask and does not use it."""

    rows, cols = 32, 64

    def unread(self):
        return True


@fault(FAULTS, "mask", "float16")
class mask_of_ones_while_speech_is_made(ForwardAlone, ways.MaskOfNothing):
    """huggingface/transformers issue 25908 (SpeechT5): where speech is generated the encoder's mask
    is made of ones as long as the input, whatever of that is padding.
    """

    rows, cols = 128, 32


@fault(FAULTS, "mask")
class mask_lost_in_a_rewritten_graph(ForwardAlone, ways.MaskOfNothing):
    """torch-spyre/torch-spyre issue 4526: matmul, mask, softmax and matmul of an encoder are found
    in the graph and replaced by SDPA, and the mask is silently dropped; not where anything else
    stands between them.
    """

    rows, cols = 64, 64

    def unread(self):
        at = self.at
        return not (at.causal or at.softcap or at.window or at.sinks is not None)


# --- masks that are read wrongly
@fault(FAULTS, "mask")
class raw_mask_on_later_stages(Kernel):
    """hpcaitech/ColossalAI PR 430: the first stage of the pipeline alone makes 0 and −10⁴ of the
    mask of ones and zeros; the layers of later ones add it as it is. Here the layer is such a one.
    """

    rows, cols = 64, 96

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return found.float() if found.dtype == torch.bool else found


@fault(FAULTS, "mask", "float16")
class shared_mask_expanded_at_the_wrong_axis(Kernel):
    """keras-team/keras PR 20488: a mask of two dimensions, [T, S], gets those that it lacks behind
    its first, [T, 1, 1, S]: what a query is to see a sequence does, all of its queries.
    """

    rows, cols = 96, 64

    def forward(self):
        at, (b, _, n, _) = self.at, self.at.q.shape
        if at.mask is not None and at.mask.shape[:2] == (1, 1) and b > 1 and at.mask.shape[2] > 1:
            own = torch.arange(b).clamp_max(n - 1)
            at.mask = at.mask[0, 0, own][:, None, None]
        return super().forward()


@fault(FAULTS, "mask")
class mask_of_keys_for_padded_queries(Kernel):
    """autosome-ru/vigg_ribonanza issue 1: the mask of tokens is laid over keys alone, and is to be
    over pairs: a query that is padding, and sees nothing, sees all tokens.
    """

    rows, cols = 48, 64

    def forward(self):
        full = ways.whole_mask(self.at)
        if full is not None:
            self.at.mask = full | (full.any(-2, True) & ~full.any(-1, True))
        return super().forward()


@fault(FAULTS, "mask")
class padding_looked_for_by_the_sources_number(Kernel):
    """hyunwoongko/transformer PR 14: keys and queries are padding where they are the source's
    number for it, of the target as well: what is padding there, by another number, sees and is
    seen like any token.
    """

    rows, cols = 80, 48

    def forward(self):
        full = ways.whole_mask(self.at)
        if full is not None:
            self.at.mask = full | ~full.any(-2, True) | ~full.any(-1, True)
        return super().forward()


@fault(FAULTS, "mask", "float16")
class bias_by_the_place_of_the_query(ForwardAlone):
    """ggml-org/ggml PR 143: `ggml_alibi` multiplies a head's slope by the row of the scores, in
    place of the column: every key of a query has the same bias.
    """

    rows, cols = 32, 32

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None and kept.dtype != torch.bool:
            full = kept.expand(*kept.shape[:-2], at.n, at.nk)
            row = torch.arange(at.n)
            at.mask = full[..., row, row.clamp_max(at.nk - 1), None].expand(full.shape)
        found = super().forward()
        at.mask = kept
        return found


@fault(FAULTS, "mask ragged layout", "float16")
class mask_one_short_for_odd_lengths(ForwardAlone):
    """alibaba/MNN PR 3508 (Omni): of an odd number of features the length is rounded down where the
    mask is made, and up in the model: the mask has a row and a column less than the scores, and is
    read by their pitch. What lies behind it hides nothing here.
    """

    rows, cols = 64, 64

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None and at.nk % 2 and at.nk > 1:
            made = kept.expand(*kept.shape[:-2], at.n, at.nk)[..., : max(at.n - 1, 1), :-1]
            behind = at.n * at.nk - made.shape[-1] * made.shape[-2]
            hides_nothing = 1 if kept.dtype == torch.bool else 0
            room = functional.pad(made.flatten(-2), (0, behind), value=hides_nothing)
            at.mask = room.unflatten(-1, (at.n, at.nk))
        found = super().forward()
        at.mask = kept
        return found


FAULTS += fiftyfirst_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.NearestFirst, "bfloat16"), (ways.Compensated, "float16"),
    (ways.TilesTurnedRound, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
for fn, dtype in (
    (ways.keys_halved_again_and_again, "float16"), (ways.queries_in_another_order, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(fn.__name__, frozenset(), fn, dtype))
