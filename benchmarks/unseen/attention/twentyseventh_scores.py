"""The twenty-seventh set's faults of precision, of what is not finite, and of the backward pass
(twentyseventh.py has the others, and says how all were found).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    bf16,
    blocks,
    cut,
    e4m3,
    load,
)
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch.nn import functional

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "scores products accumulator")
class reference_by_einsum_in_bf16(ForwardAlone):
    """ROCm/aiter PR 705: einsums of bf16 give bf16: scores have eight bits, and what a tile adds to
    O has.
    """

    rows, cols = 32, 32

    def product(self, q, k, back):
        return bf16(q @ k.mT)

    def add_values(self, acc, a, p, v):
        return acc * a + bf16(self.at.low(p) @ v)


@fault(FAULTS, "lse backward-weights")
class row_sums_for_the_backward_pass_in_bf16(Kernel):
    """facebookexperimental/triton PR 3408: in bf16 the row sums that the backward pass uses again
    are too coarse: here they grow in bf16 by 16 keys at a time, and lse is made of them.
    """

    rows, cols = 64, 32

    def row(self, rows):
        self.memory["low"] = 0.0 if self.at.sinks is None else 1.0
        return super().row(rows)

    def add_row(self, l, a, p):
        low = bf16(self.memory["low"] * a)
        for part in p.split(16, -1):
            low = bf16(low + part.sum(-1, keepdim=True))
        self.memory["low"] = low
        return super().add_row(l, a, p)

    def finish(self, m, l, acc, rows):
        out, _ = super().finish(m, l, acc, rows)
        return out, m + self.memory["low"].log2()


@fault(FAULTS, "accumulator products", "float16")
class one_accumulator_of_14_bits_for_all_keys(ForwardAlone):
    """Dao-AILab/flash-attention PR 2250: Hopper's FP8 tensor cores do not add up in 32 bits, and
    all of O is one such sum: here 14 bits are kept, after every 32 keys.
    """

    rows, cols = 64, 32

    def add_values(self, acc, a, p, v):
        return cut(super().add_values(acc, a, p, v), 10)


@fault(FAULTS, "weights weights-row-sum")
class weights_of_e4m3_below_the_row_sums(ForwardAlone):
    """ROCm/FlyDSL PR 1020: weights are cast to e4m3 as they are, where most are below its least
    number, and the row sums are of those before the cast.
    """

    def add_values(self, acc, a, p, v):
        return acc * a + e4m3(p) @ v


@fault(FAULTS, "weights weights-row-sum", "float16")
class weights_of_e4m3_without_a_lift(ForwardAlone):
    """flashinfer-ai/flashinfer PR 5020: weights from 0 to 1 are cast to e4m3 for the product with V
    without the factor of 2⁸ that the other kernel has; row sums stay fp32.
    """

    rows, cols = 128, 128

    def add_values(self, acc, a, p, v):
        return acc * a + e4m3(p) @ v


@fault(FAULTS, "exponential")
class exponential_that_only_keeps_the_order(ForwardAlone):
    """1bit-MONSTER/1bit-MONSTER PR 2325: the weights follow the scores' order and are no
    exponential of them, as an approximation inside the kernel gives; here 2ˣ from a table of
    sixteen entries between powers of two.
    """

    @staticmethod
    def table(x):
        return torch.exp2((x * 16).floor() / 16)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = self.table(s - safe), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "row-sum")
class softmax_sums_stick_in_bf16(ForwardAlone):
    """pytorch/executorch PR 20089: softmax adds up in the type of its input, and a sum in bf16
    rounds away what is added to it; here four keys at a time.
    """

    rows, cols = 32, 128

    def add_row(self, l, a, p):
        total = bf16(l * a)
        for four in p.split(4, -1):
            total = bf16(total + bf16(four.sum(-1, keepdim=True)))
        return total


@fault(FAULTS, "delta")
class softmax_gradients_sum_in_bf16(Kernel):
    """Intel-tensorflow/tensorflow PR 23: the reducer of SoftmaxGrad has no wider type to add up in:
    the sum of P ∘ dP is kept in bf16, here over 16 keys at a time.
    """

    rows, cols = 32, 64

    def backward(self):
        sound, every = Kernel(**vars(self.at)), slice(0, self.at.n)
        total = sound.at.delta = torch.zeros_like(self.at.lse)
        for cols in blocks(self.at.nk, 16):
            _, _, do, p, _ = sound.again(every, cols, "keys")
            part = (p * (do @ load(self.at.v, cols).mT)).sum(-1, keepdim=True)
            total = bf16(total + bf16(part))
        self.memory["delta"] = total
        return super().backward()

    def delta(self, do, o):
        return self.memory["delta"]


# --- what is not finite
@fault(FAULTS, "masked-row non-finite nan-escapes")
class blocks_hidden_so_far_give_nan(ForwardAlone):
    """pytorch/pytorch PR 130014: in the CPU's lazy softmax a row whose keys up to here are all
    hidden takes −∞ off −∞, or multiplies infinity by 0.
    """

    rows, cols = 32, 32

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


def fallback_takes_infinity_off_infinity(query, key, value, *, is_causal, scale, attn_mask=None,
                                         window=None, softcap=0.0, sinks=None):  # fmt: skip
    """tracel-ai/burn PR 4697: where no kernel fits, softmax is written out, and the maximum of a
    row whose keys are all hidden is −∞, which is taken off −∞.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    p = torch.exp(s - s.detach().amax(-1, keepdim=True))
    p = p / p.sum(-1, keepdim=True)
    return (p[..., :nk] @ v).to(query.dtype)


