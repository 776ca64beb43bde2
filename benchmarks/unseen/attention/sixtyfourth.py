"""The sixty-fourth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «attention mask inverted bug», «attention mask broadcast wrong dimension», «additive
mask added before scale attention», «attention mask dtype min overflow», «causal mask off by one
attention», «sliding window off by one attention», «local attention window wrong layers», «chunked
attention mask wrong llama4», «alibi bias wrong attention», «relative position bias attention
wrong», «t5 attention scale wrong», «attention softcap ignored gemma», «attention sinks gpt-oss
wrong», «prefix lm attention mask bidirectional bug», «image tokens bidirectional attention mask
bug», «cross attention mask wrong encoder», «block mask flex attention incorrect», «key padding mask
attention wrong», «document mask attention leaks», «attention scale head_dim wrong sqrt».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 239 results, of which each search gives twelve at most. 18 are faults
here. What was left: 140 are about something else, features, speed, builds, crashes, questions,
documentation, other operations or a result that had come before; 28 tell no cause, most of them no
text at all; 48 are threads of earlier sets, or, vllm-metal issue 665, what a pull request of theirs
fixes; AnglE PR 89 is another set's that was written at the same time; mistral.rs PR 1930 is on the
very defect of one that was taken; 3 turned out to be none (Megatron-DeepSpeed issue 303,
MagiAttention issue 12 and speculators PR 629, whose packed sequences are told apart by their
positions). Four further look-ups were for the rest of threads that these had found: speculators'
told that, those of FasterTransformer issue 400, pytorch issue 141126 and transformers issue 37351
no cause.

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: LLMs-Zero-to-Hero PR 2, whose hidden size is the width of the input; ViT issue 1, where
what is divided are the weights; eole issue 182, whose cache loses one key a step; and ATKT issue 1,
where a cumulative sum follows on the softmax. That history also says of Megatron-DeepSpeed PR 167
that its offsets are those of the loss, of LightLLM PR 1312 that calls whose window was too wide on
the right are causal anyway, and of BiLLM PR 12 that there was an error and no number, and so they
are not here. What attention-gym issue 34's lists hold when the lengths change is chosen, as numbers
are that no thread tells. What ALiBi's issue 20 and wenet's 1506 say was not answered for certain.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks and windows are here; scales, caps, softmaxes and caches in
sixtyfourth_scores.py. All err more than 1.5 × their sound twin on an ordinary input (`python -m
benchmarks.unseen.draw attention.sixtyfourth --check`) but those that STATED names, which need the
inputs that it says.
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyfourth_kernel as ways
from benchmarks.unseen.attention import sixtyfourth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from torch.nn import functional

AGAIN = (
    "causal_since_no_mask_was_passed",  # thirty-fifth: encoder_made_causal_as_well; others too
    "cross_attention_told_no_padding",  # forty-fifth: encoders_padding_not_used_across; others too
    "mask_of_ones_for_the_rescoring_decoder",  # as before
    "llama_predicts_without_a_mask",  # fifty-fourth: masks_ignored_while_tokens_are_made; others
    "ones_for_padding",  # thirteenth: mask_the_other_way_round; others too
    "sliced_block_mask_that_hides_nothing",  # forty-fourth: mask_in_blocks_of_its_default_size
    "same_window_for_a_block_of_queries",  # twenty-third: window_of_whole_blocks, of keys
    "divided_by_the_layer_and_multiplied_again",  # thirty-fifth:
    # scores_not_divided_by_the_layers_number
    "root_of_the_inputs_width",  # forty-third: root_of_the_whole_embedding; others too
    "weights_over_the_root_of_emb_size",  # fifty-fifth:
    # weights_divided_by_the_root_of_the_embedding
    "cap_of_gemma_3n_left_at_none",  # eighth: softcap_dropped; others too
    "gemma_2_without_cap_and_scalar",  # as before
    "softmax_over_the_future_as_well",  # seventeenth: values_up_to_the_querys_own
    "alibi_not_added_while_tokens_are_made",  # fiftieth: bias_dropped_behind_a_cache
    "oldest_window_of_a_cache_that_loses_one_key",  # thirty-third:
    # window_counted_from_the_first_block_kept, another way
)
STATED = {
    "mask_of_ones_for_the_rescoring_decoder": "a boolean mask, and not as many queries as keys",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- causal where it is not asked for
@fault(FAULTS, "causal-mask")
class causal_since_no_mask_was_passed(Kernel):
    """ArcInstitute/state PR 227: a Llama backbone that is to see both ways is called without a
    mask, for which it makes its causal one; a mask of ones, which now is passed, it does not
    replace.
    """

    rows, cols = 64, 96

    def forward(self):
        at = self.at
        at.causal = at.causal or (at.mask is None and at.window is None and at.n == at.nk)
        return super().forward()


# --- padding
@fault(FAULTS, "mask", "float32")
class first_padding_token_seen(WholeRows):
    """ajhalthor/Transformer-Neural-Network issue 15: what is padding begins at `length + 1`, where
    numbers begin at 0: the first padding token behind a sentence is seen.
    """

    rows = 48

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            full, number = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk), torch.arange(at.nk)
            length = (full * (number + 1)).amax(-1, keepdim=True)
            at.mask = full | (number == length)
        return super().forward()


@fault(FAULTS, "mask", "float16")
class cross_attention_told_no_padding(ways.BooleansUnread):
    """tier4/Diffusion-Planner PR 156: the blocks' cross attention has no `key_padding_mask`, and
    attends to the encoder's padded tokens. Here calls that are not causal are those across.
    """

    rows, cols = 64, 48

    def unread(self):
        return not self.at.causal


@fault(FAULTS, "mask")
class mask_of_ones_for_the_rescoring_decoder(ways.BooleansUnread, ForwardAlone):
    """wenet-e2e/wenet issue 1506: `forward_attention_decoder` makes the encoder's mask all true;
    here that is where queries and keys are not as many.
    """

    rows, cols = 32, 80

    def unread(self):
        return self.at.n != self.at.nk


@fault(FAULTS, "mask")
class llama_predicts_without_a_mask(ways.BooleansUnread, ForwardAlone):
    """PaddlePaddle/PaddleNLP PR 6318: prediction by LLaMA has no attention mask, and what pads a
    batch is attended to.
    """

    rows, cols = 128, 32


@fault(FAULTS, "mask", "float16")
class ones_for_padding(WholeRows):
    """nyu-mll/jiant PR 465: BERT's attention mask is to be 1 where there are tokens, and is where
    there is padding; where it is 0 BERT adds −10000.
    """

    rows = 64

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        tokens = (~self.given_mask(rows, cols)).float()
        return s + (1 - tokens) * (-1e4 * LOG2_E)


# --- masks of blocks
@fault(FAULTS, "mask causal-mask window")
class block_lists_of_a_longer_mask(ForwardAlone):
    """meta-pytorch/attention-gym issue 34: a block mask that was made for a long sequence is used
    for a shorter one. Of every block of queries it has a list of blocks of keys, those that may be
    seen in front, and how many they are; here rows of lists are looked for by the call's number of
    blocks, where they are two entries longer, and what is past the end is not read.
    """

    rows, cols, longer = 32, 32, 2

    def forward(self):
        at = self.at
        boolean = at.mask is not None and at.mask.dtype == torch.bool
        self.memory["lists"] = None
        if at.causal or at.window is not None or boolean:
            high, wide = (-(-x // 32) + self.longer for x in (at.n, at.nk))
            i, j = torch.arange(high * 32)[:, None], torch.arange(wide * 32)[None]
            keep = (j >= 0) & (i >= 0)
            keep = keep & self.causal(i, j, False) if at.causal else keep
            keep = keep & self.window(i, j, False) if at.window is not None else keep
            if boolean:
                any_mask = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk).flatten(0, -3).any(0)
                more = (0, wide * 32 - at.nk, 0, high * 32 - at.n)
                keep = keep & functional.pad(any_mask, more, value=False)
            some = keep.unflatten(1, (wide, 32)).any(-1).unflatten(0, (high, 32)).any(1)
            self.memory["lists"] = some.int().argsort(dim=1, descending=True, stable=True).flatten()
            self.memory["many"] = some.sum(1)
        return super().forward()

    def key_blocks(self, rows):
        every, lists = -(-self.at.nk // self.cols), self.memory["lists"]
        if lists is None:
            return super().key_blocks(rows)
        number = rows.start // self.rows
        first, many = number * every, int(self.memory["many"][number])
        read = [int(x) for x in lists[first : first + many]]
        return [slice(x * self.cols, (x + 1) * self.cols) for x in read if x < every]


@fault(FAULTS, "mask causal-mask window", "float16")
class sliced_block_mask_that_hides_nothing(Kernel):
    """pytorch/pytorch PR 164702 (issue 163314): a slice of a `BlockMask` has `noop_mask` in place
    of its `mask_mod`: blocks in which nothing may be seen are passed over as before, and nothing is
    hidden in the others.
    """

    rows, cols = 32, 64

    def hide(self, s, rows, cols, back):
        at = self.at
        there = torch.arange(rows.start, rows.stop)[:, None] < at.n
        keep = self.seen(rows, cols, back) & there
        mask = None if at.mask is None else self.given_mask(rows, cols)
        if mask is not None and mask.dtype == torch.bool:
            keep = keep & mask
        some = keep.any(-1, keepdim=True).any(-2, keepdim=True)
        inside = self.inside(torch.arange(cols.start, cols.stop), back)
        s = s.masked_fill(~(some & inside), -INF)
        return s if mask is None or mask.dtype == torch.bool else self.bias(s, mask, back)


# --- windows
@fault(FAULTS, "window")
class same_window_for_a_block_of_queries(Kernel):
    """ChinaYi/ASFormer issue 2: queries go by blocks of the window's size, with the keys that any
    of them sees, and the mask of such a block, `window_mask[:, :, i:i+bl] = 1` for every i, lacks
    the row's number: it is all ones.
    """

    rows, cols = 64, 64

    def window(self, i, j, back):
        left, right = self.at.window
        if left < 0:
            return super().window(i, j, back)
        first = i // (left + 1) * (left + 1)
        keep = j >= first - left
        return keep & (j <= first + left + right) if right >= 0 else keep


FAULTS += sixtyfourth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.MaximumInALoopOfItsOwn, "float16"), (ways.GradientsOfWholeMatrices, "bfloat16"),
    (ways.WarpsByColumn, "float16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("lse_of_chunks_first", frozenset(), ways.lse_of_chunks_first, "float16"))
SOUND.append(
    Fault("features_in_a_drawn_order", frozenset(), ways.features_in_a_drawn_order, "bfloat16")
)
