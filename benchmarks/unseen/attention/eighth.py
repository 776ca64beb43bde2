"""The eighth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, heads, strides and memory are here, splits, scores and precision in
eighth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.eighth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import eighth_kernel as ways
from benchmarks.unseen.attention import eighth_scores
from benchmarks.unseen.attention.eighth_kernel import as_heads, fault, permuted, rows_by
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, e4m3, load

AGAIN = (
    "weights_normalized_then_e4m3",  # third: weights_normalized_bf16
    "backward_without_the_sink",  # second: sink_misses_lse
    "delta_of_low_products",  # first: delta_products_low
    "statistics_of_half_the_columns",  # seventh: sum_of_half_the_lanes
    "keys_and_queries_in_fp16",  # second: single_products_tf32, which keeps as many bits
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask mask backward-mask")
class diagonal_on_the_last_block_alone(Kernel):
    """ROCm/rocMLIR PR 2165: the causal mask is applied in the last iteration alone, in the forward
    pass, where rows of queries are longer than blocks of keys.
    """

    cols = 32

    def causal(self, i, j, back):
        last = self.key_blocks(slice(int(i[0, 0]), int(i[-1, 0]) + 1))[-1]
        return (j <= i) | (not back and int(j[0, 0]) < last.start)


@fault(FAULTS, "mask", "float16")
class mask_of_the_first_head(Kernel):
    """tracel-ai/burn issue 4778: a boolean mask that all heads share hides keys of head 0 alone."""

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if found.dtype != torch.bool or found.ndim < 4 or found.shape[1] > 1:
            return found
        return found | (torch.arange(self.at.q.shape[1]) > 0).view(1, -1, 1, 1)


@fault(FAULTS, "mask other-data")
class shared_mask_by_query_heads(Kernel):
    """tenstorrent/tt-metal issue 39946: a mask of one head is read at the query's head, which is in
    the next sequence's.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        b, heads = self.at.q.shape[:2]
        if found.ndim < 4 or found.shape[1] > 1:
            return found
        at = (torch.arange(b)[:, None] + torch.arange(heads)) % found.shape[0]
        return found[at, 0]


@fault(FAULTS, "padding key-tail ragged mask")
class mask_padded_with_zeros(Kernel):
    """tenstorrent/tt-metal issue 54833: the columns that fill up a mask's last tile are 0, and
    nothing else hides the keys there.
    """

    cols = 32

    def inside(self, j, back):
        return j < (self.at.nk if self.at.mask is None else INF)

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is not None and mask.dtype == torch.bool:
            self.at.mask = torch.zeros(mask.shape).masked_fill(~mask, -INF)
        return super().hide(s, rows, cols, back)


@fault(FAULTS, "mask", "float32")
class mask_not_read(Kernel):
    """NVIDIA/apex issue 1119 ("does not work for padding input"): a mask is taken and not read."""

    def hide(self, s, rows, cols, back):
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


@fault(FAULTS, "backward-mask causal-mask")
class backward_always_causal(Kernel):
    """triton-lang/triton issue 4541: the tutorial's backward pass does not ask whether the call is
    causal.
    """

    def seen(self, rows, cols, back):
        i = torch.arange(rows.start, rows.stop)[:, None]
        below = torch.arange(cols.start, cols.stop)[None] <= i
        return super().seen(rows, cols, back) & (below | (not back))


