"""The thirty-seventh set of faults of attention: a sample of what public threads report, as they
come, and sound kernels.

Twenty searches were fixed before any result was seen, and all were sent to the corpus of issues and
pull requests: «softmax row max initialization wrong attention kernel», «online softmax rescale
factor bug attention», «attention probabilities cast to half precision loss», «attention accumulator
dtype fp16 overflow inf», «exp2 log2e scale mistake in attention kernel», «attention dQ gradient
wrong atomic add or scale», «attention dK dV gradient wrong grouped query heads sum», «attention
backward delta computation wrong», «attention logsumexp stored wrong shape dtype or value»,
«attention causal offset bottom right alignment bug», «sliding window attention left right off by
one bug», «attention mask boolean additive mask broadcast bug», «alibi slopes or relative position
bias wrong in attention kernel», «attention softcap logits wrong», «attention sink bias wrong
kernel», «attention kernel out of bounds keys not masked tail block», «attention block table page
index wrong kernel», «attention q k int8 or fp8 quantized scores scale wrong», «attention kernel
missing synchronization race shared memory wrong result», «attention scale applied twice or
missing». The first result of every search was gone through, then the second of every one, and so
on, until there were 28: the nineteenth search's eighth. A thread was taken if it tells a numerical
mistake of an attention computation and its cause, or lets one infer it. It was left only if it is
about something else, a feature, a build error or a question; if it tells no cause; if an earlier
set names it, or it is on the very defect of one taken; or if it cannot be written here (vllm PR
945, a bias that is as much too large for all keys; onnxruntime PR 32391, page numbers that are
none).

What is right was set down before anything ran. `AGAIN` names every fault whose mistake an earlier
set has in some form. Masks, windows, heads, scales, sinks and memory are here; precision, the
softmax, races and the backward pass in thirtyseventh_scores.py. All err more than 1.5 × their sound
twin on an ordinary input (`python -m benchmarks.unseen.draw attention.thirtyseventh --check`) but
the one that STATED names, whose inputs it says.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyseventh_kernel as ways
from benchmarks.unseen.attention import thirtyseventh_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor
from torch.nn import functional

AGAIN: tuple[str, ...] = (
    "boolean_mask_filled_with_infinity",  # twelfth: mask_of_booleans_added
    "left_edge_one_further",  # others: window_of_one_key_more
    "sliding_window_on_both_sides",  # others: window_of_one_key_more, window_as_far_ahead
    "scale_of_the_models_width",  # ninth: scale_of_all_heads_together
    "scale_not_passed_on",  # fifteenth, sixteenth: the default scale beside the one given
    "scale_missing",  # eleventh: always_causal_and_not_scaled
    "sinks_dropped_in_the_fused_path",  # eighth and others: sinks_not_used
    "numbers_of_four_pages_alone",  # eighteenth: page_numbers_of_half_the_tokens
    "rest_of_the_last_block_not_masked",  # fifth and others: zeros_have_weight
    "product_of_the_scaled_query_in_half",  # thirty-fourth: query_scaled_and_product_summed_in_half
    "scores_summed_in_half",  # thirteenth and others: Q Kᵀ accumulated in half
    "query_times_log2_e_before_the_product",  # fifth and others: scale_in_the_query
    "softmax_over_the_maps",  # sixteenth, seventeenth: softmax_over_the_queries
    "softmax_over_batch_and_queries",  # those, and thirty-third: softmax_over_all_but_the_batch
    "scale_in_half",  # eighth: scale_cut_in_the_forward_pass
    "second_page_of_a_pair_read_behind_the_first",  # twentieth: tiles_across_a_pages_end
    "zero_of_a_masked_tile_stays_the_maximum",  # eighth: maximum_of_at_least_zero
    "clamp_of_an_empty_row_is_kept",  # eighth: maximum_of_at_least_zero
    "exponentials_of_the_scores_themselves",  # thirty-second: one tile's without the maximum
    "key_gradients_added_up_without_atomics",  # sixteenth: group_added_up_in_a_race
    "rows_past_the_allocation",  # twenty-seventh and others: past_the_end_lies_anything_…
    "statistics_read_before_they_are_stored",  # same defect, other issue, sixth
    "tile_decoded_without_a_barrier",  # same defect, other pull request, eighth and fifteenth
)
STATED = {
    "scale_not_passed_on": "a scale that is not 1/√d",
}
"""Inputs on which alone a fault shows."""
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


class OtherKeys(ForwardAlone):
    """The forward pass reads keys and values at wrong places."""

    def read(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self):
        kept = self.at.k, self.at.v
        self.at.k, self.at.v = (self.read(x) for x in kept)
        found = super().forward()
        self.at.k, self.at.v = kept
        return found


def pages(x: Tensor, size: int) -> Tensor:
    """[B, H, pages, size, d], the last page filled up with zeros."""
    whole: Tensor = functional.pad(x, (0, 0, 0, -x.shape[2] % size))
    return whole.unflatten(2, (-1, size))


# --- masks and windows
@fault(FAULTS, "mask")
class boolean_mask_filled_with_infinity(Kernel):
    """microsoft/onnxscript PR 656 (issue 580): where a boolean mask is False it is filled with −∞
    and stays boolean, so that it is True everywhere, and is added as 1.
    """

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s + torch.ones(1) * LOG2_E
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "window")
class left_edge_one_further(ForwardAlone):
    """zml/zml PR 763: FlashAttention's left window does not count the query's own position, and is
    given the length that does: one key more is seen.
    """

    rows, cols = 64, 32

    def window(self, i, j, back):
        left, right = self.at.window
        return (j >= i - left - 1) & (j <= i + max(right, 0))


@fault(FAULTS, "window", "float16")
class sliding_window_on_both_sides(Kernel):
    """huggingface/transformers issue 39408: the window is passed as (length, length), inclusive:
    with a causal mask it is one key too long, and without one it is as long ahead as well.
    """

    rows, cols = 32, 64

    def window(self, i, j, back):
        left = self.at.window[0] + 1
        return (j >= i - left) & (j <= i + left)


# --- heads
@fault(FAULTS, "other-data", "float16")
class heads_summed(Kernel):
    """awf/functional-transformer issue 8: what heads give is added up instead of put side by
    side: here every head's O is the sum.
    """

    def whole(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand_as(x)

    def forward(self):
        self.at.own, lse = super().forward()
        return self.at.low(self.whole(self.at.own)), lse

    def backward(self):
        self.at.do, self.at.o = self.whole(self.at.do), self.at.own
        return super().backward()


# --- scales
class OtherScale(Kernel):
    """The scale is another one, on the way there and back."""

    def scale(self) -> float:
        raise NotImplementedError

    def forward(self):
        self.at.scale = self.scale()
        return super().forward()


@fault(FAULTS, "scale")
class scale_of_the_models_width(OtherScale):
    """chelsea0x3b/dfdx issue 171: scores are divided by the root of the model's width M where it is
    that of one head, M / H.
    """

    def scale(self):
        return self.at.scale * self.at.q.shape[1] ** -0.5


@fault(FAULTS, "scale", "float16")
class scale_missing(OtherScale):
    """Project-MONAI/GenerativeModels issue 146: the cross attention's scores are not multiplied by
    the scale.
    """

    cols = 32

    def scale(self):
        return 1.0


@fault(FAULTS, "scale")
class scale_not_passed_on(OtherScale):
    """pytorch/torchtitan PR 2173: the model's scale is no argument of the call of attention, which
    takes its default.
    """

    def scale(self):
        return float(self.at.q.shape[-1] ** -0.5)


@fault(FAULTS, "scale", "float16")
class powers_of_two_of_scores_in_nats(ForwardAlone):
    """iree-org/iree PR 16679, review: the query is multiplied by the scale as it was given, not by
    the one with log₂ e in it, and the softmax is of powers of two.
    """

    def scaled(self, s, rows, cols, back):
        return s * self.at.scale


# --- sinks
@fault(FAULTS, "sinks")
class sinks_dropped_in_the_fused_path(Kernel):
    """sgl-project/sglang-jax PR 905: the fused kernel takes sinks and has no lse to apply them
    with: they are silently dropped.
    """

    cols = 48

    def begin(self, q, first=True):
        return super().begin(q, False)


# --- pages, tiles, memory
@fault(FAULTS, "other-data layout")
class second_page_of_a_pair_read_behind_the_first(OtherKeys):
    """hw-native-sys/pypto PR 470, review: two pages are loaded at a time, from the place of the
    first: the second is what lies behind it in the pool. Here pages of 16 keys lie backwards.
    """

    def read(self, x):
        found = pages(x, 16)
        every = torch.arange(found.shape[2])
        seen = torch.where(every % 2 == 1, (every - 2).clamp_min(0), every)
        return found[:, :, seen].flatten(2, 3)[:, :, : x.shape[2]]


@fault(FAULTS, "other-data layout", "float16")
class numbers_of_four_pages_alone(OtherKeys):
    """mirage-project/mirage PR 575: the numbers of pages behind the first four are not loaded, and
    those four are used again; here pages of 32 keys.
    """

    def read(self, x):
        found = pages(x, 32)
        every = torch.arange(found.shape[2])
        return found[:, :, every % 4].flatten(2, 3)[:, :, : x.shape[2]]


@fault(FAULTS, "other-data layout unstable")
class every_thread_writes_the_same_key(OtherKeys):
    """1bit-MONSTER/1bit-MONSTER issue 393: each thread has a key of its own, and all write it to
    the same shared memory: each then reads the last one's K and V. Here 16 threads.
    """

    def read(self, x):
        nk = x.shape[2]
        last = (torch.arange(nk) // 16 * 16 + 15).clamp_max(nk - 1)
        return x[:, :, last]


@fault(FAULTS, "ragged padding other-data", "float16")
class rest_of_the_last_block_not_masked(ForwardAlone):
    """hw-native-sys/simpler PR 72: where the sequence ends within a block of the cache, scores of
    what lies in the rest of it, here another sequence's rows, keep their weight.
    """

    def inside(self, j, back):
        return super().inside(j, back) | (torch.tensor(not back) & (j >= 0))

    def load_key(self, name, x, part):
        missing = part.stop - x.shape[2]
        if missing <= 0 or name not in "kv":
            return super().load_key(name, x, part)
        others = x.roll(1, 0).repeat(1, 1, -(-missing // x.shape[2]), 1)[:, :, :missing]
        return torch.cat([x[:, :, part], others], 2)


FAULTS += thirtyseventh_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.KeysByThrees, "bfloat16"), (ways.InnerTilesFirst, "float16"),
    (ways.EvenAndOddKeys, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("halves_of_the_keys", frozenset(), ways.halves_of_the_keys, "float16"),
    Fault("one_query_at_a_time", frozenset(), ways.one_query_at_a_time, "bfloat16"),
]
