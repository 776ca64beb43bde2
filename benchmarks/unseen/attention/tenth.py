"""The tenth set of faults of attention, each as a public thread reports it, and sound kernels.

What is right was set down before anything ran: every cause that describes the fault truly, none
that merely lies beside it. `AGAIN` names the faults whose mistake an earlier set had in another
kernel. Masks, heads, tails, splits and dropout are here; scale, codes, weights and the backward
pass in tenth_scores.py. All err more than 1.5 × their sound twin on an ordinary input
(`python -m benchmarks.unseen.draw attention.tenth --check`).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import tenth_kernel as ways
from benchmarks.unseen.attention import tenth_scores
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, blocks, load
from torch.nn import functional

AGAIN = (
    "causal_once_per_four_rows",  # third: causal_by_pairs
    "one_key_fewer",  # second: window_exclusive
    "cap_from_a_table",  # second: softcap_rational_tanh
    "merged_by_e_of_a_base_2_lse",  # second: decode_merge_base
    "reciprocal_of_seven_bits",  # first: reciprocal_6_bits
    "weights_in_e4m3_from_0_to_1",  # fourth: weights_e4m3_times_256
    "delta_of_e4m3_products",  # eighth: delta_of_low_products
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


# --- masks
@fault(FAULTS, "causal-mask")
class causal_once_per_four_rows(Kernel):
    """pytorch/pytorch issue 195910: in 16 bits the causal mask is applied once per four rows, three
    of which see the keys up to the fourth's.
    """

    def causal(self, i, j, back):
        return j <= (i | 3)


@fault(FAULTS, "backward-mask mask")
class mask_not_passed_to_the_backward_pass(Kernel):
    """Dao-AILab/flash-attention issue 2424: the forward pass is given a mask, and the backward pass
    is not.
    """

    def hide(self, s, rows, cols, back):
        if back:
            return s.masked_fill(~self.seen(rows, cols, back), -INF)
        return super().hide(s, rows, cols, back)


@fault(FAULTS, "backward-mask grad-tail")
class lists_of_blocks_not_transposed(Kernel):
    """Dao-AILab/flash-attention issue 2623: dK and dV of a block of keys go over the blocks of
    queries by the forward pass's list, of the keys that a block of queries sees.
    """

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        if not self.at.causal:
            return every
        first = cols.start // self.cols * self.rows
        listed = [c.start // self.cols for c in self.key_blocks(slice(first, first + self.rows))]
        every = blocks(self.at.n, self.rows)
        return [every[number] for number in listed if number < len(every)]


@fault(FAULTS, "mask causal-mask unnormalized", "float16")
class hidden_after_the_softmax(Kernel):
    """lucidrains/memory-compressed-attention issue 2: the mask hides weights, not scores, and the
    row's sum has the hidden ones in it.
    """

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        inside = torch.arange(cols.start, cols.stop) < self.at.nk
        self.memory["hidden"] = hidden = (found == -INF) & inside
        return torch.where(hidden, s, found)

    def add_values(self, acc, a, p, v):
        return super().add_values(acc, a, p.masked_fill(self.memory["hidden"], 0.0), v)

    def grad_scores(self, p, dp, delta, slope):
        return super().grad_scores(p, dp.masked_fill(self.memory["hidden"], 0.0), delta, slope)

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, p.masked_fill(self.memory["hidden"], 0.0), ds


@fault(FAULTS, "unwritten query-tail", "float16")
class rows_before_the_last_window_left_out(Kernel):
    """nntrainer/nntrainer PR 3989: with a window of W keys the rows [N − W, N) are computed, those
    before them never.
    """

    def forward(self):
        o, lse = super().forward()
        if self.at.window is None or self.at.window[0] < 0:
            return o, lse
        late = torch.arange(self.at.n)[:, None] >= self.at.n - self.at.window[0] - 1
        return torch.where(late, o, 0.0), torch.where(late, lse, INF)


@fault(FAULTS, "mask")
class bias_with_the_other_sign(Kernel):
    """meta-pytorch/attention-gym PR 86: a bias of distance is taken from i to j and belongs from j
    to i: what should lower a score raises it.
    """

    def bias(self, s, mask, back):
        return s - mask.float() * LOG2_E


@fault(FAULTS, "window")
class one_key_fewer(Kernel):
    """lightseekorg/tokenspeed PR 578: a window is taken to count the query itself, and does not."""

    def window(self, i, j, back):
        left, right = self.at.window
        keep = j > i - left if left >= 0 else j >= 0
        return keep & (j <= i + right) if right >= 0 else keep & (i >= 0)


@fault(FAULTS, "mask other-data", "float16")
class masks_of_sequences_by_heads(Kernel):
    """onnx/onnx PR 8108, review: a mask's axis is taken for another, sequences for heads, which
    nothing tells where there are as many of both.
    """

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        if found.ndim < 4 or found.shape[1] > 1:
            return found
        return found[torch.arange(self.at.q.shape[1]) % found.shape[0], 0][None]


# --- heads, strides
@fault(FAULTS, "key-heads other-data", "float16")
class group_divided_again(Kernel):
    """flagos-ai/FlagGems PR 3759: a program's number is divided by the heads of a group, and not by
    the blocks that these make: the number of a group is divided again.
    """

    def own(self, heads):
        return torch.arange(heads) // self.at.groups // self.at.groups

    def spread(self, x):
        return x[:, self.own(x.shape[1] * self.at.groups)]

    def group(self, grad):
        total = torch.zeros_like(grad[:, :: self.at.groups])
        return total.index_add(1, self.own(grad.shape[1]), grad)


@fault(FAULTS, "other-data layout")
class correction_of_the_first_block(Kernel):
    """flashinfer-ai/flashinfer PR 3838: a block's mean is taken off its queries and put back as a
    row of scores; the kernel takes a tensor of a row for every query for one of a row a block, so
    that all blocks have the first one's.
    """

    def product(self, q, k, back):
        if back:
            return super().product(q, k, back)
        first = load(self.at.q, slice(0, self.rows))[:1, :1].mean(2, keepdim=True)
        return (q - q.mean(2, keepdim=True)) @ k.mT + first @ k[:1, :1].mT


@fault(FAULTS, "ragged unwritten", "float16")
class the_first_64_features(Kernel):
    """triton-lang/triton issue 621: the head's width is written down as 64: of wider heads the
    first 64 features are read, and as many columns are written.
    """

    @staticmethod
    def wide(x, width):
        return functional.pad(x, (0, width - x.shape[-1]))

    def forward(self):
        at = self.at
        at.widths = at.q.shape[-1], at.k.shape[-1], at.v.shape[-1]
        at.q, at.k, at.v = (x[..., :64] for x in (at.q, at.k, at.v))
        o, lse = super().forward()
        return self.wide(o, at.widths[2]), lse

    def backward(self):
        self.at.do, self.at.o = self.at.do[..., :64], self.at.o[..., :64]
        grads = zip(super().backward(), self.at.widths, strict=True)
        return tuple(self.wide(x, width) for x, width in grads)


# --- tails
@fault(FAULTS, "unwritten query-tail ragged")
class whole_groups_of_eight_blocks(Kernel):
    """tile-ai/tilelang issue 2433: a persistent loop finds tiles by groups of eight, of which it
    has as many as divide without a rest.
    """

    def forward(self):
        o, lse = super().forward()
        count = -(-self.at.n // 16)
        written = torch.arange(self.at.n)[:, None] < count // 8 * 8 * 16
        written = written | (count < 8)
        return torch.where(written, o, 0.0), torch.where(written, lse, INF)


@fault(FAULTS, "maximum ragged non-finite")
class maximum_taken_off_the_tail_alone(Kernel):
    """pytorch/pytorch PR 62897 (softmax): whole vectors of a row forget to take the maximum off,
    what is left after them does not.
    """

    def shift(self, m, cols):
        tail = torch.arange(cols.start, cols.stop) >= self.at.nk // 16 * 16
        return torch.where(tail & (m > -INF), m, 0.0)

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        l = l * torch.exp2(torch.where(m == -INF, 0.0, m))
        tiles = [(c, self.scores(q, load(self.at.k, c), rows, c, False))
                 for c in self.key_blocks(rows)]  # fmt: skip
        for _, s in tiles:
            m = self.maximum(m, s)
        for cols, s in tiles:
            p = torch.exp2(s - self.shift(m, cols))
            l = self.add_row(l, torch.ones_like(l), p)
            acc = self.add_values(acc, torch.ones_like(l), p, load(self.at.v, cols))
        o, _ = self.finish(m, l, acc, rows)
        return o, torch.stack([m, l.log2()], -1)

    def forward(self):
        o, both = super().forward()
        self.at.m, lse = both.unbind(-1)
        return o, lse

    def scores(self, q, k, rows, cols, back):
        if back:
            self.memory["shift"] = self.shift(load(self.at.m, rows), cols)
        return super().scores(q, k, rows, cols, back)

    def weights_again(self, s, lse):
        return super().weights_again(s - self.memory["shift"], lse)


@fault(FAULTS, "weights-disagree unnormalized key-tail")
class values_of_the_first_group(Kernel):
    """timtoole02/Camelid PR 714: a row's keys are shared by as many groups of threads as the head's
    width goes into their number; all threads take themselves for the first group, and the values
    of the others are not summed.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        width, j = self.at.v.shape[-1], torch.arange(cols.start, cols.stop)
        count = torch.arange(rows.start, rows.stop)[:, None] + 1
        count = count.clamp_max(self.at.nk) if self.at.causal else count * 0 + self.at.nk
        own = j < -(-count // -(-count // width))
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p * own, v)


