"""The twenty-first set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, caps, sinks, layouts and ends are here; precision and the backward pass in
twentyfirst_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentyfirst --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentyfirst_kernel as ways
from benchmarks.unseen.attention import twentyfirst_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import attention, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "half_whatever_precision_was_asked",  # eighth: keys_and_queries_in_fp16
    "exponential_in_steps_of_half",  # ninth: exponential_for_16_bits
    "scores_stored_before_they_are_upcast",  # eighteenth: scaled_scores_stored_first
    "partial_key_gradients_of_every_head_in_16_bits",  # second: group_sum_bf16
    "dq_of_every_ring_step_in_bf16",  # fifth: dq_in_bf16_at_every_hop
    "dq_up_to_the_tiles_first_query",  # sixteenth: dq_without_the_end_of_the_diagonal
    "default_scale_after_padding_on_the_way_back",  # thirteenth: backward_scale_of_the_padded_width
    "lse_by_sequences_read_by_heads",  # thirteenth: lse_by_tokens_read_by_heads
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks, caps, sinks
@fault(FAULTS, "causal-mask", "float16")
class unmasked_trips_of_whole_tiles(ForwardAlone):
    """NVIDIA/cutlass PR 2477: how many trips need no mask is counted as if the length were a
    multiple of the tile: where it is none, the first block of keys on the diagonal is one of them.
    """

    rows, cols = 64, 32

    def causal(self, i, j, back):
        keep = super().causal(i, j, back)
        first = i // self.rows * self.rows + self.cols
        return keep | (j < first) if self.at.n % self.rows else keep


@fault(FAULTS, "tiles-skipped key-tail causal-mask")
class lists_of_blocks_by_packed_tiles(ForwardAlone):
    """pytorch/pytorch PR 171271: where heads share keys, the list of a tile's blocks is looked up
    at the tile's number divided by the share, though queries of a group are not packed.
    """

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        high = (rows.start // self.rows // self.at.groups + 1) * self.rows
        return [c for c in every if c.start < high] if self.at.causal else every


@fault(FAULTS, "mask ragged", "float16")
class mask_shadowed_in_ragged_tiles(ForwardAlone):
    """ggml-org/llama.cpp PR 17606: where a tile ends past the mask, it is loaded with a check of
    bounds into a variable that hides the one which is added.
    """

    cols = 48

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if rows.stop > self.at.n or cols.stop > self.at.nk:
            self.at.mask = None
        s = super().hide(s, rows, cols, back)
        self.at.mask = mask
        return s


@fault(FAULTS, "softcap scale", "float16")
class cap_read_from_a_count_of_tiles(ForwardAlone):
    """huggingface/candle PR 3233: the caller's structure has no field for the cap, and the kernel
    reads the next one, a count of tiles, as a float: a subnormal number caps all scores.
    """

    def cap(self, s, back):
        cap = 4 * 2.0**-149
        return cap * torch.tanh(s / cap)


@fault(FAULTS, "sinks layout other-data", "float16")
class gate_of_sinks_by_padded_lse(ForwardAlone):
    """pytorch/pytorch issue 187872: sinks are applied after the kernel, by lse, which AOTriton
    gives back by sequences and heads, and which is read by heads and tokens of all sequences.
    """

    def begin(self, q, first=True):
        return super().begin(q, False)

    def forward(self):
        o, lse = super().forward()
        if self.at.sinks is None:
            return o, lse
        b, heads, n, _ = lse.shape
        read = lse.contiguous().view(heads, b, n, 1).transpose(0, 1) * math.log(2)
        sinks = self.at.sinks.float().view(1, -1, 1, 1)
        return self.at.low(o * torch.sigmoid(read - sinks)), lse


# --- sequences, ends
@fault(FAULTS, "other-data layout")
class pages_begin_where_the_sequence_does(ForwardAlone):
    """ROCm/composable_kernel PR 1688: where keys lie in pages, each sequence's own, the number of
    tokens before the sequence is added to where they begin: here sequences follow one another, and
    the first one the last.
    """

    def load_key(self, name, x, part):
        many = x.shape[0]
        return super().load_key(name, x[torch.arange(many) * 2 % many], part)


@fault(FAULTS, "other-data ragged")
class rows_past_the_end_over_the_next_sequence(ForwardAlone):
    """ggml-org/llama.cpp PR 7465: nothing keeps a tile's rows past the last query from being
    written: they are the next sequence's first.
    """

    rows = 16

    def forward(self):
        done = [self.row(rows) for rows in blocks(self.at.n, self.rows)]
        every, lse = (torch.cat(x, 2) for x in zip(*done, strict=True))
        o, past = every[:, :, : self.at.n].clone(), every[:-1, :, self.at.n : 2 * self.at.n]
        o[1:, :, : past.shape[2]] = past
        return o, lse[:, :, : self.at.n]


FAULTS += twentyfirst_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.OddTiles, "bfloat16"), (ways.SevenParts, "bfloat16"),
    (ways.ValuesInHalves, "bfloat16"), (ways.ScoresInDouble, "float16"),
    (ways.LastQueriesFirst, "bfloat16"), (ways.GradientsInDouble, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("keys_reversed", frozenset(), ways.keys_reversed, "bfloat16"),
    Fault("queries_in_rounds", frozenset(), ways.queries_in_rounds, "float16"),
]
