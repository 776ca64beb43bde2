"""The seventeenth set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, windows, heads, layouts and ends are here; scales, precision and the backward pass in
seventeenth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.seventeenth --check`).
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import seventeenth_kernel as ways
from benchmarks.unseen.attention import seventeenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, attention, load
from torch import Tensor

AGAIN = (
    "singleton_mask_by_heads",  # eighth: shared_mask_by_query_heads
    "window_of_a_negative_length",  # sixth: window_not_passed_on
    "key_heads_dealt_out_by_turns",  # fifth: heads_tiled
    "bias_scaled_with_the_scores",  # ninth: bias_before_the_scale
    "softcap_hard_coded_to_none",  # eighth: softcap_dropped
    "maximum_and_sum_saved_in_bf16",  # fourth: lse_base_2_bf16
    "backward_scores_through_half",  # second: backward_scores_bf16
    "gradients_added_up_in_their_own_type",  # fourteenth: dq_added_up_in_bf16
    "sinks_by_a_factor_of_a_fixed_lse",  # ninth: branches_without_the_gradient_of_lse
    "windows_not_masked_on_the_way_back",  # fifth: no_window_in_the_backward_pass
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask")
class causal_lost_without_a_mask(Kernel):
    """facebookresearch/xformers issue 103: the causal mask is put into the one that is given, and
    is skipped where none is.
    """

    def forward(self):
        self.at.causal = self.at.causal and self.at.mask is not None
        return super().forward()


@fault(FAULTS, "causal-mask weights-disagree unnormalized", "float16")
class values_up_to_the_querys_own(Kernel):
    """nntrainer/nntrainer PR 4312: the product with V ends at the query's own position, causal or
    not, while the softmax is over all keys.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        i = torch.arange(rows.start, rows.stop)[:, None]
        self.memory["reached"] = torch.arange(cols.start, cols.stop)[None] <= i
        return super().online(m, l, acc, s, v, rows, cols)

    def add_values(self, acc, a, p, v):
        return super().add_values(acc, a, p * self.memory["reached"], v)


@fault(FAULTS, "causal-mask key-tail")
class keys_counted_by_the_pairs_first_tile(Kernel):
    """hao-ai-lab/FastVideo PR 1719: two adjacent tiles of queries are one program's, which reads
    the number of their tiles of keys once, for the first: the second leaves out its last.
    """

    def key_blocks(self, rows):
        first = rows.start // (2 * self.rows) * (2 * self.rows)
        many = len(super().key_blocks(slice(first, first + self.rows)))
        every = super().key_blocks(rows)
        return every if hasattr(self.at, "do") else every[:many]


