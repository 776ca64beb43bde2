"""The thirtieth set's faults of precision and the backward pass (thirtieth.py has the others, and
says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtieth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.twentysixth_kernel import swapped
from torch import Tensor

FAULTS: list[Fault] = []


class OtherPowers(ForwardAlone):
    """A kernel whose exponential of scores less their maximum, in bits, is another."""

    @staticmethod
    def power(x: Tensor) -> Tensor:
        return torch.exp2(x)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.where(s == -INF, 0.0, self.power((s - safe).clamp_min(-1000.0)))
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


# --- precision
@fault(FAULTS, "weights")
class weights_in_int8_for_the_product_with_values(ForwardAlone):
    """thu-ml/SageAttention issue 141: SageAttn-vT, whose accuracy is "terrible in some situations",
    has weights in int8 for P V, a 127th apart.
    """

    def add_values(self, acc, a, p, v):
        return acc * a + (p * 127).round() / 127 @ v


@fault(FAULTS, "exponential", "float16")
class exponential_from_a_table_half_of_which_is_never_read(OtherPowers):
    """fastmachinelearning/hls4ml issue 1221: the table has 1024 places for −8 to 8, though scores
    less their maximum are never above 0, and the place is found by cutting.
    """

    @staticmethod
    def power(x):
        return torch.exp(((x / LOG2_E).clamp_min(-8.0) * 64).floor() / 64)


@fault(FAULTS, "exponential", "float16")
class exponential_of_a_whole_and_a_fraction_from_two_tables(OtherPowers):
    """nod-ai/iree-amd-aie PR 1304: npu1's exponential comes from a lookup table, and the test has a
    tolerance of 6e-2: eight bits before the point and eight behind it, in bf16 each.
    """

    @staticmethod
    def power(x):
        fixed = ((x / LOG2_E).clamp_min(-127.0) * 256).floor() / 256
        whole = fixed.floor()
        return bf16(bf16(torch.exp(whole)) * bf16(torch.exp(fixed - whole)))


@fault(FAULTS, "exponential")
class exponential_of_a_line_for_every_power(OtherPowers):
    """openvinotoolkit/openvino PR 37857: numerators have a polynomial of degree one for the
    fraction, 3 % off at most.
    """

    @staticmethod
    def power(x):
        whole = x.floor()
        return 0.9702 * (1 + x - whole) * torch.exp2(whole)


@fault(FAULTS, "reciprocal unnormalized")
class row_sum_inverted_by_a_table_of_ten_bits(ForwardAlone):
    """fastmachinelearning/hls4ml PR 42: the row sum's inverse is read from a table of 1024 places
    from 0 to 64.
    """

    def finish(self, m, l, acc, rows):
        place = (l * 16).floor().clamp_max(1023.0)
        inverse = torch.where(place > 0, 16 / place.clamp_min(1.0), 0.0)
        return self.at.low(acc * inverse), m + l.log2()


# --- precision of the backward pass
@fault(FAULTS, "lse backward-weights")
class maximum_and_reciprocal_kept_in_bf16(Kernel):
    """tenstorrent/tt-metal PR 41683: the backward pass made its weights from two tensors in bf16,
    the rows' maxima and the reciprocals of their sums.
    """

    def finish(self, m, l, acc, rows):
        out, _ = super().finish(m, l, acc, rows)
        return out, bf16(m / LOG2_E) * LOG2_E - bf16(1 / l).log2()


@fault(FAULTS, "probabilities")
class weights_of_dv_in_mxfp8_along_the_queries(Kernel):
    """triton-lang/triton issue 9231: Pᵀ is quantized to E4M3 with a power of two for 32 queries
    each before it is multiplied by dO.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, ways.mxfp8(p, -2) if which == "keys" else p, ds


@fault(FAULTS, "operand", "float16")
class do_in_mxfp8_along_its_features(Kernel):
    """triton-lang/triton issue 9231: dO comes as E4M3 with a power of two for 32 features each."""

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return ways.mxfp8(found, -1) if name == "do" else found


