"""The ninth set's faults of scale, codes, weights, precision and the backward pass
(ninth.py has the others, and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, e4m3, fp16, load

FAULTS: list[Fault] = []


# --- scale
@fault(FAULTS, "scale")
class divided_by_the_scale(Kernel):
    """AI-Hypercomputer/maxtext issue 1370: scores are divided by 1/√d ("reversed")."""

    def forward(self):
        self.at.scale = 1 / self.at.scale
        return super().forward()


@fault(FAULTS, "scale", "float16")
class scale_of_all_heads_together(Kernel):
    """juho-lee/set_transformer issue 18: the scale is that of the width of all heads together."""

    def forward(self):
        self.at.scale *= self.at.q.shape[1] ** -0.5
        return super().forward()


# --- codes of K, V and O
@fault(FAULTS, "operand scale")
class prefix_without_its_scales(Kernel):
    """sgl-project/sglang PR 24198: K and V are kept in e4m3, and the path that reads a cached
    prefix is given no scales.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        size = x.abs().max().clamp_min(1e-30) / 448
        prefix = part.stop <= self.at.nk // 2
        return e4m3(found / size) * (1.0 if prefix else size)


@fault(FAULTS, "operand")
class values_by_the_scale_of_keys(Kernel):
    """sgl-project/sglang PR 26852, review: the scale of V falls back to that of K."""

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        read = self.at.k.abs().max().clamp_min(1e-30) / 448
        return e4m3(found / (x.abs().max().clamp_min(1e-30) / 448)) * read


@fault(FAULTS, "operand other-data scale")
class scale_of_another_key_head(Kernel):
    """ROCm/aiter PR 3894: K in e4m3 has a scale for every sequence and head, which is read at the
    wrong place of the flat buffer: heads before sequences.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if not name.endswith("k"):
            return found
        size = x.abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 448
        return e4m3(found / size) * size.transpose(0, 1).reshape(size.shape)


@fault(FAULTS, "operand", "float16")
class steps_of_at_least_one(Kernel):
    """lablup/mlxcel PR 717: the scale of 8-bit K and V is held above 1, so that they are rounded to
    whole numbers.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        size = (found.abs().amax(-1, keepdim=True) / 127).clamp_min(1.0)
        return (found / size).round() * size


@fault(FAULTS, "operand other-data")
class codes_by_strides_of_a_smaller_batch(Kernel):
    """openvinotoolkit/openvino PR 37381: K and V in 8 bits have a scale and a zero for every token,
    [L, B], whose strides are those of the batch of 1 that was there before.
    """

    def load_key(self, name, x, part):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        size = (high - low).clamp_min(1e-30) / 255
        b, heads, nk, _ = x.shape
        at = torch.arange(nk) + torch.arange(b)[:, None]

        def read(y):
            flat = y.permute(2, 0, 1, 3).reshape(nk * b, heads, 1)
            return flat[at].transpose(1, 2)

        found = ((x - low) / size).round() * read(size) + read(low)
        return super().load_key(name, found, part)


@fault(FAULTS, "operand scale")
class scales_of_codes_twice(Kernel):
    """vllm-project/vllm PR 48016: K and V are made of their codes and scales, and the scales of
    scores and of O have them once more.
    """

    def size(self, x):
        return x.abs().max().clamp_min(1e-30) / 448

    def load_key(self, name, x, part):
        size = self.size(x)
        return e4m3(super().load_key(name, x, part) / size) * size

    def scaled(self, s, rows, cols, back):
        return super().scaled(s, rows, cols, back) * self.size(self.at.k)

    def finish(self, m, l, acc, rows):
        return super().finish(m, l, acc * self.size(self.at.v), rows)


@fault(FAULTS, "out")
class out_through_e4m3(Kernel):
    """vllm-project/vllm PR 55670: O is given back in e4m3 without a scale and copied into bf16."""

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return e4m3(o.clamp(-448, 448)), lse


