"""The thirty-first set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, layouts and scales are here; precision and the backward pass in
thirtyfirst_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.thirtyfirst --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyfirst_kernel as ways
from benchmarks.unseen.attention import thirtyfirst_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "window_in_the_order_before_balancing",  # others: causal_by_places_of_balanced_chunks
    "weights_again_by_exponentials_of_two_halves",  # others: exp_back_half
    "ds_packed_into_halves_towards_zero",  # others: p_and_ds_cut_on_the_way_back
    "do_in_e4m3_by_one_scale",  # others: do_in_mxfp8_along_its_features
    "gradients_stored_at_the_packed_pitch",  # others: dv_rows_at_the_packed_pitch
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask")
class causal_the_other_way_round(Kernel):
    """pytorch/xla PR 8978, review: the condition is turned: a full mask where attention is causal,
    and a causal one where it is not.
    """

    def forward(self):
        self.at.causal = not self.at.causal
        return super().forward()


@fault(FAULTS, "window mask")
class window_in_the_order_before_balancing(Kernel):
    """AI-Hypercomputer/maxtext PR 4298: chunks of queries are put in another order, so that ranks
    have as much to do, and the window is where they would be without it.
    """

    def window(self, i, j, back):
        each = -(-self.at.n // 4)
        slots = torch.tensor([0, 2, 3, 1])
        chunk = (i // each).clamp_max(3)
        return super().window(slots[chunk] * each + i - chunk * each, j, back)


@fault(FAULTS, "mask")
class mask_taken_for_a_number_of_keys(ForwardAlone):
    """microsoft/onnxruntime issue 18945: a mask is turned to how many keys a row has, as if those
    were its first ones.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if found.dtype != torch.bool:
            return found
        whole = super().given_mask(rows, slice(0, self.at.nk))
        return torch.arange(cols.start, cols.stop) < whole.sum(-1, keepdim=True)


# --- layouts
@fault(FAULTS, "layout other-data")
class views_of_a_fused_projection_at_the_packed_pitch(ForwardAlone):
    """meta-recsys/generative-recommenders issue 583: Q, K and V are views of one projection, and
    are read as if each had its own: the next token's row is the same token's next tensor.
    """

    def forward(self):
        at = self.at
        own = at.q, at.k, at.v
        if at.groups == 1 and ways.alike(*own):
            memory, heads = ways.packed_rows(*own), at.q.shape[1]
            at.q, at.k, at.v = (ways.by_heads(memory[:, o : o + at.n], heads) for o in range(3))
        found = super().forward()
        at.q, at.k, at.v = own
        return found


# --- scores
@fault(FAULTS, "scale")
class default_scale_of_zero(ForwardAlone):
    """SKaiNET-developers/SKaiNET PR 880: a scale of 0 stands for 1/√d where nothing is given, and
    a kernel multiplies by it.
    """

    def scaled(self, s, rows, cols, back):
        return s * 0.0


@fault(FAULTS, "unnormalized")
class output_multiplied_by_the_row_sum(ForwardAlone):
    """Dao-AILab/flash-attention issue 273: what is written down is diag(l) O, not its inverse."""

    def finish(self, m, l, acc, rows):
        return self.at.low(acc * l), m + l.log2()


FAULTS += thirtyfirst_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.LongKeyTiles, "bfloat16"), (ways.ThirteenParts, "float16"), (ways.ByThirds, "bfloat16"),
    (ways.MaximumFirst, "float16"), (ways.EvenAndOddQueries, "bfloat16"),
    (ways.ScaleInTheQuery, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("queries_in_stripes", frozenset(), ways.queries_in_stripes, "bfloat16"),
    Fault("weights_of_a_logarithm", frozenset(), ways.weights_of_a_logarithm, "float16"),
]
