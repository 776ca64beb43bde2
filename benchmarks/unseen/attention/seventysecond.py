"""The seventy-second set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «vllm attention backend wrong output fix», «sglang attention kernel incorrect»,
«lmdeploy attention wrong result», «TensorRT-LLM attention incorrect output», «llama.cpp flash
attention incorrect result», «mlx-lm attention mask cache bug», «transformers sdpa attention mask
bug», «diffusers attention backend wrong», «Megatron attention mask wrong», «DeepSpeed inference
attention wrong», «FlashInfer wrong result», «xformers attention incorrect», «TransformerEngine
attention incorrect», «torchtune attention mask bug», «MaxText attention wrong», «PaddleNLP
attention mask bug», «ctranslate2 attention wrong», «exllamav2 attention wrong», «mistral.rs
attention wrong», «llamafile whisper.cpp attention wrong».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 226 results, of which each search gives twelve at most. 16 are faults
here. What was left, by a count made once: 113 are about something else, features, speed, builds,
crashes, questions, documents or other operations; 15 had come before; 42 tell no cause, many of
them no text at all; 34 are threads of earlier sets, and VeloxQuant-MLX PR 392 and diffusers PR
12892 mend what two of those report; 4 cannot be written so that this function errs: a mask that
enters positions alone (Megatron-Bridge PR 1150), a list that is too short for what is written into
it (LightLLM PR 921), and the projections and the sum of additive attention (d2l-en PR 861,
PaddlePaddle models PR 1317).

Of pull requests that tell little more than that something is wrong the change itself was read, in
the public history of the repository, where that could be had: lmdeploy PR 788 and 2761, executorch
PR 9105, ComfyUI_ExtraModels PR 36, LightLLM PR 966 and 995, AngelSlim PR 161, mlx-lm PR 108, verl
PR 1411, ScaleLLM PR 408, GMT PR 4, sonar PR 657. It could not be had for vllm PR 68 and 19904 and
PaddleNLP; that the number of PaddleNLP PR 1585 was −10⁹ was read in files of its models. What
makes inputs wrong in transformers PR 27973 is told by the title of the issue that it names; what
was lacking for DeepSpeed issue 1112 by DeepSpeed PR 1114, which mends it. Other threads that were
looked up further told no more than before. Of a thread with several defects one is taken. What
memory holds is chosen where it is not told, as numbers are that no thread tells.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks, the diagonal and windows are here; scales, splits, layouts and
caches in seventysecond_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.seventysecond --check`) but those that STATED names,
which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventysecond_kernel as ways
from benchmarks.unseen.attention import seventysecond_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "mask_by_the_height_of_a_tile",  # twentieth: key_blocks_counted_by_the_querys_tile
    "true_is_added_to_the_scores",  # twelfth: mask_of_booleans_added; others too
    "token_numbers_in_place_of_the_chosen_mask",  # fifty-eighth:
    # padding_attended_to_in_translation, of every second sequence here
    "masks_for_pooling_by_seeds_alone",  # forty-ninth: padded_batch_without_its_mask; others too
    "every_layer_global",  # thirty-eighth: a window that is not implemented; others too
    "first_split_exits_without_a_history",  # eighth: empty_splits_of_scratch_memory
    "inputs_that_are_not_contiguous_and_a_mask",  # ninth: one_stride_per_head; others too
    "keys_begin_by_lengths_with_the_prefix",  # thirty-second:
    # keys_begin_where_packed_queries_do, the other way round
    "indices_begin_where_the_queries_do",  # thirty-fifth: page_lists_begin_a_page_too_early
    "prefill_told_of_no_pages",  # forty-sixth: pages_of_the_prompt_not_listed
)
STATED = {
    "inputs_that_are_not_contiguous_and_a_mask": "inputs whose heads lie behind tokens in memory, "
    "and a mask",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- the diagonal
@fault(FAULTS, "causal-mask", "float32")
class diagonal_in_the_last_block_alone(ForwardAlone):
    """pytorch/executorch PR 9105: a tile of queries hides later keys in the last block of keys that
    it visits, and in no other; where the diagonal goes through two blocks the first of them is seen
    whole. There tiles begin off the blocks by `start_pos`, here by their height.
    """

    rows, cols = 48, 64

    def seen(self, rows, cols, back):
        at = self.at
        self.memory["last"] = min(rows.stop, at.n, at.nk) - cols.start <= self.cols
        return super().seen(rows, cols, back)

    def causal(self, i, j, back):
        keep = super().causal(i, j, back)
        return keep if self.memory["last"] else keep | (j >= 0)


@fault(FAULTS, "mask causal-mask")
class later_steps_hide_the_keys_before(Kernel):
    """Tencent/AngelSlim PR 161: at every further step of EAGLE-3's training the mask hides a
    diagonal more, of the key that is as many places before a query as steps have been made; here
    two have been.
    """

    rows, cols, steps = 64, 64, 2

    def causal(self, i, j, back):
        return super().causal(i, j, back) & ((j == i) | (j < i - self.steps))


@fault(FAULTS, "mask causal-mask key-tail", "float16")
class mask_by_the_height_of_a_tile(EveryBlock, ForwardAlone):
    """vectorch-ai/ScaleLLM PR 408: the mask is told of a tile's height twice, and never of its
    width: of 32 keys a block it takes their number for 64 times the block's, and hides by that what
    is past the diagonal, outside the window or past the last key. Tiles are here 64 high.
    """

    rows, cols = 64, 32

    def seen(self, rows, cols, back):
        first = cols.start // self.cols * self.rows
        real = self.inside(torch.arange(cols.start, cols.stop)[None], back)
        return super().seen(rows, slice(first, first + self.cols), back) & real


# --- masks
@fault(FAULTS, "mask", "float16")
class true_is_added_to_the_scores(ForwardAlone):
    """city96/ComfyUI_ExtraModels PR 36: the mask of `scaled_dot_product_attention` is zeros of the
    queries' type, and True where a pair may be seen, which is 1: it is added, and nothing hidden.
    """

    rows, cols = 64, 64

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        return s + self.given_mask(rows, cols).float() * LOG2_E


@fault(FAULTS, "mask")
class token_numbers_in_place_of_the_chosen_mask(Kernel):
    """verl-project/verl PR 1411: what is stacked as the mask of a pair of answers is the token
    numbers of one and the mask of the other: the first of every two sequences hides none of its
    padding, since a token's number is not 0.
    """

    rows, cols = 96, 64

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if found.dtype != torch.bool or found.ndim < 4:
            return found
        first = torch.arange(self.at.q.shape[0])[:, None, None, None] % 2 == 0
        return found | first


@fault(FAULTS, "mask", "float32")
class masks_for_pooling_by_seeds_alone(WholeRows):
    """JinheonBaek/GMT PR 4: the mask of a batch's padding is made and handed over where a graph is
    pooled by seeds, and not where nodes attend to each other, if that comes first; here that is
    where there are as many queries as keys.
    """

    rows = 32

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.n != at.nk or at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "non-finite nan-escapes mask", "float16")
class a_billion_in_half_precision(WholeRows, ForwardAlone):
    """PaddlePaddle/PaddleNLP PR 1585: the mask is 1 or 0 times −10⁹, which fp16 has no number for:
    it is −∞, and 0 times −∞ is NaN where a key is to be seen.
    """

    rows = 64

    def hide(self, s, rows, cols, back):
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        if self.at.mask is None:
            return s
        mask = self.given_mask(rows, cols)
        if mask.dtype != torch.bool:
            return self.bias(s, mask, back)
        return s + (~mask).half() * torch.tensor(-1e9).half()


# --- windows
@fault(FAULTS, "window", "float16")
class every_layer_global(ForwardAlone):
    """deepspeedai/DeepSpeed issue 1112 (GPT-Neo): the kernels that are injected know of no local
    attention, and every other layer sees past its window.
    """

    rows, cols = 32, 128

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0)


FAULTS += seventysecond_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.MaximumFirst, "float16"), (ways.CompensatedSums, "float16"),
    (ways.ThereAndBack, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("in_double_precision", frozenset(), ways.in_double_precision, "bfloat16"))
SOUND.append(Fault("keys_by_their_remainder", frozenset(), ways.keys_by_their_remainder, "float16"))