@fault(FAULTS, "rescale operand lse-other backward-weights")
class maxima_of_unlike_codes(Kernel):
    """tile-ai/TileOPs PR 1511, review: every tile of K has a scale of its own, and the maximum that
    is carried on is that of the raw products.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name != "k":
            return found
        self.memory["size"] = size = found.abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 448
        return e4m3(found / size) * size

    def online(self, m, l, acc, s, v, rows, cols):
        size = self.memory["size"]
        new = self.maximum(m, s / size)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe * size), torch.exp2((m - safe) * size)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def finish(self, m, l, acc, rows):
        return super().finish(m * self.memory["size"], l, acc, rows)


# --- weights, precision
@fault(FAULTS, "weights weights-disagree")
class weights_past_the_largest_code(Kernel):
    """Dao-AILab/flash-attention PR 2717: weights are 2⁸ times as large, the maximum up to 2⁴ too
    small, and e4m3 ends at 448; the row's sum has them as they were.
    """

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l * 256, acc

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        new = torch.where(new - m < 4, m, new)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe + 8), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), acc * a + e4m3(p.clamp_max(448)) @ v

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse - 8


@fault(FAULTS, "maximum underflow non-finite")
class ten_for_the_maximum(Kernel):
    """HabanaAI/vllm-fork issue 275: what is taken off the scores is always 10."""

    def maximum(self, m, s):
        return torch.full_like(m, 10 * LOG2_E)


@fault(FAULTS, "rescale weights-disagree non-finite", "float32")
class output_rescaled_by_the_inverse(Kernel):
    """Dao-AILab/flash-attention issue 991: diag(e^(m − m'))⁻¹ O, as algorithm 1 was printed."""

    def add_values(self, acc, a, p, v):
        return super().add_values(acc, torch.where(a == 0, 0.0, 1 / a), p, v)


@fault(FAULTS, "unnormalized rescale", "float16")
class divided_at_every_step(Kernel):
    """1bit-MONSTER/1bit-MONSTER PR 495: O is divided by the row's sum so far at every step, in the
    place of once at the end.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        m, l, acc = super().online(m, l, acc, s, v, rows, cols)
        return m, l, acc / torch.where(l == 0, 1.0, l)

    def finish(self, m, l, acc, rows):
        return self.at.low(acc), m + l.log2()


@fault(FAULTS, "unstable maximum other-data", "float32")
class sum_in_the_maximums_place(Kernel):
    """JustVugg/colibri PR 1098: no barrier between reading the maximum from shared memory and
    writing the sums there: some rows take a sum for their maximum.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        late = (torch.rand(s.shape[-2] // 8) < 0.1).repeat_interleave(8)[:, None]
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - torch.where(late, l, safe)), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "exponential", "float32")
class exponential_for_16_bits(Kernel):
    """pytorch/pytorch PR 151441: an exponential of 20 ulp, meant where results have 16 bits, in a
    kernel of fp32.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = self.power(s - safe), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def power(self, x):
        whole = torch.where(x == -INF, 0.0, x).floor()
        f = (torch.where(x == -INF, 0.0, x) - whole - 0.5) * math.log(2)
        series = sum(f**i / math.factorial(i) for i in range(6)) * math.sqrt(2)
        return torch.where(x == -INF, 0.0, series * torch.exp2(whole))


@fault(FAULTS, "products non-finite", "float16")
class products_in_fp16(Kernel):
    """mlc-ai/mlc-llm PR 1870: operands go into fp32 after they are multiplied, not before."""

    def product(self, q, k, back):
        if back:
            return super().product(q, k, back)
        return fp16(q[..., :, None, :] * k[..., None, :, :]).sum(-1)


@fault(FAULTS, "ragged")
class whole_warps_of_features(Kernel):
    """mlc-ai/mlc-llm PR 1889: Q Kᵀ is summed over as many features as whole groups of 32 have."""

    def product(self, q, k, back):
        whole = q.shape[-1] // 32 * 32
        return q[..., :whole] @ k[..., :whole].mT


# --- the backward pass
@fault(FAULTS, "grad-scale")
class dk_without_the_scale(Kernel):
    """fla-org/flash-linear-attention issue 47 (linear attention): gradients are right for a scale
    of 1 alone.
    """

    def key_gradients(self, cols):
        dk, dv = super().key_gradients(cols)
        return dk / self.at.scale, dv


@fault(FAULTS, "grad-scale", "float16")
class dq_scaled_twice(Kernel):
    """HKUSTDial/flash-sparse-attention PR 203: dQ is scaled where it is summed and again where it
    is stored.
    """

    def query_gradient(self, rows):
        return super().query_gradient(rows) * self.at.scale


@fault(FAULTS, "probabilities", "float32")
class weights_of_dv_in_fp16(Kernel):
    """ROCm/triton PR 563, review: `ppT.to(tl.float16)` before the product that gives dV, whatever
    the operands are.
    """

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, fp16(p), ds


@fault(FAULTS, "no-delta unstable", "float32")
class delta_partly_cleared(Kernel):
    """karpathy/llm.c PR 847: nothing orders a warp's part of δ after the zeros that are written
    there first: some parts are lost.
    """

    def delta(self, do, o):
        parts = torch.stack([x.sum(-1) for x in (do * o).chunk(8, -1)], -1)
        kept = torch.rand(parts.shape[2:]) > 0.05
        return (parts * kept).sum(-1, keepdim=True)


@fault(FAULTS, "no-delta lse-gradient")
class branches_without_the_gradient_of_lse(Kernel):
    """SHI-Labs/NATTEN issue 274: two branches of keys are merged by their lse, and the backward
    pass of each has none of lse's gradient: its δ is of its own O.
    """

    def branch(self, cols):
        return int(cols.start >= self.at.nk / 2)

    def backward(self):
        at, self.memory["own"] = self.at, None
        high = -(-at.n // self.rows) * self.rows
        sums = torch.zeros(2, 2, *at.q.shape[:2], high, 1)
        at.delta = torch.zeros_like(at.lse)
        for rows in blocks(at.n, self.rows):
            for cols in self.key_blocks(rows):
                _, _, do, p, _ = self.again(rows, cols, "queries")
                dp = do @ load(at.v, cols).mT
                for i, x in enumerate((p * dp, p)):
                    sums[self.branch(cols), i, :, :, rows] += x.sum(-1, keepdim=True)
        self.memory["own"] = sums[:, 0] / sums[:, 1].clamp_min(1e-30)
        return super().backward()

    def again(self, rows, cols, which):
        own = self.memory["own"]
        if own is not None:
            self.at.delta = own[self.branch(cols)]
        return super().again(rows, cols, which)


@fault(FAULTS, "lse-other lse backward-weights")
class merged_lse_in_nats(Kernel):
    """meta-pytorch/attention-gym PR 200, review: the merged lse is in nats, and the backward pass
    reads it in base 2.
    """

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse * math.log(2)
