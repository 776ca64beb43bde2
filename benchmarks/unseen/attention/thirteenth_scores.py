"""The thirteenth set's faults of precision and of the backward pass (thirteenth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, bf16, cut, e4m3, fp16, load
from torch.nn import functional

FAULTS: list[Fault] = []


# --- operands
@fault(FAULTS, "operand")
class key_directions_in_four_bits(Kernel):
    """ahb-sjsu/turboquant-pro PR 98: a key is kept as its length and a direction, of which every
    feature has 4 bits; what the features' own sizes are is lost.
    """

    def forward(self):
        k = self.at.k
        size = (k.square().mean(-1, keepdim=True)).sqrt().clamp_min(1e-20)
        codes = (k / size / 0.335 - 0.5).round().clamp(-8, 7)
        self.at.k = (codes + 0.5) * 0.335 * size
        return super().forward()


@fault(FAULTS, "operand")
class values_in_mxfp8_along_the_keys(Kernel):
    """NVIDIA/TransformerEngine issue 3248: V is in e4m3 with a power of two for 32 keys of one
    feature, among them such as come after the query.
    """

    def forward(self):
        v, nk = self.at.v, self.at.nk
        parts = functional.pad(v, (0, 0, 0, -nk % 32)).unflatten(2, (-1, 32))
        most = parts.abs().amax(3, keepdim=True).clamp_min(1e-30)
        size = torch.exp2((most / 448).log2().ceil())
        self.at.v = (e4m3(parts / size) * size).flatten(2, 3)[:, :, :nk]
        return super().forward()


@fault(FAULTS, "operand other-data layout")
class zero_points_read_as_floats(Kernel):
    """InfiniTensor/InfiniLM PR 553: K is in 8 bits with a step and a zero point for every token;
    zero points are written in bf16, two of which the kernel reads as one float: that of token i is
    token 2 i + 1's, and the second half of them is not there at all.
    """

    def forward(self):
        k = self.at.k[:, :: self.at.groups]
        least, most = k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)
        step = ((most - least) / 255).clamp_min(1e-20)
        codes = ((k - least) / step).round()
        zero = bf16(least).flatten()
        read = functional.pad(zero[1::2], (0, len(zero) - len(zero) // 2)).view_as(least)
        self.at.k = self.spread(codes * step + read)
        return super().forward()


# --- products, weights, sums
@fault(FAULTS, "products scores non-finite", "float16")
class scores_added_up_in_half(Kernel):
    """philipturner/metal-flash-attention issue 8: Q Kᵀ is accumulated in half precision, here eight
    features after eight, and the scale is applied after it.
    """

    def product(self, q, k, back):
        if back:
            return super().product(q, k, back)
        total = torch.zeros(())
        for a, b in zip(q.split(8, -1), k.split(8, -1), strict=True):
            total = fp16(total + a @ b.mT)
        return total


@fault(FAULTS, "row-sum weights-disagree exponential unnormalized", "float16")
class cheap_exponentials_in_the_sum(Kernel):
    """tenstorrent/tt-metal issue 29030 (softmax): exponentials are computed twice, approximately
    for the sum and accurately for what is divided by it; here a parabola takes the place of 2^f.
    """

    def add_row(self, l, a, p):
        part, power = torch.frexp(p)
        f = torch.where(p > 0, 2 * part, 1.0).log2()
        cheap = torch.ldexp(1 + f * (0.6565 + 0.3435 * f), power - 1)
        return l * a + torch.where(p > 0, cheap, 0.0).sum(-1, keepdim=True)


@fault(FAULTS, "weights weights-row-sum weights-disagree")
class weights_in_nvfp4_of_one_level(Kernel):
    """kekzl/imp PR 868: weights go into e2m1 with a scale in e4m3 for 16 keys; without a second
    level the scales of small weights collapse.
    """

    LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def coded(self, p):
        parts = p.unflatten(-1, (-1, 16))
        size = e4m3(parts.amax(-1, keepdim=True) / 6)
        ratio = torch.where(size > 0, parts / size, 0.0)
        between = (self.LEVELS[1:] + self.LEVELS[:-1]) / 2
        return (self.LEVELS[torch.bucketize(ratio, between)] * size).flatten(-2)

    def add_values(self, acc, a, p, v):
        return acc * a + self.coded(p) @ v


@fault(FAULTS, "weights-normalized weights", "float16")
class exponentials_and_quotients_in_place(Kernel):
    """microsoft/onnxruntime PR 22102, review: softmax works in the tensor of scores, in float16:
    exponentials are rounded to it, and once more when they have been divided by their sum.
    """

    def key_blocks(self, rows):
        return [slice(0, self.at.nk)]

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = fp16(torch.exp2(s - safe))
        l = self.add_row(l, torch.exp2(m - safe), p)
        total = torch.where(l == 0, 1.0, l)
        return new, l, fp16(p / total) @ v * total


# --- what the backward pass starts from
@fault(FAULTS, "layout lse-other lse backward-weights other-data")
class lse_by_tokens_read_by_heads(Kernel):
    """huggingface/diffusers PR 14274: lse is kept as [B, N, H], and the backward pass reads it as
    [B, H, N].
    """

    def forward(self):
        o, lse = super().forward()
        return o, lse.transpose(1, 2).reshape(lse.shape)


@fault(FAULTS, "no-delta delta grad-tail unwritten", "float32")
class delta_on_the_forward_passes_grid(Kernel):
    """triton-lang/triton PR 2020: the kernel that makes δ runs as many programs as the forward pass
    has blocks of queries, and its own blocks are half as high: later rows have no δ.
    """

    def delta(self, do, o):
        found, n = super().delta(do, o), self.at.n
        reached = -(-n // self.rows) * (self.rows // 2)
        return torch.where(torch.arange(n)[:, None] < reached, found, 0.0)


@fault(FAULTS, "scale grad-scale backward-weights backward-scores ragged")
class backward_scale_of_the_padded_width(Kernel):
    """tile-ai/tilelang-ascend issue 1669: the forward pass has the scale of the head's width, the
    backward pass that of the width after padding, here to a multiple of 32.
    """

    def backward(self):
        kept, d = self.at.scale, self.at.q.shape[-1]
        self.at.scale = kept * (d / (d + -d % 32)) ** 0.5
        found = super().backward()
        self.at.scale = kept
        return found


# --- gradients
@fault(FAULTS, "grad-tail ragged no-delta")
class softmax_backward_of_whole_vectors(Kernel):
    """deepspeedai/DeepSpeed PR 2709, review: the softmax's backward pass works in place on as many
    vectors of eight keys as go into a row: for the keys after these dP stays in the place of dS.
    """

    def whole(self) -> int:
        return self.at.nk // 8 * 8

    def delta(self, do, o):
        at = self.at
        s = self.scores(at.q, at.k, slice(0, at.n), slice(0, at.nk), True)
        weighted = self.weights_again(s, at.lse) * (do @ at.v.mT)
        return weighted[..., : self.whole()].sum(-1, keepdim=True)

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        rest = torch.arange(cols.start, cols.stop) >= self.whole()
        dp = self.at.low(do @ load(self.at.v, cols).mT)
        return q, k, do, p, torch.where(rest, dp, ds)


@fault(FAULTS, "operand products backward-scores backward-weights probabilities grad-scores",
       "float32")  # fmt: skip
class backward_products_in_tf32(Kernel):
    """pytorch/pytorch issue 167254: how precise fp32 products are is what the setting says when the
    backward pass runs, not what it said for the forward pass: all of its operands have 10 bits.
    """

    def load_query(self, name, x, part):
        found = super().load_query(name, x, part)
        return found if name == "q" else cut(found, 13)

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return cut(found, 13) if name.startswith("b_") else found

    def backward(self):
        low, self.at.low = self.at.low, lambda x: cut(x, 13)
        found = super().backward()
        self.at.low = low
        return found


@fault(FAULTS, "grad-accumulator", "float16")
class gradients_added_up_in_half(Kernel):
    """facebookresearch/xformers PR 467 ("accumulate in f32 for bw"): gradients are summed over
    tiles in fp16.
    """

    def add(self, name, total, part, rows, cols):
        return fp16(super().add(name, total, part, rows, cols))


@fault(FAULTS, "grad-stored", "float16")
class dq_given_back_in_bf16(Kernel):
    """zhuzilin/ring-flash-attention PR 87: dQ is cast to bf16 at the end, whatever the query is;
    here it is float16.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        return bf16(dq), dk, dv


