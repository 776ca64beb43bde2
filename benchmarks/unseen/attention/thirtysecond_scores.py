"""The thirty-second set's faults of precision and the backward pass (thirtysecond.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtysecond_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, bf16, cut, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "split-merge lse")
class lse_of_splits_packed_into_bf16(ForwardAlone, Parts):
    """ROCm/aiter PR 3542: every split's lse lies behind its O, in a buffer of bf16, and the second
    stage merges by what comes back.
    """

    def merge(self, outs, lses):
        return super().merge(outs, bf16(lses / LOG2_E) * LOG2_E)


@fault(FAULTS, "accumulator row-sum", "float16")
class sums_cut_to_tf32_at_every_rescale(ForwardAlone):
    """tenstorrent/tt-metal PR 57127: an fp32 operand is truncated on its way into the source
    registers, so that rescaling O and the row sums there makes a drift to one side with every
    chunk of keys.
    """

    cols = 32

    def add_row(self, l, a, p):
        return cut(l, 13) * a + p.sum(-1, keepdim=True)

    def add_values(self, acc, a, p, v):
        return cut(acc, 13) * a + self.at.low(p) @ v


@fault(FAULTS, "operand", "float16")
class keys_cached_in_q4_0(ForwardAlone):
    """ggml-org/llama.cpp PR 7412: a cache of keys in q4_0, 32 numbers to a scale, to which results
    are far more sensitive than to values in as few bits.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return ways.q4_0(found) if name == "k" else found


@fault(FAULTS, "operand")
class keys_less_their_mean_in_their_own_type(ForwardAlone):
    """Comfy-Org/ComfyUI PR 16035: SageAttention 1 takes the mean over tokens off the caller's keys
    in place, in the keys' own format, whatever comes of them afterwards.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k" or self.at.softcap or self.at.sinks is not None:
            return found
        return self.at.low(found - self.at.low(x.mean(2, keepdim=True)))


@fault(FAULTS, "accumulator unstable")
class sums_in_bf16_rounded_by_chance(ForwardAlone):
    """tenstorrent/tt-metal issue 6094: destination registers of 16 bits are spilled and read again
    between blocks, and are rounded stochastically, so that errors do not add up.
    """

    def add_values(self, acc, a, p, v):
        return ways.at_random(acc * a + self.at.low(p) @ v)


# --- precision of the backward pass
@fault(FAULTS, "grad-scores")
class ds_in_e4m3_by_the_scale_of_the_weights(Kernel):
    """ROCm/flash-attention PR 119: `descale_ds = descale_p`: dS, with the scale in it, has codes of
    E4M3 by the factor that weights from 0 to 1 have.
    """

    def grad_scores(self, p, dp, delta, slope):
        ds = super().grad_scores(p, dp, delta, slope) * self.at.scale
        return ways.by_one_scale(ds, 448.0) / self.at.scale


@fault(FAULTS, "operand")
class do_in_e4m3_by_one_scale(Kernel):
    """ROCm/flash-attention PR 119: the backward pass is given dO in E4M3, one scale for all."""

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return ways.by_one_scale(found, float(448 / x.abs().max())) if name == "do" else found


@fault(FAULTS, "delta grad-scores", "float16")
class dp_in_bf16_before_delta_is_taken_off(Kernel):
    """philipturner/metal-flash-attention PR 22 (mixed precision): dP is kept in BF16 where operands
    are FP16, and δ is taken off what is left of it.
    """

    def grad_scores(self, p, dp, delta, slope):
        return super().grad_scores(p, bf16(dp), delta, slope)


@fault(FAULTS, "operand", "float16")
class do_in_bf16_of_a_half_kernel(Kernel):
    """philipturner/metal-flash-attention PR 22 (mixed precision): dO is BF16 in memory where Q, K
    and V are FP16.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return bf16(found) if name == "do" else found


