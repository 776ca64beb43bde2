"""The twelfth set's faults of scale, cap, sinks, precision and the backward pass (twelfth.py has
the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, cut, e4m3
from torch.nn import functional

FAULTS: list[Fault] = []


# --- scale, cap, sinks
@fault(FAULTS, "scale", "float16")
class scale_of_the_absorbed_width(Kernel):
    """ollama/ollama PR 13893: the scale is of the width that keys have once others are put into
    them, not of the one that they were trained with; here that of keys and values together.
    """

    def forward(self):
        d, wide = self.at.q.shape[-1], self.at.v.shape[-1]
        self.at.scale *= (d / (d + wide)) ** 0.5
        return super().forward()


@fault(FAULTS, "softcap scores")
class cap_in_the_operands_format(Kernel):
    """AMD-AGI/Primus PR 1057 (logits of the last layer): tanh is made of exp(2x) in the format of
    what comes in.
    """

    def tangent(self, x):
        low = self.at.low
        power = low(torch.exp(low(2 * x).clamp(-20, 20)))
        return low(low(power - 1) / low(power + 1))

    def cap(self, s, back):
        c = self.at.softcap
        return self.at.low(c * self.tangent(s / (c * LOG2_E))) * LOG2_E if c else s

    def slope(self, q, k):
        c = self.at.softcap
        return 1 - self.tangent(q @ k.mT * self.at.scale / c).square() if c else 1.0


@fault(FAULTS, "softcap non-finite nan-escapes", "float16")
class slope_of_hidden_scores(Kernel):
    """openxla/tokamax PR 1121: the cap's slope has to be taken before the mask; after it hidden
    scores are a large number, whose square overflows, and 0 times that is NaN.
    """

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        self.memory["capped"] = torch.where(found == -INF, -0.7 * torch.finfo(s.dtype).max, s)
        return found

    def slope(self, q, k):
        c = self.at.softcap * LOG2_E
        return 1 - (self.memory["capped"] / c).square() if c else 1.0


@fault(FAULTS, "softcap grad-scores")
class slope_from_rounded_weights(Kernel):
    """Dao-AILab/flash-attention PR 1033, review: the capped score that the slope is made of is got
    back from the weight by a logarithm; here from the weight as dV has it, in 16 bits.
    """

    def weights_again(self, s, lse):
        p = super().weights_again(s, lse)
        self.memory["capped"] = self.at.low(p).clamp_min(1e-20).log2() + lse
        return p

    def slope(self, q, k):
        c, mask = self.at.softcap, self.at.mask
        if not c or (mask is not None and mask.dtype != torch.bool):
            return super().slope(q, k)
        return (1 - (self.memory["capped"] / (c * LOG2_E)).square()).clamp(0, 1)


@fault(FAULTS, "lse-other backward-weights")
class lse_of_capped_scores_scaled(Kernel):
    """ROCm/rocm-libraries PR 7723: the maximum that goes into lse is of products, which are to be
    scaled yet, or of capped scores, which are not; here it is scaled in both.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse - m * (1 - self.at.scale) if self.at.softcap else lse


@fault(FAULTS, "sinks")
class sink_of_a_tiles_first_row(Kernel):
    """intel/sycl-tla PR 533, review: one thread alone takes the sink for what its maximum begins
    with; here that of a tile's first row.
    """

    def begin(self, q, first=True):
        one = torch.arange(q.shape[2])[:, None] == 0
        m, l, acc = super().begin(q, first)
        bare = super().begin(q, False)
        return torch.where(one, m, bare[0]), torch.where(one, l, bare[1]), acc


