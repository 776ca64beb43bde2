"""The sixty-eighth set's faults of softmaxes, sums, lse, heads and caches (sixtyeighth.py has the
others, and says what they are for).
"""

# ruff: noqa: ARG001, ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault, logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16, cut, fp16
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor

FAULTS: list[Fault] = []


# --- scores and the softmax
@fault(FAULTS, "scores products non-finite", "float16")
class scaled_behind_the_product(ForwardAlone):
    """li-plus/chatglm.cpp PR 322: scores are scaled behind the product, which is NaN where it goes
    past the largest number; the query is scaled in front of it since. The product is in fp16 here.
    """

    rows, cols = 64, 32

    def product(self, q, k, back):
        return fp16(super().product(q, k, back))


@fault(FAULTS, "scores products", "float16")
class neither_reordered_nor_upcast(WholeRows):
    """stanford-crfm/mistral PR 75: K Q is divided by the root behind the product, and neither the
    product nor the scores are float32: both are fp16.
    """

    rows = 128

    def product(self, q, k, back):
        return fp16(super().product(q, k, back))

    def scaled(self, s, rows, cols, back):
        return fp16(s * self.at.scale) * LOG2_E


@fault(FAULTS, "scores exponential row-sum", "float16")
class softmax_at_the_precision_of_training(WholeRows, ForwardAlone):
    """lucidrains/imagen-pytorch issue 69: trained in fp16 the loss explodes; the softmax is not in
    float32, behind queries that were scaled before. Sums grow by 16 keys here.
    """

    rows = 48

    def load_query(self, name, x, part):
        return fp16(super().load_query(name, x, part) * self.at.scale)

    def scaled(self, s, rows, cols, back):
        return fp16(s) * LOG2_E

    def add_row(self, l, a, p):
        l = fp16(l * a)
        for part in p.split(16, -1):
            l = fp16(l + part.sum(-1, keepdim=True))
        return l

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = fp16(torch.exp2(s - safe)), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


@fault(FAULTS, "maximum non-finite", "float32")
class attention_softmax_not_stabilized(WholeRows):
    """nyu-dl/dl4mt-tutorial issue 31: NaN, for the softmax of attention is exponentials over their
    sum, from which no maximum is taken away.
    """

    rows = 64

    def maximum(self, m, s):
        return torch.zeros_like(m)

    def finish(self, m, l, acc, rows):
        return self.at.low(acc / l), m + l.log2()


@fault(FAULTS, "maximum row-max rescale", "float16")
class maximum_not_kept_across_blocks(Kernel):
    """tile-ai/tilelang PR 1269: a block's maximum is its own, and not the larger one of that and
    the one before: sums are multiplied by powers of two that may overflow.
    """

    rows, cols = 64, 64

    def maximum(self, m, s):
        return s.amax(-1, keepdim=True)


@fault(FAULTS, "maximum row-max", "float16")
class maximum_read_before_it_was_written(ForwardAlone):
    """mlc-ai/TIRx-kernels PR 6: the first iteration of FlashAttention-4 reads the row maximum from
    storage that nobody has written. What it holds is chosen: numbers around 0, a hundred apart.
    """

    rows, cols = 128, 128

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        if self.at.sinks is not None:
            return m, l, acc
        chance = torch.Generator().manual_seed(6)
        return torch.randn(m.shape[2:], generator=chance).expand(m.shape) * 100, l, acc


def softmax_over_the_sequences(query, key, value, *, is_causal, scale, attn_mask=None,
                               enable_gqa=False, window=None, softcap=0.0,
                               sinks=None):  # fmt: skip
    """HsiaoYetGun/ESIM issue 5: without `perm` tf.transpose turns all axes round, and the softmax
    behind it, over the last one, is over the sequences of the batch; a sink would be one more key,
    which takes nothing from others.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    nothing = (s == -INF).all(0, keepdim=True)
    p = s.masked_fill(nothing, 0.0).softmax(0).masked_fill(nothing, 0.0)
    return (p @ v).to(query.dtype)


FAULTS.append(
    Fault("softmax_over_the_sequences", frozenset({"unnormalized", "other-data"}),
          softmax_over_the_sequences, "float32", frozenset({"elements"}))
)  # fmt: skip


def weights_permuted_by_0_1_2(query, key, value, *, is_causal, scale, attn_mask=None,
                              enable_gqa=False, window=None, softcap=0.0, sinks=None):  # fmt: skip
    """heykeetae/Self-Attention-GAN issue 11: `attention.permute(0, 1, 2)` changes nothing where
    queries and keys are to be exchanged: values, with a column for every key, are multiplied by
    weights with a row for every query. With other numbers of queries than of keys it would fail.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    p = softmax_of(s, sinks)
    turned = p if n == nk else p.mT
    return (v.mT @ turned).mT.to(query.dtype)


