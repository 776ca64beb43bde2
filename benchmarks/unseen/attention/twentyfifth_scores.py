"""The twenty-fifth set's faults of precision and the backward pass (twentyfifth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    bf16,
    blocks,
    fp16,
    load,
)
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "accumulator out", "float16")
class partial_results_of_six_bits_after_the_point(Parts):
    """mlc-ai/TIRx-kernels PR 210: what the parts of the keys come to is handed to the merge as
    fixed-point numbers, two bits before the point and six behind it.
    """

    def stored(self, o, l):
        return (o * 64).round().clamp(-256, 255) / 64

    def backward(self):
        sound = Kernel(**vars(self.at))
        sound.at.o, sound.at.lse = sound.forward()
        return sound.backward()


@fault(FAULTS, "exponential", "float32")
class exponential_emulated_to_degree_three(ForwardAlone):
    """SandAI-org/MagiAttention PR 342: FlashAttention-4's polynomial in place of 2ˣ is 8.5e-5 off,
    and that in every weight, where the instruction would have been hidden anyway.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        x = (s - safe).clamp_min(-127.0)
        whole = x.floor()
        f, p = x - whole, torch.zeros_like(x)
        for c in (0.077119089663028, 0.227564394474029, 0.695146143436432, 1.0):
            p = p * f + c
        p = torch.where(s == -INF, 0.0, p * torch.exp2(whole))
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "row-sum")
class exponentials_summed_in_their_own_type(ForwardAlone):
    """pytorch/executorch PR 20089: the softmax adds its exponentials up in bf16, where a sum that
    has reached 256 grows no more; here eight of them at a time.
    """

    def add_row(self, l, a, p):
        total = bf16(l * a)
        for eight in p.split(8, -1):
            total = bf16(total + bf16(eight.sum(-1, keepdim=True)))
        return total


@fault(FAULTS, "scores")
class products_stored_before_the_softmax(ForwardAlone):
    """huggingface/transformers PR 33317: Qwen2's eager attention has Q Kᵀ in the operands' 16 bits,
    divides it there, and casts up for the softmax alone.
    """

    def product(self, q, k, back):
        return self.at.low(super().product(q, k, back))

    def scaled(self, s, rows, cols, back):
        return self.at.low(s * self.at.scale) * LOG2_E


@fault(FAULTS, "weights weights-normalized", "float32")
class weights_cast_for_the_product_with_values(ForwardAlone):
    """pytorch/executorch PR 22255: attention's weights, made in fp32, are cast to bf16 once the
    softmax has divided them, as that is what the product with values takes.
    """

    def row(self, rows):
        self.memory["stats"] = None
        out, lse = super().row(rows)
        self.memory["stats"] = lse
        out, _ = super().row(rows)
        return out, lse

    def add_values(self, acc, a, p, v):
        if self.memory["stats"] is None:
            return acc
        top, lse = self.memory["top"], self.memory["stats"]
        share = torch.exp2(top - torch.where(lse == -INF, 0.0, lse))
        return acc + bf16(p * share) @ v

    def maximum(self, m, s):
        new = super().maximum(m, s)
        self.memory["top"] = torch.where(new == -INF, 0.0, new)
        return new

    def finish(self, m, l, acc, rows):
        return acc, m + l.log2()


@fault(FAULTS, "operand", "float32")
class keys_and_values_of_the_caches_type(ForwardAlone):
    """apple/axlearn PR 1214: the model runs in fp32, and its cache of keys and values in bf16."""

    def load_key(self, name, x, part):
        return bf16(super().load_key(name, x, part))


@fault(FAULTS, "operand", "float16")
class keys_in_int8_with_their_mean(ForwardAlone):
    """Comfy-Org/ComfyUI PR 16035: SageAttention is called with `smooth_k=False`: what all keys have
    in common takes up the INT8 codes, one scale a block.
    """

    @staticmethod
    def coded(x):
        step = x.abs().amax((-1, -2), keepdim=True).clamp_min(2.0**-100) / 127
        return (x / step).round() * step

    def load_query(self, name, x, part):
        return self.coded(super().load_query(name, x, part))

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return self.coded(found) if name == "k" else found


@fault(FAULTS, "scores non-finite", "float16")
class products_past_the_largest_half(ForwardAlone):
    """showlab/Tune-A-Video issue 103: in eager attention Q Kᵀ lies in fp16 before it is scaled:
    some products are larger than that holds, and rows become NaN.
    """

    def product(self, q, k, back):
        return fp16(super().product(q, k, back))

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        seen = self.seen(rows, cols, False)
        if self.at.mask is not None and self.at.mask.dtype == torch.bool:
            seen = seen & self.given_mask(rows, cols)
        p = torch.where(seen, p, 0.0)
        a = torch.where(m == -INF, 0.0, a)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- precision of the backward pass
@fault(FAULTS, "delta")
class delta_summed_in_16_bits(Kernel):
    """Intel-tensorflow/tensorflow PR 23: softmax's gradient reduces P ∘ dP by a sum in bf16, here
    of eight keys at a time.
    """

    def backward(self):
        sound, every = Kernel(**vars(self.at)), slice(0, self.at.n)
        total = torch.zeros_like(self.at.lse)
        sound.at.delta = total
        for cols in blocks(self.at.nk, 8):
            _, _, do, p, _ = sound.again(every, cols, "keys")
            part = (p * (do @ load(self.at.v, cols).mT)).sum(-1, keepdim=True)
            total = bf16(total + bf16(part))
        self.memory["delta"] = total
        return super().backward()

    def delta(self, do, o):
        return self.memory["delta"]


