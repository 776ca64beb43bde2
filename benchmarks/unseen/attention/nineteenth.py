"""The nineteenth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, windows, sinks, heads, layouts and ends are here; precision and the backward pass in
nineteenth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.nineteenth --check`).
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import nineteenth_kernel as ways
from benchmarks.unseen.attention import nineteenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault, permuted
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor

AGAIN = (
    "window_of_the_past_alone",  # second: window_one_too_many
    "bias_of_one_head_by_the_stride_of_many",  # eighth: shared_mask_by_query_heads
    "parts_past_a_multiple_of_four",  # eleventh: as_many_parts_as_lanes
    "query_as_if_it_lay_in_order",  # sixteenth: permuted_tensors_read_in_order
    "operands_cast_to_e4m3_at_scale_one",  # first: query_fp8
    "both_products_added_up_in_half",  # fourth: half_product_sums
    "row_summed_key_by_key_in_its_own_type",  # second: row_sum_tiles_bf16
    "dq_added_up_in_16_bits",  # fifth: atomics_in_bf16
    "backward_scores_cast_and_cast_back",  # second: backward_scores_bf16
    "delta_of_do_by_the_strides_of_out",  # eighth: do_by_the_strides_of_out
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks, windows, sinks
@fault(FAULTS, "causal-mask weights-disagree unnormalized", "float16")
class values_wiped_by_the_lane_that_loads_them(ForwardAlone):
    """microsoft/onnxruntime PR 23850: a subgroup's lane loads a row of V for all lanes, and puts 0
    in its place where it lies past what the lane's own query may see. Of the last 16 of 32 queries
    nobody gets the values of their own tile of 16 keys; their weights are in the sum.
    """

    cols = 16

    def online(self, m, l, acc, s, v, rows, cols):
        own = torch.arange(rows.start, rows.stop)[:, None] // 32 * 32
        self.memory["kept"] = (cols.start <= own) if self.at.causal else torch.ones_like(own)
        return super().online(m, l, acc, s, v, rows, cols)

    def add_values(self, acc, a, p, v):
        return super().add_values(acc, a, p * self.memory["kept"], v)


@fault(FAULTS, "window", "float16")
class window_of_the_past_alone(Kernel):
    """microsoft/onnxruntime PR 25927: the window's length does not count the query's own position,
    which models count: it has one key more.
    """

    def window(self, i, j, back):
        left, right = self.at.window
        self.at.window = (left + 1, right)
        keep = super().window(i, j, back)
        self.at.window = (left, right)
        return keep


@fault(FAULTS, "mask other-data")
class bias_of_one_head_by_the_stride_of_many(Kernel):
    """microsoft/onnxruntime PR 28963: a bias that all heads share is stepped through by as many
    heads as queries have from one sequence to the next; here the buffer begins again at its end.
    """

    def given_mask(self, rows, cols):
        mask, heads = self.at.mask, self.at.q.shape[1]
        if mask.dtype != torch.bool and mask.shape[1] == 1:
            many = mask.shape[0]
            self.at.mask = mask[torch.arange(many) * heads % many]
        found = super().given_mask(rows, cols)
        self.at.mask = mask
        return found


@fault(FAULTS, "masked-row non-finite nan-escapes")
class empty_rows_divided_by_their_sum(Kernel):
    """ggml-org/llama.cpp PR 19098: O is divided by the row's sum, and that of a row whose keys are
    all hidden is 0.
    """

    def finish(self, m, l, acc, rows):
        _, lse = super().finish(m, l, acc, rows)
        return self.at.low(acc / l), lse


@fault(FAULTS, "sinks maximum non-finite nan-escapes", "float16")
class sink_beside_a_placeholder(Parts):
    """NVIDIA/TensorRT-LLM PR 19220: the sink is added by the last part of the keys, relative to the
    part's own maximum; where a row sees none of its keys that is still −100 000.
    """

    cols = 16

    def row(self, rows):
        at, outs, lses = self.at, [], []
        q, every = self.load_query("q", at.q, rows), self.key_blocks(rows)
        for part in range(self.parts):
            m, l, acc = self.begin(q, False)
            for cols in every[part :: self.parts]:
                k, v = (self.load_key(x, getattr(at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            if at.sinks is not None and part == self.parts - 1:
                m = torch.where(m == -INF, -1e5, m)
                l = l + torch.exp2(at.sinks.float().view(1, -1, 1, 1) * LOG2_E - m)
            outs.append(acc / torch.where(l == 0, 1.0, l))
            lses.append(m + l.log2())
        o, lse = self.merge(torch.stack(outs), torch.stack(lses))
        return at.low(o), lse


# --- heads, sequences, layouts
@fault(FAULTS, "other-data")
class keys_of_the_first_sequence_for_all(ForwardAlone):
    """ml-explore/mlx PR 4431: the kernel for shared key heads, of long sequences, forgets to step
    to the sequence's own keys and values.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return found[:1].expand_as(found) if self.at.groups > 1 else found


