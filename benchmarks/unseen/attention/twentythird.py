"""The twenty-third set of faults of attention, each as a public thread reports it, and sound
kernels: Triton, Pallas, Metal, ROCm, Intel, Ascend and hand-written training kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, windows, scales, sinks and chunks are here; precision and the backward pass in
twentythird_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.twentythird --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentythird_kernel as ways
from benchmarks.unseen.attention import twentythird_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import Kernel, attention, blocks, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "later_heads_left_at_zero",  # first: odd_heads_unwritten
    "window_of_whole_blocks",  # fourth: window_by_tiles
    "diagonal_from_the_last_key",  # fourteenth: diagonal_of_the_other_corner
    "jacobian_without_the_dot_product",  # first: no_delta
    "window_ignored_on_the_way_back",  # fifth: no_window_in_the_backward_pass
    "p_through_tf32_in_the_key_kernel",  # nineteenth: transposes_through_tf32
    "ring_steps_out_in_bf16",  # fifth: partial_results_bf16
    "cap_and_tangent_in_the_inputs_type",  # twelfth: cap_in_the_operands_format
    "l_in_half_and_d_in_bf16",  # fourth: single_delta_bf16; twentieth: lse_in_the_operands_type
    "products_added_up_in_bf16",  # ninth: products_in_fp16
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks and windows
@fault(FAULTS, "causal-mask")
class diagonal_from_the_last_key(Kernel):
    """pytorch/executorch issue 22426: MLX, which computes it, has the last query see all keys, and
    the model that is exported to it has the first query see the first one.
    """

    def offset(self):
        return self.at.nk - self.at.n

    def causal(self, i, j, back):
        return j <= i + self.offset()

    def key_blocks(self, rows):
        high = rows.stop + max(0, self.offset()) if self.at.causal else self.at.nk
        return [c for c in blocks(self.at.nk, self.cols) if c.start < high]

    def query_blocks(self, cols):
        every = blocks(self.at.n, self.rows)
        more = max(0, self.offset())
        return [r for r in every if not self.at.causal or r.stop + more > cols.start]


@fault(FAULTS, "window")
class window_of_whole_blocks(ForwardAlone):
    """vllm-project/tpu-inference PR 1185: blocks of keys before a tile's window are not fetched,
    and nothing is hidden in those that are.
    """

    rows, cols = 64, 32

    def window(self, i, j, back):
        left = self.at.window[0]
        begun = (j // self.cols + 1) * self.cols > i.min() - left
        return begun if left >= 0 else super().window(i, j, back)


@fault(FAULTS, "window causal-mask")
class positions_in_eight_bits(ForwardAlone):
    """vllm-project/tpu-inference issue 2755: where there is a window, positions are 16-bit numbers,
    which wrap; here eight-bit ones.
    """

    def wrapped(self, x):
        return (x + 128) % 256 - 128

    def causal(self, i, j, back):
        if self.at.window is None:
            return super().causal(i, j, back)
        return super().causal(self.wrapped(i), self.wrapped(j), back)

    def window(self, i, j, back):
        return super().window(self.wrapped(i), self.wrapped(j), back)


@fault(FAULTS, "unwritten")
class windowed_out_never_saved(ForwardAlone):
    """vllm-project/vllm-ascend PR 6558: what the path for sliding windows computes is not saved to
    the output.
    """

    def forward(self):
        o, lse = super().forward()
        return (o if self.at.window is None else torch.zeros_like(o)), lse


@fault(FAULTS, "mask")
class mask_columns_in_eight_bits(ForwardAlone):
    """ml-explore/mlx PR 3361: the column of a mask is a 16-bit number, which wraps where there are
    more keys; here one of eight bits, so that column 128 is read in the row before.
    """

    def given_mask(self, rows, cols):
        n, nk, mask = self.at.n, self.at.nk, self.at.mask
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)
        place = (i * nk + (j + 128) % 256 - 128).clamp(0, n * nk - 1)
        found = mask.expand(*mask.shape[:-2], n, nk).flatten(-2)[..., place]
        return found * ((i < n) & (j < nk))


# --- heads, scales, sinks
@fault(FAULTS, "unwritten", "float16")
class later_heads_left_at_zero(ForwardAlone):
    """tracel-ai/burn issue 4484: where it is causal the first head is right, and later ones are 0
    on Metal.
    """

    def forward(self):
        o, lse = super().forward()
        if self.at.causal:
            o = torch.cat([o[:, :1], torch.zeros_like(o[:, 1:])], 1)
        return o, lse


@fault(FAULTS, "scale")
class scale_by_the_other_mscale(Kernel):
    """NVIDIA/Megatron-LM issue 1429: the softmax's scale has YaRN's factor of `mscale`, 0.707, and
    not that of `mscale_all_dim`, 1, which is in the scale that is asked for; contexts are 40 times
    as long.
    """

    def forward(self):
        own, asked = (0.1 * x * math.log(40) + 1 for x in (0.707, 1.0))
        self.at.scale *= (own / asked) ** 2
        return super().forward()


@fault(FAULTS, "sinks", "float16")
class sinks_of_padded_groups(ForwardAlone):
    """vllm-project/tpu-inference PR 3167: query heads of a key head are padded to an even number,
    and sinks are not, which are read by the same numbers, here up to the last one.
    """

    def begin(self, q, first=True):
        at, every = self.at, self.at.sinks
        if every is None:
            return super().begin(q, first)
        head = torch.arange(every.shape[0])
        padded = -(-at.groups // 2) * 2
        number = head // at.groups * padded + head % at.groups
        at.sinks = every[number.clamp_max(every.shape[0] - 1)]
        found = super().begin(q, first)
        at.sinks = every
        return found


# --- pages, chunks
@fault(FAULTS, "padding other-data ragged")
class page_filled_up_with_another_sequence(ForwardAlone):
    """hw-native-sys/simpler PR 91: the last page is loaded whole and its softmax hides nothing;
    what is past the sequence's end are rows that lay there before, here the next sequence's.
    """

    def inside(self, j, back):
        return torch.ones_like(j, dtype=torch.bool)

    def load_key(self, name, x, part):
        found, missing = load(x, part), part.stop - self.at.nk
        if missing > 0:
            found = torch.cat([x[:, :, part], x.roll(-1, 0)[:, :, :missing]], 2)
        return found


@fault(FAULTS, "split-merge lse-other unwritten")
class lse_of_unsplit_tiles_not_given(ways.InChunks):
    """ROCm/aiter PR 3606: the kernel that reduces splits gives lse: that of a chunk of keys that is
    not split stays 0, and chunks are merged by it.
    """

    def given(self, o, lse, many):
        return o, lse if many > 1 else torch.zeros_like(lse)


FAULTS += twentythird_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.PrimeTiles, "bfloat16"), (ways.FiveParts, "float16"),
    (ways.EvenBlocksFirst, "bfloat16"), (ways.TwoPasses, "bfloat16"),
    (ways.RescaledSeldom, "float16"), (ways.ThreeKernels, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("blocks_as_a_batch", frozenset(), ways.blocks_as_a_batch, "bfloat16"),
    Fault("sequences_one_by_one", frozenset(), ways.sequences_one_by_one, "float16"),
]
