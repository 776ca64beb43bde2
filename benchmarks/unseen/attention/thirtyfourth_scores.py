"""The thirty-fourth set's faults of precision and the backward pass (thirtyfourth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention import thirtyfourth_kernel as ways
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, fp16, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

FAULTS: list[Fault] = []


# --- precision
@fault(FAULTS, "operand", "float16")
class cache_of_eight_bits_by_one_scale_and_zero(ForwardAlone):
    """InternLM/lmdeploy issue 772: the cache in eight bits, with one calibrated scale and zero
    point for keys and one for values, is noticeably less precise.
    """

    def load_key(self, name, x, part):
        low, high = x.amin(), x.amax()
        step = ((high - low) / 255).clamp_min(2.0**-20)
        codes = ((x - low) / step).round().clamp(0, 255)
        return load(codes * step + low, part)


@fault(FAULTS, "operand")
class cache_of_four_bits_a_token(ForwardAlone):
    """InternLM/lmdeploy PR 1377: keys and values of a token and head have sixteen values from their
    least to their largest.
    """

    def load_key(self, name, x, part):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = ((high - low) / 15).clamp_min(2.0**-20)
        return load(((x - low) / step).round() * step + low, part)


@fault(FAULTS, "operand scores")
class queries_and_keys_in_int8_by_thread(ForwardAlone):
    """thu-ml/SageAttention PR 76: queries and keys are whole numbers up to 127, by one scale for
    what a thread holds of them, every eighth row of a tile.
    """

    def product(self, q, k, back):
        q, k = (ways.int8_by_thread(x) for x in (q, k))
        return super().product(q, k, back)


@fault(FAULTS, "prescaled scores products", "float16")
class query_scaled_and_product_summed_in_half(ForwardAlone):
    """microsoft/onnxruntime PR 24994: the product is in half precision again, four features at a
    time, now that the query is scaled before it.
    """

    def product(self, q, k, back):
        q, found = fp16(q * self.at.scale), torch.zeros(())
        for first in range(0, q.shape[-1], 4):
            found = fp16(found + fp16(q[..., first : first + 4] @ k[..., first : first + 4].mT))
        return found

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


@fault(FAULTS, "exponential scores row-max")
class cast_to_half_before_the_softmax(ForwardAlone):
    """tinygrad/tinygrad PR 9213: scores are cast before the softmax, not behind it, so that their
    difference from the maximum and the exponential are in 16 bits; here in bf16.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        s = bf16(s / LOG2_E)
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = bf16(torch.exp(bf16(s - safe))), torch.exp(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m / LOG2_E, l, acc

    def finish(self, m, l, acc, rows):
        return super().finish(m * LOG2_E, l, acc, rows)


# --- precision of the backward pass
@fault(FAULTS, "probabilities operand", "float16")
class weights_and_do_of_dv_in_int8(Kernel):
    """thu-ml/SageAttention issue 229 (SageBwd): dV is the product of weights and dO in eight bits,
    by one scale for a block of each.
    """

    @staticmethod
    def by_block(x):
        step = x.abs().amax((-1, -2), keepdim=True).clamp_min(2.0**-100) / 127
        return (x / step).round() * step

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv = dv + self.by_block(p).mT @ self.by_block(do)
            dk = dk + ds.mT @ q
        return dk * self.at.scale, dv


@fault(FAULTS, "operand scores backward-weights backward-scores", "float16")
class quantized_forward_pass_differentiated_as_if_exact(Kernel):
    """thu-ml/SageAttention issue 60: training goes on with a quantized forward pass, and gradients
    of an attention that is not.
    """

    def scores(self, q, k, rows, cols, back):
        if not back:
            q, k = ways.int8_groups(q, -1, 64), ways.int8_groups(k, -1, 64)
        return super().scores(q, k, rows, cols, back)


@fault(FAULTS, "grad-accumulator grad-stored", "float16")
class dk_and_dv_in_half_where_memory_was(Kernel):
    """tile-ai/tilelang PR 558, review: dK and dV, which are added up from block to block, are
    allocated in half precision.
    """

    def add(self, name, total, part, rows, cols):
        found = super().add(name, total, part, rows, cols)
        return found if name == "dq_acc" else fp16(found)


# --- the backward pass
@fault(FAULTS, "layout other-data")
class keys_and_values_transposed_twice_on_the_way_back(Kernel):
    """huggingface/diffusers issue 14338: keys and values are saved with heads before tokens, and
    transposed once more before the backward pass: tokens are read for heads.
    """

    def backward(self):
        kept = self.at.k, self.at.v
        self.at.k, self.at.v = (x.transpose(1, 2).reshape(x.shape) for x in kept)
        found = super().backward()
        self.at.k, self.at.v = kept
        return found


@fault(FAULTS, "grad-tail backward-mask", "float16")
class dk_and_dv_never_sent_on(Kernel):
    """NVIDIA/TransformerEngine issue 2484: on the way back dK and dV are not passed round with keys
    and values: of what other ranks' queries give, here of two ranks, nothing comes home.
    """

    def query_blocks(self, cols):
        half = -(-self.at.n // 128) * 64
        every = super().query_blocks(cols)
        return [r for r in every if (r.start >= half) == (cols.start >= half)]


@fault(FAULTS, "unwritten grad-tail")
class graph_severed_before_the_attention(Kernel):
    """paiml/aprender PR 2203: every step builds its tensors anew, with no edge to those before, so
    that no gradient reaches Q, K and V.
    """

    def backward(self):
        return tuple(torch.zeros_like(x) for x in super().backward())


@fault(FAULTS, "no-delta delta other-data", "float16")
class delta_of_a_do_half_written(Kernel):
    """Dao-AILab/flash-attention PR 2481: the kernel of δ does not wait for the one before it, and
    reads dO while it is written: its second half of rows is what memory was, 0.
    """

    def delta(self, do, o):
        written = torch.arange(do.shape[2])[:, None] < (do.shape[2] + 1) // 2
        return super().delta(do * written, o)


@fault(FAULTS, "backward-weights lse-other lse")
class mask_loaded_where_the_maximum_was(Kernel):
    """ELS-RD/kernl issue 200: the kernel on the way back loads the mask into `m`, which held what
    is taken off the scores: from scores with the mask, both scaled, the mask alone is taken off.
    """

    def bias(self, s, mask, back):
        if not back:
            return super().bias(s, mask, back)
        self.memory["m"] = mask.float() * LOG2_E
        return s + self.memory["m"] * self.at.scale

    def weights_again(self, s, lse):
        if "m" not in self.memory:
            return super().weights_again(s, lse)
        return torch.exp2(s - self.memory["m"])
