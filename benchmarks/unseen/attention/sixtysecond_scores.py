"""The sixty-second set's faults of products, softmaxes, scales, splits and of what is not finite
(sixtysecond.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import sixtysecond_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, cut, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows

FAULTS: list[Fault] = []


# --- products
@fault(FAULTS, "operand weights", "float32")
class tf32_since_a_nightly(Kernel):
    """pytorch/pytorch issue 161022: FlexAttention's kernels have their float32 products in TF32
    unless they are told otherwise, since the way of asking for it has changed.
    """

    rows, cols = 128, 32

    def load_key(self, name, x, part):
        return ways.tf32(load(x, part))

    def load_query(self, name, x, part):
        return ways.tf32(load(x, part))

    def add_values(self, acc, a, p, v):
        return acc * a + ways.tf32(p) @ v

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, ways.tf32(p), ways.tf32(ds)


@fault(FAULTS, "operand weights", "float32")
class reference_of_the_decoding_in_tf32(ForwardAlone, WholeRows):
    """pytorch/pytorch PR 158979: what a test of flex decoding is compared with is computed with
    matrix products in TF32; the softmax between them is in float32.
    """

    rows = 64

    def product(self, q, k, back):
        return ways.tf32(q) @ ways.tf32(k).mT

    def online(self, m, l, acc, s, v, rows, cols):
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        l = l * a + p.sum(-1, keepdim=True)
        p = ways.tf32(p / torch.where(l == 0, 1.0, l))
        return top, l, (p @ ways.tf32(v)) * l


@fault(FAULTS, "weights operand", "float32")
class points_aggregated_in_tf32(ForwardAlone):
    """lucidrains/invariant-point-attention PR 3: the part behind the softmax is the sensitive one,
    where weights and values go into their product as TF32; what is in front of it stays.
    """

    rows, cols = 48, 128

    def add_values(self, acc, a, p, v):
        return acc * a + ways.tf32(p) @ ways.tf32(v)


@fault(FAULTS, "out weights grad-stored")
class bf16_of_xpu_not_to_the_nearest(Kernel):
    """PaddlePaddle/Paddle PR 68689: the bf16 of flash_attn and of its gradient on XPU is not
    rounded to the nearest, ties to even; here the lower bits are cut off wherever bf16 is made.
    """

    rows, cols = 64, 128

    def forward(self):
        self.at.low = cut
        return super().forward()

    def backward(self):
        return tuple(cut(x) for x in super().backward())


# --- the softmax
@fault(FAULTS, "scores exponential row-sum")
class chameleons_weights_not_upcast(ForwardAlone, WholeRows):
    """huggingface/transformers PR 33822: Chameleon's attention weights are computed in the model's
    type, where others' are cast to float32: scores, exponentials and their sum are bf16.
    """

    rows = 32

    def product(self, q, k, back):
        return bf16(super().product(q, k, back))

    def scaled(self, s, rows, cols, back):
        return bf16(s * self.at.scale) * LOG2_E

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = bf16(torch.exp2(s - safe)), torch.exp2(m - safe)
        l = bf16(l * a)
        for part in p.split(16, -1):
            l = bf16(l + part.sum(-1, keepdim=True))
        return new, l, self.add_values(acc, a, p, v)


# --- scales
@fault(FAULTS, "scale", "float16")
class packed_width_over_the_query_heads(ForwardAlone):
    """ROCm/hip-ep PR 621: where no scale is given and Q, K and V are one tensor, its width is
    divided by the number of query heads alone, for the size of a head; here that is where there are
    as many queries as keys, and the scale is 1/√d.
    """

    rows, cols = 64, 48

    def scaled(self, s, rows, cols, back):
        s, at = super().scaled(s, rows, cols, back), self.at
        (_, heads, _, d), shared = at.q.shape, at.q.shape[1] // at.groups
        if at.n != at.nk or abs(at.scale * d**0.5 - 1) > 1e-4:
            return s
        return s * (heads / (heads + 2 * shared)) ** 0.5


# --- splits
@fault(FAULTS, "split-merge unnormalized")
class statistics_of_later_queries_over_the_first_ones(ForwardAlone):
    """ikawrakow/ik_llama.cpp PR 1521: with a bf16 cache the pointers to maxima and sums of a part
    of the keys stay where they are while those to queries and O go on by eight rows: later rows'
    statistics are stored over the first ones', and parts are merged by those. What was never stored
    is chosen: a maximum of 0 and a sum of 1.
    """

    rows, cols, step = 16, 64, 8

    def stored(self, m, l, rows):
        many = max(0, min(rows.stop, self.at.n) - rows.start - self.step)
        m, l = m.clone(), l.clone()
        for x, memory in ((m, 0.0), (l, 1.0)):
            x[:, :, :many] = x[:, :, self.step : self.step + many].clone()
            x[:, :, self.step : self.step + many] = memory
        return m, l

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        middle, states = -(-len(every) // 2), []
        for number, part in enumerate((every[:middle], every[middle:])):
            state = self.begin(q, number == 0)
            for cols in part:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            if part:
                states.append(state)
        if len(states) < 2:
            return self.finish(*states[0], rows)
        states = [(*self.stored(m, l, rows), acc) for m, l, acc in states]
        top = torch.maximum(states[0][0], states[1][0])
        safe = torch.where(top == -INF, 0.0, top)
        l = sum(l * torch.exp2(m - safe) for m, l, _ in states)
        acc = sum(acc * torch.exp2(m - safe) for m, _, acc in states)
        return self.finish(top, l, acc, rows)


# --- what is not finite
@fault(FAULTS, "nan-escapes non-finite", "float16")
class beta_of_zero_times_empty_memory(ForwardAlone, WholeRows):
    """huggingface/diffusers PR 2643 (MPS): without a mask scores are 0 times a tensor that nobody
    has written plus Q Kᵀ, and 0 times NaN is NaN. Which of it is NaN is chosen: the first key's
    place in every sixth row of the last sequence.
    """

    rows = 64

    def scaled(self, s, rows, cols, back):
        s = super().scaled(s, rows, cols, back)
        if self.at.mask is not None:
            return s
        memory = torch.zeros_like(s)
        memory[-1, :, 5::6, 0] = torch.nan
        return s + 0 * memory