@fault(FAULTS, "grad-accumulator grad-stored")
class dq_of_two_numbers_to_a_word(Kernel):
    """facebookexperimental/triton PR 3615: partial sums of dQ are packed into words, two numbers
    each, and are added there as integers with a carry: here 16 bits from −512 to 512.
    """

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = dq + (ds @ k * 64).round() / 64
        return dq * self.at.scale


@fault(FAULTS, "grad-scores unstable")
class ds_rounded_by_chance(Kernel):
    """karpathy/llm.c PR 304: what comes out of the softmax's backward pass in attention is rounded
    to bf16 stochastically.
    """

    def grad_scores(self, p, dp, delta, slope):
        return ways.at_random(super().grad_scores(p, dp, delta, slope))


@fault(FAULTS, "grad-accumulator")
class dv_in_a_buffer_of_its_own_type(Kernel):
    """xlite-dev/ffpa-attn PR 176: V's gradient alone is added up in a buffer of V's format, where
    it is not asked for one in fp32.
    """

    rows = 16

    def add(self, name, total, part, rows, cols):
        found = super().add(name, total, part, rows, cols)
        return self.at.low(found) if name == "dv_acc" else found


# --- the backward pass
@fault(FAULTS, "backward-mask")
class mask_of_the_transpose_not_transposed(Kernel):
    """intel/torch-xpu-ops PR 2756: the backward pass makes K Qᵀ in place of Q Kᵀ, so that rows and
    columns have to change places in the causal mask too; here they do not.
    """

    def causal(self, i, j, back):
        return i <= j if back else j <= i


@fault(FAULTS, "no-delta")
class sum_of_the_logarithms_mode(Kernel):
    """ROCm/MIOpen issue 112: one kernel for the gradients of softmax and of log-softmax, and the
    sum that is taken off is the other mode's: of dP, without the weights.
    """

    def delta(self, do, o):
        rows, cols, mask = slice(0, self.at.n), slice(0, self.at.nk), self.at.mask
        seen = self.seen(rows, cols, True)
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & self.given_mask(rows, cols)
        return (do * (seen.float() @ self.at.v)).sum(-1, keepdim=True)


@fault(FAULTS, "grad-scale")
class key_gradients_averaged_over_ranks(Kernel):
    """ByteDance-Seed/VeOmni PR 1120, review: what ranks of a sequence, here two, add to a gathered
    tensor's gradient is not summed, and their mean is taken later: it is half as large.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return dq, dk / 2, dv / 2


@fault(FAULTS, "backward-mask mask", "float16")
class bias_that_the_backward_pass_does_not_take(Kernel):
    """ROCm/aiter PR 5578, review: the forward pass adds a bias, and the backward pass has no
    argument for it: gradients are those of other scores.
    """

    def bias(self, s, mask, back):
        return s if back else super().bias(s, mask, back)


@fault(FAULTS, "backward-mask")
class diagonal_on_the_first_tile_of_queries_alone(Kernel):
    """Dao-AILab/flash-attention PR 436, comment: causal masking may be needed on two blocks, and is
    done on one: in dK and dV's loop here, where two tiles of queries lie on the diagonal.
    """

    rows, cols = 32, 64

    def key_gradients(self, cols):
        self.memory["keys"] = True
        found = super().key_gradients(cols)
        self.memory["keys"] = False
        return found

    def causal(self, i, j, back):
        if back and self.memory.get("keys"):
            return (j <= i) | (i[0, 0] >= j[0, 0] + self.rows)
        return j <= i


@fault(FAULTS, "grad-tail")
class tiles_of_a_listed_block_rounded_down(Kernel):
    """intel/intel-xpu-backend-for-triton issue 4856 (FlexAttention): blocks of the mask have to be
    whole tiles, "otherwise the code wouldn't work": 64 queries are one tile of 48, and the sixteen
    that are left add nothing to dK and dV.
    """

    rows = 48

    def query_blocks(self, cols):
        every = [slice(first, first + self.rows) for first in range(0, self.at.n, 64)]
        return [r for r in every if not self.at.causal or r.stop > cols.start]
