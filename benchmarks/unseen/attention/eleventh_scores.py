"""The eleventh set's faults of the cap, codes, weights, precision and the backward pass
(eleventh.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    bf16,
    blocks,
    e4m3,
    fp16,
    load,
)
from torch.nn import functional

FAULTS: list[Fault] = []


# --- cap
@fault(FAULTS, "softcap scale")
class capped_before_the_scale(Kernel):
    """huggingface/trl PR 5691, review (logits of the last layer): the cap is applied to products
    that are not scaled yet, and the scale after it.
    """

    def scaled(self, s, rows, cols, back):
        return s if self.at.softcap else super().scaled(s, rows, cols, back)

    def cap(self, s, back):
        c = self.at.softcap
        return c * torch.tanh(s / c) * (self.at.scale * LOG2_E) if c else s

    def slope(self, q, k):
        c = self.at.softcap
        return 1 - torch.tanh(q @ k.mT / c).square() if c else 1.0


# --- codes of the operands
@fault(FAULTS, "operand other-data scale")
class key_scales_as_fine_as_the_querys(Kernel):
    """thu-ml/SageAttention issue 232: Q has a scale for every 16 rows and K one a block, and the
    kernel is told one granularity for both: here K's scale is looked up by Q's.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        if name != "q":
            return found
        warps = found.unflatten(2, (-1, 16))
        size = warps.abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 127
        return ((warps / size).round() * size).flatten(2, 3)

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k":
            return found
        every = blocks(self.at.nk, self.cols)
        other = every[min(part.start // 16, len(every) - 1)]
        own, read = (load(x, c).abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 127
                     for c in (part, other))  # fmt: skip
        return (found / own).round() * read


@fault(FAULTS, "operand value-factor")
class values_by_the_last_tiles_scale(Kernel):
    """NVIDIA/TensorRT-LLM PR 18496, review: every tile of V has a scale of its own; here O, a sum
    over the codes of all tiles, is multiplied by the last one's.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "v":
            return found
        self.memory["size"] = size = found.abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 448
        return e4m3(found / size)

    def finish(self, m, l, acc, rows):
        return super().finish(m, l, acc * self.memory["size"], rows)


@fault(FAULTS, "operand prescaled")
class rotated_and_rounded(Kernel):
    """ROCm/aiter PR 2240: Q, with the scale in it, and K are multiplied by a Hadamard matrix before
    the kernel, and what comes out is rounded to their format once more.
    """

    def rotated(self, x):
        turn = torch.ones(1, 1)
        for _ in range(4):
            turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)], 0)
        parts = functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
        return self.at.low((parts @ turn / 4).flatten(-2))

    def product(self, q, k, back):
        if back:
            return super().product(q, k, back)
        factor = self.at.scale * LOG2_E
        return self.rotated(q * factor) @ self.rotated(k).mT / factor


@fault(FAULTS, "operand weights out probabilities grad-scores grad-stored", "float32")
class everything_cast_for_the_kernel(Kernel):
    """knatarajan-lab/cehrgpt PR 6: the kernel takes 16 bits alone, so fp32 is cast to bf16 before
    and back after it.
    """

    def forward(self):
        at = self.at
        at.low, (at.q, at.k, at.v) = bf16, map(bf16, (at.q, at.k, at.v))
        return super().forward()

    def backward(self):
        self.at.do = bf16(self.at.do)
        return tuple(map(bf16, super().backward()))


# --- weights, sums
@fault(FAULTS, "rescale")
class weights_of_the_maximum_not_taken(Kernel):
    """meta-pytorch/MSLK PR 242: where the maximum grows by less than 2⁸ the old one stays and
    nothing is rescaled, but the weights are those of the new one.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        stays = (m > -INF) & (new - m <= 8)
        p, a = torch.exp2(s - safe), torch.where(stays, 1.0, torch.exp2(m - safe))
        return torch.where(stays, m, new), self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "exponential", "float16")
class some_columns_by_a_polynomial(Kernel):
    """Dao-AILab/flash-attention PR 2316: of 16 columns ten have 2^f by a polynomial of degree 2,
    the others by the hardware.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        x, a = s - safe, torch.exp2(m - safe)
        own = torch.where(x == -INF, 0.0, x)
        f = own - own.floor()
        close = (1.0017247 + f * (0.6576362 + f * 0.3371894)) * torch.exp2(own.floor())
        some = (torch.arange(x.shape[-1]) % 16 < 10) & (x > -INF)
        p = torch.where(some, close, torch.exp2(x))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "row-sum")
class row_summed_in_16_bits(Kernel):
    """tenstorrent/tt-metal issue 52045 (softmax): the reduction keeps a row's sum in 16 bits, so
    that rows do not sum to 1.
    """

    def add_row(self, l, a, p):
        l = bf16(l * a)
        for tile in p.split(16, -1):
            l = bf16(l + tile.sum(-1, keepdim=True))
        return l


@fault(FAULTS, "accumulator")
class values_added_four_keys_at_a_time(Kernel):
    """Xilinx/mlir-air PR 1606: weights times V are added up in bf16, few keys after few keys."""

    def add_values(self, acc, a, p, v):
        low, acc = self.at.low(p), bf16(acc * a)
        for part in range(0, p.shape[-1], 4):
            acc = bf16(acc + low[..., part : part + 4] @ v[:, :, part : part + 4])
        return acc


@fault(FAULTS, "unstable unnormalized weights-disagree", "float32")
class denominator_in_a_race(Kernel):
    """NervanaSystems/neon issue 171 (softmax): the sum in the denominator is now and then read
    before all threads have added their part.
    """

    def add_row(self, l, a, p):
        late = (torch.rand(p.shape[-2] // 8) < 0.05).repeat_interleave(8)[:, None]
        own = torch.where(late, p[..., :-8].sum(-1, keepdim=True), p.sum(-1, keepdim=True))
        return l * a + own


# --- the backward pass
@fault(FAULTS, "no-delta delta other-data")
class offsets_of_delta_wrap(Kernel):
    """SHI-Labs/NATTEN issue 347: offsets into O overflow their integer in the kernel that makes δ,
    and later rows have the δ of earlier ones; here the integer is smaller.
    """

    def delta(self, do, o):
        right, wide = super().delta(do, o), o.shape[-1]
        at = torch.arange(right.numel()) * wide % 2**14 // wide
        return right.flatten()[at].view(right.shape)


@fault(FAULTS, "delta", "float16")
class delta_added_up_in_fp16(Kernel):
    """ROCm/MIOpen PR 3427 (backward of softmax): "fp16 += fp16*fp16", of the weights and their
    gradients.
    """

    def backward(self):
        at, every, total = self.at, slice(0, self.at.n), torch.zeros_like(self.at.lse)
        for cols in blocks(at.nk, self.cols):
            s = self.scores(at.q, load(at.k, cols), every, cols, True)
            products = fp16(fp16(self.weights_again(s, at.lse)) * fp16(at.do @ load(at.v, cols).mT))
            for part in products.split(4, -1):
                total = fp16(total + part.sum(-1, keepdim=True))
        self.memory["delta"] = total
        return super().backward()

    def delta(self, do, o):
        return self.memory["delta"]


@fault(FAULTS, "unstable other-data backward-weights lse-other non-finite", "float16")
class lse_given_back_too_soon(Kernel):
    """Dao-AILab/flash-attention PR 2033: the buffer of lse is released before all warps have read
    it, and some rows have that of the next block of queries.
    """

    def again(self, rows, cols, which):
        kept = self.at.lse
        if which == "keys" and rows.stop < self.at.n:
            after = load(kept, slice(rows.stop, rows.stop + self.rows), INF)
            late = (torch.rand(self.rows // 8) < 0.1).repeat_interleave(8)[:, None]
            self.at.lse = kept.clone()
            self.at.lse[:, :, rows] = torch.where(late, after, kept[:, :, rows])
        found = super().again(rows, cols, which)
        self.at.lse = kept
        return found


@fault(FAULTS, "other-data")
class workspace_of_the_sequence_before(Kernel):
    """NVIDIA/TransformerEngine issue 2186: the workspace that dQ is added up in is not set to 0;
    here a sequence goes on where the one before it ended.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return dq.cumsum(0), dk, dv
