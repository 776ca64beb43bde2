"""The fiftieth set of faults of attention: a sample of what public threads report, as the searches
return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «Gemma attention wrong scaling or softcap fix», «Llama 4 chunked attention mask
incorrect», «DeepSeek MLA attention wrong output fix», «Qwen2-VL vision window attention wrong
mask», «Mistral sliding window attention mask bug», «gpt-oss attention sinks incorrect», «Falcon MPT
alibi attention wrong», «T5 relative position bias attention bug», «Whisper attention wrong mask
cross attention», «Swin shifted window attention mask bug», «SAM ViT decomposed relative position
attention bug», «Longformer BigBird sparse attention wrong», «Phi-3 long context attention sliding
window bug», «GPT-2 GPT-J attention fp16 upcast scale bug», «ChatGLM prefix attention mask bug»,
«Stable Diffusion attention slicing upcast wrong», «Perceiver set transformer attention mask bug»,
«BERT attention mask extended dtype min bug», «graph attention or point transformer softmax wrong»,
«speech conformer relative attention mask streaming bug».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were 28 faults: the eleventh of the twentieth, 217 results. What was left: 125 are about
something else (all of the first search, which finds games), features, crashes, questions, other
operations or a result that had come before; 34 tell no cause, many of them no text at all; 21 are
threads of earlier sets; 3 are on the very defect of one that was taken (mlxcel issue 991, candle PR
3730, mistral.rs PR 244); 4 report what is no mistake (transformers issue 29067, whose bias lies in
the mask, and issue 10221, SwinIR issue 153, whose mask is zero without a shift, and a review in
sgl-kernel-npu PR 216 that wants values for sinks); 2 cannot be written so that this function errs:
factors of a layer that cancel (libai PR 61) and one map of weights where each feature is to have
one (point-transformer-pytorch PR 3).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: graphormer-pyg issue 14, mist issue 17, diffusers PR 1591, transformers issue 37574. Of
vllm PR 15200 that windows got the lengths of frames is inferred from what it takes out, of
llama.cpp PR 8627 that the memory held zeros. Numbers that no thread tells were chosen, as are the
tokens of a step where a thread is about a cache. Of a thread with several defects one is taken;
that of transformers PR 27114 shows here on rows that see nothing alone.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks are here; windows, caches, scores and what is added to them in
fiftieth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.fiftieth --check`) but that which STATED names, which
needs the input that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftieth_kernel as ways
from benchmarks.unseen.attention import fiftieth_scores
from benchmarks.unseen.attention.eighth_kernel import fault, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, attention, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "pictures_columns_never_told_apart",  # sixteenth, of queries: mask_of_each_blocks_first_row
    "ones_added_where_nothing_may_be_seen",  # ninth and others: mask_of_ones_and_zeros_added
    "booleans_of_padding_added",  # as before: mask_of_booleans_added
    "mask_under_the_tanh",  # ninth: capped_after_the_mask, bias_within_the_cap
    "hidden_scores_times_minus_a_million",  # sixteenth: scores_times_the_mask
    "least_numbers_added_up",  # others: all_masked_rows_of_a_finite_number,
    # softmax_of_rows_that_are_all_masked
    "prefill_handed_no_mask",  # eighteenth and others: decoder_called_without_its_mask
    "mask_for_single_tokens_alone",  # as before
    "full_mask_never_filled",  # as before, and fifth: zeros_have_weight
    "mask_not_handed_to_the_block",  # eighth: mask_not_read; others too
    "rows_zeroed_in_place_of_a_mask",  # as before, and thirty-fourth:
    # mask_of_minus_infinity_behind_the_softmax
    "window_not_implemented",  # fortieth: window_never_consulted; others too
    "config_without_its_window",  # as before
    "past_keys_not_sliced",  # forty-fifth: windows_decoded_by_full_attention
    "window_that_counts_the_query",  # tenth: one_key_fewer; others too
    "cache_cut_to_the_last_window",  # twenty-fourth: keys_of_the_last_window_alone
    "full_layers_never_found",  # thirty-eighth: every_layer_has_a_window
    "upcast_forgotten_in_slices",  # scores in half: many sets
    "factor_of_the_layer_not_loaded",  # thirty-seventh: scale_not_passed_on; others too
    "sinks_hard_coded_to_false",  # thirty-eighth, a pull request to this issue: sinks_never_bound
)
STATED = {
    "factor_of_the_layer_not_loaded": "a scale that is not 1/√d",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that are made wrongly
@fault(FAULTS, "mask", "float16")
class pictures_columns_never_told_apart(ways.MaskChanged):
    """zsyOAOA/ResShift issue 81 (Swin): the picture that numbers the regions of shifted windows is
    laid out with its channel first and filled as if that were last: regions differ in their rows
    alone. Here rows of a picture are sixteen tokens, and all of a row get the mask of its first.
    """

    rows, cols = 64, 64

    def changed(self, mask):
        i, j = (torch.arange(n) // 16 * 16 for n in mask.shape[-2:])
        return mask[..., i[:, None], j]


@fault(FAULTS, "mask ragged")
class regions_a_padding_further_on(ways.MaskChanged):
    """huggingface/pytorch-image-models issue 2438 (Swin v2): what is shifted is padded to whole
    windows, here of 48 tokens, and the mask's regions are counted from the padding's end: they lie
    as many tokens further on as were added.
    """

    rows, cols = 48, 48

    def changed(self, mask):
        missing = -mask.shape[-1] % 48
        if mask.shape[-2] != mask.shape[-1]:
            return mask
        from_ = (torch.arange(mask.shape[-1]) - missing).clamp_min(0)
        return mask[..., from_[:, None], from_]


@fault(FAULTS, "mask", "float16")
class lengths_of_frames_for_the_windows(ways.MaskChanged):
    """vllm-project/vllm PR 15200 (Qwen2.5-VL): lengths are reckoned once for all layers, from the
    boundaries of whole frames, and layers with windows get those: here frames are 64 tokens.
    """

    rows, cols = 128, 32

    def changed(self, mask):
        i, j = (torch.arange(n) // 64 for n in mask.shape[-2:])
        return (i[:, None] == j).expand_as(mask) if len(i) == len(j) else mask


@fault(FAULTS, "mask window")
class distance_in_place_of_windows(ways.MaskChanged):
    """sgl-project/sglang-jax PR 1289 (Qwen2.5-VL): where tokens are to see their own window, what
    is farther than a window's length is hidden, and nothing else; here 32 tokens.
    """

    rows, cols = 96, 96

    def changed(self, mask):
        i, j = (torch.arange(n) for n in mask.shape[-2:])
        near = (i[:, None] - j).abs() <= 32
        return near.expand_as(mask) if len(i) == len(j) else mask


@fault(FAULTS, "mask")
class ones_added_where_nothing_may_be_seen(ways.OnesWhereHidden):
    """Blaizzy/mlx-vlm PR 704 (Qwen2-VL): the mask that is added is full of ones, and zero where an
    image sees itself.
    """

    rows, cols = 32, 128


@fault(FAULTS, "mask", "float32")
class booleans_of_padding_added(ways.OnesWhereHidden):
    """samgoldman97/mist issue 17: the mask of −∞ is made, and the boolean one is added, which is
    true for padding.
    """

    rows, cols = 64, 48


# --- masks that are applied wrongly
def mask_under_the_tanh(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                        softcap=0.0, sinks=None):  # fmt: skip
    """zinengtang/Perceiver_VL issue 2: scores go through tanh after the mask has set them to −∞,
    and what is hidden scores −1, here less the cap; what a mask adds is capped as well.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    s = query.float() @ repeated(key, heads).mT * scale
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.float()
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    return (softmax_of(s, sinks) @ repeated(value, heads)).to(query.dtype)