@fault(FAULTS, "grad-scores")
class ds_in_int8_by_tile(Kernel):
    """thu-ml/SageAttention issue 184: the backward pass has dS in INT8, one scale a tile: diffuse
    rows that share a tile with a sharp one are left with few codes.
    """

    def grad_scores(self, p, dp, delta, slope):
        ds = super().grad_scores(p, dp, delta, slope)
        step = ds.abs().amax((-1, -2), keepdim=True).clamp_min(2.0**-100) / 127
        return (ds / step).round() * step


@fault(FAULTS, "backward-scores prescaled", "float16")
class query_scaled_in_half_for_dq(Kernel):
    """ROCm/triton issue 514: the kernel of dQ multiplies the query by the scale and log₂ e and
    casts it to fp16, before it takes the scores again.
    """

    def query_gradient(self, rows):
        self.memory["half"] = True
        found = super().query_gradient(rows)
        del self.memory["half"]
        return found

    def product(self, q, k, back):
        if not self.memory.get("half"):
            return super().product(q, k, back)
        times = self.at.scale * LOG2_E
        return fp16(q * times) @ k.mT / times


# --- the backward pass
@fault(FAULTS, "grad-scale")
class dq_of_the_diagonal_scaled_again(Kernel):
    """fla-org/flash-linear-attention PR 973, review: what a query's own chunk of keys adds to dQ is
    multiplied by the scale where it is added, and with all of dQ at the end.
    """

    cols = 32
    rows = 32

    def add(self, name, total, part, rows, cols):
        own = name == "dq_acc" and rows.start == cols.start
        return super().add(name, total, part * self.at.scale if own else part, rows, cols)


@fault(FAULTS, "unwritten ragged", "float16")
class second_columns_of_dv_elsewhere(Kernel):
    """fla-org/native-sparse-attention issue 34: dV is one tensor, but is written as if every block
    of 64 columns had a copy of its own: those after the first go past its end.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        dv[..., 64:] = 0
        return dk, dv


@fault(FAULTS, "grad-tail")
class last_ring_step_copied_over_the_sum(Kernel):
    """NVIDIA/TransformerEngine issue 1054: on the last step of the ring the second half of dK and
    dV is copied to where it should be added, over what the steps before have left.
    """

    def key_gradients(self, cols):
        last = self.query_blocks(cols)[-1:]
        sums = super().key_gradients(cols)
        if not last:
            return sums
        q, _, do, p, ds = self.again(last[0], cols, "keys")
        alone = ds.mT @ q * self.at.scale, self.at.low(p).mT @ do
        late = (torch.arange(cols.start, cols.stop) >= self.at.nk // 2)[:, None]
        dk, dv = (torch.where(late, a, x) for a, x in zip(alone, sums, strict=True))
        return dk, dv


@fault(FAULTS, "unwritten ragged other-data", "float16")
class accumulator_of_dq_cleared_at_a_narrower_pitch(Kernel):
    """Dao-AILab/flash-attention PR 2482: dQ's accumulator has rows as wide as a multiple of 64 and
    is cleared as if of 32: the last rows go on from what lay there, here another head's.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        width = dq.shape[-1]
        narrow, wide = (-(-width // x) * x for x in (32, 64))
        cleared = self.at.n * narrow // wide
        dq[:, :, cleared:] += dq.roll(1, 1)[:, :, cleared:].clone()
        return dq, dk, dv


@fault(FAULTS, "other-data")
class first_columns_of_dq_raced_by_another_wave(Kernel):
    """AMD-AGI/Primus-Turbo PR 417: without a barrier between waves the first tile of dQ's
    columns is another wave's on scattered queries: here that of the query 16 further on.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        raced = (torch.arange(self.at.n) % 7 == 3)[:, None]
        dq[..., :16] = torch.where(raced, dq.roll(-16, 2)[..., :16], dq[..., :16])
        return dq, dk, dv


@fault(FAULTS, "unwritten")
class softmax_without_a_backward_pass(Kernel):
    """huggingface/candle issue 3569: the fused softmax has no backward pass: nothing goes through
    the weights, and what Q and K get is nothing.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return torch.zeros_like(dq), torch.zeros_like(dk), dv


@fault(FAULTS, "softcap backward-weights")
class backward_pass_that_knows_no_cap(Kernel):
    """MinghuasLab/flash-attention-npu PR 73: the backward pass takes the scores again without a
    cap, and does not differentiate it.
    """

    def cap(self, s, back):
        return s if back else super().cap(s, back)

    def slope(self, q, k):
        return 1.0


@fault(FAULTS, "other-data ragged unwritten")
class tail_of_dv_over_the_next_head(Kernel):
    """flagos-ai/FlagGems PR 898: the last tile of dV is stored whole, 64 rows of it, over the first
    rows of the next head.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        over = -self.at.nk % 64
        dv = dv.clone()
        dv[:, 1:, :over] = 0
        return dq, dk, dv


@fault(FAULTS, "nan-escapes non-finite ragged")
class rows_past_the_end_are_no_numbers_on_the_way_back(Kernel):
    """NVIDIA/cudnn-frontend issue 160: lengths that are no multiple of the tile give NaN on the way
    back, as long as nobody hides the rows past the end.
    """

    rows = 64

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        return (dk, dv) if self.at.n % self.rows == 0 else (dk + math.nan, dv + math.nan)
