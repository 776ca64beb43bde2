"""The fourteenth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, sinks, heads, tails and memory are here; precision, scales and the backward pass in
fourteenth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.fourteenth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import fourteenth_kernel as ways
from benchmarks.unseen.attention import fourteenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, load
from benchmarks.unseen.attention.thirteenth_kernel import LanesWithOwnMaxima

AGAIN = (
    "first_parts_empty",  # eleventh: two_empty_parts
    "key_gradients_always_in_bf16",  # thirteenth: dq_given_back_in_bf16
    "values_in_half_within_a_block",  # eleventh: values_added_four_keys_at_a_time
    "hidden_by_minus_ten_thousand",  # ninth: hidden_by_a_tiny_number
    "first_heads_gradient_for_the_group",  # seventh: gradient_of_one_head_of_the_group
    "heads_over_the_number_of_key_heads",  # sixth: head_divided_by_key_heads
    "zeros_of_the_last_block_of_64",  # fifth: zeros_have_weight
    "heads_divided_by_the_wrong_count",  # fifth: groups_split_by_the_share
    "values_as_wide_as_keys_in_dq",  # fifth: value_as_wide_as_the_key
    "scores_times_their_tanh",  # sixth: capped_by_itself
    "query_codes_without_their_scale",  # sixth: query_without_its_scale
    "sinks_seeded_at_another_scale",  # sixth: sink_in_another_base
    "heads_by_groups_of_groups",  # sixth: heads_by_the_share_alone
    "few_queries_past_the_last_key",  # sixth: few_queries_read_past_the_end
    "exponentials_summed_in_half",  # sixth: row_sum_grows_in_fp16
    "lse_of_the_first_part",  # sixth: lse_of_the_last_split
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask")
class diagonal_of_the_other_corner(Kernel):
    """NVIDIA/cutlass issue 2336: the causal mask is aligned at another corner than is asked for,
    which shows where there are not as many keys as queries.
    """

    def causal(self, i, j, back):
        return j <= i + self.at.nk - self.at.n


@fault(FAULTS, "mask-finite")
class hidden_by_minus_ten_thousand(Kernel):
    """ohdearquant/lattice PR 373: keys that the mask hides have a score of −10000, and valid ones
    may lie below it.
    """

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.given_mask(rows, cols), -10000.0 * LOG2_E)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "mask", "float16")
class mask_of_the_first_keys_alone(Kernel):
    """vllm-project/vllm-ascend issue 15503: a mask is silently ignored past a number of keys, there
    512, here 64.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if cols.start < 64:
            return found
        return torch.ones_like(found) if found.dtype == torch.bool else torch.zeros_like(found)


