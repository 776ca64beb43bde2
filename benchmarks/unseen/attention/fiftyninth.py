"""The fifty-ninth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «TensorFlow 1 attention wrapper memory mask bug», «tensor2tensor attention bias bug»,
«fairseq multihead attention key padding mask bug», «OpenNMT attention mask beam wrong», «MXNet
gluonnlp attention cell mask bug», «Chainer attention softmax axis bug», «Marian or sockeye
attention wrong», «ESPnet attention mask streaming bug», «AllenNLP masked softmax bug», «Keras
attention layer score scale bug», «torchtext or torchtune attention mask bug», «PaddleNLP attention
mask wrong», «trax reformer attention lsh bug», «DGL PyG transformer conv attention normalization
bug», «timm attention scale bug», «mmdetection mmcv multi scale or window attention mask bug»,
«detectron DETR attention key padding mask bug», «lucidrains attention mask bug fix»,
«x-transformers memory kv null key attention bug», «KoboldAI or text-generation attention bug sdp
wrong».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 236 results, of which each search gives twelve at most. 13 are faults
here. What was left: 154 are about something else, features, speed, builds, crashes, questions,
reports that are mistaken (detr issue 528, tutorials issue 2250, llm.c PR 531), other operations (a
softmax or its logarithm alone among them, allennlp issue 890) or a result that had come before; 45
tell no cause, many of them no text at all; 20 are threads of earlier sets; 4 cannot be written so
that this function errs: buffers of another layer (espnet PR 4025), the bias of an additive
attention (OpenSeq2Seq PR 76), random features (performer-pytorch issue 50), and weights that are
only shown (sockeye issue 637).

Where a thread tells the cause in a line, how it comes about was read in the issue that it mends:
mlverse/torch PR 1208, mmdetection PR 12352; for PaddleNLP PR 4494 in the code before it. espnet PR
1273 has no more than its title, and FewRel issue 17 a picture, which was not seen; that the number
in OMG-Seg issue 24 is a length, which no batch reaches, is inferred. allennlp PR 437 tells no
number that is added to the sum; 10⁻¹³ is as remembered. Numbers that no thread tells were chosen,
and what memory holds.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks that do not reach the scores are here; what is not finite, and
what hidden or missing keys leave behind, in fiftyninth_scores.py. All err more than 1.5 × their
sound twin on an ordinary input (`python -m benchmarks.unseen.draw attention.fiftyninth --check`)
but those that STATED names, which need the inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyninth_kernel as ways
from benchmarks.unseen.attention import fiftyninth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "energies_filled_into_a_copy",  # eighth: mask_not_read; others too
    "rows_of_the_batch_marked_for_columns",  # as before
    "mask_of_global_attention_never_applied",  # as before
    "large_number_filled_into_truth_values",  # fiftieth: ones_added_where_nothing_may_be_seen
    "left_padding_unknown_to_the_flash_path",  # eighth: mask_not_read, everywhere; others too
    "length_taken_behind_the_padding",  # as before
    "sequence_that_has_no_keys",  # fifty-third: request_without_keys_divided_by_nothing
    "image_that_is_padding_alone",  # fifty-fifth: infinities_for_a_sequence_of_padding; others too
    "entries_that_are_hidden_gather_slot_zero",  # thirty-seventh: rows_past_the_allocation
)
STATED = {
    "float_padding_mask_ignored": "a mask of floats that all queries share, [B, 1, 1, Nk]",
    "sequence_that_has_no_keys": "a mask that hides all keys of a sequence",
    "softmax_that_hidden_scores_lead": "hidden scores that are 30 or more above the visible ones",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that do not reach the scores
@fault(FAULTS, "mask")
class float_padding_mask_ignored(Kernel):
    """mlverse/torch PR 1208 (issue 1205): the mask of pairs is added if it is of floats; that of
    padding is always one to fill by, and has no effect if it is of floats. Here that of padding is
    one that all queries share.
    """

    rows, cols = 64, 32

    def bias(self, s, mask, back):
        return s if self.at.mask.shape[-2] == 1 else super().bias(s, mask, back)


@fault(FAULTS, "mask", "float32")
class energies_filled_into_a_copy(EveryBlock):
    """espnet/espnet PR 1273 (issue 1272): `masked_fill` is called where `masked_fill_` is meant,
    and what it returns is thrown away.
    """

    rows, cols = 48, 64

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is not None and mask.dtype == torch.bool:
            s.masked_fill(~self.given_mask(rows, cols), -torch.inf)
            return s.masked_fill(~self.seen(rows, cols, back), -torch.inf)
        return super().hide(s, rows, cols, back)


@fault(FAULTS, "mask")
class padding_looked_for_by_another_number(EveryBlock):
    """PaddlePaddle/PaddleNLP PR 4494 (ERNIE-M): the mask is made where tokens are 0, and padding is
    token 1; token 0 is the one that every sequence begins with: it is hidden by −10⁴, and padding
    is not.
    """

    rows, cols = 32, 96

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -torch.inf)
        return s - 1e4 * LOG2_E * (torch.arange(cols.start, cols.stop) == 0)


@fault(FAULTS, "mask", "float16")
class rows_of_the_batch_marked_for_columns(ways.OtherTruth):
    """lxtGH/OMG-Seg issue 24 (xtuner): `attention_mask[:i] = True` is to mark the first i tokens,
    and marks the first i sequences of the batch, of which there are fewer: padding is seen.
    """

    rows, cols = 64, 48

    def other(self, mask):
        made = torch.zeros(len(mask), mask.shape[-1], dtype=torch.bool)
        for length in mask.flatten(1, 2).any(1).sum(-1).tolist():
            made[:length] = True
        return made[:, None, None]


@fault(FAULTS, "mask", "float32")
class mask_of_global_attention_never_applied(WholeRows):
    """OpenNMT/OpenNMT-py issue 272: `GlobalAttention.applyMask` is never called: with sentences of
    several lengths in a batch the shorter ones' padding is attended to.
    """

    rows = 32

    def hide(self, s, rows, cols, back):
        if self.at.mask is not None and self.at.mask.dtype == torch.bool:
            return s.masked_fill(~self.seen(rows, cols, back), -torch.inf)
        return super().hide(s, rows, cols, back)


@fault(FAULTS, "mask", "float16")
class large_number_filled_into_truth_values(ForwardAlone):
    """open-mmlab/mmdetection PR 12352 (issue 12351): −9 · 10¹⁵ is filled into the mask, which is of
    truth values and stays so: all of them are true, and 1 is added to every score.
    """

    rows, cols = 128, 64

    def given_mask(self, rows, cols):
        mask = super().given_mask(rows, cols)
        return mask.masked_fill(~mask, True) if mask.dtype == torch.bool else mask

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s + self.given_mask(rows, cols).float() * LOG2_E
        return s.masked_fill(~self.seen(rows, cols, back), -torch.inf)


@fault(FAULTS, "mask")
class left_padding_unknown_to_the_flash_path(ForwardAlone, ways.OtherTruth):
    """OpenNMT/OpenNMT-py PR 2589: the path of flash attention does not know the mask of padding on
    the left, which has to be applied before it; here the path of all prompts, which have as many
    queries as keys.
    """

    rows, cols = 128, 128

    def other(self, mask):
        return torch.ones_like(mask) if self.at.n == self.at.nk else mask


@fault(FAULTS, "mask", "float16")
class length_taken_behind_the_padding(ways.OtherTruth):
    """thunlp/FewRel issue 17: tokens are padded first, and the mask is 1 for as many as there are
    then: all of them.
    """

    rows, cols = 80, 64

    def other(self, mask):
        tokens = mask.shape[-1]
        return torch.arange(tokens).expand(1, 1, 1, tokens) < tokens


FAULTS += fiftyninth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.MiddleOutwards, "bfloat16"), (ways.FeaturesInFiveLanes, "float16"),
    (ways.AllQueriesOnTheWayBack, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(
    Fault("sums_of_exponentials_by_block", frozenset(), ways.sums_of_exponentials_by_block,
          "float16")
)  # fmt: skip
SOUND.append(Fault("a_sequence_at_a_time", frozenset(), ways.a_sequence_at_a_time, "bfloat16"))
