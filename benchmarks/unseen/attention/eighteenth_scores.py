"""The eighteenth set's faults of precision and of the backward pass (eighteenth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault, permuted
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, e4m3, to
from torch import Tensor

FAULTS: list[Fault] = []
e5m2 = to(torch.float8_e5m2)


def at_amax(x: Tensor, rounded, largest: float) -> Tensor:
    """Rounded to codes, at one scale that brings the largest value to their largest."""
    scale = x.abs().amax().clamp_min(1e-30) / largest
    return rounded(x / scale) * scale


# --- precision, forward
@fault(FAULTS, "operand")
class queries_cast_to_e4m3(Kernel):
    """sgl-project/sglang PR 28144: where the cache is FP8 queries are cast to E4M3 as well, with a
    scale of 1.
    """

    def forward(self):
        self.at.q = e4m3(self.at.q.clamp(-448, 448))
        return super().forward()


@fault(FAULTS, "softcap scores", "float16")
class tangent_of_the_fast_instruction(Kernel):
    """Dao-AILab/flash-attention issue 1181: the cap's tanh is the hardware's approximation, right
    to about 2⁻¹¹: here straight lines between multiples of 1/16.
    """

    def cap(self, s, back):
        c = self.at.softcap * LOG2_E
        if not c:
            return s
        below = torch.floor(s / c * 16) / 16
        low, high = torch.tanh(below), torch.tanh(below + 1 / 16)
        return c * (low + (s / c - below) * 16 * (high - low))


@fault(FAULTS, "scores")
class scaled_scores_stored_first(Kernel):
    """NVIDIA/TransformerEngine PR 652: the softmax's kernel is given scores that have been scaled
    and stored in the input's type, and takes its exponentials of those.
    """

    def scaled(self, s, rows, cols, back):
        return self.at.low(s * self.at.scale) * LOG2_E


@fault(FAULTS, "products accumulator")
class values_multiplied_in_16_bits(Kernel):
    """vllm-project/vllm PR 25740: weights times values are multiplied and added in the vectors'
    16 bits, four keys a lane, before the sum goes on in fp32.
    """

    def add_values(self, acc, a, p, v):
        low, total = self.at.low, 0.0
        p = low(p).unflatten(-1, (-1, 2, 4))
        v = v.unflatten(-2, (-1, 2, 4)).unsqueeze(2)
        for t in range(4):
            total = low(total + p[..., t, None] * v[..., t, :])
        return acc * a + total.sum((-3, -2))


@fault(FAULTS, "prescaled")
class scale_applied_to_the_query_first(Kernel):
    """flashinfer-ai/flashinfer PR 799: the query is multiplied by the softmax's scale, and stored
    in its own type, before its product with the keys.
    """

    def product(self, q, k, back):
        return self.at.low(q * self.at.scale) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


# --- precision, backward
@fault(FAULTS, "delta grad-scores")
class ds_of_rounded_factors(Kernel):
    """Dao-AILab/flash-attention PR 2893: dS is the product of two numbers of 16 bits: of the
    weight, and of the scaled difference of dP and δ.
    """

    def grad_scores(self, p, dp, delta, slope):
        low, scale = self.at.low, self.at.scale
        return low(p) * (low((dp - delta) * scale) / scale) * slope


@fault(FAULTS, "delta-from-out delta")
class delta_from_an_out_in_e4m3(Kernel):
    """NVIDIA/TransformerEngine PR 2719: with NVTE_DPA_FP8CS_O_in_F16=0 the O that is kept for the
    backward pass, of which δ is made, is E4M3 at the scale of its largest value.
    """

    def delta(self, do, o):
        return super().delta(do, at_amax(o, e4m3, 448))


@fault(FAULTS, "grad-stored")
class gradients_through_e5m2(Kernel):
    """NVIDIA/TransformerEngine PR 1566: dQ, dK and dV leave the kernel as E5M2, and are cast back
    to the type that is asked for.
    """

    def backward(self):
        return tuple(at_amax(x, e5m2, 57344) for x in super().backward())


@fault(FAULTS, "grad-accumulator")
class partial_gradients_in_their_type(Kernel):
    """Dao-AILab/flash-attention issue 1088: every block's call gives its gradients in 16 bits, and
    the caller adds those up.
    """

    rows, cols = 32, 32

    def add(self, name, total, part, rows, cols):
        return total + self.at.low(part)


# --- the backward pass
@fault(FAULTS, "unwritten other-data layout grad-tail", "float16")
class dv_rows_at_the_packed_pitch(Kernel):
    """Dao-AILab/flash-attention issue 2541: dV is stored with the pitch of a packed tensor, four
    rows to one: its rows lie four apart, and between them nothing is written.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        apart = torch.zeros_like(dv)
        apart[:, :, ::4] = dv[:, :, : -(-dv.shape[2] // 4)]
        return dq, dk, apart


@fault(FAULTS, "backward-mask causal-mask")
class diagonal_not_masked_on_the_way_back(Kernel):
    """triton-lang/triton issue 7216: the backward pass of the tutorial's kernel does not hide what
    lies past the diagonal.
    """

    def backward(self):
        self.at.causal = False
        return super().backward()


@fault(FAULTS, "grad-tail key-tail backward-mask")
class keys_as_many_as_queries_on_the_way_back(Kernel):
    """pytorch/pytorch PR 115576: the backward pass does not read the keys' own number, and takes
    the queries'.
    """

    def inside(self, j, back):
        return j < (min(self.at.nk, self.at.n) if back else self.at.nk)


@fault(FAULTS, "layout other-data")
class dk_by_the_strides_of_the_key(Kernel):
    """pytorch/pytorch issue 146377: dK is stored by the strides of the key, which is a transposed
    view, in memory that is contiguous.
    """

    def spread(self, x):
        self.memory.setdefault("key", permuted(x))
        self.at.turned = self.memory["key"]
        return super().spread(x)

    def backward(self):
        dq, dk, dv = super().backward()
        return dq, dk.transpose(1, 2).reshape(dk.shape) if self.at.turned else dk, dv


@fault(FAULTS, "grad-tail unwritten ragged")
class dq_reduced_in_whole_steps_of_32(Kernel):
    """Dao-AILab/flash-attention PR 2715: the reduction of dQ takes 32 columns a step, as many whole
    steps as the width has: the rest of it is not added.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        d = dq.shape[-1]
        if d > 32:
            dq[..., d // 32 * 32 :] = 0
        return dq, dk, dv


@fault(FAULTS, "backward-mask mask")
class bias_of_the_first_pair_on_the_way_back(Kernel):
    """Dao-AILab/flash-attention PR 2654: what is added to the scores is asked for, in the backward
    pass, with sequence, head, query and key all 0.
    """

    def bias(self, s, mask, back):
        if not back:
            return super().bias(s, mask, back)
        return s + self.at.mask.flatten()[0].float() * LOG2_E


@fault(FAULTS, "grad-tail unwritten")
class queries_of_the_last_ring_steps_length(Kernel):
    """pytorch/pytorch PR 185493: a causal ring's last step has half of the queries, and every step
    of the backward pass is given its number: blocks past it are not visited.
    """

    def passed(self, rows: slice) -> bool:
        return self.at.causal and rows.start >= -(-self.at.n // 2)

    def query_blocks(self, cols):
        return [rows for rows in super().query_blocks(cols) if not self.passed(rows)]

    def query_gradient(self, rows):
        found = super().query_gradient(rows)
        return torch.zeros_like(found) if self.passed(rows) else found


@fault(FAULTS, "layout ragged other-data unwritten")
class dv_by_two_roundings_of_the_width(Kernel):
    """Dao-AILab/flash-attention PR 2888: where heads share a key, dV is added up in a buffer whose
    rows are allocated and read at the width rounded to 32, and written at that rounded to 64.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        b, h, n, d = dv.shape
        narrow, wide = -(-d // 32) * 32, -(-d // 64) * 64
        if self.at.groups == 1 or narrow == wide:
            return dq, dk, dv
        head = torch.arange(b * h).view(b, h, 1, 1) * (n * narrow)
        row, column = torch.arange(n)[:, None], torch.arange(d)
        room = torch.zeros(b * h * n * narrow + n * wide)
        room.index_add_(0, (head + row * wide + column).flatten(), dv.flatten())
        return dq, dk, room[head + row * narrow + column]
