"""The nineteenth set's faults of precision and the backward pass (nineteenth.py has the others, and
says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import as_heads, fault, permuted
from benchmarks.unseen.attention.fifth_kernel import (
    LOG2_E,
    Kernel,
    blocks,
    cut,
    e4m3,
    fp16,
    load,
)
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone, down
from torch import Tensor
from torch.nn import functional

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "maximum weights underflow", "float16")
class maximum_over_hidden_scores_too(Kernel):
    """thu-ml/SageAttention PR 224: a row's maximum is taken before scores are hidden: where a
    hidden one is far larger, weights are far smaller than 1.
    """

    def hide(self, s, rows, cols, back):
        if not back:
            self.memory["seen"] = s
        return super().hide(s, rows, cols, back)

    def maximum(self, m, s):
        return super().maximum(m, self.memory["seen"])


@fault(FAULTS, "mask scores backward-weights")
class bias_in_base_2_rounded_on_the_way_there(Kernel):
    """ROCm/aotriton PR 228: the bias is multiplied by log₂ e in its own 16 bits in the forward
    pass, and in fp32 in the backward pass.
    """

    def bias(self, s, mask, back):
        return super().bias(s, mask, back) if back else s + self.at.low(mask.float() * LOG2_E)


@fault(FAULTS, "operand")
class operands_cast_to_e4m3_at_scale_one(Kernel):
    """NVIDIA/TensorRT-LLM issue 1921: queries, keys and values are converted to fp8 by a scale of 1
    whatever they are.
    """

    def forward(self):
        at = self.at
        at.q, at.k, at.v = map(e4m3, (at.q, at.k, at.v))
        return super().forward()


@fault(FAULTS, "products scores", "float16")
class every_pair_multiplied_in_half(Kernel):
    """ggml-org/llama.cpp PR 17558: Q Kᵀ is added up in fp32, but what is added are products of two
    fp16 numbers that are rounded to fp16.
    """

    rows, cols = 32, 32

    def product(self, q, k, back):
        if back:
            return super().product(q, k, back)
        return fp16(q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)


@fault(FAULTS, "operand products weights")
class operands_in_blocks_rounded_down(ForwardAlone):
    """Xilinx/mlir-aie PR 3442: bf16 matrices are converted to blocks of eight mantissas with one
    exponent before their product, each mantissa rounded towards −∞.
    """

    def product(self, q, k, back):
        return down(q, -1) @ down(k, -1).mT

    def add_values(self, acc, a, p, v):
        return acc * a + down(self.at.low(p), -1) @ down(v, -2)


@fault(FAULTS, "products scores accumulator", "float16")
class both_products_added_up_in_half(ForwardAlone):
    """uxlfoundation/oneDNN PR 3842: Q Kᵀ and the product with V are accumulated in fp16, here 16
    terms after 16; the softmax between them is in fp32.
    """

    @staticmethod
    def summed(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(a.split(16, -1), b.split(16, -2), strict=True):
            total = fp16(total + x @ y)
        return total

    def product(self, q, k, back):
        return self.summed(q, k.mT)

    def add_values(self, acc, a, p, v):
        return acc * a + self.summed(self.at.low(p), v)


@fault(FAULTS, "row-sum")
class row_summed_key_by_key_in_its_own_type(Kernel):
    """huggingface/candle issue 3727: the softmax's denominator is summed in bf16, one key after the
    other, and stays where it is once it is some hundred times as large.
    """

    def add_row(self, l, a, p):
        total = self.at.low(l * a)
        for own in p.unbind(-1):
            total = self.at.low(total + own.unsqueeze(-1))
        return total


# --- precision of gradients
@fault(FAULTS, "operand probabilities delta", "float16")
class do_divided_by_the_row_sum_in_its_own_type(Kernel):
    """jax-ml/jax-triton PR 177: the backward pass takes weights without their division, dO is
    divided by the row's sum instead, and is stored in 16 bits once more.
    """

    def forward(self):
        self.at.kept = []
        found = super().forward()
        m, l = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*self.at.kept, strict=True))
        self.at.m, self.at.l = m, torch.where(l == 0, 1.0, l)
        return found

    def finish(self, m, l, acc, rows):
        self.at.kept.append((m, l))
        return super().finish(m, l, acc, rows)

    def backward(self):
        at = self.at
        at.do, at.lse = at.low(at.do / at.l), at.m
        return super().backward()


@fault(FAULTS, "probabilities grad-scores products", "float32")
class transposes_through_tf32(Kernel):
    """tenstorrent/tt-metal issue 53313: Pᵀ and dSᵀ of dV and dK are transposed by a unit that keeps
    ten bits of a mantissa.
    """

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv = self.add("dv_acc", dv, cut(p, 13).mT @ do, rows, cols)
            dk = self.add("dk_acc", dk, cut(ds, 13).mT @ q, rows, cols)
        return dk * self.at.scale, dv


@fault(FAULTS, "grad-accumulator", "float16")
class dq_added_up_in_16_bits(Kernel):
    """ROCm/composable_kernel PR 1397: before it dQ was added up by atomics in its own 16 bits."""

    rows, cols = 32, 32

    def add(self, name, total, part, rows, cols):
        found = super().add(name, total, part, rows, cols)
        return self.at.low(found) if name == "dq_acc" else found


@fault(FAULTS, "backward-scores backward-weights")
class backward_scores_cast_and_cast_back(Kernel):
    """jax-ml/jax PR 19301: Q Kᵀ of the backward pass is cast to the queries' type, and to fp32
    right after it.
    """

    def product(self, q, k, back):
        s = super().product(q, k, back)
        return self.at.low(s) if back else s


# --- the backward pass
@fault(FAULTS, "layout other-data no-delta")
class delta_of_do_by_the_strides_of_out(Kernel):
    """ROCm/aiter PR 2808: δ reads dO by the strides of O, which lies as the queries do."""

    def delta(self, do, o):
        return super().delta(as_heads(do) if permuted(self.at.q) else do, o)


@fault(FAULTS, "layout other-data", "float16")
class dq_by_the_strides_of_the_query(Kernel):
    """ROCm/flash-attention PR 122: dQ is written by the strides of Q, and its own are others."""

    def backward(self):
        dq, dk, dv = super().backward()
        if permuted(self.at.q):
            dq = dq.transpose(1, 2).reshape(dq.shape)
        return dq, dk, dv


@fault(FAULTS, "layout other-data")
class dq_added_up_by_heads_and_read_by_tokens(Kernel):
    """ROCm/aiter PR 145: the buffer that dQ is added up in lies by tokens and heads as the older
    kernel had it, and the newer one fills it by heads and tokens.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return as_heads(dq), dk, dv


