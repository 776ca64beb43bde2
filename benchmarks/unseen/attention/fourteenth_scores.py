"""The fourteenth set's faults of precision, scales and of the backward pass (fourteenth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import LOG2_E, Kernel, bf16, e4m3, fp16, load
from torch.nn import functional

FAULTS: list[Fault] = []


# --- scales of codes, caps
@fault(FAULTS, "scale operand")
class query_codes_without_their_scale(Kernel):
    """vllm-project/vllm PR 42080: queries are quantized to fp8 with a scale, here a half, which
    the kernel ignores.
    """

    def forward(self):
        self.at.q = e4m3(self.at.q / 0.5)
        return super().forward()


@fault(FAULTS, "value-factor operand", "float16")
class value_codes_without_their_scale(Kernel):
    """sgl-project/sglang PR 18882: kernels get the fp8 codes of V as they are, and no scale, here
    of two.
    """

    def forward(self):
        self.at.v = e4m3(self.at.v / 2)
        return super().forward()


@fault(FAULTS, "softcap", "float16")
class no_cap_where_scores_are_in_fp32(Kernel):
    """kekzl/imp PR 688: scores are capped in the buffer of half precision alone; where the fp32
    buffer is large enough, here for more than 128 keys, softmax reads them uncapped.
    """

    def cap(self, s, back):
        return s if not back and self.at.nk > 128 else super().cap(s, back)


@fault(FAULTS, "softcap")
class scores_times_their_tanh(Kernel):
    """unslothai/unsloth-zoo PR 593 (logits): the capped value is s · tanh(s / c), and not
    c · tanh(s / c).
    """

    def cap(self, s, back):
        c = self.at.softcap * LOG2_E
        return s * torch.tanh(s / c) if c else s


# --- sums
@fault(FAULTS, "row-sum weights-disagree", "float16")
class exponentials_summed_in_half(Kernel):
    """sonos/tract PR 2586: the row's exponentials are summed in an f16 accumulator."""

    def add_row(self, l, a, p):
        total = fp16(l * a)
        for part in p.split(1, -1):
            total = fp16(total + part)
        return total


@fault(FAULTS, "accumulator products", "float16")
class values_in_half_within_a_block(Kernel):
    """cactus-compute/cactus PR 480: products with V are added up in fp16 within a block, and
    widened to fp32 at its end.
    """

    def add_values(self, acc, a, p, v):
        total = torch.zeros(())
        for w, x in zip(self.at.low(p).split(2, -1), v.split(2, -2), strict=True):
            total = fp16(total + w @ x)
        return acc * a + total


@fault(FAULTS, "accumulator")
class out_buffer_of_the_inputs_type(Kernel):
    """facebookresearch/xformers PR 411: O is accumulated in memory, in the output's type, which is
    that of the inputs.
    """

    cols = 32

    def add_values(self, acc, a, p, v):
        return self.at.low(super().add_values(acc, a, p, v))


@fault(FAULTS, "unnormalized weights-disagree ragged", "float16")
class sum_over_whole_tiles(Kernel):
    """linkedin/Liger-Kernel PR 1139: the loop of the softmax counts its iterations wrongly; here
    the one that sums has whole tiles alone.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new, total, out = super().online(m, l, acc, s, v, rows, cols)
        if cols.stop <= self.at.nk or cols.start == 0:
            return new, total, out
        safe = torch.where(new == -torch.inf, 0.0, new)
        return new, l * torch.exp2(m - safe), out


# --- what the backward pass starts from
@fault(FAULTS, "lse-other backward-weights non-finite", "float16")
class lse_of_the_first_part(Parts):
    """flashinfer-ai/flashinfer PR 58: lse is wrong if the keys are split: here it is that of the
    first part.
    """

    def merge(self, outs, lses):
        return super().merge(outs, lses)[0], lses[0]


@fault(FAULTS, "no-delta other-data")
class delta_without_the_heads_offset(Kernel):
    """fla-org/flash-linear-attention issue 1115: a load of the backward pass lacks the sequence's
    and the head's offset; here that of δ.
    """

    def delta(self, do, o):
        return super().delta(do, o)[:1, :1].expand(*do.shape[:2], -1, -1)


@fault(FAULTS, "prescaled backward-scores backward-weights operand")
class backward_keys_times_the_scale(Kernel):
    """HKUSTDial/flash-sparse-attention issue 202: for the backward pass the scale goes into the
    key, in its own format, for the scores and for dQ.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return self.at.low(found * self.at.scale) / self.at.scale if name == "b_k" else found


