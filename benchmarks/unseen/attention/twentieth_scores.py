"""The twentieth set's faults of precision and the backward pass (twentieth.py has the others, and
says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault, permuted
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    bf16,
    e4m3,
    fp16,
    load,
)
from torch import Tensor

FAULTS: list[Fault] = []


def tf32(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


# --- precision
@fault(FAULTS, "row-max scores")
class maximum_taken_off_in_16_bits(Kernel):
    """tinygrad/tinygrad PR 12280: softmax takes the maximum off in the scores' own 16 bits, and
    only what follows is in fp32.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.exp2(self.at.low((s - safe) / LOG2_E) * LOG2_E)
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "scores mask")
class bias_added_in_16_bits(Kernel):
    """huggingface/transformers PR 18057: the bias is added to scores of its own 16 bits, and
    softmax casts the sum to fp32.
    """

    def bias(self, s, mask, back):
        return self.at.low(s / LOG2_E + mask.float()) * LOG2_E


@fault(FAULTS, "operand", "float16")
class cache_scaled_by_its_first_token(Kernel):
    """weicj/vLLM-2080Ti-Definitive PR 109, review: K and V are in 8 bits with one scale each, which
    is set by the first token that comes, and later ones are cut off at its largest.
    """

    @staticmethod
    def codes(x: Tensor) -> Tensor:
        step = x[:1, :, :1].abs().amax() / 127
        return (x / step).round().clamp(-127, 127) * step

    def forward(self):
        self.at.k, self.at.v = map(self.codes, (self.at.k, self.at.v))
        return super().forward()


@fault(FAULTS, "weights weights-row-sum", "float16")
class weights_below_the_least_code(Kernel):
    """ROCm/FlyDSL PR 1020: weights go into e4m3 as they are, so that small ones become 0, and the
    row's sum is of those before.
    """

    def add_values(self, acc, a, p, v):
        return acc * a + e4m3(p) @ v


@fault(FAULTS, "operand products", "float32")
class products_in_tf32_unless_told(Kernel):
    """evintunador/triton_docs_tutorials issue 6: products of fp32 are in TF32 where no precision is
    asked for, in both passes.
    """

    def load_key(self, name, x, part):
        return tf32(super().load_key(name, x, part))

    def load_query(self, name, x, part):
        return tf32(super().load_query(name, x, part))

    def add_values(self, acc, a, p, v):
        return acc * a + tf32(p) @ v

    def backward(self):
        self.at.low = tf32
        return super().backward()


# --- precision of gradients
@fault(FAULTS, "delta grad-scores")
class dp_added_up_in_bf16(Kernel):
    """pytorch/pytorch PR 188998: on Hopper a product of bf16 that allows TF32, and is not told what
    to give, is accumulated in bf16: here that of dO and V, 16 terms after 16.
    """

    def again(self, rows, cols, which):
        at = self.at
        q, k, do, p, _ = super().again(rows, cols, which)
        v, dp = self.load_key("b_v", at.v, cols), torch.zeros(())
        for x, y in zip(do.split(16, -1), v.split(16, -1), strict=True):
            dp = bf16(dp + x @ y.mT)
        ds = self.grad_scores(p, dp, load(at.delta, rows), self.slope(q, k))
        return q, k, do, p, at.low(ds)


@fault(FAULTS, "probabilities grad-scores", "float32")
class backward_casts_to_half_as_the_example_does(Kernel):
    """alexzhang13/flashattention2-custom-mask issue 7: P and dS are cast to fp16 before their
    products, as in the kernel that this one comes from, though all else is in fp32.
    """

    def backward(self):
        self.at.low = fp16
        return super().backward()


@fault(FAULTS, "lse backward-weights")
class lse_in_the_operands_type(Kernel):
    """DeepLink-org/DeepLinkExt PR 22: the backward pass is given lse in the type of the query."""

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, self.at.low(lse / LOG2_E) * LOG2_E


# --- the backward pass
@fault(FAULTS, "lse-other backward-weights", "float16")
class maximum_in_nats_and_sum_in_bits(Kernel):
    """intel/sycl-tla PR 848, as it writes lse down: a row's maximum in nats, and the logarithm in
    base 2 of its sum; here the backward pass takes it to be in base 2.
    """

    def finish(self, m, l, acc, rows):
        o, _ = super().finish(m, l, acc, rows)
        return o, m / LOG2_E + l.log2()