@fault(FAULTS, "causal-mask key-tail", "float16")
class straddling_tile_left_out(Kernel):
    """tenstorrent/tt-metal PR 42582: of two devices one has the first and the last quarter of the
    keys, side by side. The other's queries see the former: it takes half of the tiles of 32, and
    not the one that both quarters lie in.
    """

    cols = 32

    def causal(self, i, j, back):
        keep = super().causal(i, j, back)
        quarter = -(-self.at.nk // 4)
        taken = -(-2 * quarter // self.cols) // 2 * self.cols
        if self.at.n != self.at.nk:
            return keep
        other = (i >= quarter) & (i < 3 * quarter)
        return keep & ~(other & (j >= taken) & (j < quarter))


@fault(FAULTS, "mask other-data")
class singleton_mask_by_heads(Kernel):
    """Tencent/ncnn PR 6869: a mask of three dimensions is taken for one of every head, and a head
    reads what lies as many masks further on, though all heads share one.
    """

    def given_mask(self, rows, cols):
        mask, heads = self.at.mask, self.at.q.shape[1]
        if mask.shape[1] > 1:
            return super().given_mask(rows, cols)
        many = mask.shape[0]
        at = torch.arange(many)[:, None] + torch.arange(heads)
        self.at.mask = mask[at.clamp_max(many - 1), 0]
        found = super().given_mask(rows, cols)
        self.at.mask = mask
        return found


@fault(FAULTS, "mask", "float16")
class keys_in_the_masks_place(Kernel):
    """tenstorrent/tt-metal PR 43411: the accumulator of Q Kᵀ starts with the mask's tile of 32, but
    what is moved there comes from the register that K's tile is in.
    """

    rows, cols = 32, 32

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is not None:
            tile = load(self.at.k, cols)[..., : self.cols]
            s = s + tile * (self.at.scale * LOG2_E)
        self.at.mask = None
        found = super().hide(s, rows, cols, back)
        self.at.mask = mask
        return found


@fault(FAULTS, "window")
class window_of_a_negative_length(Kernel):
    """proger/hippogriff issue 7: the window is passed as (−length, 0), and a negative number stands
    for no limit.
    """

    def forward(self):
        at = self.at
        if at.window is not None:
            at.window = (-at.window[0], at.window[1])
        return super().forward()


# --- heads, layouts
@fault(FAULTS, "key-heads", "float16")
class key_heads_dealt_out_by_turns(Kernel):
    """ekzhang/jax-js PR 180: key heads are tiled where each has to be repeated."""

    def spread(self, x):
        return x.repeat(1, self.at.groups, 1, 1)

    def group(self, grad):
        return grad.unflatten(1, (self.at.groups, -1)).sum(1)


@fault(FAULTS, "layout other-data")
class heads_split_without_transposing(Kernel):
    """reczoo/FuxiCTR issue 30: what lies by tokens and heads is viewed as if it lay by heads and
    tokens, and O likewise.
    """

    @staticmethod
    def split(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape)

    @staticmethod
    def joined(x: Tensor) -> Tensor:
        b, h, t, d = x.shape
        return x.reshape(b, t, h, d).transpose(1, 2)

    def spread(self, x):
        return super().spread(self.split(x))

    def group(self, grad):
        return self.joined(super().group(grad))

    def forward(self):
        self.at.q = self.split(self.at.q)
        o, lse = super().forward()
        return self.joined(o), lse

    def backward(self):
        at = self.at
        at.do, at.o = self.split(at.do), self.split(at.o)
        dq, dk, dv = super().backward()
        return self.joined(dq), dk, dv


@fault(FAULTS, "layout other-data", "float16")
class out_reshaped_without_permuting(Kernel):
    """jsbaan/transformer-from-scratch PR 6: O lies by heads and tokens and is reshaped to tokens
    and features at once: a token gets what belongs to several tokens of one head.
    """

    def forward(self):
        o, lse = super().forward()
        b, h, n, d = o.shape
        return o.reshape(b, n, h, d).transpose(1, 2), lse

    def backward(self):
        at = self.at
        at.do, at.o = (x.transpose(1, 2).reshape(x.shape) for x in (at.do, at.o))
        return super().backward()


@fault(FAULTS, "other-data layout")
class heads_in_the_order_of_ranks(Kernel):
    """snowflakedb/ArcticInference PR 142: ranks are in a square, 2 in a row, and what comes from
    them is put together by columns: O's heads are in another order.
    """

    def forward(self):
        o, lse = super().forward()
        return o.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), lse

    def backward(self):
        at = self.at
        at.do, at.o = (x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
                       for x in (at.do, at.o))  # fmt: skip
        return super().backward()


@fault(FAULTS, "unwritten other-data", "float16")
class heads_taken_for_sequences(Kernel):
    """bledden/triton-msl PR 7: the number of heads is folded to 1: a program's head number is its
    sequence's, so that the first heads alone are written, and further ones past the end.
    """

    def forward(self):
        o, lse = super().forward()
        return torch.cat([o[:, :1], torch.zeros_like(o[:, 1:])], 1), lse


# --- ends
@fault(FAULTS, "ragged padding key-tail")
class remainder_masked_by_rows(Kernel):
    """intel/sycl-tla PR 813: the mask of the last, partial tile of keys is spread along the wrong
    axis: it hides the tile's rows past the remainder, and not its columns.
    """

    def seen(self, rows, cols, back):
        keep, rest = super().seen(rows, cols, back), self.at.nk - cols.start
        if back or rest >= self.cols:
            return keep
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        keep = (i < rows.start + rest).expand(-1, self.cols)
        if self.at.causal:
            keep = keep & self.causal(i, j, back)
        return keep & self.window(i, j, back) if self.at.window is not None else keep


@fault(FAULTS, "ragged unstable other-data layout", "float16")
class lanes_past_the_width_clamped_to_its_end(Kernel):
    """microsoft/onnxruntime PR 29593: eight lanes add four columns each, and those past the width
    are clamped to the last four, which all of them add to at once: one lane's sum stays, of its own
    columns or of what lies behind the row.
    """

    def add_values(self, acc, a, p, v):
        found, over = super().add_values(acc, a, p, v), -(v.shape[-1] // 4) % 8
        lane = int(torch.randint(over + 1, ()))
        if not over or not lane:
            return found
        behind = v.roll(-1, 2)[..., 4 * (lane - 1) : 4 * lane]
        last = acc[..., -4:] * a + self.at.low(p) @ behind
        return torch.cat([found[..., :-4], last], -1)


FAULTS += seventeenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.PowerOfTwoInTheQuery, "bfloat16"), (ways.NaturalBase, "float16"),
    (ways.CompensatedSums, "float16"), (ways.EvenAndOddFeatures, "bfloat16"),
    (ways.PositiveAndNegativeValues, "float16"), (ways.EveryOtherBlockFirst, "bfloat16"),
    (ways.ScoresSaved, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("two_halves_merged", frozenset(), ways.two_halves_merged, "float16")]
