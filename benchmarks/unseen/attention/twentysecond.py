"""The twenty-second set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, maxima, layouts and ends are here; precision and the backward pass in
twentysecond_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentysecond --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentysecond_kernel as ways
from benchmarks.unseen.attention import twentysecond_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "nothing_taken_off_the_scores",  # ninth: ten_for_the_maximum
    "values_of_freed_pages_are_not_numbers",  # twentieth: padding_of_values_is_not_a_number
    "unpadded_kernel_for_padded_keys",  # fifth: zeros_have_weight
    "dot_products_added_up_in_half",  # thirteenth: scores_added_up_in_half
    "sum_in_nats_and_maximum_in_bits",  # twentieth: maximum_in_nats_and_sum_in_bits
    "gradients_grow_in_the_operands_fp8",  # eighteenth: gradients_through_e5m2
    "delta_of_products_in_16_bits",  # eighth: delta_of_low_products
    "queries_and_do_by_one_scale_for_32_rows",  # twelfth: grad_scores_in_mxfp8
    "sums_begin_where_the_head_before_ended",  # eleventh: workspace_of_the_sequence_before
    "partial_key_gradients_of_query_chunks",  # twenty-first: partial_key_gradients_of_every_head_…
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks, maxima
@fault(FAULTS, "causal-mask", "float16")
class first_stage_past_the_diagonal(ForwardAlone):
    """triton-lang/triton PR 8853: tiles have more keys than queries: the loop that hides nothing
    ends with whole blocks of keys, beyond the tile's first query, and the loop along the diagonal
    begins at that query.
    """

    rows, cols = 32, 64

    def key_blocks(self, rows):
        if not self.at.causal:
            return super().key_blocks(rows)
        whole = [slice(i, i + self.cols) for i in range(0, rows.start, self.cols)]
        return [*whole, slice(rows.start, rows.start + self.cols)]

    def causal(self, i, j, back):
        if int(j[0, 0]) < int(i[0, 0]):
            return (j >= 0) & (i >= 0)
        return super().causal(i, j, back)


@fault(FAULTS, "causal-mask")
class columns_of_the_fp4_product_masked_as_they_lie(ForwardAlone):
    """hao-ai-lab/FastVideo PR 1506: the FP4 product leaves columns of 32 in an order of its own,
    bits 1 and 3 and bits 2 and 4 of their numbers exchanged, which the causal mask does not undo.
    """

    def causal(self, i, j, back):
        return ((j & ~30) | ((j & 24) >> 2) | ((j & 6) << 2)) <= i


@fault(FAULTS, "rescale split-merge", "float16")
class cut_tiles_by_their_own_maximum(ForwardAlone):
    """carlushuang/gcnasm PR 21: in tiles that the causal mask cuts, the tile's own maximum is taken
    off, and not the one so far, which all else goes by.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        cut = self.at.causal and cols.stop > rows.start + 1
        top = s.amax(-1, keepdim=True) if cut else new
        a = torch.exp2(m - torch.where(new == -INF, 0.0, new))
        p = torch.exp2(s - torch.where(top == -INF, 0.0, top))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "window causal-mask unwritten")
class no_window_is_a_window_of_minus_one(ForwardAlone):
    """NVIDIA/TransformerEngine issue 3528: a causal call without a window passes −1 for its left
    side, and that is taken for a bound: keys begin behind the query, and none is left.
    """

    def seen(self, rows, cols, back):
        keep = super().seen(rows, cols, back)
        if not self.at.causal or self.at.window is not None:
            return keep
        i = torch.arange(rows.start, rows.stop)[:, None]
        return keep & (torch.arange(cols.start, cols.stop)[None] >= i + 1)


@fault(FAULTS, "mask")
class offsets_of_the_bias_wrap(ForwardAlone):
    """pytorch/pytorch issue 187227: where a tile's rows of the bias begin, its first query times
    the stride, is computed in 32 bits, and wraps; here in 13.
    """

    def given_mask(self, rows, cols):
        mask, nk = self.at.mask, self.at.nk
        flat = mask.expand(*mask.shape[:-2], self.at.n, nk).flatten(-2)
        begin = rows.start * nk % (1 << 13)
        i = torch.arange(rows.stop - rows.start)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        inside = (i + rows.start < self.at.n) & (j < nk)
        found = flat[..., (begin + i * nk + j).clamp_max(self.at.n * nk - 1)]
        return found & inside if mask.dtype == torch.bool else found.where(inside, 0.0)


