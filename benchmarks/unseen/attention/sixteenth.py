"""The sixteenth set of faults of attention, each as a public thread of a training or a kernel
project reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, sinks, heads, layouts and splits are here; precision and the backward pass in
sixteenth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.sixteenth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixteenth_kernel as ways
from benchmarks.unseen.attention import sixteenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault, logits, permuted, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, blocks
from torch.nn import functional

AGAIN = (
    "causal_for_the_fused_path_alone",  # fifth: causal_ignored_where_it_divides
    "mask_of_each_blocks_first_row",  # twelfth: bias_of_the_first_row
    "permuted_tensors_read_in_order",  # sixth: keys_transposed_twice
    "conversions_by_cutting",  # third: weights_cut
    "products_in_tf32_by_default",  # sixth: tf32_everywhere
    "scores_again_through_fp16",  # second: backward_scores_bf16
    "windows_gradients_of_all_pairs",  # fifth: no_window_in_the_backward_pass
    "dq_without_the_end_of_the_diagonal",  # fourth: diagonal_tile_short
    "each_ring_steps_own_out",  # fifth: ring_with_its_own_lse
    "lse_of_the_last_row_past_the_end",  # eighth: lse_not_set_past_the_end
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask", "float16")
class causal_for_the_fused_path_alone(Kernel):
    """keras-team/keras issue 23038: the causal mask is left to the fused path, by its flag, and the
    other path, here that of grouped heads, has neither.
    """

    def forward(self):
        self.at.causal = self.at.causal and self.at.groups == 1
        return super().forward()


@fault(FAULTS, "causal-mask")
class blocks_counted_at_half_the_rate(Kernel):
    """Xilinx/mlir-air PR 1428: the counter of heads wraps at twice their number, so that the number
    of the block of queries, which the diagonal is found by, grows half as fast as it must.
    """

    def causal(self, i, j, back):
        block = i // self.rows
        return super().causal(i - (block - block // 2) * self.rows, j, back)


@fault(FAULTS, "mask mask-finite", "float16")
class scores_times_the_mask(Kernel):
    """openxla/xla PR 11444: what a boolean mask hides is multiplied by it, and not set to −∞."""

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s * self.given_mask(rows, cols)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        mask = self.at.mask
        if mask is not None and mask.dtype == torch.bool:
            ds = ds * self.given_mask(rows, cols)
        return q, k, do, p, ds


@fault(FAULTS, "mask layout")
class bias_in_fp32_read_as_bf16(Kernel):
    """pytorch/pytorch PR 191612: the type of an fp32 mask is not declared to the kernel, which
    reads it, element by element, as one in the query's type.
    """

    def forward(self):
        mask = self.at.mask
        if mask is not None and mask.dtype != torch.bool:
            halves = mask.float().contiguous().view(torch.bfloat16)
            self.at.mask = halves.flatten()[: mask.numel()].view_as(mask)
        return super().forward()


@fault(FAULTS, "mask")
class mask_of_each_blocks_first_row(Kernel):
    """google-research/tabfm PR 40: of a block of queries one row of the mask or bias is taken, the
    first, which stands for all of them.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return found[..., :1, :].expand_as(found)


# --- scale, softmax
@fault(FAULTS, "scale", "float16")
class scaled_in_the_projection_and_again(Kernel):
    """huggingface/transformers PR 38290: queries are scaled where they are projected, and again by
    the default of the attention function.
    """

    def forward(self):
        self.at.scale = self.at.scale**2
        return super().forward()


