"""The twentieth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Blocks, heads, pages, splits and the scale are here; precision and the backward pass in
twentieth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentieth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentieth_kernel as ways
from benchmarks.unseen.attention import twentieth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch.nn import functional

AGAIN = (
    "weights_below_the_least_code",  # tenth: weights_in_e4m3_from_0_to_1
    "products_in_tf32_unless_told",  # sixth: tf32_everywhere
    "lse_in_the_operands_type",  # seventeenth: maximum_and_sum_saved_in_bf16
    "maximum_in_nats_and_sum_in_bits",  # seventh: lse_in_nats_read_in_base_2
    "lse_taken_for_packed",  # thirteenth: lse_by_tokens_read_by_heads
    "delta_as_if_all_lay_in_order",  # nineteenth: delta_of_do_by_the_strides_of_out
    "backward_kernel_by_the_keys_width",  # fifth: value_as_wide_as_the_key
    "dq_read_at_offsets_of_wider_tiles",  # sixth: dq_read_at_other_tiles
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- blocks and tiles
@fault(FAULTS, "causal-mask mask key-tail", "float16")
class lists_of_the_block_divided_by_the_group(ForwardAlone):
    """pytorch/pytorch PR 171271 (flash-attention PR 2098): lists of the blocks of keys to visit are
    read at the number of the block of queries divided by the heads of a group, as if those were
    packed into the rows; they are not. Here the lists are those of the causal mask.
    """

    rows, cols = 32, 32

    def key_blocks(self, rows):
        if self.at.causal:
            block = rows.start // self.rows // self.at.groups
            rows = slice(block * self.rows, (block + 1) * self.rows)
        return super().key_blocks(rows)


@fault(FAULTS, "weights-disagree other-data", "float16")
class halves_stored_over_scores_unread(ForwardAlone):
    """kekzl/imp PR 539: weights in half go where the scores lie in float: those of row 2r + 1 over
    the second half of row r's scores, which are exponentiated later. Two halves of weights are a
    float next to 0. The maximum and the sum were made before.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        l = self.add_row(l, a, p)
        high, wide = p.shape[-2] // 2, p.shape[-1] // 2
        p[..., :high, wide:] = torch.exp2(-safe)[..., :high, :].clamp_max(2.0**15)
        return new, l, self.add_values(acc, a, p, v)


@fault(FAULTS, "nan-escapes non-finite padding ragged")
class padding_of_values_is_not_a_number(ForwardAlone):
    """vllm-project/vllm PR 53856: past a sequence's end its last page of V holds what was there
    before. Weights there are 0, and so is what they are multiplied by, unless that is NaN.
    """

    def load_key(self, name, x, part):
        return load(x, part, math.nan) if name == "v" else super().load_key(name, x, part)


@fault(FAULTS, "other-data layout", "float16")
class tiles_across_a_pages_end(ForwardAlone):
    """ai-bond/flash-attention-v100 issue 41: where a tile of keys begins is looked up in the table
    of pages, its later rows follow in memory. Tiles of 160 keys do not divide pages of 256; here
    they are of 40 and 64, and pages lie in the order of the last to the first.
    """

    cols = 40

    def load_key(self, name, x, part):
        pages = -(-x.shape[2] // 64)
        whole = functional.pad(x, (0, 0, 0, pages * 64 - x.shape[2]))
        pool = whole.unflatten(2, (pages, 64)).flip(2).flatten(2, 3)
        at = (pages - 1 - part.start // 64) * 64 + part.start % 64
        return load(pool, slice(at, at + part.stop - part.start))


# --- heads, splits, the scale
@fault(FAULTS, "unwritten", "float16")
class heads_numbered_by_the_group_alone(ForwardAlone):
    """HazyResearch/HipKittens PR 22: a program's head is its number modulo the heads of a group,
    times those, and the quotient: right where there are as many groups as heads in one. Else some
    heads are computed by nobody, here O is 0 there.
    """

    def forward(self):
        o, lse = super().forward()
        each, many = self.at.groups, o.shape[1]
        done = [x % each * each + x // each for x in range(many)]
        written = torch.tensor([each == 1 or head in done for head in range(many)])
        return o * written.view(1, -1, 1, 1), lse


@fault(FAULTS, "split-merge other-data", "float16")
class statistics_of_sequences_overlap(ForwardAlone, Parts):
    """flashinfer-ai/flashinfer PR 3393: where a sequence's maxima and sums of its splits begin is
    counted in blocks of queries, not in queries: the next one's begin in the midst of them. Here
    blocks are of four, and the last sequence stores last.
    """

    def forward(self):
        o, lse = self.row(slice(0, self.at.n))
        return o, lse

    def merge(self, outs, lses):
        parts, many, heads, n, _ = lses.shape
        step = -(-n // 4)
        room = torch.zeros(parts, heads, many * n, 1)
        for b in range(many):
            room[:, :, b * step : b * step + n] = lses[:, b]
        kept = [room[:, :, b * step : b * step + n] for b in range(many)]
        return super().merge(outs, torch.stack(kept, 1))


@fault(FAULTS, "split-merge non-finite nan-escapes masked-row")
class lse_of_nothing_is_plus_infinity(ForwardAlone, Parts):
    """Dao-AILab/flash-attention PR 978: of queries that see no key lse is +∞, and what merges parts
    by it gets NaN from parts that are empty.
    """

    def merge(self, outs, lses):
        return super().merge(outs, torch.where(lses == -INF, INF, lses))


@fault(FAULTS, "scale")
class layer_number_not_multiplied_back(Kernel):
    """NVIDIA/Megatron-LM PR 848: with scaling by layers the scores are divided by the layer's
    number, which the softmax is to multiply them by again; the scale it is given is another. Here
    it is the second layer.
    """

    def __init__(self, **at):
        super().__init__(**at)
        self.at.scale = self.at.scale / 2


FAULTS += twentieth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.ContiguousSplits, "bfloat16"), (ways.MaximumAndSum, "float16"),
    (ways.NaturalLogarithms, "bfloat16"), (ways.QueriesInTwoHalves, "float16"),
    (ways.LongKeyTiles, "float16"), (ways.TreeSums, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("one_sequence_at_a_time", frozenset(), ways.one_sequence_at_a_time, "bfloat16"),
    Fault("keys_in_a_shuffled_order", frozenset(), ways.keys_in_a_shuffled_order, "float16"),
]