@fault(FAULTS, "layout lse-other backward-weights other-data", "float16")
class lse_taken_for_packed(Kernel):
    """NVIDIA/cudnn-frontend PR 304: the backward kernels do not read the strides of lse, and take
    it to lie by heads and tokens; here it lies as the queries do.
    """

    def forward(self):
        o, lse = super().forward()
        if permuted(self.at.q):
            lse = lse.transpose(1, 2).reshape(lse.shape)
        return o, lse


@fault(FAULTS, "layout other-data no-delta")
class delta_as_if_all_lay_in_order(Kernel):
    """flagos-ai/FlagAttention PR 1: the kernel that makes δ takes no strides: rows of O and dO are
    numbered as they lie, and so is δ, which is read by heads and tokens.
    """

    def delta(self, do, o):
        found = super().delta(do, o)
        return found.transpose(1, 2).reshape(found.shape) if permuted(self.at.q) else found


@fault(FAULTS, "grad-tail unwritten")
class key_blocks_counted_by_the_querys_tile(Kernel):
    """Dao-AILab/flash-attention PR 1233, review: whether a block of keys lies past the end is asked
    of its number times the height of a tile of queries; here that is twice the width.
    """

    rows = 128

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        past = cols.start // self.cols * self.rows >= self.at.nk
        return (torch.zeros_like(dk), torch.zeros_like(dv)) if past else (dk, dv)


@fault(FAULTS, "backward-mask", "float16")
class right_edge_dropped_where_sinks_are(Kernel):
    """AMD-AGI/Primus-Turbo PR 262, review: with sinks the backward pass is given the window's left
    edge alone, neither the right one nor whether the call is causal.
    """

    def backward(self):
        if self.at.sinks is not None:
            self.at.causal = False
            if self.at.window is not None:
                self.at.window = (self.at.window[0], -1)
        return super().backward()


@fault(FAULTS, "ragged unwritten")
class padded_columns_wipe_the_next_heads(Kernel):
    """Dao-AILab/flash-attention PR 2698: dK and dV are stored as wide as their tile, a multiple of
    32, and where a head is not what fills it up, zeros, goes over the first columns of the head
    that follows. Here the last head is stored first.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        for grad in (dk, dv):
            grad[:, 1:, :, : -grad.shape[-1] % 32] = 0
        return dq, dk, dv


@fault(FAULTS, "layout other-data", "float16")
class transpose_of_ds_from_registers(Kernel):
    """fla-org/flash-linear-attention PR 826: on Hopper the transpose of what a product left in
    registers has its rows in another order where it is multiplied again: in dK alone. Here of
    eight queries even ones come before odd ones.
    """

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            turned = ds.mT.unflatten(-1, (-1, 4, 2)).transpose(-1, -2).flatten(-3)
            dv, dk = dv + self.at.low(p).mT @ do, dk + turned @ q
        return dk * self.at.scale, dv


@fault(FAULTS, "ragged unwritten no-delta")
class backward_kernel_by_the_keys_width(Kernel):
    """Dao-AILab/flash-attention PR 1604, review: the kernel of the backward pass is chosen by the
    width of keys, rounded up to 64, though values may be wider: their later columns have no part in
    dP, and no dV.
    """

    def backward(self):
        at = self.at
        self.memory["do"], wide = at.do, -(-at.q.shape[-1] // 64) * 64
        seen = torch.arange(at.v.shape[-1]) < wide
        at.do, at.v = at.do * seen, at.v * seen
        return super().backward()

    def delta(self, do, o):
        return super().delta(self.memory["do"], o)


@fault(FAULTS, "other-data layout", "float16")
class dq_read_at_offsets_of_wider_tiles(Kernel):
    """Dao-AILab/flash-attention PR 2333: in packed sequences dQ is added up where its sequence
    begins, rounded to tiles of 64 queries, and is read where tiles of 128 would begin.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        many, _, n, _ = dq.shape
        ends = [[b * (n + tile) // tile * tile for b in range(many)] for tile in (64, 128)]
        room = torch.zeros(*dq.shape[1:2], max(map(max, ends)) + n, dq.shape[3])
        for b, start in enumerate(ends[0]):
            room[:, start : start + n] = dq[b]
        return torch.stack([room[:, start : start + n] for start in ends[1]]), dk, dv