def softmax_over_the_queries(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                             softcap=0.0, sinks=None):  # fmt: skip  # noqa: ARG001
    """labmlai/annotated_deep_learning_paper_implementations issue 146: the softmax is along the
    axis of queries; a column of nothing but −∞ is zero here, and a sink has no part in it.
    """
    share, n, nk = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    k, v = (x.repeat_interleave(share, 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    empty = (s == -INF).all(-2, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -2).masked_fill(empty, 0.0)
    return (p @ v.float()).to(query.dtype)


FAULTS.append(Fault("softmax_over_the_queries", frozenset({"unnormalized", "weights-disagree"}),
                    softmax_over_the_queries, vague=frozenset({"elements"})))  # fmt: skip


# --- sinks
@fault(FAULTS, "sinks", "float16")
class sink_within_every_score(Kernel):
    """huggingface/transformers PR 41083: the sink is applied to each score by itself, before the
    softmax: the score becomes its weight beside the sink alone.
    """

    def begin(self, q, first=True):
        return super().begin(q, False)

    def beside(self, s):
        return torch.sigmoid(s / LOG2_E - self.at.sinks.view(1, -1, 1, 1))

    def cap(self, s, back):
        s = super().cap(s, back)
        return s if self.at.sinks is None else self.beside(s) * LOG2_E

    def slope(self, q, k):
        if self.at.sinks is None:
            return super().slope(q, k)
        weight = self.beside(q @ k.mT * (self.at.scale * LOG2_E))
        return weight * (1 - weight)


@fault(FAULTS, "lse-gradient sinks no-delta")
class gate_of_sinks_without_lses_gradient(Kernel):
    """pytorch/torchtitan PR 4796: O of the keys alone is multiplied by the sigmoid of lse less the
    sink, and the attention function gives lse no gradient.
    """

    def finish(self, m, l, acc, rows):
        return acc / torch.where(l == 0, 1.0, l), m + l.log2()

    def forward(self):
        at, sinks = self.at, self.at.sinks
        at.sinks = None
        out, lse = super().forward()
        at.inner, at.gate = at.low(out), torch.ones(())
        if sinks is not None:
            at.gate = torch.sigmoid(lse / LOG2_E - sinks.view(1, -1, 1, 1))
        return at.low(out * at.gate), lse

    def backward(self):
        at = self.at
        at.do, at.o = at.low(at.do * at.gate), at.inner
        return super().backward()


# --- heads, layouts
@fault(FAULTS, "unwritten other-data layout", "float16")
class heads_taken_for_sequences(Kernel):
    """bledden/triton-msl PR 7: the number of heads is taken for one, so that every program's number
    is a sequence's: it reads and writes there the first head, and past the end nothing; the
    backward pass, another kernel, has statistics of its own.
    """

    def of(self, x):
        found = torch.zeros_like(x).flatten(0, 1)
        found[: len(x)] = x[:, 0]
        return found.view_as(x)

    def forward(self):
        at, (_, lse) = self.at, super().forward()
        kept = at.q, at.k, at.v, at.mask
        at.q, at.k, at.v = (self.of(x) for x in kept[:3])
        if at.mask is not None:
            shape = *at.q.shape[:2], *at.mask.shape[-2:]
            at.mask = self.of(at.mask.expand(shape).contiguous())
        out, _ = super().forward()
        at.q, at.k, at.v, at.mask = kept
        written = torch.zeros_like(out)
        written[:, 0] = out.flatten(0, 1)[: len(out)]
        return written, lse


@fault(FAULTS, "layout other-data")
class permuted_tensors_read_in_order(Kernel):
    """pytorch/pytorch issue 181133: tensors that a permutation made, tokens before heads in memory,
    are read as if heads came first.
    """

    def forward(self):
        at = self.at
        if permuted(at.q):
            at.q, at.k, at.v = (x.transpose(1, 2).reshape(x.shape) for x in (at.q, at.k, at.v))
        return super().forward()


# --- splits
@fault(FAULTS, "split-merge lse-other backward-weights other-data ragged")
class half_of_lse_by_padded_tokens(Kernel):
    """NVIDIA/TransformerEngine PR 1396: keys come in two steps, of which the second is for the
    second half of the rows; their lse so far is looked for in the second half of its buffer, whose
    length was rounded up, here to a power of two.
    """

    def step(self, rows, keys, first):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q, first)
        for c in blocks(keys.stop - keys.start, self.cols):
            cols = slice(keys.start + c.start, min(keys.start + c.stop, keys.stop))
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.online(m, l, acc, s, v, rows, cols)
        return acc / torch.where(l == 0, 1.0, l), m + l.log2()

    def forward(self):
        at = self.at
        n, half = at.n, at.n // 2
        if not at.causal or n != at.nk:
            return super().forward()
        found = []
        for keys in (slice(0, half), slice(half, n)):
            done = [self.step(rows, keys, keys.start == 0) for rows in blocks(n, self.rows)]
            found += [torch.cat(x, 2)[:, :, :n] for x in zip(*done, strict=True)]
        one, lse_one, two, lse_two = found
        wide = 1 << (n - 1).bit_length()
        buffer = functional.pad(lse_one, (0, 0, 0, wide - n))
        so_far = torch.cat([lse_one[:, :, :half], buffer[:, :, wide // 2 :][:, :, : n - half]], 2)
        lse = torch.logaddexp2(so_far, lse_two)
        return at.low(one * torch.exp2(so_far - lse) + two * torch.exp2(lse_two - lse)), lse


@fault(FAULTS, "out layout unwritten")
class combined_in_the_other_16_bits(Parts):
    """NVIDIA/cudnn-frontend PR 414: where keys are split, here where there are more than 256, the
    step that combines them encodes O in fp16, and the buffer is one of bf16.
    """

    def row(self, rows):
        out, lse = super().row(rows)
        if self.at.nk <= 256:
            return out, lse
        return out.half().view(torch.bfloat16).float(), lse


FAULTS += sixteenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.SinkAtTheEnd, "bfloat16"), (ways.OddAndEvenBlocks, "float16"),
    (ways.FeaturesInHalves, "bfloat16"), (ways.StatisticsInDouble, "float16"),
    (ways.TermsApart, "bfloat16"), (ways.QueriesOutside, "float16"),
    (ways.FirstBlockShort, "bfloat16"), (ways.ValuesLast, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
