"""The fifteenth set's faults of scales, codes, precision and parts (fifteenth.py has the others,
and says what they are for).
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, e4m3, fp16
from torch import Tensor

FAULTS: list[Fault] = []


# --- scales
@fault(FAULTS, "scale", "float16")
class uniform_where_nothing_is_hidden(Kernel):
    """vllm-project/vllm-ascend issue 13699: where there is no mask and nothing is causal the
    operator returns the average of all values, as if every score were the same.
    """

    def product(self, q, k, back):
        s = super().product(q, k, back)
        at = self.at
        return s if at.causal or at.mask is not None or at.window is not None else s * 0.0


@fault(FAULTS, "scale")
class default_scale_on_top_of_the_given_one(Kernel):
    """tracel-ai/burn-onnx PR 453: the query is scaled already, and the fused operator, which is
    given no scale, multiplies by 1/√d once more.
    """

    def forward(self):
        self.at.scale = self.at.scale * self.at.q.shape[-1] ** -0.5
        return super().forward()


# --- codes
@fault(FAULTS, "scale value-factor operand")
class codes_of_keys_and_values_as_they_are(Kernel):
    """vllm-project/vllm PR 42580: where the query is in fp8 too, keys and values are taken for the
    codes that they are stored as: their scales, here of a half and of two, are dropped.
    """

    def forward(self):
        at = self.at
        at.k, at.v = e4m3(at.k / 0.5), e4m3(at.v / 2)
        return super().forward()


@fault(FAULTS, "operand")
class int8_codes_of_fp8s_range(Kernel):
    """weicj/vLLM-2080Ti-Definitive PR 109: scales are the largest number over fp8's ranges, 200 for
    keys and 100 for values, and codes are int8: what is past 127 is clipped.
    """

    def forward(self):
        at = self.at
        at.k, at.v = self.coded(at.k, 200), self.coded(at.v, 100)
        return super().forward()

    def coded(self, x: Tensor, most: float) -> Tensor:
        scale = x.abs().amax() / most
        return (x / scale).round().clamp(-127, 127) * scale


@fault(FAULTS, "operand", "float16")
class two_bits_of_codes_of_three(Kernel):
    """vllm-project/vllm PR 38479: keys are coded by the nearest of eight numbers, and the kernels
    that store and read them know of the first four and their three midpoints alone.
    """

    numbers = torch.tensor([-2.1520, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1520])

    def forward(self):
        at, first = self.at, self.numbers[:4]
        size = at.k.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        between = (first[1:] + first[:-1]) / 2
        code = torch.bucketize(at.k / size, between) & 3
        at.k = first[code] * size
        return super().forward()


# --- the softmax
@fault(FAULTS, "exponential", "float32")
class remainder_of_the_lesser_power(Kernel):
    """openvinotoolkit/openvino PR 33325: the exponent is made one less for the scale, and what
    remains is taken with it: the polynomial of degree 5 is asked for e^r up to r = 1.04, and was
    fitted to 0.35.
    """

    def power(self, x: Tensor) -> Tensor:
        x = x.clamp_min(-125) * math.log(2)
        n = (x * LOG2_E + 0.5).floor() - 1
        r = x - n * math.log(2)
        y = torch.full_like(r, 0.00828929059)
        for factor in (0.0418978221, 0.166676521, 0.499991506, 0.999999701, 1.0):
            y = y * r + factor
        return torch.ldexp(y, n)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = (torch.where(x == -INF, 0.0, self.power(x - safe)) for x in (s, m))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "scores row-max exponential row-sum weights-normalized")
class softmax_in_the_inputs_type(Kernel):
    """tinygrad/tinygrad PR 12280: there is no way to have the softmax in fp32: scores, their
    differences to the maximum, exponentials, the sum and the quotients are in bf16 as inputs are.
    """

    def key_blocks(self, rows):
        return [slice(0, self.at.nk)]

    def online(self, m, l, acc, s, v, rows, cols):
        low = self.at.low
        s, m = low(s / LOG2_E), low(m / LOG2_E)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = torch.where(new == -INF, 0.0, new)
        p = low(torch.exp(low(s - safe)))
        total = low(p.sum(-1, keepdim=True) + l * low(torch.exp(low(m - safe))))
        return new * LOG2_E, total, low(p / torch.where(total == 0, 1.0, total)) @ v

    def finish(self, m, l, acc, rows):
        return self.at.low(acc), m + l.log2()


@fault(FAULTS, "row-sum weights-disagree", "float16")
class statistics_in_half_at_every_block(Kernel):
    """ggml-org/llama.cpp PR 24389: the running maximum, the running sum and a block's own sum are
    kept in fp16, block after block.
    """

    cols = 32

    def maximum(self, m, s):
        return fp16(super().maximum(m, s))

    def add_row(self, l, a, p):
        return fp16(l * a + fp16(p.sum(-1, keepdim=True)))


@fault(FAULTS, "accumulator", "float16")
class out_added_up_in_half(Kernel):
    """ggml-org/llama.cpp PR 13975: O is accumulated in fp16."""

    cols = 32

    def add_values(self, acc, a, p, v):
        return fp16(fp16(acc * a) + super().add_values(torch.zeros_like(acc), a, p, v))


# --- parts
@fault(FAULTS, "split-merge other-data layout", "float16")
class last_parts_lse_as_if_dense(Parts):
    """vllm-project/vllm PR 21996: lse of the keys that are not shared is a transposed view, by
    tokens and heads, and the kernel that merges reads its memory by heads and tokens.
    """

    def merge(self, outs, lses):
        last = lses[-1].transpose(1, 2).reshape(lses[-1].shape)
        return super().merge(outs, torch.cat([lses[:-1], last[None]]))


@fault(FAULTS, "split-merge")
class prefix_and_rest_merged_in_nats(Parts):
    """sgl-project/sglang issue 40903: lse of both parts is in base 2, and their weights are powers
    of e.
    """

    parts = 2

    def merge(self, outs, lses):
        top = lses.amax(0)
        w = torch.exp(lses - torch.where(top == -INF, 0.0, top))
        total = w.sum(0)
        out = (w * outs).sum(0) / torch.where(total == 0, 1.0, total)
        return out, super().merge(outs, lses)[1]


# --- races
@fault(FAULTS, "unstable weights-disagree")
class weights_that_other_warps_still_write(Kernel):
    """pengcuo/FlashMLA-ETAP PR 3: the product with V starts when the own warp has stored its
    quarter of the weights: the three other quarters may be the tile before's.
    """

    def row(self, rows):
        self.memory.pop("weights", None)
        return super().row(rows)

    def add_values(self, acc, a, p, v):
        before = self.memory.get("weights")
        self.memory["weights"] = p
        if before is not None:
            late = (torch.rand(4) < 0.3) & (torch.arange(4) > 0)
            p = torch.where(late.repeat_interleave(p.shape[-1] // 4), before, p)
        return super().add_values(acc, a, p, v)
