"""The twenty-ninth set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Kernels that are trained with are what it looks at; masks and tiles are here, precision and
the backward pass in twentyninth_scores.py. All err more than 1.5 × their sound twin on an ordinary
input (`python -m benchmarks.unseen.draw attention.twentyninth --check`).
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentyninth_kernel as ways
from benchmarks.unseen.attention import twentyninth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "every_ring_step_goes_back_over_its_own_keys",  # fifth: ring_of_stale_keys
    "gradients_converted_towards_zero",  # others: gradients_cut_where_they_are_scaled
    "bias_of_the_first_sequence_on_the_way_back",  # others: bias_of_the_first_pair, in that pass
    "do_of_dk_and_dv_by_the_strides_of_out",  # others: do_by_the_strides_of_out
    "dk_at_the_pitch_of_query_heads",  # others: dk_at_query_heads
    "selected_blocks_not_causal_on_the_way_back",  # others: diagonal_not_masked_on_the_way_back
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask mask")
class causal_by_places_within_buckets(Kernel):
    """lucidrains/ring-attention-pytorch issue 11: striped causal attention is right with one bucket
    for a machine alone: every pair of buckets, here of 64 tokens, is hidden as if it were one.
    """

    def causal(self, i, j, back):
        return super().causal(i, j, back) & (j % 64 <= i % 64)


# --- tiles
@fault(FAULTS, "other-data", "float16")
class heavy_chunks_read_what_is_no_longer_forwarded(ForwardAlone):
    """tenstorrent/tt-metal PR 41461: chunks of queries are dealt in pairs, a light and a heavy one,
    and keys are forwarded by the chunk's number in place of the work that is done: past what the
    light one needs, the heavy one reads the tile that arrived last.
    """

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        state, every = self.begin(q), self.key_blocks(rows)
        other = (-(-self.at.n // self.rows) - 1) * self.rows - rows.start
        sent = len(self.key_blocks(slice(other, other + self.rows)))
        for number, cols in enumerate(every):
            there = every[min(number, sent - 1)]
            k, v = (self.load_key(x, getattr(self.at, x), there) for x in "kv")
            state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
        return self.finish(*state, rows)


FAULTS += twentyninth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.SmallTiles, "bfloat16"), (ways.FiveParts, "float16"), (ways.FromTheMiddle, "bfloat16"),
    (ways.FeaturesByThirtyTwo, "float32"), (ways.KeyGradientsOfPairs, "float16"),
    (ways.NegatedMaximum, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("one_head_at_a_time", frozenset(), ways.one_head_at_a_time, "bfloat16"),
    Fault("keys_by_their_remainder", frozenset(), ways.keys_by_their_remainder, "float16"),
]
