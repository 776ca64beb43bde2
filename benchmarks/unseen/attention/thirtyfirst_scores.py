"""The thirty-first set's faults of precision and the backward pass (thirtyfirst.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, with the kernel's steps

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyfirst_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, bf16, e4m3, fp16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtieth_scores import OtherPowers
from torch.nn import functional

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "operand")
class keys_less_their_mean_in_their_own_type(ForwardAlone):
    """thu-ml/SageAttention issue 269: `k = k - km` is done on keys as they are, in 16 bits, before
    anything else is.
    """

    def forward(self):
        at, keys = self.at, self.at.k
        if not at.softcap and at.sinks is None:
            at.k = at.low(keys - at.low(keys.mean(2, keepdim=True)))
        found = super().forward()
        at.k = keys
        return found


@fault(FAULTS, "exponential", "float16")
class exponential_by_a_polynomial_past_its_interval(OtherPowers):
    """nibrunie/rvv-examples PR 6: the polynomial's degree and interval do not fit what it is given:
    one around 0, good to half of ln 2, takes remainders up to all of it.
    """

    @staticmethod
    def power(x):
        r = (x - x.floor()) * math.log(2)
        return (1 + r * (1 + r * (0.5 + r / 6))) * torch.exp2(x.floor())


@fault(FAULTS, "operand weights", "float16")
class halves_multiplied_as_bf16(ForwardAlone):
    """ROCm/composable_kernel issue 671: to work around halves that are flushed to zero, matrix
    instructions of bf16 multiply them, in the forward pass as well: Q K and P V.
    """

    def product(self, q, k, back):
        return bf16(q) @ bf16(k).mT

    def add_values(self, acc, a, p, v):
        return acc * a + bf16(self.at.low(p)) @ bf16(v)


@fault(FAULTS, "lse backward-weights")
class lse_corrected_by_a_product_in_16_bits(Kernel):
    """thu-ml/SageAttention issue 269: keys are less their mean, and what that takes from the
    log-sum-exp is `torch.matmul(q, km)` in the operands' type, turned to fp32 afterwards.
    """

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        at = self.at
        if at.softcap or at.sinks is not None:
            return out, lse
        own = load(at.q, rows) @ at.low(at.k.mean(2, keepdim=True)).mT
        return out, lse + (at.low(own) - own) * (at.scale * LOG2_E)


# --- precision of the backward pass
@fault(FAULTS, "operand probabilities grad-scores", "float16")
class halves_through_bf16_in_the_backward_passes_products(Kernel):
    """microsoft/onnxruntime PR 13352: in the backward pass alone rocBLAS casts halves to bf16, so
    that none is flushed to zero: Q, K, V, dO, the weights and dS, each for its product.
    """

    def again(self, rows, cols, which):
        q, k, do, p, _ = super().again(rows, cols, which)
        v, at = bf16(load(self.at.v, cols)), self.at
        ds = self.grad_scores(p, bf16(do) @ v.mT, load(at.delta, rows), self.slope(q, k))
        return bf16(q), bf16(k), bf16(do), bf16(at.low(p)), bf16(at.low(ds))


@fault(FAULTS, "backward-weights backward-scores probabilities")
class weights_again_by_exponentials_of_two_halves(Kernel):
    """pytorch/helion PR 3614: weights are made again by a packed exp2 of two halves."""

    def weights_again(self, s, lse):
        exponent = s - torch.where(lse == -math.inf, 0.0, lse)
        return fp16(torch.exp2(fp16(exponent)))


@fault(FAULTS, "grad-scores", "float16")
class ds_packed_into_halves_towards_zero(Kernel):
    """ROCm/rocm-libraries issue 2739: two numbers become halves by `cvt_pkrtz`, which rounds
    towards zero and has twice the error; here it packs dS.
    """

    def grad_scores(self, p, dp, delta, slope):
        return ways.towards_zero(super().grad_scores(p, dp, delta, slope))


@fault(FAULTS, "operand")
class do_in_e4m3_by_one_scale(Kernel):
    """ROCm/flash-attention PR 162, whose fp8 backward pass has too low a ratio of signal to noise:
    dO is E4M3 by one scale for all of it.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        if name != "do":
            return found
        scale = 448 / self.at.do.abs().amax()
        return e4m3(found * scale) / scale


