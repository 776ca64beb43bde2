"""The twenty-eighth set of faults of attention, each as a public thread reports it, and sound
kernels: a short one, cut off by its deadline.

What is right was set down before anything ran. `AGAIN` names the faults whose mistake an earlier
set had in another kernel.
"""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, attention, bf16, e4m3
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone

AGAIN = (
    "window_as_wide_to_the_right",
    "padding_seen_on_the_way_back",
    "statistics_of_heads_and_queries_exchanged",
    "key_gradients_added_up_in_their_own_dtype",
)
FAULTS: list[Fault] = []
SOUND: list[Fault] = []


@fault(FAULTS, "prescaled")
class scaled_queries_back_in_bf16(ForwardAlone):
    """antirez/h3.c issue 3: queries are scaled in fp32 and rounded to bf16 before the product."""

    def product(self, q, k, back):
        return bf16(q * self.at.scale) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


@fault(FAULTS, "scale prescaled")
class scale_factor_and_log2_e_in_bf16(ForwardAlone):
    """ml-explore/mlx PR 3119: the scale goes down to bf16, times another one: so do queries."""

    def product(self, q, k, back):
        factor = float(bf16(q.new_tensor(self.at.scale * LOG2_E)))
        return bf16(q * factor) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s


@fault(FAULTS, "row-sum weights-disagree")
class row_sums_in_the_dtype_of_the_input(ForwardAlone):
    """pytorch/executorch PR 20090: the softmax adds up its denominator in bf16."""

    def add_row(self, l, a, p):
        l = bf16(l * a)
        for j in range(p.shape[-1]):
            l = bf16(l + p[..., j : j + 1])
        return l


@fault(FAULTS, "key-tail window")
class loop_begins_at_the_first_query(ForwardAlone):
    """openai/gpt-oss PR 196: where queries have an offset the loop over keys begins there, and the
    first keys of the cache are skipped; here by whole blocks, of queries fewer than keys.
    """

    def key_blocks(self, rows):
        start = max(self.at.nk - self.at.n, 0) // self.cols * self.cols
        return [c for c in super().key_blocks(rows) if c.start >= start]


@fault(FAULTS, "window")
class window_as_wide_to_the_right(ForwardAlone):
    """vllm-project/vllm PR 9679, review: (W, W) for (W − 1, 0), here on the left by one key."""

    def window(self, i, j, back):
        left, _ = self.at.window
        return (j >= i - left - 1) & (j <= i + left)


@fault(FAULTS, "backward-mask padding grad-tail")
class padding_seen_on_the_way_back(Kernel):
    """hao-ai-lab/FastVideo PR 925: the backward pass takes padding of a block for tokens, and its
    weights go into gradients; keys there are the last one, again.
    """

    def inside(self, j, back):
        return super().inside(j, back) | back

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        if name in ("b_k", "b_v") and part.stop > self.at.nk:
            found[:, :, self.at.nk - part.stop :] = x[:, :, -1:]
        return found


@fault(FAULTS, "ragged")
class value_channels_past_the_width_of_keys_left_out_of_dq(Kernel):
    """XunhaoLai/native-sparse-attention-triton issue 27: dQ's kernel reads V and dO as wide as Q
    is: channels of V past that are missing from dP.
    """

    def again(self, rows, cols, which):
        at, wide = self.at, self.at.q.shape[-1]
        kept = at.v
        if which == "queries":
            at.v = kept.clone()
            at.v[..., wide:] = 0
        found = super().again(rows, cols, which)
        at.v = kept
        return found


@fault(FAULTS, "grad-accumulator")
class key_gradients_added_up_in_their_own_dtype(Kernel):
    """marin-community/levanter PR 449, diff: what a block adds to dK and dV is cast to their dtype
    and added in it, block after block.
    """

    rows = 16

    def add(self, name, total, part, rows, cols):
        if name == "dq_acc":
            return total + part
        return self.at.low(total + self.at.low(part))


