"""The twenty-third set's faults of precision and the backward pass (twentythird.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, blocks, cut, fp16
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.twentythird_kernel import InChunks, past

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "prescaled operand")
class both_operands_by_the_root_of_the_scale(ForwardAlone):
    """onnx/onnx issue 7865, whose pattern of Attention multiplies Q and K by the root of the scale,
    each in its own type, before their product.
    """

    def product(self, q, k, back):
        root = math.sqrt(self.at.scale)
        return self.at.low(q * root) @ self.at.low(k * root).mT

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


@fault(FAULTS, "exponential row-max")
class exponential_of_bf16_arguments(ForwardAlone):
    """tinygrad/tinygrad PR 11778: exp of a bf16 number is 2 to the power of its product with
    log₂ e, which is in bf16 as well; the softmax is one of whole rows.
    """

    def key_blocks(self, rows):
        return [slice(0, self.at.nk)]

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = bf16(torch.exp2(bf16(bf16((s - safe) / LOG2_E) * LOG2_E)))
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "rescale exponential", "float16")
class rescaled_by_the_approximate_exponential(ForwardAlone):
    """tenstorrent/tt-metal issue 13866: the approximate exponential makes errors that grow with the
    number of chunks; here it is what sums are rescaled by, a parabola in place of 2^f.
    """

    cols = 32

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, x = torch.exp2(s - safe), (m - safe).clamp_min(-100)
        f = x - x.floor()
        a = torch.ldexp(1 + f * (0.6565 + 0.3435 * f), x.floor().int())
        a = torch.where(m == -INF, 0.0, a)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "products scores")
class products_added_up_in_bf16(ForwardAlone):
    """sgl-project/sglang-jax PR 1462 (the query of absorbed keys): a product that does not ask for
    fp32 is added up in bf16 on newer TPUs; here Q Kᵀ, eight features after eight.
    """

    def product(self, q, k, back):
        total = torch.zeros(())
        for a, b in zip(q.split(8, -1), k.split(8, -1), strict=True):
            total = bf16(total + a @ b.mT)
        return total


@fault(FAULTS, "accumulator products grad-accumulator")
class every_tiles_product_through_bf16(Kernel):
    """pytorch/helion PR 2141 (a product and a norm): on Pallas a tile's product is cast to the
    operands' type, and cast back where it is added to a sum in fp32; here O, dQ, dK and dV.
    """

    rows, cols = 32, 32

    def add_values(self, acc, a, p, v):
        return acc * a + bf16(self.at.low(p) @ v)

    def add(self, name, total, part, rows, cols):
        return total + bf16(part)


@fault(FAULTS, "accumulator split-merge out")
class ring_steps_out_in_bf16(InChunks):
    """zhuzilin/ring-flash-attention issue 22: each step of the ring gives its O in bf16, which are
    merged in fp32.
    """

    chunk = 64

    def given(self, o, lse, many):
        return bf16(o), lse


@fault(FAULTS, "softcap scores")
class cap_and_tangent_in_the_inputs_type(ForwardAlone):
    """EricLBuehler/mistral.rs PR 2076: scores are divided by the cap, go through tanh and are
    multiplied by it in the type of the input.
    """

    def cap(self, s, back):
        c, low = self.at.softcap, self.at.low
        return low(c * low(torch.tanh(low(low(s / LOG2_E) / c)))) * LOG2_E if c else s


@fault(FAULTS, "weights weights-row-sum", "float32")
class weights_in_half_for_single_inputs(ForwardAlone):
    """philipturner/metal-flash-attention commit 0e1c4483: with intermediates of low precision the
    weights are FP16 in the product with V, though inputs are FP32.
    """

    def add_values(self, acc, a, p, v):
        return acc * a + fp16(p) @ v


@fault(FAULTS, "operand", "float32")
class keys_and_values_kept_in_bf16(ForwardAlone):
    """apple/axlearn PR 1214: the cache of keys and values is bf16 where the model is fp32, and its
    queries are.
    """

    def load_key(self, name, x, part):
        return bf16(super().load_key(name, x, part))


# --- precision of gradients
@fault(FAULTS, "probabilities grad-scores backward-weights products", "float32")
class p_through_tf32_in_the_key_kernel(Kernel):
    """tenstorrent/tt-metal PR 53315: the kernel of dK and dV has P and dS go through registers of
    ten bits of mantissa, which cut them; that of dQ has not.
    """

    def again(self, rows, cols, which):
        self.memory["keys"] = which == "keys"
        return super().again(rows, cols, which)

    def weights_again(self, s, lse):
        p = super().weights_again(s, lse)
        return cut(p, 13) if self.memory["keys"] else p

    def grad_scores(self, p, dp, delta, slope):
        ds = super().grad_scores(p, dp, delta, slope)
        return cut(ds, 13) if self.memory["keys"] else ds


@fault(FAULTS, "lse delta", "float16")
class l_in_half_and_d_in_bf16(Kernel):
    """philipturner/metal-flash-attention commit 0e1c4483: with intermediates of low precision lse
    is kept in FP16 and δ in BF16 for the backward pass.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, fp16(lse)

    def delta(self, do, o):
        return bf16(super().delta(do, o))


