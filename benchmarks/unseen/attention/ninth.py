"""The ninth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, heads, strides and splits are here, codes, scores and the backward pass in
ninth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.ninth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import ninth_kernel as ways
from benchmarks.unseen.attention import ninth_scores
from benchmarks.unseen.attention.eighth_kernel import fault, permuted
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, bf16, blocks

AGAIN = (
    "hidden_by_a_tiny_number",  # sixth: minus_ten_thousand
    "capped_after_the_mask",  # fifth: capped_padding
    "partials_in_bf16_in_a_wide_buffer",  # fifth: partial_results_bf16
    "dq_scaled_twice",  # seventh: dk_scaled_twice
    "merged_lse_in_nats",  # seventh: lse_in_nats_read_in_base_2
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "softcap mask")
class bias_within_the_cap(Kernel):
    """NVIDIA/TransformerEngine PR 3391: the soft cap is applied after the bias is added."""

    def bias(self, s, mask, back):
        return s

    def cap(self, s, back):
        mask = self.at.mask
        if mask is not None and mask.dtype != torch.bool:
            s = s + self.given_mask(*self.memory["tile"]).float() * LOG2_E
        s = super().cap(s, back)
        self.memory["capped"] = s
        return s

    def scaled(self, s, rows, cols, back):
        self.memory["tile"] = rows, cols
        return super().scaled(s, rows, cols, back)

    def slope(self, q, k):
        c = self.at.softcap * LOG2_E
        return 1 - (self.memory["capped"] / c).square() if c else 1.0


@fault(FAULTS, "masked-row mask mask-finite", "float16")
class hidden_rows_give_the_mean(Kernel):
    """microsoft/onnxruntime issue 28904: a mask hides by −10³⁰, so that a row that sees no key has
    the mean of V, where 0 belongs.
    """

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return s
        inside = torch.arange(cols.start, cols.stop) < self.at.nk
        return s.masked_fill(~self.given_mask(rows, cols) & inside, -1e30)


@fault(FAULTS, "mask-finite mask causal-mask")
class hidden_by_a_tiny_number(Kernel):
    """hyunwoongko/transformer issue 10: hidden scores are −e, and e is 10⁻¹²."""

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)

    def hide(self, s, rows, cols, back):
        s = super().hide(s, rows, cols, back)
        inside = torch.arange(cols.start, cols.stop) < self.at.nk
        return s.masked_fill((s == -INF) & inside, -1e-12)


@fault(FAULTS, "mask")
class mask_along_the_other_axis(Kernel):
    """lsdefine/attention-is-all-you-need-keras issue 16: a mask of keys hides rows: what should
    hide column j hides query j.
    """

    def given_mask(self, rows, cols):
        kept = self.at.mask
        if kept.shape[-1] == kept.shape[-2]:
            self.at.mask = kept.mT
        found = super().given_mask(rows, cols)
        self.at.mask = kept
        return found


@fault(FAULTS, "mask", "float16")
class bias_before_the_scale(Kernel):
    """HKUSTDial/flash-sparse-attention PR 199: the bias and the scale enter in the wrong order, so
    that the bias is scaled with the scores.
    """

    def bias(self, s, mask, back):
        return s + mask.float() * (LOG2_E * self.at.scale)


@fault(FAULTS, "mask other-data")
class mask_columns_twice_as_far(Kernel):
    """tenstorrent/tt-metal PR 38004: from block to block of keys the mask's columns go on by as
    many as belong to two tiles of heads.
    """

    def given_mask(self, rows, cols):
        mask, n, nk = self.at.mask, self.at.n, self.at.nk
        full = mask.expand(*mask.shape[:-2], n, nk).reshape(*mask.shape[:-2], n * nk)
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.stop - cols.start) + 2 * cols.start
        return full[..., (i * nk + j) % (n * nk)]


@fault(FAULTS, "causal-mask mask")
class folded_positions_of_unfolded_rows(Kernel):
    """feifeibear/long-context-attention issue 53: the mask is that of a zigzag order, in which a
    rank has the first and the last quarter, and the sequence was not folded.
    """

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)

    def causal(self, i, j, back):
        quarter = -(-max(self.at.n, self.at.nk) // 4)
        order = torch.tensor([0, 3, 1, 2])

        def place(x):
            return order[(x // quarter).clamp_max(3)] * quarter + x % quarter

        return place(j) <= place(i)


@fault(FAULTS, "window backward-mask")
class window_unmasked_below_the_diagonal(Kernel):
    """ROCm/aiter issue 5741: tiles that lie below the diagonal are not masked at all, those that
    the window begins in among them.
    """

    cols = 32

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        if self.at.window is None or self.at.window[0] < 0:
            return every
        return [c for c in every if c.stop > rows.start - self.at.window[0]]

    def window(self, i, j, back):
        below = self.at.causal and not back and int(j.max()) <= int(i.min())
        return super().window(i, j, back) | below


@fault(FAULTS, "softcap mask causal-mask mask-finite padding")
class capped_after_the_mask(Kernel):
    """flashinfer-ai/flashinfer PR 350: −∞ goes through the soft cap, and hidden keys score −c."""

    def scores(self, q, k, rows, cols, back):
        s = self.scaled(self.product(q, k, back), rows, cols, back)
        return self.cap(self.hide(s, rows, cols, back), back)


# --- heads, strides
@fault(FAULTS, "key-heads other-data layout")
class keys_at_the_query_head(Kernel):
    """LMCache/LMCache PR 3092, review: K and V [N, H_k, D] are read at the query's head, which past
    the last one is in the next token.
    """

    def place(self, heads, shared):
        at = torch.arange(self.at.nk) * shared + torch.arange(heads)[:, None]
        return at.clamp_max(self.at.nk * shared - 1).flatten()

    def spread(self, x):
        b, shared, nk, d = x.shape
        rows = x.transpose(1, 2).reshape(b, nk * shared, d)
        return rows[:, self.place(shared * self.at.groups, shared)].view(b, -1, nk, d)

    def group(self, grad):
        b, heads, nk, d = grad.shape
        shared = heads // self.at.groups
        total = torch.zeros(b, nk * shared, d)
        total = total.index_add(1, self.place(heads, shared), grad.reshape(b, -1, d))
        return total.view(b, nk, shared, d).transpose(1, 2)


@fault(FAULTS, "key-heads other-data", "float16")
class queries_renumbered_on_each_device(Kernel):
    """GenerelSchwerz/llama.cpp PR 48: query heads are split over two devices and numbered anew on
    each, which both have every key head.
    """

    def own(self, heads):
        shared, half = heads // self.at.groups, heads // 2
        if self.at.groups == 1 or heads % 2 or half < shared:
            return torch.arange(heads) // self.at.groups
        return (torch.arange(heads) % half // (half // shared)).clamp_max(shared - 1)

    def spread(self, x):
        return x[:, self.own(x.shape[1] * self.at.groups)]

    def group(self, grad):
        total = torch.zeros_like(grad[:, :: self.at.groups])
        return total.index_add(1, self.own(grad.shape[1]), grad)


@fault(FAULTS, "layout other-data")
class one_stride_per_head(Kernel):
    """huggingface/candle PR 3703: heads are found by their stride, and the rows of each taken to be
    packed, which they are not where tokens lie before heads.
    """

    def packed(self, x, groups):
        b, heads, t, d = x[:, ::groups].shape
        rows = x[:, ::groups].transpose(1, 2).reshape(b, t * heads, d)
        found = rows[:, torch.arange(heads)[:, None] + torch.arange(t)]
        return found.repeat_interleave(groups, 1)

    def forward(self):
        at = self.at
        if permuted(at.q):
            at.k, at.v = self.packed(at.k, at.groups), self.packed(at.v, at.groups)
            at.q = self.packed(at.q, 1)
        return super().forward()


@fault(FAULTS, "layout other-data unwritten")
class combined_rows_a_token_apart(Parts):
    """flagos-ai/FlagGems issue 5235: the kernel that merges splits begins each tile where rows are
    packed and goes on from row to row by a token's stride; what is not written stays as it was.
    """

    def forward(self):
        o, lse = super().forward()
        if not permuted(self.at.q):
            return o, lse
        b, heads, n, d = o.shape
        row = torch.arange(b * heads * n)
        at = row // 16 * 16 + row % 16 * heads
        inside = at < len(row)
        flat = torch.zeros(len(row), d)
        flat[at[inside]] = o.reshape(-1, d)[inside]
        return flat.view(b, n, heads, d).transpose(1, 2), lse


@fault(FAULTS, "sinks other-data")
class sinks_in_another_order(Kernel):
    """sgl-project/sgl-kernel-xpu PR 254, review: heads of a group are rows of one tile, whose order
    is not that of the sinks.
    """

    def begin(self, q, first=True):
        kept = self.at.sinks
        if kept is not None:
            self.at.sinks = kept.view(-1, self.at.groups).flip(-1).flatten()
        found = super().begin(q, first)
        self.at.sinks = kept
        return found


# --- splits
@fault(FAULTS, "split-merge other-data lse-other backward-weights", "float32")
class lse_of_splits_by_other_strides(Parts):
    """Dao-AILab/flash-attention PR 2388: lse of the splits is written by strides of its own, split
    after sequence, and merged by others.
    """

    def merge(self, outs, lses):
        return super().merge(outs, lses.transpose(0, 1).reshape(lses.shape))


@fault(FAULTS, "split-merge other-data")
class merged_by_the_first_heads_lse(Parts):
    """Tencent/hpc-ops PR 6: the stride of key heads is forgotten where lse of the splits is
    read."""

    def merge(self, outs, lses):
        o, _ = super().merge(outs, lses[:, :, :1].expand_as(lses))
        return o, super().merge(outs, lses)[1]


@fault(FAULTS, "split-merge unnormalized other-data lse-other backward-weights", "float32")
class weights_of_splits_not_cleared(Parts):
    """tile-ai/tilelang issue 328: the sum of the splits' weights is not set to 0 before a block
    adds its own.
    """

    def merge(self, outs, lses):
        m = lses.amax(0)
        w = torch.exp2(lses - torch.where(m == -INF, 0.0, m))
        self.memory["sum"] = total = w.sum(0) + self.memory.get("sum", 0.0)
        return (w * outs).sum(0) / torch.where(total == 0, 1.0, total), m + total.log2()


@fault(FAULTS, "accumulator split-merge out")
class partials_in_bf16_in_a_wide_buffer(Parts):
    """flashinfer-ai/flashinfer issue 5107: a workspace for fp32 is read back as bf16, to which what
    each split gives is rounded.
    """

    def stored(self, o, l):
        return bf16(o)


FAULTS += ninth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.Compensated, "float32"), (ways.InNats, "bfloat16"), (ways.MaximumAndSum, "float16"),
    (ways.HighAndLow, "bfloat16"), (ways.RootScaled, "float16"), (ways.InDouble, "bfloat16"),
    (ways.Unrounded, "bfloat16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("keys_shuffled", frozenset(), ways.keys_shuffled),
          Fault("through_lse", frozenset(), ways.through_lse),
          Fault("in_row_chunks", frozenset(), ways.in_row_chunks, "float16")]  # fmt: skip