@fault(FAULTS, "unstable other-data")
class parts_of_dk_overwritten_unread(Kernel):
    """NVIDIA/cudnn-frontend PR 396: the next tile's dK and dV are written over half of the columns
    before all warps have taken this one's: some rows add the next tile's twice.
    """

    def key_gradients(self, cols):
        parts = []
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            parts.append((ds.mT @ q * self.at.scale, self.at.low(p).mT @ do))
        totals = [torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v)]
        for own, after in zip(parts, parts[1:] + parts[-1:], strict=True):
            late = (torch.rand(self.cols // 8) < 0.2).repeat_interleave(8)[:, None]
            for which, (part, new) in enumerate(zip(own, after, strict=True)):
                second = torch.arange(part.shape[-1]) >= part.shape[-1] // 2
                totals[which] = totals[which] + torch.where(late & second, new, part)
        return tuple(totals)


@fault(FAULTS, "layout ragged other-data unwritten grad-tail")
class dv_by_the_width_of_keys(Kernel):
    """fla-org/flash-linear-attention issue 632: dV is added up in memory by rows as wide as a key,
    and as many of its columns are; where V is wider or narrower, rows go to the wrong place.
    """

    def backward(self):
        dq, dk, dv = super().backward()
        d, (nk, wide) = dq.shape[-1], dv.shape[2:]
        if wide == d:
            return dq, dk, dv
        many = min(d, wide)
        at = torch.arange(nk)[:, None] * d + torch.arange(many)
        flat = torch.zeros(*dv.shape[:2], nk * max(d, wide))
        flat.index_add_(2, at.flatten(), dv[..., :many].flatten(2))
        return dq, dk, flat[..., : nk * wide].view_as(dv)