@fault(FAULTS, "probabilities grad-scores")
class p_and_ds_cut_on_the_way_back(Kernel):
    """ROCm/aiter PR 789, whose table has kernels of the backward pass by how they convert to bf16,
    one of them towards zero: so P and dS are.
    """

    def backward(self):
        self.at.low = cut
        return super().backward()


# --- the backward pass
@fault(FAULTS, "no-delta")
class jacobian_without_the_dot_product(Kernel):
    """HomericIntelligence/Odyssey issue 2134 (Mojo): the softmax's backward pass is P times what
    comes in, without the sum over the row that is taken off.
    """

    def grad_scores(self, p, dp, delta, slope):
        return p * dp * slope


@fault(FAULTS, "unwritten", "float16")
class softmax_without_a_backward_pass(Kernel):
    """huggingface/candle issue 3569: the fused softmax has no backward pass, and nobody says so: no
    gradient reaches Q and K.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return torch.zeros_like(dq), torch.zeros_like(dk), dv


@fault(FAULTS, "softcap")
class slope_of_tanh_without_parentheses(Kernel):
    """apache/tvm PR 7340: tanh's gradient is g · 1 − y² for g · (1 − y²)."""

    def grad_scores(self, p, dp, delta, slope):
        if not self.at.softcap:
            return super().grad_scores(p, dp, delta, slope)
        return p * (dp - delta) - (1 - slope) / self.at.softcap


@fault(FAULTS, "backward-mask window backward-weights", "float16")
class window_ignored_on_the_way_back(Kernel):
    """ROCm/aiter PR 3158: the backward pass in Triton takes a window, and ignores it."""

    def window(self, i, j, back):
        keep = super().window(i, j, back)
        return torch.ones_like(keep) if back else keep


@fault(FAULTS, "grad-tail backward-mask")
class first_keys_left_out_of_dq(Kernel):
    """flagos-ai/FlagGems issue 3395: before the tiles of the diagonal dQ takes whole blocks of
    keys, here of 64; a tile of 32 queries that begins amid one leaves out the first 32.
    """

    rows, cols = 32, 32

    def query_gradient(self, rows):
        self.memory["left"] = rows.start % 64
        found = super().query_gradient(rows)
        self.memory["left"] = 0
        return found

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        left = self.memory.get("left", 0) if self.at.causal else 0
        return [c for c in every if c.start >= left]


@fault(FAULTS, "grad-tail unwritten", "float16")
class dq_on_the_grid_of_larger_key_tiles(Kernel):
    """intel/intel-xpu-backend-for-triton PR 7317: one grid, of as many programs as there are tiles
    of keys, is for dQ as well, whose tiles are half as long: later rows stay 0.
    """

    rows, cols = 32, 64

    def backward(self):
        dq, dk, dv = super().backward()
        many = -(-self.at.nk // self.cols)
        written = torch.arange(self.at.n)[:, None] < many * self.rows
        return torch.where(written, dq, 0.0), dk, dv


@fault(FAULTS, "grad-tail unwritten")
class key_gradients_on_the_forward_passes_grid(Kernel):
    """triton-lang/triton issue 1975: the backward pass has the forward pass's grid, of tiles of
    128, and tiles of its own, here of 64.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        written = torch.arange(self.at.nk)[:, None] < -(-self.at.n // 128) * 64
        return dq, torch.where(written, dk, 0.0), torch.where(written, dv, 0.0)


@fault(FAULTS, "grad-tail query-tail", "float16")
class key_gradients_in_whole_steps(Kernel):
    """ROCm/triton issue 666: the loop of dK and dV over queries has as many steps as whole tiles
    fit into the length, which an assertion that is taken out requires to be divisible.
    """

    rows, cols = 32, 64

    def query_blocks(self, cols):
        return [r for r in super().query_blocks(cols) if r.stop <= self.at.n]


@fault(FAULTS, "other-data", "float16")
class gradients_of_the_sum_of_out(Kernel):
    """mindspore-lab/mindone PR 1438, review: the backward pass differentiates the forward pass
    again and does not use dO, as if it were 1.
    """

    def backward(self):
        self.at.do = torch.ones_like(self.at.do)
        return super().backward()


@fault(FAULTS, "other-data ragged backward-mask")
class dq_over_the_next_heads_keys(Kernel):
    """flagos-ai/FlagGems PR 3607: the keys of dQ end with the diagonal, though there are fewer of
    them than of queries: later ones are the next head's.
    """

    rows, cols = 64, 32

    def query_gradient(self, rows):
        self.memory["past"] = self.at.causal
        found = super().query_gradient(rows)
        self.memory["past"] = False
        return found

    def key_blocks(self, rows):
        on = self.memory.get("past", False)
        return blocks(rows.stop, self.cols) if on else super().key_blocks(rows)

    def inside(self, j, back):
        on = self.memory.get("past", False)
        return torch.ones_like(j, dtype=torch.bool) if on else super().inside(j, back)

    def load_key(self, name, x, part):
        return past(x, part) if self.memory.get("past", False) else super().load_key(name, x, part)
