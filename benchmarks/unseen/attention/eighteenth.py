"""The eighteenth set of faults of attention, each as a public thread reports it, and sound
kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, windows, heads, layouts and ends are here; precision and the backward pass in
eighteenth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.eighteenth --check`).
"""

# ruff: noqa: D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import eighteenth_kernel as ways
from benchmarks.unseen.attention import eighteenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, attention
from torch import Tensor

AGAIN = (
    "mask_overwritten_by_an_empty_one",  # eighth: mask_not_read
    "causal_lost_where_no_kernel_fits",  # sixteenth: causal_for_the_fused_path_alone
    "scaled_scores_stored_first",  # sixth: scores_in_fp16
    "values_multiplied_in_16_bits",  # eleventh: values_added_four_keys_at_a_time
    "scale_applied_to_the_query_first",  # tenth: query_times_a_low_scale
    "ds_of_rounded_factors",  # fourth: difference_bf16
    "partial_gradients_in_their_type",  # fifth: dq_in_bf16_at_every_hop
    "diagonal_not_masked_on_the_way_back",  # first: backward_without_causal
    "keys_as_many_as_queries_on_the_way_back",  # sixteenth: keys_end_where_queries_do_in_dq
    "dv_by_two_roundings_of_the_width",  # twelfth: dq_by_two_pitches
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks, windows, sinks
@fault(FAULTS, "window causal-mask")
class window_as_far_ahead(Kernel):
    """vllm-project/vllm PR 51257: layers with a window of w pass (w, w), and where there is a
    window the kernel masks by it alone, whether causal or not.
    """

    def forward(self):
        if self.at.window is not None:
            self.at.window, self.at.causal = (self.at.window[0],) * 2, False
        return super().forward()


@fault(FAULTS, "rescale unnormalized", "float16")
class sums_begin_again_on_the_diagonal(Kernel):
    """Dao-AILab/flash-attention PR 2329: each block that the causal mask cuts, from the last one
    on, is called the first: maximum and sum begin again, O goes on as it is.
    """

    cols = 32

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def online(self, m, l, acc, s, v, rows, cols):
        if not self.at.causal or cols.stop - 1 <= rows.start:
            return super().online(m, l, acc, s, v, rows, cols)
        new, l, part = super().online(*self.begin(m), s, v, rows, cols)
        return new, l, acc + part


@fault(FAULTS, "sinks")
class sink_added_to_the_first_key(Kernel):
    """vllm-project/vllm PR 49815: two things are called a sink: the first tokens, and a logit of
    its own for every head. The logit is given to what expects the former, the first key.
    """

    def begin(self, q, first=True):  # noqa: ARG002
        return super().begin(q, False)

    def hide(self, s, rows, cols, back):
        if self.at.sinks is not None and cols.start == 0:
            sink = self.at.sinks.float().view(1, -1, 1, 1) * LOG2_E
            s = torch.cat([s[..., :1] + sink, s[..., 1:]], -1)
        return super().hide(s, rows, cols, back)


@fault(FAULTS, "scale")
class key_scale_without_codes(Kernel):
    """sgl-project/sglang PR 18396: the scale of FP8 keys, 0.06 in the checkpoint, goes into the
    scores' though the cache holds keys in BF16.
    """

    def forward(self):
        self.at.scale = self.at.scale * 0.06
        return super().forward()


@fault(FAULTS, "mask")
class mask_overwritten_by_an_empty_one(Kernel):
    """deepspeedai/DeepSpeed issue 1912: the mask that is given is replaced by an empty tensor
    before the softmax is called.
    """

    def forward(self):
        self.at.mask = None
        return super().forward()


@fault(FAULTS, "causal-mask")
class causal_lost_where_no_kernel_fits(Kernel):
    """NVIDIA/TransformerEngine issue 1524: sizes that the fused softmax does not take, of queries
    or of heads times sequences that 4 does not divide, go to one that reads no causal mask.
    """

    def forward(self):
        at = self.at
        many = at.q.shape[0] * at.q.shape[1]
        at.causal = at.causal and at.n % 4 == 0 and many % 4 == 0
        return super().forward()


@fault(FAULTS, "masked-row non-finite nan-escapes")
class blocks_before_the_window_give_nan(Kernel):
    """sgl-project/sglang PR 38142: a block that lies wholly before a query's window leaves its
    maximum at −∞, and exp(−∞ − (−∞)) spoils all that follow.
    """

    def online(self, m, l, acc, s, v, rows, cols):  # noqa: ARG002
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- what is not written, or written elsewhere
@fault(FAULTS, "ragged unwritten", "float16")
class uneven_shares_exchanged_as_even(Kernel):
    """deepspeedai/DeepSpeed issue 7842: of an odd number of tokens one rank has one more, and the
    exchange takes its share for as long as the other's: what lies in the middle does not arrive.
    """

    def hide(self, s, rows, cols, back):
        s, nk = super().hide(s, rows, cols, back), self.at.nk
        if nk % 2 and cols.start <= nk // 2 < cols.stop:
            s = s.clone()
            s[:, s.shape[1] // 2 :, :, nk // 2 - cols.start] = -torch.inf
        return s

    def forward(self):
        o, lse = super().forward()
        if self.at.n % 2:
            o[:, o.shape[1] // 2 :, self.at.n // 2] = 0
        return o, lse


@fault(FAULTS, "unwritten")
class splits_write_the_first_sequence_alone(Kernel):
    """pytorch/pytorch issue 194167: few queries take the path that splits the keys, and the rows
    of every sequence behind the first stay as they were.
    """

    def forward(self):
        o, lse = super().forward()
        if self.at.n <= 16:
            o[1:] = 0
        return o, lse


@fault(FAULTS, "unnormalized split-merge other-data")
class statistics_in_half_the_room(Kernel):
    """pytorch/pytorch PR 174945: sums and maxima of the parts are fp32, in room that is allocated
    for as many of the input's 16 bits: the maxima lie over the latter half of the sums.
    """

    def row(self, rows):
        if self.at.n > 8:
            return super().row(rows)
        rows, parts = slice(0, self.at.n), []
        q = self.load_query("q", self.at.q, rows)
        for number, cols in enumerate(self.key_blocks(rows)):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            parts.append(self.online(*self.begin(q, number == 0), s, v, rows, cols))
        m, l, acc = (torch.stack(x, -1) for x in zip(*parts, strict=True))
        half, sums = l.numel() // 2, l.flatten()
        sums[half:] = m.flatten()[: len(sums) - half]
        top = m.amax(-1, keepdim=True)
        a = torch.exp2(m - torch.where(top == -torch.inf, 0.0, top))
        total = (sums.view_as(l) * a).sum(-1)
        out = (acc * a).sum(-1) / torch.where(total == 0, 1.0, total)
        return self.at.low(out), top[..., 0] + total.abs().log2()


@fault(FAULTS, "key-tail other-data")
class page_numbers_of_half_the_tokens(Kernel):
    """sgl-project/sglang PR 11985: the loop that writes page numbers counts its turns in tokens,
    twice as many as a turn's pages hold: later pages keep the number 0.
    """

    def found(self) -> Tensor:
        j = torch.arange(self.at.nk)
        return torch.where(j < -(-self.at.nk // 128) * 64, j, j % 16)

    def forward(self):
        at, found = self.at, self.found()
        at.k, at.v = at.k[:, :, found], at.v[:, :, found]
        return super().forward()

    def backward(self):
        dq, *pair = super().backward()
        dk, dv = (torch.zeros_like(x).index_add(2, self.found(), x) for x in pair)
        return dq, dk, dv


@fault(FAULTS, "unwritten masked-row")
class hidden_rows_never_written(Kernel):
    """flashinfer-ai/flashinfer PR 1533: a row that sees no key is left before O is stored, and has
    what its memory held.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return torch.where(l == 0, self.at.v[:, :, :1], o), lse


@fault(FAULTS, "unwritten")
class heads_past_the_planned_number(Kernel):
    """vllm-project/vllm PR 42650: the launch is planned for fewer heads than the layer has, and
    those past them are not written.
    """

    def forward(self):
        o, lse = super().forward()
        o[:, max(1, 3 * o.shape[1] // 4) :] = 0
        return o, lse


@fault(FAULTS, "layout other-data")
class sequences_and_tokens_exchanged(Kernel):
    """deepspeedai/DeepSpeed PR 8317: O comes back with tokens before sequences, and is reshaped as
    if sequences came first.
    """

    def forward(self):
        o, lse = super().forward()
        b, h, n, d = o.shape
        return o.permute(2, 0, 1, 3).reshape(b, n, h, d).transpose(1, 2), lse

    def backward(self):
        at = self.at
        b, h, n, d = at.do.shape
        at.do, at.o = (
            x.transpose(1, 2).reshape(n, b, h, d).permute(1, 2, 0, 3) for x in (at.do, at.o)
        )
        return super().backward()


@fault(FAULTS, "unstable other-data")
class accumulators_not_cleared(Kernel):
    """vllm-project/vllm PR 26599: a tile's accumulators are not set to zero, and now and then hold
    what the tile before left in them.
    """

    def finish(self, m, l, acc, rows):
        left, self.memory["left"] = self.memory.get("left", torch.zeros_like(acc)), acc
        if torch.rand(()) < 0.5:
            acc = acc + left
        return super().finish(m, l, acc, rows)


FAULTS += eighteenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.GrowingTiles, "bfloat16"), (ways.TwoLevels, "float16"),
    (ways.HalvesOfColumns, "bfloat16"), (ways.WideSums, "float16"),
    (ways.RootOfTheScaleOnBoth, "bfloat16"), (ways.DeltaByTheWeights, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [
    Fault("sink_as_a_key", frozenset(), ways.sink_as_a_key, "bfloat16"),
    Fault("two_passes_over_chunks", frozenset(), ways.two_passes_over_chunks, "float16"),
]
