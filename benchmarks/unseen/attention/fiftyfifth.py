"""The fifty-fifth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «fix(attention): correct causal mask offset», «fix: attention scale should be
1/sqrt(head_dim)», «fix: apply attention mask before softmax», «fix: kv head repeat order GQA»,
«fix: flash attention varlen max_seqlen cu_seqlens», «fix: window size off by one flash attention»,
«fix: softcap backward», «fix: alibi slopes in attention kernel», «fix: use float32 softmax in
attention», «fix: attention bias shape broadcast», «fix: mask value -inf vs -1e9 attention», «fix:
sliding window mask in decode», «fix: lse output split-k combine», «fix: paged kv last page length»,
«fix: query offset chunked prefill causal», «fix: cross attention mask uses wrong length», «fix:
relative position bias index», «fix: q k norm before attention scale», «fix: value head dim
different from qk head dim», «fix: bidirectional attention for encoder model instead of causal».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were 28 faults: the twelfth of the second, 219 results. What was left: 121 are about
something else, features, speed, builds, crashes, questions, other operations or a result that had
come before; 27 tell no cause, or no mistake, many of them no text at all; 35 are threads of earlier
sets; 2 are on the very defect of one that was taken (TransformerLens PR 366 and issue 318); 6
cannot be written so that this function errs: delta rules in place of a softmax, whose heads were
said to be right (llama.cpp PR 25315), norms of queries and keys that are never called (modelzoo PR
85), −10¹⁰ in fp16, which is −∞ or an error (linformer-pytorch PR 19), key heads that are not
repeated, which fit no query heads (mamba PR 462), masks that are too long, which fit no scores
(xformers PR 66), and a number of pages past the table (cudnn-frontend PR 964).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: TMUnet issue 13, whose line divides the weights, and onnxruntime PR 24017, where a
sequence's bias is looked for as many heads further on; what lies past the end there is chosen, it
is zeros. FastDeploy PR 3745 says that offsets of the mask were kept where they have to follow every
step; here they are a row late. LibreYOLO PR 546 fears an overflow; what is written is the softmax
in fp16. Of a thread with several defects one is taken. Numbers that no thread tells were chosen.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. Masks and windows are here; scales, softmaxes, splits and heads in
fiftyfifth_scores.py. All err more than 1.5 × their sound twin on an ordinary input (`python -m
benchmarks.unseen.draw attention.fiftyfifth --check`) but those that STATED names, which need the
inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fiftyfifth_kernel as ways
from benchmarks.unseen.attention import fiftyfifth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "window_from_minus_its_size",  # seventeenth: window_of_a_negative_length
    "causal_whatever_the_call_says",  # thirty-fifth: encoder_made_causal_as_well; others too
    "boundary_block_of_the_window_dropped",  # fifteenth: tiles_across_the_windows_begin
    "ends_together_where_beginnings_should",  # sixth: causal_from_the_end
    "causal_skipped_without_another_mask",  # thirty-eighth: causal_mask_only_with_a_mask
    "config_left_causal",  # thirty-fifth: encoder_made_causal_as_well; others too
    "mask_of_all_heads_found_by_its_key_head",  # eighth: shared_mask_by_query_heads, another way
    "bias_of_sequences_times_the_heads",  # nineteenth: bias_of_one_head_by_the_stride_of_many
    "right_frames_fewer_by_one",  # fortieth: window_of_cudnn_one_key_short, on the other side
    "window_forgotten_for_a_single_token",  # forty-fifth: mask_launched_for_several_queries_alone
    "root_of_the_channels_of_the_input",  # forty-seventh: root_of_the_features_of_all_heads
    "root_of_the_models_dim_not_of_dim_head",  # forty-seventh:
    # root_of_the_models_width_on_one_backend
    "sixty_four_where_heads_have_sixteen",  # forty-third: root_of_the_whole_embedding
    "root_of_the_embedding_in_the_language_model",  # as before
    "weights_divided_by_the_root_of_the_embedding",  # as before, behind the softmax
    "raw_attention_not_divided",  # thirty-seventh: scale_missing; others too
    "pooled_attentions_softmax_in_half",  # thirty-fourth: cast_to_half_before_the_softmax
    "ignored_scores_at_minus_a_hundred_thousand",  # fortieth: all_masked_rows_of_a_finite_number
    "padding_at_minus_a_billionth",  # forty-fifth: filled_with_a_ten_millionth
    "weights_not_multiplied_by_the_mask",  # fortieth: all_masked_rows_of_a_finite_number
    "full_qk_attention_of_nothing",  # forty-first: windows_that_hold_padding_alone
    "infinities_for_a_sequence_of_padding",  # as before
    "lse_of_splits_stored_only_where_asked_for",  # twenty-first: lse_never_stored, for
    # the way back
    "base_2_not_forwarded_to_the_combine",  # ninth: merged_lse_in_nats
    "key_heads_one_group_after_the_other",  # fifth: heads_tiled; others too
)
STATED = {
    "right_frames_fewer_by_one": "a window with keys to the right",
    "mask_of_all_heads_found_by_its_key_head": "one query, shared key heads, and a mask of its own "
    "for every query head",
    "slopes_by_the_local_number_of_a_head": "an added mask with its own numbers for every head",
    "window_forgotten_for_a_single_token": "one query, and a window that hides keys from it",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that are given
@fault(FAULTS, "mask")
class offsets_of_the_mask_a_step_late(ways.OtherMask):
    """PaddlePaddle/FastDeploy PR 3745: how far each token sees is kept with the metadata of the
    call where it has to follow every step: here a row's limit is the one of the row before, and a
    key past that is hidden from it.
    """

    rows, cols = 64, 64

    def read(self, mask):
        if mask.dtype != torch.bool:
            return mask
        limit = (mask * torch.arange(1, self.at.nk + 1)).amax(-1, keepdim=True)
        late = torch.cat([limit[..., :1, :], limit[..., :-1, :]], -2)
        return mask & (torch.arange(self.at.nk) < late)


@fault(FAULTS, "mask other-data")
class mask_of_all_heads_found_by_its_key_head(ways.OtherMask):
    """HKUSTDial/flash-sparse-attention PR 190: a single query's heads become rows of their key
    head, and the mask's and the bias's strides are not told: a row reads the mask of the head that
    has the key head's number.
    """

    rows, cols = 64, 128

    def read(self, mask):
        if self.at.n > 1 or mask.ndim < 4 or mask.shape[1] == 1:
            return mask
        return mask[:, torch.arange(mask.shape[1]) // self.at.groups]


@fault(FAULTS, "mask other-data", "float16")
class slopes_by_the_local_number_of_a_head(ways.OtherMask):
    """flashinfer-ai/flashinfer PR 5101 (issue 1606): slopes of ALiBi are reckoned from a rank's own
    number of heads, counted from 0: the second of two ranks' heads have the first one's bias. Here
    a mask that is added is the bias.
    """

    rows, cols = 128, 64

    def read(self, mask):
        heads = mask.shape[1] if mask.ndim == 4 else 1
        if mask.dtype == torch.bool or heads % 2:
            return mask
        return mask[:, torch.arange(heads) % (heads // 2)]


@fault(FAULTS, "mask other-data layout")
class bias_of_sequences_times_the_heads(ways.OtherMask):
    """microsoft/onnxruntime PR 24017: where a bias is one for all heads and not for all sequences,
    a sequence's is looked for as many heads further on as if every head had one.
    """

    rows, cols = 64, 96

    def read(self, mask):
        if mask.dtype == torch.bool or mask.ndim < 4 or mask.shape[1] > 1:
            return mask
        past = mask.new_zeros(mask.shape[0] * self.at.q.shape[1], *mask.shape[1:])
        return torch.cat([mask, past])[:: self.at.q.shape[1]][: mask.shape[0]]


# --- causal where it is not asked for, and not where it is
@fault(FAULTS, "causal-mask mask")
class causal_whatever_the_call_says(EveryBlock):
    """huggingface/transformers PR 39707 (issue 39554): `is_causal` of the call is thrown away, and
    the attribute of the module is taken, which is always true; the ends of queries and keys lie
    together, as flash attention has it.
    """

    rows, cols = 128, 64

    def seen(self, rows, cols, back):
        found = super().seen(rows, cols, back)
        if self.at.causal:
            return found
        i = torch.arange(rows.start, rows.stop)[:, None]
        return found & (torch.arange(cols.start, cols.stop)[None] <= i + self.at.nk - self.at.n)


@fault(FAULTS, "causal-mask mask window", "float16")
class config_left_causal(EveryBlock):
    """huggingface/transformers issue 46077 (Gemma 4): modules are told to see both ways, the config
    is not, by which masks are made: full and sliding ones stay causal.
    """

    rows, cols = 64, 48

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        return super().seen(rows, cols, back) & (below | (self.at.n != self.at.nk))


@fault(FAULTS, "causal-mask mask", "float32")
class causal_skipped_without_another_mask(EveryBlock):
    """facebookresearch/xformers PR 104: the causal mask is put to a mask that is given, and where
    none is there is no causal one either.
    """

    rows, cols = 64, 64

    def causal(self, i, j, back):
        return (j <= i) | torch.tensor(self.at.mask is None)


@fault(FAULTS, "causal-mask window mask")
class ends_together_where_beginnings_should(EveryBlock):
    """ROCm/flash-attention PR 185 (issue 158): causal and local masks are aligned at the bottom
    right, and with fewer queries than keys, or more, others are hidden than those that ought to be.
    """

    rows, cols = 128, 32

    def causal(self, i, j, back):
        return super().causal(i + self.at.nk - self.at.n, j, back)

    def window(self, i, j, back):
        left, right = self.at.window
        i = i + self.at.nk - self.at.n
        keep = (j >= i - left) if left >= 0 else (j >= 0) & (i == i)
        return keep & (j <= i + right) if right >= 0 else keep


# --- windows
@fault(FAULTS, "window", "float16")
class window_from_minus_its_size(ForwardAlone):
    """thu-nics/DiTFastAttn issue 7: the window is (−size, size), and what is below 0 stands for all
    keys on that side.
    """

    rows, cols = 128, 64

    def window(self, i, j, back):
        right = self.at.window[1]
        keep = (j >= 0) & (i >= 0)
        return keep & (j <= i + right) if right >= 0 else keep


@fault(FAULTS, "window")
class boundary_block_of_the_window_dropped(EveryBlock, ForwardAlone):
    """vllm-project/vllm-gaudi PR 1395: a window has as many blocks as its size divided by theirs,
    rounded down, the one that a token is in among them: up to a block of the oldest keys is not
    seen. Nothing else hides by a window; none of its blocks are all of them. Blocks have 16 keys.
    """

    rows, cols, page = 16, 128, 16

    def window(self, i, j, back):
        left, right = self.at.window
        many = (left + 1) // self.page if left >= 0 else 0
        keep = (j >= 0) & (i >= 0)
        if many:
            keep = keep & (j // self.page > i // self.page - many)
        return keep & (j <= i + right) if right >= 0 else keep


@fault(FAULTS, "window", "float16")
class right_frames_fewer_by_one(Kernel):
    """huggingface/transformers PR 47010 (Moonshine, Gemma 4): a window of four frames to the right
    sees three, for `<` in place of `<=`; a frame sees itself.
    """

    rows, cols = 96, 64

    def window(self, i, j, back):
        keep, right = super().window(i, j, back), self.at.window[1]
        return keep & ((j <= i) | (j < i + right)) if right >= 0 else keep


@fault(FAULTS, "window", "float16")
class window_forgotten_for_a_single_token(EveryBlock, ForwardAlone):
    """rajveer43/VeloxQuant-MLX PR 463: for one query the mask is None, and a window that was passed
    in is thrown away with it.
    """

    rows, cols = 16, 64

    def window(self, i, j, back):
        return super().window(i, j, back) | torch.tensor(self.at.n == 1)


FAULTS += fiftyfifth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.TwoBlocksAtOnce, "bfloat16"), (ways.ThreeStatesInTurn, "float16"),
    (ways.GradientsAsATree, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("keys_in_a_drawn_order", frozenset(), ways.keys_in_a_drawn_order, "float16"))
SOUND.append(Fault("groups_by_einsum", frozenset(), ways.groups_by_einsum, "bfloat16"))