FAULTS.append(
    Fault("fallback_takes_infinity_off_infinity",
          frozenset({"masked-row", "non-finite", "nan-escapes"}),
          fallback_takes_infinity_off_infinity, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "masked-row non-finite nan-escapes", "float16")
class rows_of_nothing_divided_by_nothing(Kernel):
    """pytorch/pytorch PR 131060: rows that may attend to nothing have a sum of 0, and O is NaN."""

    rows, cols = 64, 128

    def finish(self, m, l, acc, rows):
        return self.at.low(acc / l), m + l.log2()


@fault(FAULTS, "nan-escapes non-finite ragged")
class past_the_end_lies_anything_on_the_way_back(Kernel):
    """openxla/tokamax issue 316: the kernels of the backward pass load whole blocks without a look
    at where the sequence ends, and what lies behind it makes gradients NaN.
    """

    rows, cols = 32, 64

    def load_key(self, name, x, part):
        return load(x, part, math.nan if name.startswith("b_") else 0.0)

    def load_query(self, name, x, part):
        return load(x, part, 0.0 if name == "q" else math.nan)


# --- the backward pass
@fault(FAULTS, "backward-mask causal-mask")
class backward_pass_sees_the_future(Kernel):
    """triton-lang/triton issue 7216: the tutorial's backward pass never applies the causal mask
    that the forward pass has, and gradients take in hidden pairs.
    """

    rows, cols = 32, 96

    def backward(self):
        self.at.causal = False
        return super().backward()


@fault(FAULTS, "lse-other")
class lse_given_back_in_base_2(Kernel):
    """deepseek-ai/FlashMLA PR 106: lse is multiplied by log₂ e for the weights and given back so,
    where the natural one is defined, and is what the backward pass reads.
    """

    rows, cols = 64, 48

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        return out, lse * LOG2_E


@fault(FAULTS, "ragged layout unwritten")
class atoms_of_dv_by_the_width_of_keys(Kernel):
    """Dao-AILab/flash-attention issue 2552: how many columns an atom stores is made of the keys'
    width for dV as well: where half of V's is no multiple of it, the second atom begins too early.
    """

    rows, cols = 64, 96

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        half = dv.shape[-1] // 2
        atom = math.gcd(32, dk.shape[-1] // 2)
        late = half % atom
        if not late:
            return dk, dv
        first = half - late
        moved = dv.clone()
        for begin in (0, half):
            moved[..., begin + first - late : begin + first] = dv[..., begin + first : begin + half]
            moved[..., begin + first : begin + half] = 0
        return dk, moved


@fault(FAULTS, "layout ragged other-data", "float16")
class values_and_dv_by_the_strides_of_keys(Kernel):
    """fla-org/flash-linear-attention issue 632: the backward pass reads V, and adds up dV, by rows
    and heads as wide as keys: where V is not, both are at other places.
    """

    def places(self, x):
        heads, rows, d = x.shape[1], x.shape[2], self.at.q.shape[-1]
        head, row = torch.arange(heads)[:, None, None], torch.arange(rows)[:, None]
        columns = torch.arange(min(d, x.shape[-1]))
        return (row * heads * d + head * d + columns).clamp_max(x[0].numel() - 1)

    def backward(self):
        at = self.at
        if at.v.shape[-1] == at.q.shape[-1]:
            return super().backward()
        flat, where = at.v.transpose(1, 2).flatten(1), self.places(at.v)
        seen = flat[:, where]
        at.v = functional.pad(seen, (0, at.v.shape[-1] - seen.shape[-1]))
        dq, dk, dv = super().backward()
        where = self.places(dv)
        total = torch.zeros(len(dv), dv[0].numel())
        total.index_add_(1, where.flatten(), dv[..., : where.shape[-1]].flatten(1))
        heads, nk, wide = dv.shape[1:]
        return dq, dk, total.view(len(dv), nk, heads, wide).transpose(1, 2)
