"""The forty-third set of faults of attention: a sample of what public threads report, as the
searches return them, and sound kernels.

Twenty searches were fixed by the task before any result was seen, all in the corpus of issues and
pull requests: «softmax denominator wrong in attention kernel», «log-sum-exp combine of attention
parts wrong», «attention dropout applied at the wrong place result differs», «attention softmax over
wrong axis bug», «attention query key transposed wrong matmul dimensions result», «attention values
gathered with wrong index bug», «attention key cache stale or overwritten wrong output», «attention
ring buffer cache wraps wrong positions», «attention bias sign wrong bug», «attention mask inverted
boolean semantics bug», «attention mask additive value too small leaks», «attention window and
causal combined wrong mask», «attention offset wrong with past key values causal mask», «attention
heads merged wrong reshape transpose bug», «attention scale uses padded head dim bug», «attention
fp16 accumulate QK precision bug», «attention exp approximation accuracy bug kernel», «attention
gradient missing scale factor bug», «attention backward softmax gradient delta wrong bug»,
«attention gradient at masked positions wrong or NaN».

Of these the first result of every search was gone through, then the second of every one, and so on,
to the end: 234 results (twelve each, nine of two), in which 21 faults are. What was left: 142 are
about something else (four searches found nothing of attention at all), features, builds, crashes,
questions or a result that had come before; 32 tell no cause, most of them no text at all, one of
them (vllm-ascend PR 1958) takes what is right for the mistake; 25 are threads of earlier sets, or
on the list of threads that other samplers share; 4 are on the very defect of another thread (onnx
issue 8054, onnxscript PR 656, pytorch PRs 196170 and 42323); 10 cannot be written so that this
function errs: dropout that is left out, comes twice or is somewhere else (min-decision-transformer
issue 2, perceiver-pytorch 57, Informer2020 97, gpt-jax 1, SSAN 2, tiny-universe 18), attention of
another kind (xformers issue 96, MoChA-pytorch 4, pytorch-attention 1), and a causal mask beside a
mask that is given (gomlx PR 388), which is what this function means.

Where a thread tells the cause in a line, how it comes about was read in the public history of its
repository or in the threads that it names: perceiver-io PR 10 (`/ self.scale`), kvpress PR 283
(issues 250, 268, PR 281), stable-diffusion.cpp PR 736 (PR 774), hyunwoongko/transformer PR 5. Of a
thread with several defects one is taken. tinygrad PR 15949 is mirrored, as an earlier set has such
a triangle. GLM-4-Voice issue 182 asks whether it is a mistake, and nobody answers. Numbers that no
thread tells were chosen.

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form. Masks, heads and layouts are here; scales, softmaxes, sums and what is not
finite in fortythird_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.fortythird --check`) but the one that STATED names,
which needs the inputs that it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fortythird_kernel as ways
from benchmarks.unseen.attention import fortythird_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock

AGAIN = (
    "hidden_where_both_masks_hide",  # fifth: causal_ignored_where_it_divides, which has no window
    "plain_layers_do_not_read_the_window",  # fortieth: window_never_consulted; others too
    "triangle_in_the_other_corner",  # 27th: diagonal_of_the_other_corner_in_the_definition
    "mask_repeated_sequence_by_sequence",  # forty-first: mask_of_sequences_laid_over_heads
    "padding_hidden_in_the_loss_alone",  # eighth: mask_not_read; others too
    "true_where_nothing_is_to_be_seen",  # twenty-seventh: valid_positions_hidden; others too
    "keys_chosen_from_the_whole_sequence",  # 41st: lines_chosen_by_scores_without_their_scale
    "heads_merged_as_they_lie",  # seventeenth: out_reshaped_without_permuting
    "keys_viewed_and_not_transposed",  # eleventh: flat_rows_of_values_transposed, of values
    "softmax_along_the_batch",  # thirty-seventh: softmax_over_batch_and_queries
    "gates_normalized_over_the_batch",  # as before
    "third_dimension_of_four",  # sixteenth: softmax_over_the_queries; others too
    "softmax_after_expand_dims",  # thirty-seventh: softmax_over_one_element
    "exponential_pinned_to_the_approximate_one",  # 26th: exponential_by_the_bits_of_its_argument
    "scores_divided_by_the_scale",  # ninth: divided_by_the_scale
    "root_of_the_whole_embedding",  # ninth: scale_of_all_heads_together
    "values_accumulated_in_half",  # nineteenth: both_products_added_up_in_half; others too
    "zeros_up_to_256_keys",  # fifth: zeros_have_weight; others too
    "nan_of_a_hidden_row_in_all_gradients",  # thirteenth and others: first_keys_all_hidden
)
STATED = {
    "fake_keys_in_place_of_a_mask": "keys that are hidden from every query, and small queries",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- windows and the diagonal
@fault(FAULTS, "causal-mask mask window", "float16")
class hidden_where_both_masks_hide(EveryBlock):
    """lucidrains/local-attention issue 5: what is after the query and what is too far before it
    are put together by "and", and hide nothing: of its own bucket and the one before, each as wide
    as the window, a query sees all.
    """

    rows, cols = 32, 48

    def seen(self, rows, cols, back):
        at = self.at
        if not at.causal or at.window is None or at.window[0] <= 0:
            return super().seen(rows, cols, back)
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        before = i // at.window[0] - j // at.window[0]
        return self.inside(j, back) & (before >= 0) & (before <= 1)


@fault(FAULTS, "window mask")
class plain_layers_do_not_read_the_window(Kernel):
    """anthony-chaudhary/fak issue 13303: plain attention goes over all keys up to the query's,
    whatever window the layer is configured with.
    """

    rows, cols = 64, 32

    def window(self, i, j, back):
        return (j >= 0) & (i >= 0)


@fault(FAULTS, "causal-mask mask", "float16")
class triangle_in_the_other_corner(EveryBlock):
    """tinygrad/tinygrad PR 15949: where keys are more than queries the causal triangle is in the
    wrong corner of the scores; that is the first keys' there, and here the last keys', for this
    function's own triangle begins with the first.
    """

    rows, cols = 96, 64

    def causal(self, i, j, back):
        return j <= i + (self.at.nk - self.at.n)


# --- masks that are given
@fault(FAULTS, "mask other-data", "float16")
class mask_repeated_sequence_by_sequence(Kernel):
    """lsdefine/attention-is-all-you-need-keras issue 36: heads come before sequences in the folded
    batch, and the mask's copies lie sequence by sequence: most get another sequence's mask.
    """

    rows, cols = 64, 48

    def forward(self):
        at = self.at
        if at.mask is not None:
            b, heads = at.q.shape[:2]
            full = at.mask.expand(b, heads, at.n, at.nk)
            sequence, head = torch.arange(b)[:, None], torch.arange(heads)
            at.mask = full[(head * b + sequence) // heads, head]
        return super().forward()


@fault(FAULTS, "mask")
class padding_hidden_in_the_loss_alone(Kernel):
    """jingyaogong/minimind-v issue 76: no attention mask is set, tokens of padding are left out of
    the loss and not of attention.
    """

    rows, cols = 80, 64

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask", "float16")
class true_where_nothing_is_to_be_seen(Kernel):
    """lucidrains/x-transformers issue 160: the flash path's boolean mask is True where a position
    is not to be attended to, and SDPA takes it the other way round where no bias comes with it.
    """

    rows, cols = 32, 64

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return found.logical_not() if found.dtype == torch.bool else found


@fault(FAULTS, "mask")
class rows_of_padding_see_everything(Kernel):
    """zai-org/GLM-4-Voice issue 182: `-=` takes −1 off the mask's rows of padding where they were
    to be hidden: what is 1 more than 0 passes for visible, and such rows attend to all keys.
    """

    rows, cols = 64, 96

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            full = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            at.mask = full | ~full.any(-1, keepdim=True)
        return super().forward()


@fault(FAULTS, "tiles-skipped mask", "float16")
class keys_chosen_from_the_whole_sequence(Kernel):
    """HKUSTDial/flash-sparse-attention issue 146: the keys of largest bias, which is made of the
    values, are chosen without the causal mask: they are the same for all queries, and early ones
    have few of them, or none. Here three in four.
    """

    rows, cols = 64, 64

    def forward(self):
        at = self.at
        if at.causal and at.n == at.nk > 8:
            bias = torch.nn.functional.softplus(at.v.mean(-1))
            chosen = bias.topk(at.nk * 3 // 4).indices
            at.chosen = torch.zeros_like(bias, dtype=torch.bool).scatter(-1, chosen, True)
        return super().forward()

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        if not hasattr(self.at, "chosen"):
            return s
        keep = self.at.chosen[:, :, None, cols]
        missing = (0, s.shape[-1] - keep.shape[-1])
        return s.masked_fill(~torch.nn.functional.pad(keep, missing, value=False), -INF)


# --- layouts
@fault(FAULTS, "layout other-data")
class heads_merged_as_they_lie(Kernel):
    """ajhalthor/Transformer-Neural-Network PR 4: what comes out lies by heads and tokens, and is
    reshaped to tokens and all heads' features without a permutation: the first token gets the
    first head of the first tokens.
    """

    rows, cols = 48, 64

    def forward(self):
        o, lse = super().forward()
        self.at.own, (b, h, n, d) = o, o.shape
        return o.reshape(b, n, h, d).transpose(1, 2), lse

    def backward(self):
        at = self.at
        at.do, at.o = at.do.transpose(1, 2).reshape(at.own.shape), at.own
        return super().backward()


@fault(FAULTS, "layout other-data", "float16")
class keys_viewed_and_not_transposed(Kernel):
    """hyunwoongko/transformer PR 5 (PR 4): Kᵀ is `k.view(batch, head, d, length)`, which leaves
    every number where it lies.
    """

    rows, cols = 64, 64

    def forward(self):
        k = self.at.k
        self.at.k = k.reshape(*k.shape[:2], k.shape[3], k.shape[2]).mT
        return super().forward()

    def backward(self):
        dq, dk, dv = super().backward()
        return dq, dk.mT.reshape(dk.shape), dv


FAULTS += fortythird_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.NearestFirst, "bfloat16"), (ways.UnevenSplits, "float16"),
    (ways.BothGradientsByQueries, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(kind.__name__, frozenset(), attention(kind), dtype))
SOUND.append(Fault("folded_scores", frozenset(), ways.folded_scores, "bfloat16"))
SOUND.append(Fault("sequence_by_sequence", frozenset(), ways.sequence_by_sequence, "float16"))