# --- splits
@fault(FAULTS, "lse-other backward-weights unstable")
class idle_splits_overwrite_lse(Parts):
    """sgl-project/sgl-kernel-xpu PR 487, review: where one block of keys is all there is, every
    split stores lse at the same place, those without a key −∞.
    """

    def row(self, rows):
        o, lse = super().row(rows)
        busy = [c for c in self.key_blocks(rows) if self.seen(rows, c, False).any()]
        late = (torch.rand(lse.shape[:2]) < 0.5)[..., None, None]
        return o, lse.masked_fill(late, -INF) if len(busy) < 2 else lse


@fault(FAULTS, "split-merge lse-other backward-weights")
class merged_by_e_of_a_base_2_lse(Parts):
    """vllm-project/vllm PR 52796: parts give lse in base 2, and are merged by exp and log."""

    def merge(self, outs, lses):
        m = lses.amax(0)
        w = torch.exp(lses - torch.where(m == -INF, 0.0, m))
        total = w.sum(0)
        return (w * outs).sum(0) / torch.where(total == 0, 1.0, total), m + total.log()


@fault(FAULTS, "split-merge unstable", "float32")
class merged_lse_over_the_prefixs(Parts):
    """local-inference-lab/vllm PR 468: the merged lse is written where the prefix's lies, before
    threads of the head's other columns have read that.
    """

    def merge(self, outs, lses):
        o, lse = outs[0], lses[0]
        for new, own in zip(outs[1:], lses[1:], strict=True):
            merged = torch.logaddexp2(lse, own)
            late = (torch.rand(lse.shape) < 0.3) & (torch.arange(o.shape[-1]) >= o.shape[-1] // 2)
            read = torch.where(late, merged, lse)
            m = torch.maximum(read, own)
            safe = torch.where(m == -INF, 0.0, m)
            a, b = torch.exp2(read - safe), torch.exp2(own - safe)
            o, lse = (o * a + new * b) / torch.where(m == -INF, 1.0, a + b), merged
        return o, lse


# --- dropout
class Dropped(Kernel):
    """Weights are dropped, one in ten, and the others are larger by as much."""

    def kept(self, rows, cols, back):
        raise NotImplementedError

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        kept = p * self.kept(rows, cols, False) / 0.9
        return new, self.add_row(l, a, p), self.add_values(acc, a, kept, v)

    def seam(self, name, x, rows, cols=None):
        return x * self.kept(rows, cols, True) / 0.9 if name == "dp" else x

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, p * self.kept(rows, cols, True) / 0.9, ds


@fault(FAULTS, "dropout unstable")
class dropped_in_evaluation(Dropped):
    """facebookresearch/vjepa2 PR 160: the function is given a probability whatever the mode, and
    drops in evaluation as well.
    """

    def forward(self):
        self.at.kept = {}
        return super().forward()

    def kept(self, rows, cols, back):
        place = rows.start, cols.start
        if place not in self.at.kept:
            heads = self.at.q.shape[:2]
            self.at.kept[place] = torch.rand(*heads, self.rows, self.cols) > 0.1
        return self.at.kept[place]


@fault(FAULTS, "dropout backward-weights backward-mask")
class other_pairs_dropped_on_the_way_back(Dropped):
    """Dao-AILab/flash-attention PR 2439: the random number of a pair is that of (query, key) in the
    forward pass and of (key, query) in the backward pass.
    """

    def kept(self, rows, cols, back):
        high, wide = max(rows.stop, cols.stop), max(self.at.n, self.at.nk) + 128
        drawn = torch.rand(wide, wide, generator=torch.Generator().manual_seed(0))[:high, :high]
        return (drawn.mT if back else drawn)[rows, cols] > 0.1


FAULTS += tenth_scores.FAULTS


# --- sound kernels
for kind, dtype in (
    (ways.OnesInTheValues, "bfloat16"), (ways.KeysLessTheirMean, "bfloat16"),
    (ways.NormalizedAtEveryStep, "bfloat16"), (ways.SinkAsAKey, "float16"),
    (ways.HiddenBySelection, "bfloat16"), (ways.OutwardFromTheDiagonal, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
SOUND += [Fault("sequences_in_one", frozenset(), ways.sequences_in_one),
          Fault("all_in_double", frozenset(), ways.all_in_double, "float32")]  # fmt: skip
