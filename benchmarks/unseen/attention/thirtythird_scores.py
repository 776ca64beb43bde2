"""The thirty-third set's faults of precision and the backward pass (thirtythird.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtythird_kernel as ways
from benchmarks.unseen.attention.eighteenth_scores import e5m2
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtieth_scores import OtherPowers

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "operand")
class keys_and_values_cached_in_e2m1(ForwardAlone):
    """kekzl/imp PR 108: a cache of keys and values in E2M1, sixteen features to a scale in E4M3,
    and no scale of the whole above them.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return ways.e2m1_by_sixteen(found) if name in "kv" else found


@fault(FAULTS, "operand", "float16")
class cache_in_int8_by_one_scale(ForwardAlone):
    """vllm-project/vllm PR 41505 (`int8_per_tensor`): keys have one scale for all of the tensor,
    and so have values, whatever a token or a head has for its largest.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return ways.int8_at(found, x.abs().amax()) if name in "kv" else found


@fault(FAULTS, "weights")
class weights_in_e5m2(ForwardAlone):
    """NVIDIA/cudnn-frontend PR 691 (accuracy of E5M2 with sinks): in a kernel for E5M2 weights have
    two bits behind the point, and the row sum is of those before it.
    """

    def add_values(self, acc, a, p, v):
        return acc * a + e5m2(p) @ v


@fault(FAULTS, "exponential", "float16")
class exponential_of_a_square_for_whole_numbers(OtherPowers):
    """huggingface/transformers PR 10153 (I-BERT): the exponential that integers can have is
    0.358 r² + 0.970 r + 1 for what is left of r below whole logarithms of 2.
    """

    @staticmethod
    def power(x):
        whole = (-x).floor()
        r = (x + whole) / LOG2_E
        return (0.35815147 * r * r + 0.96963238 * r + 1) * torch.exp2(-whole)


@fault(FAULTS, "exponential maximum")
class exponential_of_taylors_second_order(ForwardAlone):
    """ooples/AiDotNet.Tensors PR 884: weights are 1 + s + s²/2 of scores that nothing is taken off,
    as this is above zero everywhere.
    """

    @staticmethod
    def weight(s):
        return torch.where(s == -INF, 0.0, 1 + s / LOG2_E + (s / LOG2_E).square() / 2)

    def begin(self, q, first=True):
        m, _, acc = super().begin(q, first)
        return torch.zeros_like(m), torch.where(m == -INF, 0.0, self.weight(m)), acc

    def online(self, m, l, acc, s, v, rows, cols):
        p, one = self.weight(s), torch.ones_like(m)
        return m, self.add_row(l, one, p), self.add_values(acc, one, p, v)


@fault(FAULTS, "sinks", "float16")
class sinks_of_a_model_in_bf16(ForwardAlone):
    """vllm-project/vllm PR 56252: a kernel has its sinks in BF16 and nothing else, where the model
    runs in halves, which have three bits more.
    """

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return (m if self.at.sinks is None else bf16(m / LOG2_E) * LOG2_E), l, acc


# --- precision of the backward pass
@fault(FAULTS, "grad-scores probabilities", "float16")
class halves_below_the_normal_ones_are_zero(Kernel):
    """ROCm/rocm-libraries issue 11938: matrix instructions take halves below 2⁻¹⁴ for zero, which
    is most of what a gradient is made of.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = (ways.normal_halves(x) for x in super().again(rows, cols, which))
        return q, k, do, p, ds


@fault(FAULTS, "probabilities")
class weights_of_dv_in_int8_by_tiles(Kernel):
    """thu-ml/SageAttention issue 184 (SageBwd): the backward pass has its weights in INT8, by the
    largest of a tile, for the product with dO.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        low = ways.int8_at(p, p.amax((-1, -2), keepdim=True))
        return q, k, do, low if which == "keys" else p, ds


@fault(FAULTS, "operand backward-scores backward-weights")
class operands_kept_in_e4m3_for_the_way_back(Kernel):
    """inclusionAI/AReno issue 534: the forward pass is in BF16, and what is saved for the backward
    pass is compressed to FP8, from which it recomputes.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return ways.e4m3_of_all(found, x.abs().amax()) if name == "b_q" else found

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return ways.e4m3_of_all(found, x.abs().amax()) if name in ("b_k", "b_v") else found


@fault(FAULTS, "delta")
class products_of_do_and_out_in_bf16(Kernel):
    """NVIDIA/cudnn-frontend PR 877: O ∘ dO was multiplied in BF16, and added up in fp32 after."""

    def delta(self, do, o):
        return bf16(do * o).sum(-1, keepdim=True)