# --- precision
@fault(FAULTS, "exponential row-max weights", "float16")
class packed_exponential(Kernel):
    """facebookexperimental/triton PR 3216: exponentials are made two at a time, in bf16: what goes
    in is rounded to it, and so is what comes out.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = bf16(torch.exp2(bf16(s - safe))), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "operand products weights", "float32")
class three_products_of_bf16(Kernel):
    """triton-lang/triton PR 7592: a product in fp32 is three of bf16, of numbers cut into two; what
    is below both is lost.
    """

    def times(self, x, y):
        x0, y0 = bf16(x), bf16(y)
        return bf16(x - x0) @ y0 + x0 @ bf16(y - y0) + x0 @ y0

    def product(self, q, k, back):
        return self.times(q, k.mT)

    def add_values(self, acc, a, p, v):
        return acc * a + self.times(p, v)


@fault(FAULTS, "accumulator products", "float16")
class accumulator_of_22_bits(Kernel):
    """thu-ml/SageAttention issue 287: the tensor cores' sums have 13 bits below the first, the
    others are cut off; here those of weights and values, 32 keys at a time.
    """

    def add_values(self, acc, a, p, v):
        low, acc = self.at.low(p), cut(acc * a, 10)
        for part in range(0, p.shape[-1], 32):
            acc = cut(acc + low[..., part : part + 32] @ v[:, :, part : part + 32], 10)
        return acc


@fault(FAULTS, "reciprocal")
class reciprocal_without_its_constants(Kernel):
    """tenstorrent/tt-metal issue 44829: the reciprocal relies on constants that an exponential was
    thought to have loaded; here it starts at 3 − 2x, and one step of Newton's follows.
    """

    def finish(self, m, l, acc, rows):
        _, lse = super().finish(m, l, acc, rows)
        part, power = torch.frexp(torch.where(l == 0, 1.0, l))
        start = 3 - 2 * part
        return self.at.low(acc * torch.ldexp(start * (2 - part * start), -power)), lse


@fault(FAULTS, "maximum row-max other-data non-finite underflow", "float16")
class maximum_of_the_next_row(Kernel):
    """pytorch/pytorch PR 156379 (log-softmax): two rows' maxima are stored at one place, and the
    first row has the second one's.
    """

    def maximum(self, m, s):
        second = super().maximum(m, s)[:, :, 1::2]
        return second.repeat_interleave(2, 2)


# --- the backward pass
@fault(FAULTS, "grad-tail unwritten")
class dq_of_as_many_rows_as_features(Kernel):
    """pytorch/pytorch PR 186142: the backward pass reads the length of the sequences where the
    width is, and dQ has as many rows; here later ones stay 0.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        written = torch.arange(self.at.n)[:, None] < dq.shape[-1]
        return torch.where(written, dq, 0.0), dk, dv


@fault(FAULTS, "layout ragged other-data")
class dq_by_two_pitches(Kernel):
    """Dao-AILab/flash-attention PR 2896: the kernel takes rows of dQ's sums to be as wide as the
    head, up to a multiple of 16, and what reads them back takes a multiple of 32.
    """

    def query_gradient(self, rows):
        dq = super().query_gradient(rows)
        n, d = dq.shape[2:]
        flat = functional.pad(dq, (0, -d % 16)).flatten(2)
        read = functional.pad(flat, (0, n * (d + -d % 32) - flat.shape[-1]))
        return read.unflatten(-1, (n, -1))[..., :d]


@fault(FAULTS, "grad-tail unwritten ragged non-finite nan-escapes", "float16")
class tail_of_dk_as_memory_was(Kernel):
    """fla-org/flash-linear-attention PR 892: gradients are allocated without being cleared, and
    rows past the last whole block are not written: they are NaN where memory was.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        return (torch.full_like(dk, torch.nan), dv) if cols.stop > self.at.nk else (dk, dv)


@fault(FAULTS, "grad-scores")
class grad_scores_in_mxfp8(Kernel):
    """NVIDIA/cudnn-frontend PR 226: dS goes into e4m3 twice, in blocks of 32 along the keys for dQ
    and along the queries for dK.
    """

    def coded(self, x):
        parts = x.unflatten(-1, (-1, 32))
        most = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        size = torch.exp2((most / 448).log2().ceil())
        return (e4m3(parts / size) * size).flatten(-2)

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, p, self.coded(ds.mT).mT if which == "keys" else self.coded(ds)