@fault(FAULTS, "exponential mask-finite mask causal-mask padding", "float16")
class exponential_with_a_floor(Kernel):
    """torch-spyre/torch-spyre PR 4522: exp in fp16 ends at a floor above 0, of −∞ as well."""

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe).clamp_min(2**-14), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- heads, strides
@fault(FAULTS, "key-heads other-data")
class share_padded_to_a_power_of_two(Kernel):
    """ggml-org/llama.cpp PR 19115: heads are cut into blocks of the next power of 2, so that a
    share of 3 takes another's keys.
    """

    def own(self, heads):
        wide = 1 << (self.at.groups - 1).bit_length()
        return (torch.arange(heads) // wide).clamp_max(heads // self.at.groups - 1)

    def spread(self, x):
        return x[:, self.own(x.shape[1] * self.at.groups)]

    def group(self, grad):
        total = torch.zeros_like(grad[:, :: self.at.groups])
        return total.index_add(1, self.own(grad.shape[1]), grad)


@fault(FAULTS, "operand other-data")
class values_by_the_first_scale(Kernel):
    """sgl-project/sgl-kernel-xpu PR 252, review: V in e4m3 has a scale for every sequence and head,
    of which the kernel reads one.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v":
            return found
        scale = self.at.v.abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 448
        return e4m3(found / scale) * scale[:1, :1]


@fault(FAULTS, "layout other-data")
class do_by_the_strides_of_out(Kernel):
    """ROCm/aotriton PR 237: dK and dV read dO by the strides of O, which lies as the queries do."""

    def key_gradients(self, cols):
        kept = self.at.do
        if self.memory["permuted"] and kept.is_contiguous():
            self.at.do = as_heads(kept)
        found = super().key_gradients(cols)
        self.at.do = kept
        return found

    def backward(self):
        self.memory["permuted"] = permuted(self.at.q)
        return super().backward()


@fault(FAULTS, "layout ragged other-data")
class out_by_the_strides_of_the_query(Kernel):
    """pytorch/pytorch PR 135882: where values are wider than keys, O has the strides of Q, and a
    row ends in the next one.
    """

    def forward(self):
        o, lse = super().forward()
        d, wide = self.at.q.shape[-1], o.shape[-1]
        if wide <= d or wide > 2 * d:
            return o, lse
        flat = o.reshape(-1, wide)
        return torch.cat([flat[:, :d], flat.roll(-1, 0)[:, : wide - d]], -1).view_as(o), lse


@fault(FAULTS, "layout other-data ragged", "float16")
class tile_rows_by_the_others_strides(Kernel):
    """flagos-ai/FlagAttention PR 46: rows of a tile of K lie by V's strides and those of V by K's;
    from tile to tile each goes by its own.
    """

    def load_key(self, name, x, part):
        other = {"k": self.at.v, "v": self.at.k}.get(name, x)
        return rows_by(x, part, other.shape[-1])


@fault(FAULTS, "scale")
class scale_of_one_half(Kernel):
    """BobMcDear/attorch issue 14: the scale is 0.5 whatever the head's width."""

    def forward(self):
        self.at.scale = 0.5
        return super().forward()


@fault(FAULTS, "other-data layout unwritten")
class every_head_is_the_first(Kernel):
    """BobMcDear/attorch issue 14: a head's place is one stride divided by another, which is 0 where
    tokens lie before heads: each reads and writes what is head 0's.
    """

    def written(self, x):
        if not permuted(self.at.q):
            return x
        return torch.cat([x[:, :1], torch.zeros_like(x[:, 1:])], 1)

    def forward(self):
        o, lse = super().forward()
        return self.written(o), lse

    def backward(self):
        return tuple(self.written(x) for x in super().backward())


# --- what another tile, thread or call left
@fault(FAULTS, "split-merge other-data")
class merged_output_goes_on(Parts):
    """flashinfer-ai/flashinfer PR 5029: the sum over splits is not set to 0 where a block goes on
    to its next rows.
    """

    def merge(self, outs, lses):
        o, lse = super().merge(outs, lses)
        before, self.memory["o"] = self.memory.get("o"), o
        return o if before is None else o + before, lse


@fault(FAULTS, "rescale", "float32")
class correction_of_one(Kernel):
    """paiml/aprender issue 2706: the old maximum is the new one's register, and their difference
    always 0.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - torch.where(new == -INF, 0.0, new)), torch.ones_like(m)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "row-sum rescale unnormalized weights-disagree", "float32")
class lanes_of_other_maxima(Kernel):
    """KarhouTam/cuda-kernels issue 3 (softmax): sums of lanes, each over its own maximum, are added
    up as if it were one.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        self.memory["lanes"] = s.unflatten(-1, (-1, 4))
        return super().online(m, l, acc, s, v, rows, cols)

    def add_row(self, l, a, p):
        lanes = self.memory["lanes"]
        most = lanes.amax(-2, keepdim=True)
        sums = torch.exp2(lanes - torch.where(most == -INF, 0.0, most)).sum(-2)
        return l * a + sums.sum(-1, keepdim=True)


@fault(FAULTS, "other-data unstable")
class keys_of_the_stage_before(Kernel):
    """ashalliants/ninfer-3090 PR 49: no barrier between a thread's own wait and reading what others
    load: after the first tile some of K is the tile's before.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k" or not part.start:
            return found
        before = load(x, slice(part.start - self.cols, part.stop - self.cols))
        late = (torch.rand(self.cols // 8) < 0.5).repeat_interleave(8)
        return torch.where(late[:, None], before, found)


@fault(FAULTS, "weights-disagree unnormalized key-tail tiles-skipped", "float32")
class values_of_half_a_block(Kernel):
    """vllm-project/vllm PR 438: lanes past 32 do not multiply: of each block the second half of V
    is left out, its weights are in the sum.
    """

    def add_values(self, acc, a, p, v):
        half = p.shape[-1] // 2
        return super().add_values(acc, a, p[..., :half], v[:, :, :half])


@fault(FAULTS, "unstable grad-accumulator grad-tail other-data")
class dq_store_overtaken(Kernel):
    """hao-ai-lab/FastVideo PR 735: dQ's part is still being added from shared memory when the next
    part is written there.
    """

    def query_gradient(self, rows):
        parts = []
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            parts.append(ds @ k)
        late = torch.rand(len(parts), self.rows // 8) < 0.3
        dq = parts[-1]
        for part, after, by in zip(parts[:-1], parts[1:], late[:-1], strict=True):
            dq = dq + torch.where(by.repeat_interleave(8)[:, None], after, part)
        return dq * self.at.scale


@fault(FAULTS, "other-data unstable grad-tail", "float16")
class dv_staged_where_values_load(Kernel):
    """facebookexperimental/triton PR 1853: dV waits for its store where the next tile's V is
    loaded, in a persistent backward pass.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        if cols.stop >= self.at.nk:
            return dk, dv
        after = load(self.at.v, slice(cols.stop, cols.stop + self.cols))
        late = (torch.rand(self.cols // 16) < 0.3).repeat_interleave(16)
        return dk, torch.where(late[:, None], after, dv)


@fault(FAULTS, "grad-tail grad-accumulator")
class key_gradients_cleared_midway(Kernel):
    """AI-Hypercomputer/maxdiffusion PR 485, review: step 0 sets dK and dV to 0, and the order of
    steps is not given.
    """

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[len(every) // 2 :] + every[: len(every) // 2]

    def add(self, name, total, part, rows, cols):
        first = name != "dq_acc" and rows.start == 0
        return part if first else super().add(name, total, part, rows, cols)


@fault(FAULTS, "non-finite nan-escapes ragged", "float16")
class lse_not_set_past_the_end(Kernel):
    """tile-ai/tilelang PR 2461: rows of lse that fill up the last tile are what memory holds, and 0
    times NaN goes into dK.
    """

    def weights_again(self, s, lse):
        p = super().weights_again(s, lse)
        return torch.where(lse == INF, torch.nan, p)


FAULTS += eighth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.Tree, "bfloat16"), (ways.Ring, "bfloat16"), (ways.OwnStatistics, "bfloat16"),
    (ways.OneBackwardPass, "float16"), (ways.InStripes, "bfloat16"), (ways.Lifted, "bfloat16"),
    (ways.FromBothEnds, "float32"), (ways.Columns, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("head_by_head", frozenset(), ways.head_by_head, "float16"),
          Fault("groups_packed", frozenset(), ways.groups_packed)]  # fmt: skip
