"""The fifty-sixth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «diffusion transformer joint attention text mask bug», «CLIP text encoder causal mask
wrong», «multimodal image tokens bidirectional attention mask bug», «mixture of block attention
sparse mask wrong», «native sparse attention top-k block bug», «linear attention normalizer
denominator bug», «differential attention implementation bug lambda», «multi-query attention shape
bug», «talking heads attention bug», «attention pooling mask bug», «memory compressed kv attention
bug», «StreamingLLM sink cache positions attention bug», «LoRA or adapter attention wrong scaling»,
«prefix tuning past key values attention mask wrong», «dual chunk attention long context bug», «ring
or striped attention causal load balance bug», «Ulysses all-to-all attention heads mismatch»,
«nested jagged tensor attention wrong output», «vmap or functorch attention wrong result»,
«attention with rotary partial dims wrong scale».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 228 results, of which each search gives twelve at most. 22 are faults
here. What was left: about 144 are about something else, features, speed, crashes, questions (among
them whether a missing mask is meant so, Motus issue 37 and torchmultimodal issue 530), other
operations (LoRA above all), or a result that had come before; about 34 tell no cause, many of them
no text at all; 16 are threads of earlier sets; one is on the very defect of one that was taken
(flash-linear-attention PR 594); 11 cannot be written so that this function errs: rotations, of a
part of the head or of keys in a cache of sinks (transformers issues 35350 and 33691 and PR 33692,
pie PR 603, mlx-lm PR 1698, cascadia PR 69, vllm PR 30384), keys of another call (StableAnimator
issue 111), shards of heads of which the thread does not show what comes out (DeepSpeed PR 8316 and
issue 8291), and an attention that is no softmax (ceecnet issue 6).

Where a thread tells the cause in a line, how it comes about was looked for in public code:
candle-vllm PR 52, whose mapping of heads is in its code and is inferred to be the bug;
flash-sparse-attention PR 138, of which later code shows what was missing. That gpt-neox PR 139's
booleans are read four at a time is inferred from its types, and that SageAttention PR 230's blocks
are skipped where the largest number of the mask is 0 from its title. VeloxQuant-MLX issue 370 is
written without the eviction itself: the keys that are given are those that are left. Numbers that
no thread tells were chosen. Of a thread with several defects one is taken.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks that are given are here; the rest in fiftysixth_scores.py. All
err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.fiftysixth --check`) but those that STATED names, which
need the inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps are the kernel's

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftysixth_kernel as ways
from benchmarks.unseen.attention import fiftysixth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "image_tokens_in_a_causal_model",  # thirty-second: causal_where_a_mask_is_given; others too
    "flag_of_vision_ignored",  # forty-first: image_spans_under_the_causal_triangle; others too
    "plain_masks_for_the_mixture_of_experts",  # as before
    "mask_of_the_target_for_the_source",  # thirty-second: causal_where_a_mask_is_given, but for
    # the padding
    "sequences_first_where_tokens_come_first",  # forty-seventh: a token attends to those at its
    # place in the other sequences (Molecule-Generator PR 22)
    "sequences_of_the_dual_path_attend_to_each_other",  # as before
    "stripes_of_the_image_taken_for_tokens",  # as before
    "slots_and_tables_of_zeros",  # thirty-ninth: all_keys_in_slot_zero; forty-fifth:
    # tables_of_zeros_where_nothing_was_hit
    "prefix_no_shorter_than_what_is_new",  # thirty-sixth: cached_prefix_not_attended
    "mapping_of_heads_repeated_as_a_whole",  # fifth: heads_tiled; others too
    "scales_of_the_cache_left_at_one",  # ninth: prefix_without_its_scales; others too
    "causal_by_name_where_lengths_differ",  # fourteenth: diagonal_of_the_other_corner; others too
    "text_encoder_of_another_library",  # fifth: causal_ignored_where_it_divides; others too
    "future_at_minus_ten_thousand",  # sixth: minus_ten_thousand; others too
)
STATED = {
    "blocks_of_zeros_skipped": "a float mask of which the largest number in a tile is 0, as in one"
    " of zeros and −∞",
    "future_at_minus_ten_thousand": "causal calls with rows whose scores lie below −10 000",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- images in text
@fault(FAULTS, "mask causal-mask")
class image_tokens_in_a_causal_model(ways.OtherMask):
    """allenai/OLMo-core PR 726: tokens of images are to see all of each other, and the language
    model is causal over them as over everything.
    """

    rows, cols, square = 64, 64, True

    def changed(self, mask):
        return ways.below(self.at.n).expand_as(mask)


@fault(FAULTS, "mask causal-mask", "float16")
class flag_of_vision_ignored(ForwardAlone, ways.OtherMask):
    """vllm-project/vllm issue 40106 (Gemma 4): `use_bidirectional_attention="vision"` is not read,
    and tokens of an image see none that come later.
    """

    rows, cols, square = 128, 32, True

    def changed(self, mask):
        return mask & ways.below(self.at.n)


@fault(FAULTS, "mask causal-mask")
class plain_masks_for_the_mixture_of_experts(ways.OtherMask):
    """NVIDIA-NeMo/Automodel PR 1901 (Gemma 4): the backend for mixtures of experts makes plain
    causal masks whatever the configuration says of vision.
    """

    rows, cols, square = 48, 96, True

    def changed(self, mask):
        return mask & ways.below(self.at.n)


@fault(FAULTS, "mask")
class every_image_sees_every_image(ways.OtherMask):
    """huggingface/transformers PR 38080 (Gemma 3; issue 38053): tokens of images see those of all
    images, and are not to see those of later ones. The first 24 of every 64 tokens are an image
    here.
    """

    rows, cols, square = 64, 128, True

    def changed(self, mask):
        image = torch.arange(self.at.n) % 64 < 24
        return mask | (image[:, None] & image)


@fault(FAULTS, "mask", "float16")
class mask_of_image_and_text_for_text_and_image(ways.OtherMask):
    """bghira/SimpleTuner issue 904 (Flux): the mask is put together as image and text, and queries
    and keys as text and image; here the text is a fourth of the keys.
    """

    rows, cols = 64, 64

    def changed(self, mask):
        return mask.roll(-(self.at.nk // 4), -1)


# --- masks of another kind
@fault(FAULTS, "mask causal-mask")
class mask_of_the_target_for_the_source(ways.OtherMask):
    """Kamichanw/SeekDeeper issue 3: the decoder's attention to the encoder is given the target's
    mask, which is causal and hides the target's padding, in place of the source's.
    """

    rows, cols, square = 32, 32, True

    def changed(self, mask):
        token = mask.any(-1)
        return token.unsqueeze(-2) & ways.below(self.at.n)


@fault(FAULTS, "mask key-tail")
class prefix_of_zeros_in_the_mask(ways.OtherMask):
    """QwenLM/ParScale PR 11: the mask's columns for the tokens of the prefix, 48 of them, are 0 in
    place of 1, and nothing attends to it.
    """

    rows, cols = 64, 48

    def changed(self, mask):
        return mask & (torch.arange(self.at.nk) >= 48)


@fault(FAULTS, "mask", "float16")
class hidden_keys_among_the_largest(ways.OtherMask):
    """HKUSTDial/flash-sparse-attention PR 138: keys are kept that are among the largest, here 112,
    and whether one of them is hidden is not looked at: where fewer are to be seen hidden ones are.
    """

    rows, cols = 64, 64

    def changed(self, mask):
        if mask.shape[-1] <= 112:
            return mask
        index = mask.float().topk(112, -1).indices
        return torch.zeros_like(mask).scatter(-1, index, True)


@fault(FAULTS, "tiles-skipped mask", "float16")
class blocks_of_zeros_skipped(ForwardAlone):
    """thu-ml/SageAttention PR 230 (PR 226): a block is skipped where the largest number in its part
    of the mask is 0, which is right for booleans and is done to floats, whose 0 hides nothing.
    """

    rows, cols = 128, 64

    def bias(self, s, mask, back):
        found = super().bias(s, mask, back)
        return found.masked_fill(mask.amax((-2, -1), keepdim=True) == 0, -INF)


FAULTS += fiftysixth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.StaggeredBlocks, "bfloat16"), (ways.InterleavedFeatures, "float16"),
    (ways.SumsAsProducts, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("tiles_by_autograd", frozenset(), ways.tiles_by_autograd, "float16"))
SOUND.append(Fault("groups_by_einsum", frozenset(), ways.groups_by_einsum, "bfloat16"))