FAULTS.append(
    Fault("mask_under_the_tanh", frozenset({"softcap", "mask", "mask-finite"}),
          mask_under_the_tanh, "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "mask mask-finite unnormalized", "float32")
class hidden_scores_times_minus_a_million(ForwardAlone):
    """leffff/graphormer-pyg issue 14: scores of nodes of other graphs are multiplied by −10⁶ where
    it was to be added, so that negative ones are the largest of all; behind the softmax their
    weights are set to zero, which the row's sum keeps.
    """

    rows, cols = 64, 64

    def hide(self, s, rows, cols, back):
        self.memory["own"] = torch.tensor(True)
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        own = self.given_mask(rows, cols)
        self.memory["own"] = own
        s = torch.where(own, s, s * -1e6)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)

    def add_values(self, acc, a, p, v):
        return super().add_values(acc, a, p.masked_fill(~self.memory["own"], 0.0), v)


@fault(FAULTS, "masked-row mask-finite non-finite nan-escapes", "float16")
class least_numbers_added_up(WholeRows, ForwardAlone):
    """huggingface/transformers PR 27114: the causal mask and that of padding are the type's least
    number where they hide, and are added up, which is −∞ where both do: a row has both numbers, and
    where it has nothing else it is spread over the one, or is NaN.
    """

    rows = 64

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        least = torch.finfo(torch.float16).min
        j = torch.arange(cols.start, cols.stop)
        causal = (~self.seen(rows, cols, back)).float() * least
        added = at.low(causal + (~self.given_mask(rows, cols)).float() * least)
        hidden = at.low(s / LOG2_E + added) * LOG2_E
        return torch.where(added == 0, s, hidden).masked_fill(~self.inside(j, back), -INF)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "mask")