# --- the backward pass
@fault(FAULTS, "other-data backward-mask")
class query_blocks_counted_by_a_longer_mask(Kernel):
    """pytorch/pytorch PR 136601: the block mask is for a longer sequence than the queries, and dK
    and dV visit as many blocks of queries as it has: past the end lie those of the next head.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        at, every = self.at, slice(0, self.at.n)
        if not at.causal or at.window is not None or at.n % self.rows:
            return dk, dv
        q, do, lse, delta = map(ways.of_next_head, (at.q, at.do, at.lse, at.delta))
        k, v = load(at.k, cols), load(at.v, cols)
        s = self.cap(self.scaled(q @ k.mT, every, cols, True), True)
        p = self.weights_again(s, lse) * (torch.arange(cols.start, cols.stop) < at.nk)
        ds = at.low(self.grad_scores(p, do @ v.mT, delta, self.slope(q, k)))
        return dk + ds.mT @ q * at.scale, dv + at.low(p).mT @ do


@fault(FAULTS, "key-heads other-data", "float16")
class keys_of_dq_by_the_chunks_first_head(Kernel):
    """NVIDIA/cudnn-frontend PR 956: the backward pass goes through heads in chunks, and which head
    of the keys is meant is counted from the chunk's first, as if a group began with it.
    """

    def query_gradient(self, rows):
        at, heads = self.at, torch.arange(self.at.q.shape[1])
        each = at.groups // 2 + 1
        first = heads // each * each
        own = first // at.groups + (heads - first) // at.groups
        keys = at.k[:, own * at.groups]
        dq = torch.zeros_like(load(at.q, rows))
        for cols in self.key_blocks(rows):
            dq = dq + self.again(rows, cols, "queries")[-1] @ load(keys, cols)
        return dq * at.scale


@fault(FAULTS, "layout other-data unwritten")
class gradients_stored_at_the_packed_pitch(Kernel):
    """meta-recsys/generative-recommenders issue 583: dQ, dK and dV are views of one tensor, and are
    stored as if each had its own: a token's row begins one row after the last, not three.
    """

    def backward(self):
        grads = super().backward()
        if not ways.alike(*grads):
            return grads
        b, heads, n, d = grads[0].shape
        memory = torch.zeros(b, 3 * n, heads * d)
        for first, grad in enumerate(grads):
            memory[:, first : first + n] = grad.transpose(1, 2).reshape(b, n, heads * d)
        dq, dk, dv = (ways.by_heads(memory[:, first::3], heads) for first in range(3))
        return dq, dk, dv


@fault(FAULTS, "grad-tail")
class packed_rows_counted_as_queries(Kernel):
    """Dao-AILab/flash-attention PR 2610: with the heads of a group packed in one tile, dK and dV
    have a trip for so many queries as if no rows were packed, and leave out the last of them.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        at = self.at
        if which == "queries" or at.groups == 1 or at.causal or at.window is not None:
            return q, k, do, p, ds
        last = -(-at.n // self.rows) * self.rows // at.groups
        visited = (torch.arange(rows.start, rows.stop) < last)[:, None]
        return q, k, do, p * visited, ds * visited


@fault(FAULTS, "layout other-data", "float16")
class dq_of_packed_groups_not_scattered(Kernel):
    """Dao-AILab/flash-attention PR 2610: dQ of packed heads has the group's heads beside each other
    for each query, and is stored as it lies, not by heads.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        if self.at.groups > 1 and not self.at.causal:
            packed = dq.unflatten(1, (-1, self.at.groups)).transpose(2, 3)
            dq = packed.reshape(dq.shape)
        return dq, dk, dv


@fault(FAULTS, "scale grad-scale backward-scores backward-weights")
class backward_kernels_at_scale_one(Kernel):
    """pytorch/xla PR 6886: kernels of the backward pass are called with `sm_scale` 1.0, whatever
    the forward pass had.
    """

    def backward(self):
        own, self.at.scale = self.at.scale, 1.0
        grads = super().backward()
        self.at.scale = own
        return grads


@fault(FAULTS, "no-delta")
class delta_summed_over_the_rows(Kernel):
    """Dao-AILab/flash-attention issue 2555: D has as many numbers as a head has features, not as
    the block has rows: dO O is summed over the wrong one.
    """

    def again(self, rows, cols, which):
        q, k, do, p, _ = super().again(rows, cols, which)
        wide = cols.stop - cols.start
        sums = (do * load(self.at.o, rows)).sum(-2, keepdim=True)
        delta = functional.pad(sums, (0, max(wide - sums.shape[-1], 0)))[..., :wide]
        ds = self.grad_scores(p, do @ load(self.at.v, cols).mT, delta, self.slope(q, k))
        return q, k, do, p, self.at.low(ds)


@fault(FAULTS, "no-delta")
class delta_subtracted_in_every_slice_of_the_values(Kernel):
    """fla-org/flash-linear-attention PR 1042: with the values' features in slices, a program each,
    every one subtracts the whole of D from its part of dP: here 32 features a slice.
    """

    def delta(self, do, o):
        return super().delta(do, o) * -(-do.shape[-1] // 32)