@fault(FAULTS, "maximum underflow non-finite masked-row")
class nothing_taken_off_the_scores(ForwardAlone):
    """FluxML/NNlibCUDA.jl issue 67: cuDNN's fast softmax does not take off the maximum: scores far
    below zero give weights of 0, and 0 / 0.
    """

    def maximum(self, m, s):
        return torch.zeros_like(m)

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        if self.at.sinks is not None and first:
            return torch.zeros_like(m), torch.exp2(m), acc
        return torch.zeros_like(m), l, acc

    def finish(self, m, l, acc, rows):
        return self.at.low(acc / l), m + l.log2()


@fault(FAULTS, "nan-escapes non-finite")
class values_of_freed_pages_are_not_numbers(ForwardAlone):
    """vllm-project/vllm PR 30887: pages before the window are freed, and what lies there may be
    NaN: keys there are hidden, values are multiplied by weights of 0.
    """

    def row(self, rows):
        left = self.at.window[0] if self.at.window is not None else -1
        self.memory["begin"] = max(0, rows.start - left) // 16 * 16 if left >= 0 else 0
        return super().row(rows)

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v":
            return found
        freed = torch.arange(part.start, part.stop)[:, None] < self.memory["begin"]
        return found.masked_fill(freed, math.nan)


# --- sequences, ends
@fault(FAULTS, "other-data unwritten layout", "float16")
class sequences_one_row_apart(ForwardAlone):
    """triton-lang/triton issue 6242: rows of a sequence and a head begin at z + h N, where it is
    (z H + h) N: a sequence reads and writes those of the first one, z rows further on.
    """

    def forward(self):
        at = self.at
        own, (b, heads) = (at.q, at.k, at.v), at.q.shape[:2]

        def begins(n):
            z, h = torch.arange(b)[:, None, None], torch.arange(heads)[None, :, None]
            return (z + h * n + torch.arange(n)).clamp_max(b * heads * n - 1)

        at.q, at.k, at.v = (x.flatten(0, 2)[begins(x.shape[2])] for x in own)
        o, lse = super().forward()
        at.q, at.k, at.v = own
        found = torch.zeros_like(o).flatten(0, 2)
        for z in range(b):
            found[begins(at.n)[z].flatten()] = o[z].flatten(0, 1)
        return found.view_as(o), lse


@fault(FAULTS, "key-tail")
class keys_by_whole_division_among_splits(ForwardAlone):
    """tile-ai/TileOPs PR 101: each split takes as many keys as a division without remainder gives,
    and the remainder belongs to none; here of eight splits.
    """

    def inside(self, j, back):
        return j < self.at.nk // 8 * 8


@fault(FAULTS, "unwritten ragged")
class columns_by_whole_division_among_warps(ForwardAlone):
    """vllm-project/vllm PR 34570: each of four warps has as many pieces of 16 columns of O as a
    division without remainder gives: what is past a multiple of 64 is never written.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        whole = o.shape[-1] // 64 * 64
        return torch.cat([o[..., :whole], torch.zeros_like(o[..., whole:])], -1), lse


@fault(FAULTS, "padding ragged")
class unpadded_kernel_for_padded_keys(ForwardAlone):
    """ROCm/rocm-libraries PR 10309: the kernel for lengths that are multiples of the tile is taken
    for others as well: zeros past the last key are never hidden.
    """

    def inside(self, j, back):
        return j >= 0


@fault(FAULTS, "unwritten")
class sequences_as_short_as_the_shortest(ForwardAlone):
    """vllm-project/vllm PR 28670: the length below which sequences are skipped, meant for those
    of one token, is that of the shortest one: it is skipped, and here all are of its length.
    """

    def forward(self):
        o, lse = super().forward()
        return torch.zeros_like(o), lse


FAULTS += twentysecond_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.SplitsMergedInOrder, "bfloat16"), (ways.RescaledWhereItGrew, "float16"),
    (ways.KeysOutside, "bfloat16"), (ways.OffsetMaximum, "float16"),
    (ways.RowSumAsAColumn, "bfloat16"), (ways.KeyGradientsInTwoSweeps, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("even_and_odd_keys", frozenset(), ways.even_and_odd_keys, "bfloat16"),
    Fault("queries_by_sevens", frozenset(), ways.queries_by_sevens, "float16"),
]