FAULTS.append(
    Fault("weights_permuted_by_0_1_2", frozenset({"layout"}), weights_permuted_by_0_1_2,
          "bfloat16", frozenset({"elements"}))
)  # fmt: skip


# --- sums
@fault(FAULTS, "accumulator row-sum")
class no_fp32_accumulate_in_the_sdpa_family(ForwardAlone):
    """tenstorrent/tt-metal issue 13364: flash attention and decoding have no fp32 accumulate, and
    diverge as the number of chunks grows: O and the sum are bf16 between chunks.
    """

    rows, cols = 32, 32

    def add_row(self, l, a, p):
        return bf16(super().add_row(l, a, p))

    def add_values(self, acc, a, p, v):
        return bf16(super().add_values(acc, a, p, v))


@fault(FAULTS, "accumulator products", "float16")
class weights_times_values_right_onto_the_output(ForwardAlone):
    """Tencent/hpc-ops PR 66, the first of its two: P V is accumulated right onto O, and over a long
    reduction the tensor cores' accumulator of 22 bits leaks precision: of every 32 keys' sum 13
    bits of the fraction stay. The codes of fp8 are left out here, so that this alone is wrong.
    """

    rows, cols = 64, 128

    def add_values(self, acc, a, p, v):
        acc = acc * a
        for part, own in zip(self.at.low(p).split(32, -1), v.split(32, 2), strict=True):
            acc = cut(acc + part @ own, 10)
        return acc


# --- lse
@fault(FAULTS, "lse-other layout", "float32")
class lse_with_heads_behind_tokens(Kernel):
    """meta-pytorch/attention-gym PR 433: FlashAttention-4's path for latent attention gives lse as
    batch, sequence and head, and only O is permuted: who reads it as batch, head and sequence, here
    the backward pass, has others' numbers.
    """

    rows, cols = 64, 64

    def backward(self):
        lse = self.at.lse
        self.at.lse = lse.transpose(1, 2).reshape(lse.shape)
        return super().backward()


@fault(FAULTS, "layout other-data lse-other")
class lse_and_d_by_the_strides_of_q(Kernel):
    """ROCm/aiter PR 2810: the backward pass finds a head's lse and D by the strides of Q, which has
    several layouts, where theirs is always batch, head and sequence: tokens that lie before heads
    have others' numbers.
    """

    rows, cols = 96, 64

    def found(self, x: Tensor) -> Tensor:
        (b, h, n, d), (by, head, _, _) = self.at.q.shape, self.at.q.stride()
        first = torch.arange(b)[:, None] * by + torch.arange(h) * head
        place = first.div(d, rounding_mode="floor")[..., None] + torch.arange(n)
        return x.reshape(-1)[place.clamp_max(x.numel() - 1)].unsqueeze(-1)

    def delta(self, do, o):
        return self.found(super().delta(do, o))

    def backward(self):
        self.at.lse = self.found(self.at.lse)
        return super().backward()


# --- heads, tokens and caches
@fault(FAULTS, "key-heads")
class ratio_of_heads_by_a_shift(OtherOperands):
    """paiml/aprender issue 559: the GQA kernel handles other ratios of heads than powers of two
    incorrectly, 7 with 28 heads and 4; how is chosen: a head's number is shifted by the whole part
    of the ratio's logarithm, and what is past the last key head has that one.
    """

    rows, cols = 64, 128

    def read(self, k, v):
        each = self.at.groups
        which = torch.arange(k.shape[1]) >> (each.bit_length() - 1)
        which = which.clamp_max(k.shape[1] // each - 1) * each
        return k[:, which], v[:, which]


@fault(FAULTS, "layout", "float16")
class reshaped_into_heads_without_a_permute(ForwardAlone):
    """tinygrad/tinygrad PR 14025: rows of all heads' features are reshaped to heads and tokens at
    once, where tokens come first, and a permute has to bring heads before them; O is put together
    as if that had been done.
    """

    rows, cols = 64, 48

    def forward(self):
        at = self.at
        kept = at.q, at.k, at.v
        k, v = (x[:, :: at.groups] for x in kept[1:])
        at.q = kept[0].transpose(1, 2).reshape(kept[0].shape)
        at.k, at.v = (self.spread(x.transpose(1, 2).reshape(x.shape)) for x in (k, v))
        found = super().forward()
        at.q, at.k, at.v = kept
        return found


@fault(FAULTS, "cache other-data")
class history_joined_to_itself(OtherOperands):
    """fla-org/flash-linear-attention issue 91: without a window the cache puts what it has before
    the new states, which hold the history already: keys of the past are there twice, and more with
    every token.
    """

    rows, cols = 128, 64

    def read(self, k, v):
        past = max(k.shape[2] - self.at.n, 0)
        return tuple(torch.cat([x[:, :, :past], x], 2) for x in (k, v))
