"""The thirtieth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, tiles and caps are here; precision and the backward pass in thirtieth_scores.py.
All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.thirtieth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtieth_kernel as ways
from benchmarks.unseen.attention import thirtieth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "exponential_of_a_line_for_every_power",  # others: exponential_of_degree_one
    "maximum_and_reciprocal_kept_in_bf16",  # others: maximum_and_sum_saved_in_bf16
    "other_corner_on_the_way_back",  # others: backward_diagonal_from_the_end
    "dq_of_packed_sequences_read_as_if_padded",  # others: dq_read_at_offsets_of_wider_tiles
    "weights_of_dv_outside_the_window",  # others: windows_not_masked_on_the_way_back
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks and tiles
@fault(FAULTS, "mask causal-mask nan-escapes non-finite")
class later_keys_set_to_plus_infinity(ForwardAlone):
    """lucidrains/memory-compressed-attention issue 2: scores of later keys are filled with
    `-float('-inf')`, which is +∞.
    """

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        if not self.at.causal:
            return s
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        return s.masked_fill((j > i) & (j < self.at.nk), INF)


@fault(FAULTS, "causal-mask key-tail", "float16")
class key_tiles_per_query_tile_rounded_down(ForwardAlone):
    """ROCm/rocm-libraries PR 10999, review: how far a block of queries reaches is so many whole
    tiles of keys for each block, which is one where 48 keys do not divide 64 queries.
    """

    rows, cols = 64, 48

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        number, each = rows.start // self.rows, self.rows // self.cols
        return every[: (number + 1) * each] if self.at.causal else every


@fault(FAULTS, "mask key-tail split-merge")
class keys_of_other_ranks_never_come_round(ForwardAlone):
    """sgl-project/sglang PR 33353: paths that know nothing of the ring never pass keys and values
    on: every rank's queries, here of two ranks, see its own alone.
    """

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        same = (i >= -(-self.at.n // 2)) == (j >= -(-self.at.nk // 2))
        return super().seen(rows, cols, back) & same


# --- caps
@fault(FAULTS, "softcap", "float16")
class tangent_not_multiplied_by_its_cap(ForwardAlone):
    """microsoft/onnxruntime PR 21683, review: `tanh(scores)` is left as it is where the factor
    behind it is not folded into the exponential's, as it was where the code comes from.
    """

    def cap(self, s, back):
        c = self.at.softcap * LOG2_E
        return torch.tanh(s / c) * LOG2_E if c else s


@fault(FAULTS, "softcap")
class capped_with_log2_e_already_in_the_scale(ForwardAlone):
    """sgl-project/sgl-kernel-xpu PR 491: the scale has log2(e) in it, which has to be undone before
    the tangent; here scores in base 2 meet a cap that is meant for natural ones.
    """

    def cap(self, s, back):
        c = self.at.softcap
        return c * torch.tanh(s / c) if c else s


FAULTS += thirtieth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.TinyTiles, "bfloat16"), (ways.ElevenParts, "float16"), (ways.OddBlocksFirst, "bfloat16"),
    (ways.AllKeysAtOnce, "float16"), (ways.WholePowers, "bfloat16"),
    (ways.FeaturesInHalves, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("sequence_by_sequence", frozenset(), ways.sequence_by_sequence, "bfloat16"),
    Fault("sums_of_two_halves", frozenset(), ways.sums_of_two_halves, "float16"),
]
