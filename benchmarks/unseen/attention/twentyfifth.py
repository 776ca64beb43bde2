"""The twenty-fifth set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, windows, heads, scales and caps are here; precision and the backward pass in
twentyfifth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentyfifth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentyfifth_kernel as ways
from benchmarks.unseen.attention import twentyfifth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "unmasked_stage_ends_with_a_wider_block",  # twenty-first: unmasked_trips_of_whole_tiles
    "window_lost_where_no_mask_is_made",  # thirteenth and others: window_not_passed_on
    "exponential_emulated_to_degree_three",  # others: exponential_by_a_polynomial
    "exponentials_summed_in_their_own_type",  # others: row_summed_key_by_key_in_its_own_type
    "products_stored_before_the_softmax",  # eighteenth: scaled_scores_stored_first
    "products_past_the_largest_half",  # a grid of an earlier set: half_scores_unscaled
    "backward_pass_that_knows_no_cap",  # others: slope_of_the_cap_forgotten
    "query_scaled_in_half_for_dq",  # others: keys_scaled_in_bf16_on_the_way_back
    "tail_of_dv_over_the_next_head",  # twenty-first: rows_past_the_end_over_the_next_sequence
    "rows_past_the_end_are_no_numbers_on_the_way_back",  # others: lse_not_set_past_the_end
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- maxima and masks
@fault(FAULTS, "rescale maximum")
class last_tile_by_its_own_maximum(ForwardAlone):
    """carlushuang/gcnasm PR 21: in the epilogue of the causal kernel the last tile's weights are
    taken by that tile's maximum, though the running one, by which the sums go on, is larger.
    """

    def row(self, rows):
        self.memory["last"] = self.key_blocks(rows)[-1]
        return super().row(rows)

    def online(self, m, l, acc, s, v, rows, cols):
        if not self.at.causal or cols != self.memory["last"]:
            return super().online(m, l, acc, s, v, rows, cols)
        own, new = s.amax(-1, keepdim=True), self.maximum(m, s)
        safe, own = (torch.where(x == -INF, 0.0, x) for x in (new, own))
        p, a = torch.exp2(s - own), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "causal-mask", "float16")
class unmasked_stage_ends_with_a_wider_block(ForwardAlone):
    """triton-lang/triton PR 8853: where a tile has fewer queries than keys, the stage without a
    mask ends at a whole block of keys, past the tile's first query.
    """

    rows, cols = 32, 64

    def causal(self, i, j, back):
        first = i // self.rows * self.rows
        return super().causal(i, j, back) | (j < -(-first // self.cols) * self.cols)


@fault(FAULTS, "causal-mask", "float16")
class causal_by_places_of_balanced_chunks(Kernel):
    """AI-Hypercomputer/maxtext PR 4537: tokens are dealt out to devices in chunks from both ends,
    and the mask compares where they lie in place of where they stood.
    """

    def causal(self, i, j, back):
        size = -(-max(self.at.n, self.at.nk) // 4)
        place = torch.tensor([0, 2, 3, 1])

        def lies(x):
            return place[(x // size).clamp_max(3)] * size + x % size

        return lies(j) <= lies(i)

    def key_blocks(self, rows):
        causal, self.at.causal = self.at.causal, False
        every = super().key_blocks(rows)
        self.at.causal = causal
        return every

    def query_blocks(self, cols):
        causal, self.at.causal = self.at.causal, False
        every = super().query_blocks(cols)
        self.at.causal = causal
        return every


@fault(FAULTS, "causal-mask layout", "float16")
class keys_repeated_along_the_sequence(Kernel):
    """PrimeIntellect-ai/prime-rl PR 2681, review: for shared key heads keys and values are repeated
    along the dimension of the sequence, and the causal mask counts every copy.
    """

    def causal(self, i, j, back):
        return j * self.at.groups <= i

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        if not self.at.causal:
            return s
        i = torch.arange(rows.start, rows.stop)[:, None]
        copies = i - torch.arange(cols.start, cols.stop)[None] * self.at.groups + 1
        return s + copies.clamp(1, self.at.groups).float().log2()


# --- windows
@fault(FAULTS, "window")
class window_lost_where_no_mask_is_made(Kernel):
    """unslothai/unsloth PR 8253: without FlashAttention and xFormers nothing carries the window, as
    training makes no mask: every query sees its whole past.
    """

    def window(self, i, j, back):
        return (i >= 0) & (j >= 0)


@fault(FAULTS, "window")
class window_of_both_sides_before_the_query(Kernel):
    """huggingface/transformers PR 40700: the window counts both sides of a query, of which each has
    a half; all of it is put before the query.
    """

    def window(self, i, j, back):
        return super().window(i, j, back) | ((j >= i - 2 * self.at.window[0]) & (j <= i))


# --- heads
@fault(FAULTS, "key-heads")
class heads_padded_apart_for_the_exchange(Kernel):
    """vllm-project/vllm-omni PR 5716: query and key heads are each padded to a multiple of four
    devices, so that as many queries no longer share a key; heads of the padding are zero.
    """

    def key_head(self, head: int, heads: int) -> int:
        queries, keys = (-(-x // 4) * 4 for x in (heads, heads // self.at.groups))
        return head // max(1, queries // keys)

    def spread(self, x):
        heads, zero = x.shape[1] * self.at.groups, torch.zeros_like(x[:, 0])
        found = [self.key_head(head, heads) for head in range(heads)]
        return torch.stack([x[:, f] if f < x.shape[1] else zero for f in found], 1)

    def group(self, grad):
        heads, total = grad.shape[1], torch.zeros_like(grad[:, :: self.at.groups])
        for head in range(heads):
            own = self.key_head(head, heads)
            if own < total.shape[1]:
                total[:, own] += grad[:, head]
        return total


# --- scales, caps, values
@fault(FAULTS, "scale", "float16")
class scale_of_the_split_width(Kernel):
    """huggingface/transformers PR 43481: eager attention makes the scale of the width that it
    finds, which tensor parallelism has halved, and does not look at the one it is given.
    """

    def scaled(self, s, rows, cols, back):
        return super().scaled(s, rows, cols, back) * 2**0.5

    def backward(self):
        dq, dk, dv = super().backward()
        return dq * 2**0.5, dk * 2**0.5, dv

    def slope(self, q, k):
        return super().slope(q * 2**0.5, k)


@fault(FAULTS, "scale")
class unscaled_where_the_fused_kernel_does_not_fit(ForwardAlone):
    """mlc-ai/mlc-llm PR 3426: the path that is taken where the fused kernel is not, here for widths
    other than 64 and 128, is called with a scale of 1.
    """

    def scaled(self, s, rows, cols, back):
        s = super().scaled(s, rows, cols, back)
        return s if self.at.q.shape[-1] in (64, 128) else s / self.at.scale


@fault(FAULTS, "softcap", "float16")
class cap_multiplied_where_it_divides(ForwardAlone):
    """microsoft/onnxruntime PR 21683, review: scores are multiplied by the cap, before the tangent
    is taken, and not divided.
    """

    def cap(self, s, back):
        c = self.at.softcap
        nats = s * 0.6931471805599453
        return c * torch.tanh(nats * c) / 0.6931471805599453 if c else s


@fault(FAULTS, "value-factor unnormalized")
class factor_of_values_never_read(Kernel):
    """NVIDIA-NeMo/Megatron-Bridge PR 4155: V's factor of 0.707 is stored and never used: what comes
    out is 1.414 times as large as it should be.
    """

    def finish(self, m, l, acc, rows):
        return super().finish(m, l, acc / 0.707, rows)

    def backward(self):
        self.at.do, self.at.o = self.at.do / 0.707, self.at.o * 0.707
        return super().backward()


FAULTS += twentyfifth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.TallTiles, "float16"), (ways.FiveParts, "bfloat16"), (ways.TwoPasses, "bfloat16"),
    (ways.CompensatedSums, "bfloat16"), (ways.KeysFromTheMiddle, "float16"),
    (ways.GradientsByHalves, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("keys_shuffled", frozenset(), ways.keys_shuffled, "bfloat16"),
    Fault("sequences_one_by_one", frozenset(), ways.sequences_one_by_one, "float16"),
]
