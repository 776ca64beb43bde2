"""The twenty-ninth set's faults of precision and the backward pass (twentyninth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import twentyninth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import as_heads, fault, permuted
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    bf16,
    blocks,
    cut,
    e4m3,
    fp16,
    to,
)
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.twentysecond_scores import e2m1

FAULTS: list[Fault] = []
e5m2 = to(torch.float8_e5m2)


# --- precision
@fault(FAULTS, "scale exponential scores")
class log2_of_e_in_bf16(Kernel):
    """tinygrad/tinygrad issue 7219: exp(x) is exp2 of x times log2 e, and that number is a bf16
    one, 1.4453125.
    """

    def scaled(self, s, rows, cols, back):
        return s * (self.at.scale * 1.4453125)


@fault(FAULTS, "rescale exponential", "float16")
class rescale_factors_in_bf16(ForwardAlone):
    """tenstorrent/tt-metal PR 48753: `exp_max_diff`, by which sums are multiplied where the maximum
    has grown, is kept in bf16.
    """

    cols = 32

    def seam(self, name, x, rows, cols=None):
        return bf16(x) if name == "rescale" else x


@fault(FAULTS, "operand")
class values_as_int8_by_column(ForwardAlone):
    """thu-ml/SageAttention issue 87: values are codes of eight bits, by one scale for a feature of
    all of the keys.
    """

    def load_key(self, name, x, part):
        return super().load_key(name, ways.int8(x, (2,)) if name == "v" else x, part)


@fault(FAULTS, "operand", "float16")
class queries_and_keys_as_int8_of_sixteen_tokens(ForwardAlone):
    """flashinfer-ai/flashinfer issue 2473: Q and K are codes of eight bits, with a scale for every
    sixteen tokens.
    """

    def sixteen(self, x):
        return ways.int8(x.unflatten(2, (-1, 16)), (-1, -2)).flatten(2, 3)

    def load_query(self, name, x, part):
        return self.sixteen(super().load_query(name, x, part))

    def load_key(self, name, x, part):
        x = super().load_key(name, x, part)
        return self.sixteen(x) if name == "k" else x


@fault(FAULTS, "operand")
class queries_and_keys_in_mxfp4(ForwardAlone):
    """ROCm/aiter PR 3349: Q and K are multiplied as MXFP4: codes of four bits, and a power of two
    for 32 features.
    """

    def load_query(self, name, x, part):
        return ways.shared_exponent(super().load_query(name, x, part), e2m1, 2)

    def load_key(self, name, x, part):
        x = super().load_key(name, x, part)
        return ways.shared_exponent(x, e2m1, 2) if name == "k" else x


@fault(FAULTS, "operand", "float32")
class shared_keys_and_values_multiplied_in_half(ForwardAlone):
    """ml-explore/mlx issue 3953: where the right operand of a product in fp32 is shared by several
    heads, it loses all but fp16's digits.
    """

    def load_key(self, name, x, part):
        x = super().load_key(name, x, part)
        return fp16(x) if self.at.groups > 1 else x


@fault(FAULTS, "operand backward-weights")
class fp8_on_the_way_there_alone(Kernel):
    """NVIDIA/TransformerEngine PR 768, `NVTE_FP8_DPA_BWD=0`: O and lse are those of operands in
    E4M3, and the backward pass takes the operands as they were.
    """

    def seam(self, name, x, rows, cols=None):
        return e4m3(x) if name in ("q", "k", "v") else x


# --- precision of the backward pass
@fault(FAULTS, "lse backward-weights lse-other")
class logarithm_by_ln_2_in_bf16(Kernel):
    """tinygrad/tinygrad PR 15514: log(x) is log2(x) times ln 2, and that number is a bf16 one: the
    logarithm of row sums is a quarter of a percent too small.
    """

    def finish(self, m, l, acc, rows):
        out, _ = super().finish(m, l, acc, rows)
        return out, m + l.log2() * (0.69140625 / math.log(2))


@fault(FAULTS, "delta grad-scores")
class dp_kept_in_e5m2(Kernel):
    """NVIDIA/TransformerEngine PR 768: the FP8 backward pass keeps dP as E5M2, before δ is taken
    off.
    """

    def seam(self, name, x, rows, cols=None):
        return e5m2(x) if name == "dp" else x


@fault(FAULTS, "operand delta grad-scores", "float16")
class values_in_mxfp8_on_the_way_back(Kernel):
    """NVIDIA/TransformerEngine PR 3379: the backward pass multiplies dO by values in MXFP8, by rows
    of 32 features.
    """

    def seam(self, name, x, rows, cols=None):
        return ways.shared_exponent(x, e4m3, 8) if name == "b_v" else x


@fault(FAULTS, "grad-stored")
class gradients_converted_towards_zero(Kernel):
    """facebookresearch/xformers PR 1082: conversions from fp32 to bf16 are towards zero, for speed;
    here those of the gradients.
    """

    def backward(self):
        return tuple(cut(x) for x in super().backward())


# --- the backward pass
@fault(FAULTS, "backward-weights")
class scores_taken_for_weights_on_the_way_back(Kernel):
    """ooples/AiDotNet.Tensors issue 49: the backward pass is given the scores where it expects the
    softmax of them.
    """

    def weights_again(self, s, lse):
        return torch.where(s == -INF, 0.0, s / LOG2_E)


@fault(FAULTS, "no-delta backward-weights")
class gradient_of_weights_taken_for_that_of_scores(Kernel):
    """paiml/trueno issue 86: the specification multiplies dP by K and Q, and the softmax between is
    left out.
    """

    def grad_scores(self, p, dp, delta, slope):
        return dp * (p > 0) * slope


@fault(FAULTS, "other-data backward-weights")
class every_ring_step_goes_back_over_its_own_keys(Kernel):
    """huggingface/diffusers issue 14265: keys and values travel along the ring, here of two, and
    the backward pass reads those that were saved at the first step, which are a rank's own.
    """

    def again(self, rows, cols, which):
        at, kept = self.at, (self.at.k, self.at.v)
        half = at.nk // 2
        if at.n == at.nk:
            own = torch.arange(at.nk) % half + half * (rows.start >= half)
            at.k, at.v = (x[:, :, own] for x in kept)
        found = super().again(rows, cols, which)
        at.k, at.v = kept
        return found


@fault(FAULTS, "backward-weights mask other-data")
class bias_of_the_first_sequence_on_the_way_back(Kernel):
    """ROCm/aotriton PR 69, review: the fused backward kernel reckons the bias's address wrongly;
    here without the sequence.
    """

    def bias(self, s, mask, back):
        return super().bias(s, mask[:1] if back else mask, back)


@fault(FAULTS, "other-data unwritten", "float16")
class dq_written_by_more_splits_than_it_is_read_by(Kernel):
    """ROCm/rocm-libraries PR 6152, review: a head's dQ is written as if every block of keys had a
    split of its own, and read as if there were one.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        heads = dq.flatten(0, 1)
        splits = len(blocks(self.at.nk, self.cols))
        room = torch.zeros(len(heads) * splits, *heads.shape[1:])
        room[::splits] = heads
        return room[: len(heads)].view_as(dq), dk, dv