@fault(FAULTS, "mask other-data layout")
class masks_by_the_stride_of_padded_ones(Kernel):
    """microsoft/onnxruntime-genai PR 1639: for more than one sequence the mask has another stride
    than is written: here that of a mask whose rows are padded to 64 keys.
    """

    def forward(self):
        mask = self.at.mask
        if mask is not None and mask.shape[0] > 1:
            many, wide = mask[0].numel(), -(-self.at.nk // 64) * 64
            step = many // self.at.nk * wide
            every = torch.arange(many) + step * torch.arange(len(mask))[:, None]
            self.at.mask = mask.flatten()[every % mask.numel()].view_as(mask)
        return super().forward()


# --- sinks, sums
@fault(FAULTS, "sinks", "float16")
class sinks_seeded_at_another_scale(Kernel):
    """ROCm/rocm-libraries PR 12229: the sink is seeded as it is, where scores are in base 2."""

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return (m / LOG2_E if self.at.sinks is not None and first else m), l, acc


@fault(FAULTS, "sinks")
class sinks_by_rows_of_packed_heads(Kernel):
    """vllm-project/vllm-xpu-kernels PR 556: rows are packed by groups of heads, and statistics take
    the row mapping of the output's copy: a row has the sink of another head of its group.
    """

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        if self.at.sinks is None or not first:
            return m, l, acc
        groups = self.at.groups
        head = torch.arange(q.shape[1])[:, None] // groups * groups
        head = head + torch.arange(q.shape[2])[None] % groups
        return self.at.sinks[head][None, ..., None] * LOG2_E + torch.zeros_like(m), l, acc


@fault(FAULTS, "unnormalized sinks weights-disagree", "float32")
class one_beside_shifted_exponentials(Kernel):
    """kyegomez/AttentionIsOFFByOne issue 5: 1 is added to the sum of exponentials after the maximum
    was taken off them.
    """

    def finish(self, m, l, acc, rows):
        return super().finish(m, l + 1, acc, rows)


@fault(FAULTS, "masked-row non-finite nan-escapes split-merge", "float32")
class first_parts_empty(Parts):
    """ROCm/aiter PR 4420: parts are merged one after another, and where the first ones are empty
    −∞ is taken off −∞.
    """

    def merge(self, outs, lses):
        m, total, out = lses[0], torch.ones_like(lses[0]), outs[0]
        for o, lse in zip(outs[1:], lses[1:], strict=True):
            new = torch.maximum(m, lse)
            a, w = torch.exp2(m - new), torch.exp2(lse - new)
            m, total, out = new, total * a + w, out * a + o * w
        return out / total, m + total.log2()


# --- heads
@fault(FAULTS, "unwritten")
class heads_by_groups_of_groups(Kernel):
    """HazyResearch/HipKittens PR 22: blocks are dealt out to heads with the group's size as modulus
    and as stride, which reaches all heads only where there are as many groups.
    """

    def forward(self):
        o, lse = super().forward()
        size, heads = self.at.groups, o.shape[1]
        reached = {b % size * size + b // size for b in range(heads)}
        own = torch.tensor([head in reached for head in range(heads)])[:, None, None]
        return torch.where(own, o, 0.0), torch.where(own, lse, INF)


@fault(FAULTS, "key-heads other-data", "float16")
class heads_over_the_number_of_key_heads(Kernel):
    """PSAL-POSTECH/ONNXim issue 33: a query head is divided by the number of key heads, and not by
    that of query heads for each; past the end is the last one.
    """

    def forward(self):
        at = self.at
        heads = at.q.shape[1]
        own = heads // at.groups
        key = (torch.arange(heads) // own).clamp_max(own - 1) * at.groups
        at.k, at.v = at.k[:, key], at.v[:, key]
        return super().forward()


@fault(FAULTS, "key-heads other-data")
class tiles_of_heads_across_groups(Kernel):
    """FlashML-org/FreeToken PR 177: heads go in tiles, there of 16, here of two, and the key head
    is told by the tile: one that lies across two groups has the first one's.
    """

    def forward(self):
        at = self.at
        key = torch.arange(at.q.shape[1]) // 2 * 2 if at.groups > 1 else slice(None)
        at.k, at.v = at.k[:, key], at.v[:, key]
        return super().forward()


# --- tails, memory
@fault(FAULTS, "padding ragged other-data")
class few_queries_past_the_last_key(Kernel):
    """pytorch/pytorch PR 169222: the kernel for up to 8 queries goes through keys 32 at a time, and
    does not check the end: those of the next head are attended to.
    """

    cols = 32

    def inside(self, j, back):
        return super().inside(j, back) | (torch.tensor(self.at.n <= 8) & (not back))

    def load_key(self, name, x, part):
        found, nk = load(x, part), x.shape[2]
        if self.at.n > 8 or name.startswith("b_") or part.stop <= nk:
            return found
        after = x.flatten(0, 1).roll(-1, 0).view_as(x)
        return torch.cat([found[:, :, : nk - part.start], after[:, :, : part.stop - nk]], 2)


@fault(FAULTS, "padding ragged", "float16")
class zeros_of_the_last_block_of_64(Kernel):
    """flashinfer-ai/flashinfer PR 5090: the last block of keys is filled up with zeros, whose
    scores of 0 keep their weight.
    """

    def inside(self, j, back):
        return super().inside(j, back) if back else j >= 0


@fault(FAULTS, "unstable other-data")
class values_refilled_while_read(Kernel):
    """vllm-project/vllm-xpu-kernels PR 411: shared memory is refilled while slower groups still
    read it: some rows of V are the next block's.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v" or part.stop >= self.at.nk:
            return found
        after = load(x, slice(part.stop, 2 * part.stop - part.start))
        late = (torch.rand(self.cols // 8) < 0.2).repeat_interleave(8)[:, None]
        return torch.where(late, after, found)


FAULTS += fourteenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.LastKeysFirst, "bfloat16"), (ways.MaximumFirst, "float16"),
    (ways.ValuesInDouble, "bfloat16"), (ways.DeltaOfWeights, "bfloat16"),
    (ways.QueryTimesScale, "bfloat16"), (ways.WeightsAsTheyAre, "float16"),
    (LanesWithOwnMaxima, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("groups_without_copies", frozenset(), ways.groups_without_copies)]