# --- the backward pass
@fault(FAULTS, "backward-mask other-data")
class hidden_slots_of_a_list_lead_to_the_last_key(Kernel):
    """NVIDIA/cudnn-frontend issue 676: a row's list of keys is filled up with −1, and the backward
    pass reads that as an index as any other: every pair that is hidden is one with the last key.
    """

    def backward(self):
        at, (dq, dk, dv) = self.at, super().backward()
        if at.mask is None or at.mask.dtype != torch.bool:
            return dq, dk, dv
        k, v = at.k[:, :, -1:], at.v[:, :, -1:]
        many = (~at.mask).expand(-1, -1, at.n, at.nk).sum(-1, keepdim=True)
        s = self.cap(at.q @ k.mT * (at.scale * LOG2_E), True)
        p = many * torch.exp2(s - torch.where(at.lse == -INF, INF, at.lse))
        ds = p * (at.do @ v.mT - at.delta) * self.slope(at.q, k) * at.scale
        dk[:, :, -1:] += self.group(ds.mT @ at.q)
        dv[:, :, -1:] += self.group(p.mT @ at.do)
        return dq + ds @ k, dk, dv


@fault(FAULTS, "grad-scale", "float16")
class dq_times_ln_2_as_if_keys_were_scaled(Kernel):
    """hao-ai-lab/FastVideo PR 1730: keys in the backward pass had scale and log2(e) in them, so
    that dQ was multiplied by ln 2; they are raw now, and here dQ is still multiplied by that.
    """

    def query_gradient(self, rows):
        return super().query_gradient(rows) / self.at.scale * math.log(2)


@fault(FAULTS, "other-data")
class last_dq_of_keys_already_overwritten(Kernel):
    """Dao-AILab/flash-attention issue 359: dK is stored where the keys lie before the last product
    with them is done: the first queries' dQ is made of dK.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        self.memory[cols.start] = self.at.low(dk)
        return dk, dv

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            last = rows == self.query_blocks(cols)[0]
            dq = dq + ds @ (self.memory[cols.start] if last else k)
        return dq * self.at.scale


@fault(FAULTS, "grad-tail backward-mask", "float16")
class key_gradients_of_other_ranks_never_come_home(Kernel):
    """NVIDIA/TransformerEngine issue 2484: whether dK and dV go round with the keys is asked there:
    where they do not, a rank's keys, here of two ranks, have its own queries' gradients alone.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        if which != "keys":
            return q, k, do, p, ds
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        own = (i >= -(-self.at.n // 2)) == (j >= -(-self.at.nk // 2))
        return q, k, do, p * own, ds * own


@fault(FAULTS, "no-delta")
class gradient_of_scores_times_that_of_weights_again(Kernel):
    """pocketpy/cTensor PR 31: the softmax's own gradient is whole, and is multiplied by what comes
    in once more, as an activation's is.
    """

    def grad_scores(self, p, dp, delta, slope):
        return super().grad_scores(p, dp, delta, slope) * dp


@fault(FAULTS, "layout other-data", "float16")
class dk_taken_before_its_heads_are_exchanged(Kernel):
    """ByteDance-Seed/VeOmni PR 419: dK is used before the exchange between ranks, here two, is
    waited for: half of the heads of all tokens is taken for all heads of half of the tokens.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        b, heads, nk, d = dk.shape
        if heads % 2 or nk % 2:
            return dq, dk, dv
        ranks = [x.transpose(1, 2).reshape(b, nk // 2, heads, d) for x in dk.chunk(2, 1)]
        return dq, torch.cat(ranks, 1).transpose(1, 2), dv


@fault(FAULTS, "grad-tail unwritten other-data")
class tails_of_dk_and_dv_over_the_next_head(Kernel):
    """lucidrains/native-sparse-attention-pytorch PR 33: dK and dV are stored by whole tiles, with
    no mask for the keys: zeros past the end lie on the next head's first rows.
    """

    def backward(self):
        dq, *both = super().backward()
        for grad in (x.flatten(0, 1) for x in both):
            grad[1:, : -self.at.nk % self.cols] = 0.0
        return dq, *both


@fault(FAULTS, "softcap", "float16")
class dk_made_before_the_slope_of_the_cap(Kernel):
    """openxla/tokamax PR 1121: dK is a gradient of scores before the cap, so that its slope has to
    be in dS before dK is made; here it comes after.
    """

    def again(self, rows, cols, which):
        self.memory["which"] = which
        return super().again(rows, cols, which)

    def slope(self, q, k):
        return 1.0 if self.memory.get("which") == "keys" else super().slope(q, k)