@fault(FAULTS, "ragged other-data")
class rows_past_the_end_on_the_way_back(Kernel):
    """openxla/tokamax issue 316: the backward kernel does not check bounds: rows of the last block
    past the end are read, here those of the next head.
    """

    def past(self, x, part):
        found = load(x, part)
        missing = part.stop - x.shape[2]
        if missing > 0:
            after = x.flatten(0, 1).roll(-1, 0).view_as(x)
            found = torch.cat([found[:, :, : x.shape[2] - part.start], after[:, :, :missing]], 2)
        return found

    def again(self, rows, cols, which):
        if which == "queries" or rows.stop - self.at.n > self.at.n:
            return super().again(rows, cols, which)
        at = self.at
        q, do, lse, delta = (self.past(x, rows) for x in (at.q, at.do, at.lse, at.delta))
        k, v = load(at.k, cols), load(at.v, cols)
        p = self.weights_again(self.scores(q, k, rows, cols, True), lse)
        return q, k, do, p, at.low(self.grad_scores(p, do @ v.mT, delta, self.slope(q, k)))


# --- gradients
@fault(FAULTS, "group-sum")
class first_heads_gradient_for_the_group(Kernel):
    """marin-community/levanter PR 449: K and V are broadcast over the heads of a group, and their
    gradients are not summed over it; here the first head's is given back.
    """

    def group(self, grad):
        return grad.unflatten(1, (-1, self.at.groups))[:, :, 0]


@fault(FAULTS, "group-sum other-data unwritten key-heads", "float16")
class heads_divided_by_the_wrong_count(Kernel):
    """XunhaoLai/native-sparse-attention-triton issue 27: where dK and dV are written the number of
    a query head is divided by the other one of the two counts; some go out of range, and what is
    not written counts as zero.
    """

    def group(self, grad):
        heads, share = grad.shape[1], self.at.groups
        own = heads // share
        found = torch.zeros_like(grad).unflatten(1, (own, share))
        for h in range(heads):
            if share == 1:
                found[:, h, 0] = grad[:, h]
            elif h // own < own and h % own < share:
                found[:, h // own, h % own] = grad[:, h]
        return found.sum(2)


@fault(FAULTS, "ragged layout")
class values_as_wide_as_keys_in_dq(Kernel):
    """XunhaoLai/native-sparse-attention-triton issue 27: in the kernel of dQ the blocks of V and dO
    end at the width of keys: where V is wider its other features are not in dP.
    """

    def again(self, rows, cols, which):
        at, wide = self.at, self.at.q.shape[-1]
        if which == "keys":
            return super().again(rows, cols, which)
        do, v = at.do, at.v
        at.do, at.v = do[..., :wide], v[..., :wide]
        found = super().again(rows, cols, which)
        at.do, at.v = do, v
        return found


@fault(FAULTS, "grad-accumulator")
class dq_added_up_in_bf16(Kernel):
    """meta-recsys/generative-recommenders PR 549: the backward pass accumulates in bf16; here dQ,
    over blocks of 32 keys.
    """

    cols = 32

    def add(self, name, total, part, rows, cols):
        found = super().add(name, total, part, rows, cols)
        return bf16(found) if name == "dq_acc" else found


@fault(FAULTS, "grad-stored", "float16")
class key_gradients_always_in_bf16(Kernel):
    """open-mmlab/mmcv PR 3136: after the kernel fp32 gradients of K and V become bf16, whatever K
    and V are.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return dq, bf16(dk), bf16(dv)


# --- values by another's stride
@fault(FAULTS, "layout other-data ragged")
class values_by_the_querys_stride(Kernel):
    """thu-ml/SageAttention issue 26: rows of V are the query's stride apart."""

    def forward(self):
        v, d = self.at.v, self.at.q.shape[-1]
        nk, wide = v.shape[2:]
        at = torch.arange(nk)[:, None] * d + torch.arange(wide)
        flat = functional.pad(v.flatten(2), (0, max(0, (d - wide) * nk)))
        kept, self.at.v = v, flat[:, :, at]
        found = super().forward()
        self.at.v = kept
        return found