@fault(FAULTS, "group-sum key-heads")
class every_head_taken_for_a_key_head_on_the_way_back(Kernel):
    """ooples/AiDotNet.Tensors PR 633, review: a fallback's backward pass treats every head
    independently: a key head gets the gradient of the query head of its own number.
    """

    def group(self, grad):
        return grad[:, : grad.shape[1] // self.at.groups]


@fault(FAULTS, "scale value-factor")
class scales_of_fp8_keys_and_values_dropped(ForwardAlone):
    """vllm-project/vllm PR 42580: where queries are fp8 too, codes of keys and values are cast
    without their scale, here of a half.
    """

    def load_key(self, name, x, part):
        return e4m3(super().load_key(name, x, part) / 0.5)


@fault(FAULTS, "row-max exponential row-sum scores weights-normalized weights")
class softmax_in_bf16_throughout(ForwardAlone):
    """tinygrad/tinygrad PR 12280: of bf16 operands the maximum, the difference, the exponentials
    and their sum are bf16 as well.
    """

    def online(self, m, l, acc, s, v, rows, cols):
        s = bf16(s / LOG2_E) * LOG2_E
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = bf16(torch.exp2(bf16((s - safe) / LOG2_E) * LOG2_E))
        a = torch.exp2(m - safe)
        return new, bf16(self.add_row(l, a, p)), self.add_values(acc, a, p, v)


@fault(FAULTS, "unwritten layout other-data")
class rows_of_the_merge_land_heads_too_far(ForwardAlone):
    """flagos-ai/FlagGems issue 5235: rows of a merged tile go by the stride of tokens among heads
    from a base that goes by the width of one: all but a tile's first are not where they belong.
    """

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        found = torch.zeros_like(out)
        step = out.shape[1]
        if step == 1:
            return out, lse
        some = out[:, :, : -(-out.shape[2] // step)]
        found[:, :, ::step] = some
        return found, lse


@fault(FAULTS, "lse-other other-data")
class statistics_of_heads_and_queries_exchanged(Kernel):
    """vllm-project/flash-attention PR 87: lse of split keys lies as queries of heads, and is read
    as heads of queries; here the backward pass reads it.
    """

    def forward(self):
        out, lse = super().forward()
        return out, lse.transpose(1, 2).reshape(lse.shape)


@fault(FAULTS, "weights", "float16")
class weights_in_fp8_by_tiles_of_96(ForwardAlone):
    """vllm-project/vllm issue 54035: weights are e4m3 by the maximum of tiles of 96 keys."""

    cols = 96

    def add_values(self, acc, a, p, v):
        return acc * a + e4m3(p) @ v


@fault(FAULTS, "scale value-factor")
class prefix_of_the_cache_read_without_its_scales(ForwardAlone):
    """sgl-project/sglang PR 24198: keys and values of a cached prefix, here the first 64, are fp8
    codes whose scales, here a half, the call for paged keys is not given.
    """

    def load_key(self, name, x, part):
        found = super().load_key(name, x, part)
        return e4m3(found / 0.5) if part.start == 0 else found


class TilesOf48And80(Kernel):
    """48 queries and 80 keys a tile."""

    rows, cols = 48, 80


class BackToFront(Kernel):
    """Blocks of keys and of queries from the last one on."""

    rows, cols = 32, 64

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class ThreeParts(Parts):
    """Three parts of the keys, each with O and lse of its own."""

    rows, cols, parts = 40, 24, 3


class PowersOfE(Kernel):
    """Weights of the backward pass are powers of e."""

    rows, cols = 24, 56

    def weights_again(self, s, lse):
        return torch.exp((s - torch.where(lse == -INF, 0.0, lse)) / LOG2_E)


for kind, dtype in (
    (TilesOf48And80, "float16"), (BackToFront, "bfloat16"), (ThreeParts, "bfloat16"),
    (PowersOfE, "float16"),
):  # fmt: skip
    SOUND.append(Fault(f"{kind.__name__}_{dtype}", frozenset(), attention(kind), dtype))