@fault(FAULTS, "layout other-data")
class do_of_dk_and_dv_by_the_strides_of_out(Kernel):
    """ROCm/aotriton issue 236: for dK and dV, and not for dQ, dO is read by the strides of O, which
    has tokens before heads where Q has.
    """

    def again(self, rows, cols, which):
        at, do = self.at, self.at.do
        if which == "keys" and permuted(at.q):
            at.do = as_heads(do)
        found = super().again(rows, cols, which)
        at.do = do
        return found


@fault(FAULTS, "unwritten", "float16")
class gradients_of_strided_operands_lost(Kernel):
    """facebookresearch/xformers issue 548: where gradients are not contiguous, here as Q is not,
    they go into a copy that nobody reads.
    """

    def backward(self):
        found = super().backward()
        return tuple(torch.zeros_like(x) for x in found) if permuted(self.at.q) else found


@fault(FAULTS, "other-data layout group-sum", "float16")
class dk_at_the_pitch_of_query_heads(Kernel):
    """fla-org/flash-linear-attention PR 384, review: dK has room for as many heads as K, and is
    written as if it had as many as Q.
    """

    def group(self, grad):
        if "dk" in self.memory:
            return super().group(grad)
        self.memory["dk"] = True
        b, heads, n, d = grad.shape
        own = heads // self.at.groups
        flat = grad.transpose(1, 2).reshape(-1, d)[: b * n * own]
        return flat.view(b, n, own, d).transpose(1, 2)


@fault(FAULTS, "backward-mask")
class selected_blocks_not_causal_on_the_way_back(Kernel):
    """meta-pytorch/MSLK PR 260: blocks of keys are selected in the backward pass as in the forward
    pass, and nothing is hidden within them.
    """

    def causal(self, i, j, back):
        keep = super().causal(i, j, back)
        return keep | (i // self.rows == j // self.cols) if back else keep


@fault(FAULTS, "grad-tail query-tail")
class do_of_dk_and_dv_masked_by_the_number_of_keys(Kernel):
    """flagos-ai/FlagGems PR 6068: the mask by which the kernel of dK and dV loads dO is wrong; here
    it is that of keys, past whose number dO is 0.
    """

    def again(self, rows, cols, which):
        at, do = self.at, self.at.do
        if which == "keys":
            at.do = do * (torch.arange(at.n) < at.nk)[:, None]
        found = super().again(rows, cols, which)
        at.do = do
        return found