@fault(FAULTS, "unwritten lse-other other-data backward-weights", "float16")
class lse_of_a_groups_first_head_alone(Kernel):
    """NVIDIA/cudnn-frontend issue 1083: with shared key heads lse is written for the first query
    head of every group, and the others' is what the buffer held: zeros here. There it was so for
    one query, here for any number.
    """

    def forward(self):
        o, lse = super().forward()
        first = torch.arange(lse.shape[1]) % self.at.groups == 0
        return o, lse * first.view(1, -1, 1, 1)


@fault(FAULTS, "unwritten")
class workspace_of_one_head(Kernel):
    """NVIDIA/cudnn-frontend PR 462: the backward pass's workspace is sized by the distance between
    two tokens of lse, which is 1 where heads lie outside: it has room for one head, and with more
    of them all gradients are 0.
    """

    def backward(self):
        grads = super().backward()
        many = self.at.q.shape[1] > 1
        return tuple(torch.zeros_like(x) if many else x for x in grads)


@fault(FAULTS, "grad-tail query-tail unwritten")
class kernel_for_16_queries_taken_for_more(Kernel):
    """ROCm/rocm-libraries PR 6764: for several sequences the kernel is chosen by a field that is
    not set in that mode, and it is the one for at most 16 queries: later ones have no dQ, and no
    part in dK and dV.
    """

    def backward(self):
        at = self.at
        if at.q.shape[0] > 1:
            at.do = at.do * (torch.arange(at.n) < 16)[:, None]
        return super().backward()


@fault(FAULTS, "other-data layout", "float16")
class gradients_by_the_stride_of_a_head(Kernel):
    """unslothai/unsloth-zoo PR 776: MLX adds gradients into place and steps from one sequence's to
    the next by too small a stride, here a head's: those of all but the first are others'.
    """

    def backward(self):
        return tuple(self.shifted(x) for x in super().backward())

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        many, heads = x.shape[:2]
        return x.flatten(0, 1)[torch.arange(many)[:, None] + torch.arange(heads)]


@fault(FAULTS, "ragged other-data")
class tail_rows_are_the_next_heads(Kernel):
    """ROCm/rocm-libraries PR 7586: rows that fill the backward pass's last tile of queries are not
    marked as invalid: they are the next head's first, and dQ's atomic additions of them go there.
    """

    def extended(self, x: Tensor) -> Tensor:
        over = -self.at.n % self.rows
        flat = x.flatten(0, 1)
        after = torch.cat([flat[1:], torch.zeros_like(flat[:1])])[:, :over]
        return torch.cat([flat, after], 1).unflatten(0, x.shape[:2])

    def backward(self):
        at = self.at
        over = -at.n % self.rows
        if not over:
            return super().backward()
        at.delta = self.delta(at.do, at.o)
        q = at.q
        lse = torch.where(torch.isfinite(at.lse), at.lse, 1e30)
        at.q, at.do, at.lse, at.delta = map(self.extended, (q, at.do, lse, at.delta))
        pairs = [self.key_gradients(cols) for cols in blocks(at.nk, self.cols)]
        dk, dv = (torch.cat(x, 2)[:, :, : at.nk] for x in zip(*pairs, strict=True))
        every = torch.cat([self.query_gradient(rows) for rows in blocks(at.n, self.rows)], 2)
        dq, tail = every[:, :, : at.n].flatten(0, 1), every[:, :, at.n :].flatten(0, 1)
        strays = functional.pad(tail[:-1], (0, 0, 0, at.n - over, 1, 0)) if over <= at.n else 0.0
        return (dq + strays).unflatten(0, q.shape[:2]), self.group(dk), self.group(dv)
