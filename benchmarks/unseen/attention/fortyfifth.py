"""The forty-fifth set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «attention returns wrong result when batch size is one», «attention output depends on
padding length bug», «attention fails gradcheck in backward», «attention scores not masked before
softmax bug», «flash attention causal flag ignored», «attention key padding mask ignored»,
«attention wrong after prefix cache hit», «attention kernel wrong for head_dim 64 only», «attention
mismatch for large batch or many heads», «attention output NaN for long sequences half precision»,
«sliding window attention mask not applied in decode», «kv cache dtype mismatch wrong attention
output», «attention softmax computed in bf16 accuracy», «attention mask dtype wrong value -10000 or
finfo min bug», «ALiBi slopes wrong number of heads», «relative attention bias wrong bucket or
offset», «attention dropout active in eval mode», «attention head repeat interleave wrong order
GQA», «attention logits scaling twice bug», «chunked attention merging wrong softmax».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were 28 faults: the eleventh of the sixth, 206 results. What was left: 126 are about
something else, features, errors that are raised, questions, other operations (a softmax alone among
them) or a result that had come before; 26 tell no cause, many of them no text at all; 21 are
threads of earlier sets and of the list that samplers share; 3 are on the very defect of one that
was taken; 2 cannot be written so that this function errs: other tensors overwritten by the cache
(vllm PR 2622) and sums of keys in linear attention (fast-transformers issue 32). Among the
questions are masks of padding that are missed where it does no harm (unsloth issue 903, AKT issue
6, self-critical.pytorch issue 89), one on a tutorial that nobody answers (tensorflow issue 43941),
and slopes of ALiBi that are as the authors' (Baichuan2 issue 225, TensorRT-LLM PR 1611).

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository: reading_comprehension_tf PR 30, whose title alone says that the softmax is of the wrong
index, gluonts PR 1401, MatchZoo-py issue 163. DNABERT issue 102 is taken at its word. Of
transformers PR 32522 it is inferred that the window reaches the kernel nowhere else. What of a
sequence is decoded is chosen, as are probabilities and other numbers that no thread tells.

What is right was set down before anything was measured by halfulp. `AGAIN` names every fault whose
mistake an earlier set has in some form. Masks and windows are here; operands, heads, scales,
softmax, dropout, caches and what comes out in fortyfifth_scores.py. All err more than 1.5 × their
sound twin on an ordinary input (`python -m benchmarks.unseen.draw attention.fortyfifth --check`)
but those that STATED names, which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortyfifth_kernel as ways
from benchmarks.unseen.attention import fortyfifth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.fortyfifth_scores import whole
from benchmarks.unseen.attention.fortysecond_kernel import MaskNotRead
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch.nn import functional

AGAIN = (
    "lengths_of_the_sources_not_passed",  # eighth: mask_not_read; others too
    "no_masking_op_before_the_softmax",  # as before
    "encoders_padding_not_used_across",  # as before, of all calls
    "memory_lengths_given_and_not_used",  # as before
    "padding_of_zeros_keeps_its_weight",  # forty-second: padded_peaks_keep_a_score_of_zero
    "ten_thousand_added_to_hide",  # fourteenth: hidden_by_minus_ten_thousand; others too
    "mask_of_ones_and_zeros_added",  # forty-second: truth_added_to_the_scores
    "hidden_at_a_billionth",  # ninth: hidden_by_a_tiny_number
    "filled_with_a_ten_millionth",  # as before
    "causal_never_true_for_flash",  # seventeenth: causal_lost_without_a_mask; others too
    "prefill_of_one_token_more",  # fifteenth: window_of_one_key_more; others too
    "mask_cut_in_place_of_a_window",  # sixth: window_not_passed_on; others too
    "mask_launched_for_several_queries_alone",  # fortieth: window_never_consulted, by all queries
    "windows_decoded_by_full_attention",  # as before
    "bits_of_bf16_read_as_fp16",  # forty-fourth: numbers_taken_for_bytes
    "key_heads_tiled_by_the_operator",  # fifth: heads_tiled; others too
    "scale_of_the_paper_never_passed",  # thirty-seventh: scale_not_passed_on; others too
    "softmax_over_the_sources",  # seventeenth: softmax_over_the_queries; others too
    "softmax_in_the_models_bf16",  # fifteenth: softmax_in_the_inputs_type; others too
    "exported_softmax_at_its_inputs_precision",  # twenty-eighth: softmax_in_bf16_throughout
    "flash_attention_drops_in_evaluation",  # tenth: dropped_in_evaluation
    "drop_rate_given_whatever_the_mode",  # as before
    "history_that_no_one_kept",  # thirty-sixth: cached_prefix_not_attended
    "out_in_bf16_whatever_the_query",  # ninth: out_through_e4m3, which is coarser still
)
STATED = {
    "slopes_of_heads_that_are_no_power_of_two": "an additive mask, and a number of heads that is"
    " no power of two",
    "scale_of_the_paper_never_passed": "a scale that is not 1/√d",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks that are not applied
@fault(FAULTS, "mask")
class lengths_of_the_sources_not_passed(MaskNotRead):
    """OpenNMT/OpenNMT-py PR 486: the argument `lengths` is not passed, and attention has the hidden
    states of padding as well.
    """

    rows, cols = 64, 48


@fault(FAULTS, "mask", "float16")
class no_masking_op_before_the_softmax(WholeRows, MaskNotRead):
    """tensorflow/tensorflow issue 512: energies go into the softmax as they are, those of the empty
    part of the encoder's sequence among them.
    """

    rows = 96


@fault(FAULTS, "mask")
class encoders_padding_not_used_across(EveryBlock):
    """facebookresearch/fairseq issue 318: `key_padding_mask` is not used in the attention between
    encoder and decoder; here that is where queries and keys are not as many.
    """

    rows, cols = 32, 64

    def hide(self, s, rows, cols, back):
        if self.at.n == self.at.nk:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask", "float16")
class memory_lengths_given_and_not_used(MaskNotRead):
    """tensorflow/addons PR 133: scores are not masked even where `memory_sequence_length` is
    given.
    """

    rows, cols = 16, 128


@whole("mask mask-finite padding")
def padding_of_zeros_keeps_its_weight(query, key, value, options):
    """pmixer/SASRec.pytorch issue 36: `key_padding_mask` is commented out, for padding is zeros:
    it adds nothing to O, but its scores of 0 have a weight in the softmax.
    """
    mask, heads = options["attn_mask"], query.shape[1]
    if mask is None or mask.dtype != torch.bool:
        p = softmax_of(ways.eager(query, key, options), options["sinks"])
        return p @ repeated(value, heads)
    s = ways.eager(query, key, options | {"attn_mask": None})
    unseen = s == -INF
    s = s.masked_fill(~mask & ~unseen, 0.0)
    p = softmax_of(s, options["sinks"]).masked_fill(~mask, 0.0)
    return p @ repeated(value, heads)


# --- masks of other numbers
@fault(FAULTS, "mask-finite mask", "float16")
class ten_thousand_added_to_hide(EveryBlock):
    """huggingface/transformers issue 14859 (T5): −10⁴ is added to what the mask hides, and scores
    that are farther apart than that, or a row that is hidden throughout, are not hidden by it.
    """

    rows, cols = 64, 96

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        added = (~self.given_mask(rows, cols)).float() * (-1e4 * LOG2_E)
        return (s + added).masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask")
class mask_of_ones_and_zeros_added(Kernel):
    """jerryji1993/DNABERT issue 102: what is (1 − mask) · −10⁴ goes to a name that is not the one
    that is returned: the mask of ones and zeros itself is added to the scores.
    """

    rows, cols = 128, 32

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        added = self.given_mask(rows, cols).float() * LOG2_E
        return (s + added).masked_fill(~self.seen(rows, cols, back), -INF)


@whole("mask-finite mask causal-mask", "float16")
def hidden_at_a_billionth(query, key, value, options):
    """awslabs/gluonts PR 1401 (TFT): scores of what is hidden, by the causal mask and by that of
    keys, are 1e-9 in place of −1e9.
    """
    s = ways.eager(query, key, options)
    s = s.masked_fill(s == -INF, 1e-9 * options["scale"])
    return softmax_of(s, options["sinks"]) @ repeated(value, query.shape[1])


@whole("mask-finite mask", "float16")
def filled_with_a_ten_millionth(query, key, value, options):
    """NTMC-Community/MatchZoo-py issue 163: `masked_fill` gets −1e-7 where it is to get −1e7, and
    what is hidden has a score of 0.
    """
    mask, own = options["attn_mask"], options
    if mask is not None and mask.dtype == torch.bool:
        own = options | {"attn_mask": None}
    s = ways.eager(query, key, own)
    if own is not options:
        s = s.masked_fill(~mask & (s > -INF), -1e-7)
    return softmax_of(s, options["sinks"]) @ repeated(value, query.shape[1])


@fault(FAULTS, "mask")
class slopes_of_heads_that_are_no_power_of_two(Kernel):
    """ml-explore/mlx PR 3071 (issue 343): slopes of ALiBi are one geometric series whatever the
    number of heads is, where those past the last power of two are to be every other one of twice as
    many. Here a mask that is added is the right bias, and gets the wrong slopes.
    """

    rows, cols = 64, 64

    @staticmethod
    def series(many: int) -> torch.Tensor:
        return torch.exp2(-8.0 * torch.arange(1, many + 1) / many)

    def bias(self, s, mask, back):
        heads = s.shape[1]
        least = 2 ** int(math.log2(heads))
        right = torch.cat([self.series(least), self.series(2 * least)[::2][: heads - least]])
        ratio = (self.series(heads) / right).view(1, -1, 1, 1)
        return super().bias(s, mask.float() * ratio, back)


# --- causal masks
@fault(FAULTS, "causal-mask mask")
class causal_never_true_for_flash(EveryBlock):
    """iCog-Labs-Dev/PC-Transformers PR 105 (issue 97): flash attention is called without its
    `causal`, and tokens see those after them.
    """

    rows, cols = 64, 64

    def causal(self, i, j, back):
        return (j >= 0) & (i >= 0)


# --- windows
@fault(FAULTS, "window mask", "float16")
class prefill_of_one_token_more(Kernel):
    """mistralai/mistral-inference issue 60: the mask of prefill begins at the diagonal −window, and
    not at −window + 1: a token sees one more than when it is decoded.
    """

    rows, cols = 48, 64

    def window(self, i, j, back):
        left, right = self.at.window
        keep = j >= i - left - 1 if left >= 0 else j >= 0
        return keep & (j <= i + right) if right >= 0 else keep & (i >= 0)


@fault(FAULTS, "window mask")
class mask_cut_in_place_of_a_window(Kernel):
    """huggingface/transformers PR 32522 (Gemma 2): flash attention gets no `window_size`; the mask
    of padding is cut to its last columns instead, where there is one, and then stands for the first
    keys.
    """

    rows, cols = 128, 64

    def forward(self):
        at = self.at
        if at.window is not None and at.mask is not None and at.window[0] >= 0:
            wide = min(at.window[0] + 1, at.nk)
            fill = False if at.mask.dtype == torch.bool else -INF
            full = at.mask.expand(*at.mask.shape[:-1], at.nk)[..., -wide:]
            at.mask = functional.pad(full, (0, at.nk - wide), value=fill)
        at.window = None
        return super().forward()


@fault(FAULTS, "window mask", "float16")
class mask_launched_for_several_queries_alone(ways.NoWindowOfTheLast):
    """ROCm/hip-ep PR 144: the kernel that hides what is after a token and before its window is
    launched for more queries than one, and a step of decoding sees keys before its window. Here the
    later half of a sequence is such steps.
    """

    rows, cols = 64, 32


@fault(FAULTS, "window mask")
class windows_decoded_by_full_attention(ways.NoWindowOfTheLast):
    """XunhaoLai/native-sparse-attention-triton issue 22: the function that decodes for the window's
    attention is that of full attention; here for the last quarter of a sequence.
    """

    rows, cols, decoded = 16, 64, 4


FAULTS += fortyfifth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.DiagonalFirst, "bfloat16"), (ways.SixParts, "float16"),
    (ways.FeaturesBySixteen, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("keys_as_rows", frozenset(), ways.keys_as_rows, "float16"))
SOUND.append(Fault("sequences_apart", frozenset(), ways.sequences_apart, "bfloat16"))