@fault(FAULTS, "operand")
class keys_of_dq_quantized_along_one_side_and_then_the_other(Kernel):
    """NVIDIA/TransformerEngine issue 1490: what was quantized along rows is decoded, and quantized
    again along columns for the backward pass's product, in place of a copy made from the original.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, ways.mxfp8(ways.mxfp8(k, -1), -2) if which == "queries" else k, do, p, ds


# --- the backward pass
@fault(FAULTS, "backward-mask")
class other_corner_on_the_way_back(Kernel):
    """xlite-dev/ffpa-attn PR 300: where queries are not as many as keys, the diagonal starts from
    one corner in the forward pass, and from the other in the backward pass.
    """

    def causal(self, i, j, back):
        return j <= i + (self.at.nk - self.at.n if back else 0)


@fault(FAULTS, "grad-tail other-data unwritten")
class slots_of_skipped_causal_chunks_not_written(Kernel):
    """NVIDIA/cudnn-frontend PR 905: queries are split in chunks, each with a slot for its part of
    dK and dV; a chunk that the diagonal leaves nothing of writes none, and what lies there is
    added.
    """

    def chunk(self, own, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in own:
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dk, dv = dk + ds.mT @ q, dv + self.at.low(p).mT @ do
        return dk * self.at.scale, dv

    def key_gradients(self, cols):
        trips, slots = self.query_blocks(cols), self.memory.setdefault("slots", {})
        for number, chunk in enumerate(ways.in_chunks(self.at.n, self.rows)):
            own = [rows for rows in trips if rows in chunk]
            if own:
                slots[number] = self.chunk(own, cols)
        if not slots:
            return self.chunk([], cols)
        dk, dv = zip(*slots.values(), strict=True)
        return sum(dk), sum(dv)


@fault(FAULTS, "layout other-data ragged", "float16")
class dq_of_packed_sequences_read_as_if_padded(Kernel):
    """ROCm/TransformerEngine PR 671, review: dQ's accumulator is packed, and the kernel that turns
    it to bf16 expects every sequence at a multiple of 16 rows.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        b, heads, n, d = dq.shape
        high = -(-n // 16) * 16
        flat = torch.zeros(heads, b * high, d)
        flat[:, : b * n] = dq.transpose(0, 1).reshape(heads, b * n, d)
        return flat.view(heads, b, high, d).transpose(0, 1)[:, :, :n], dk, dv


@fault(FAULTS, "grad-scale", "float16")
class gradient_of_the_softmax_twice_as_large(Kernel):
    """markroxor/fromscratchtoml issue 65: the softmax's gradient is off by a factor of two."""

    def grad_scores(self, p, dp, delta, slope):
        return 2 * super().grad_scores(p, dp, delta, slope)


@fault(FAULTS, "layout other-data")
class dq_postprocessed_as_if_operands_were_swapped(Kernel):
    """Dao-AILab/flash-attention PR 2889 (of PR 2888): dQ's accumulator is written in the layout of
    one order of operands, and read in that of the other; here every 16 by 16 lies transposed.
    """

    def query_gradient(self, rows):
        return swapped(super().query_gradient(rows))


@fault(FAULTS, "backward-mask window")
class weights_of_dv_outside_the_window(Kernel):
    """flagos-ai/FlagAttention issue 25: "masking on s is not needed" in the backward pass: dS is
    masked afterwards, and the weights of dV are not, to which the window adds what it hides.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        window = self.at.window
        if which == "keys" and window is not None:
            self.at.window = None
            p = super().again(rows, cols, which)[3]
            self.at.window = window
        return q, k, do, p, ds


@fault(FAULTS, "value-factor grad-scale")
class descale_of_values_not_kept_for_the_way_back(Kernel):
    """ROCm/flash-attention PR 116, review: `descale_v` is not among what is saved: dP is made of
    the values' codes as they are.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return found * (448 / self.at.v.abs().amax()) if name == "b_v" else found


@fault(FAULTS, "no-delta")
class gradient_of_weights_taken_for_that_of_scores(Kernel):
    """paiml/trueno issue 86: the specification has dQ = dP K and dK = dPᵀ Q, as if no softmax lay
    between scores and weights.
    """

    def grad_scores(self, p, dp, delta, slope):
        return torch.where(p > 0, dp, 0.0) * slope