class mask_not_handed_to_the_block(ways.MaskChanged):
    """mistralai/mistral-inference PR 218 (Pixtral): the transformer's block takes a mask and does
    not hand it to its attention: images that are passed together see each other.
    """

    rows, cols = 48, 32

    def changed(self, mask):
        return torch.ones_like(mask)


@fault(FAULTS, "mask", "float16")
class rows_zeroed_in_place_of_a_mask(ForwardAlone):
    """vllm-project/vllm-omni PR 5704 (CosyVoice 3): attention is not given the mask of chunks; it
    sets what comes out for padding to zero, and keys are hidden from nobody.
    """

    rows, cols = 128, 64

    def hide(self, s, rows, cols, back):
        mask, self.at.mask = self.at.mask, None
        found = super().hide(s, rows, cols, back)
        self.at.mask = mask
        return found if mask is None or mask.dtype == torch.bool else self.bias(
            found, self.given_mask(rows, cols), back)  # fmt: skip

    def finish(self, m, l, acc, rows):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            full = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            acc = acc * load(full.any(-1, keepdim=True).float(), rows)
        return super().finish(m, l, acc, rows)


# --- causal calls that are not
@fault(FAULTS, "causal-mask mask", "float16")
class prefill_handed_no_mask(EveryBlock, ForwardAlone):
    """lablup/mlxcel PR 998 (DeepSeek-V2): where there are several new tokens attention is handed
    the caller's mask, which is none, and not the causal one: queries see what comes after them.
    """

    rows, cols = 64, 128

    def causal(self, i, j, back):
        handed = self.at.mask is None and self.at.n > 1
        return super().causal(i, j, back) | torch.tensor(handed)


@fault(FAULTS, "causal-mask mask")
class mask_for_single_tokens_alone(EveryBlock, ForwardAlone):
    """huggingface/candle issue 3505 (Qwen3-VL): the mask is not made if there is more than one
    token, where it should be if there is one.
    """

    rows, cols = 32, 64

    def causal(self, i, j, back):
        return super().causal(i, j, back) | torch.tensor(self.at.n > 1)


@fault(FAULTS, "causal-mask mask padding", "float16")
class full_mask_never_filled(EveryBlock, ForwardAlone):
    """ggml-org/llama.cpp PR 8627, review: once there is a mask of windows the pointer to the other
    is put into the windows' variable, and the mask of layers without one is never filled; here it
    holds zeros, for the cache's empty cells too, of which there are up to a multiple of 32.
    """

    rows, cols = 32, 32

    def unfilled(self):
        return torch.tensor(bool(self.at.causal) and self.at.window is None)

    def causal(self, i, j, back):
        return super().causal(i, j, back) | self.unfilled()

    def inside(self, j, back):
        return super().inside(j, back) | self.unfilled()


FAULTS += fiftieth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.KeysByTheThird, "bfloat16"), (ways.DiagonalOutwards, "float16"),
    (ways.TreesOfSums, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("one_einsum_for_a_group", frozenset(), ways.one_einsum_for_a_group, "float16"))
SOUND.append(
    Fault("softmax_and_values_in_one", frozenset(), ways.softmax_and_values_in_one, "bfloat16")
)