@fault(FAULTS, "other-data layout", "float16")
class keys_offset_by_the_querys_heads(Kernel):
    """jax-ml/jax PR 39521: where the keys of a packed sequence begin is counted in rows as wide as
    all query heads: with shared key heads it is as many sequences further on as heads share one.
    Here the buffer begins again at its end.
    """

    def begins(self, many: int):
        return torch.arange(many) * self.at.groups % many

    def spread(self, x):
        return super().spread(x[self.begins(x.shape[0])])

    def group(self, grad):
        found = super().group(grad)
        placed = torch.zeros_like(found)
        for where, own in zip(self.begins(found.shape[0]), found, strict=True):
            placed[where] = own
        return placed


@fault(FAULTS, "layout other-data")
class query_as_if_it_lay_in_order(ForwardAlone):
    """pytorch/pytorch issue 163597: a kernel that came from MLX takes strides of keys and values,
    and steps through queries by their width, though heads and tokens are exchanged in memory.
    """

    def load_query(self, name, x, part):
        if permuted(x):
            x = x.transpose(1, 2).reshape(x.shape)
        return super().load_query(name, x, part)


@fault(FAULTS, "layout other-data weights-disagree", "float16")
class weights_as_another_instruction_has_them(ForwardAlone):
    """ROCm/rocm-libraries PR 7016: on RDNA3 a tile of weights stays in the registers that Q Kᵀ left
    it in, even keys before odd ones, and the product with V takes 16 keys in their order.
    """

    def add_values(self, acc, a, p, v):
        p = p.unflatten(-1, (-1, 8, 2)).transpose(-1, -2).flatten(-3)
        return super().add_values(acc, a, p, v)


@fault(FAULTS, "unwritten", "float16")
class first_pass_of_two_writes_nothing(ForwardAlone):
    """EricLBuehler/candle PR 73: for long sequences there are two passes over parts of the keys,
    and the first one's store is missing: O is what the second finds, here zeros.
    """

    def forward(self):
        o, lse = super().forward()
        return (torch.zeros_like(o) if self.at.nk > self.cols else o), lse


# --- ends, parts
@fault(FAULTS, "ragged other-data layout", "float16")
class lanes_past_the_width_go_on_reading(ForwardAlone):
    """ohdearquant/lattice issue 1549: each of 32 lanes has four features of a query and of a key,
    and the sum over them is of 128 whatever the width: what follows a row is the next row.
    """

    @staticmethod
    def lanes(x: Tensor, part: slice) -> Tensor:
        b, h, n, d = x.shape
        memory = torch.cat([x.reshape(-1), torch.zeros((part.stop + 1) * d + 128)])
        row = torch.arange(part.start, part.stop)[:, None]
        head = torch.arange(b * h).view(b, h, 1, 1) * (n * d)
        return memory[head + row * d + torch.arange(128)] * (row < n)

    def load_query(self, name, x, part):
        return self.lanes(x, part) if name == "q" else super().load_query(name, x, part)

    def load_key(self, name, x, part):
        return self.lanes(x, part) if name == "k" else super().load_key(name, x, part)


@fault(FAULTS, "unnormalized", "float16")
class rows_left_over_by_the_subgroups(ForwardAlone):
    """openvinotoolkit/openvino PR 24930: a block's rows are dealt out to subgroups, as many to
    each, and the division leaves some over where it has a remainder: here of 16 rows 6 subgroups
    take 2 each, and 4 rows of O are not divided by their sum.
    """

    def finish(self, m, l, acc, rows):
        left = torch.arange(rows.start, rows.stop)[:, None] % 16 >= 12
        o, lse = super().finish(m, l, acc, rows)
        return torch.where(left, self.at.low(acc), o), lse


@fault(FAULTS, "split-merge key-tail lse-other backward-weights", "float16")
class parts_past_a_multiple_of_four(Parts):
    """ml-explore/mlx PR 3875: the second pass takes as many parts at once as there are lanes, and
    leaves out those past the last whole round: here two of six, four at once.
    """

    cols, parts = 16, 6

    def merge(self, outs, lses):
        whole = self.parts // 4 * 4
        return super().merge(outs[:whole], lses[:whole])


FAULTS += nineteenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.FourWarps, "bfloat16"), (ways.LargestBlocksFirst, "float16"),
    (ways.PrefixScan, "bfloat16"), (ways.MaskAsBias, "float16"),
    (ways.SmallQueryTiles, "bfloat16"), (ways.PaddedWithTheLastKey, "float16"),
    (ways.OneLoopOverQueries, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("chunks_weighed_by_their_lse", frozenset(), ways.chunks_weighed_by_their_lse,
                "float16")]  # fmt: skip
