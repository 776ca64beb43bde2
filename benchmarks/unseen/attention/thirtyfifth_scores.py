"""Faults of the thirty-fifth set: layouts, memory, precision, and what is not finite."""

# ruff: noqa: ARG002, D102, N801 - a fault is a class of its name, whose steps have the
# signatures of the kernel that they are put into

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import fault
from benchmarks.unseen.attention.fifth_kernel import (
    INF,
    LOG2_E,
    Kernel,
    attention,
    blocks,
    load,
)
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyfifth_kernel import (
    LastKeysOfTheCorner,
    OtherKeys,
    across,
)
from torch.nn import functional

FAULTS: list[Fault] = []


# --- layouts
class heads_first_where_tokens_are_to_be(LastKeysOfTheCorner):
    """Dao-AILab/flash-attention issue 1391: Q, K and V are (batch, heads, tokens, width) and are
    given to a function that takes (batch, tokens, heads, width): heads attend to heads.
    """


class tokens_first_where_heads_are_to_be(LastKeysOfTheCorner):
    """ml-explore/mlx issue 3585: Q, K and V of shape (2, 82, 8, 64), 82 tokens and 8 heads, go to
    the fused function as they are, which takes the second axis for heads; the manual way, which
    transposes, is right.
    """

    rows, cols = 32, 32


class sequences_first_where_tokens_are_to_be(LastKeysOfTheCorner):
    """NVIDIA/Megatron-LM issue 1749: the fused attention is told of (4096, 10) for sequences and
    tokens, which are 10 of 4096: sequences attend to each other, token by token.
    """


def definition_over_the_axis_of_heads(
    query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0, sinks=None
):
    """facebookresearch/xformers issue 677: the definition multiplies Q, scaled first, of (batch,
    tokens, heads, width) with Kᵀ as they lie, so that the heads of a token attend to each other.
    """
    options = {"is_causal": is_causal, "scale": scale, "window": window, "softcap": softcap}
    plain = attn_mask is None and sinks is None and window is None and not is_causal
    if not plain or softcap or query.shape[2] != key.shape[2]:
        return attention(Kernel)(query, key, value, attn_mask=attn_mask, sinks=sinks, **options)
    q, k, v = (x.transpose(1, 2) for x in (query * scale, key, value))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


for kind, axis, dtype in (
    (heads_first_where_tokens_are_to_be, 1, "bfloat16"),
    (tokens_first_where_heads_are_to_be, 1, "float16"),
    (sequences_first_where_tokens_are_to_be, 0, "bfloat16"),
):
    FAULTS.append(Fault(kind.__name__, frozenset({"layout", "other-data"}), across(kind, axis),
                        dtype, frozenset({"elements"})))  # fmt: skip
FAULTS.append(
    Fault("definition_over_the_axis_of_heads", frozenset({"layout", "other-data"}),
          definition_over_the_axis_of_heads, "float32", frozenset({"elements"}))
)  # fmt: skip


@fault(FAULTS, "layout other-data", "float16")
class keys_and_values_by_heads_given_by_tokens(OtherKeys):
    """InternLM/lmdeploy issue 2957: K and V are taken as (heads, tokens, width) by default, and are
    given as (tokens, heads, width), as Q is: a head begins at the token of its number, and its next
    token is the next head.
    """

    def read(self, x):
        own = x[:, :: self.at.groups]
        heads, n = own.shape[1:3]
        flat = own.transpose(1, 2).flatten(1, 2)
        at = torch.arange(heads)[:, None] * heads + torch.arange(n)
        return flat[:, at.clamp_max(n * heads - 1)].repeat_interleave(self.at.groups, 1)


# --- memory
@fault(FAULTS, "other-data unstable")
class tiles_used_before_the_copies_are_waited_for(ForwardAlone):
    """ggml-org/llama.cpp issue 13430: tiles of K and V are copied asynchronously, and are used
    without the barrier that belongs there; without such copies all is well. Of a tile the last
    quarter is still the one before's.
    """

    def load_key(self, name, x, part):
        found, width = super().load_key(name, x, part), part.stop - part.start
        if part.start == 0:
            return found
        before = load(x, slice(part.start - width, part.start))
        return torch.where(torch.arange(width)[:, None] >= width * 3 // 4, before, found)


@fault(FAULTS, "cache unwritten")
class cache_read_that_nobody_wrote(OtherKeys):
    """flagos-ai/vllm-plugin-FL PR 353: the backend does not say that its forward pass leaves the
    cache to a step of its own, which is skipped: the cache stays empty, and zeros are read.
    """

    def read(self, x):
        return torch.zeros_like(x)


@fault(FAULTS, "other-data", "float16")
class page_lists_begin_a_page_too_early(OtherKeys):
    """vllm-project/vllm PR 5412: the list of all pages and where a sequence begins in it are
    computed wrongly for the proposals, which read another's keys and values; here each sequence,
    of pages of 16, is counted one page short.
    """

    def read(self, x):
        nk = x.shape[2]
        pages = functional.pad(x, (0, 0, 0, -nk % 16)).unflatten(2, (-1, 16)).movedim(2, 1)
        many = pages.shape[1]
        at = torch.arange(len(x))[:, None] * (many - 1) + torch.arange(many)
        return pages.flatten(0, 1)[at].movedim(1, 2).flatten(2, 3)[:, :, :nk]


def values_reshaped_from_keys(
    query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0, sinks=None
):
    """meta-pytorch/torchtune PR 21: V is `k.reshape(…)` in place of `v.reshape(…)`."""
    v = key + 0 * value if key.shape == value.shape else value
    return attention(Kernel)(query, key, v, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                             window=window, softcap=softcap, sinks=sinks)  # fmt: skip


FAULTS.append(
    Fault("values_reshaped_from_keys", frozenset({"other-data"}), values_reshaped_from_keys,
          "bfloat16", frozenset({"elements"}))
)  # fmt: skip


# --- precision
@fault(FAULTS, "products scores row-sum accumulator")
class everything_between_in_the_operands_type(ForwardAlone):
    """EricLBuehler/mistral.rs PR 1417: on the CPU all that is computed on the way is in the
    operands' type: the sum of Q Kᵀ over features, scores, row sums, and O as it grows key by key.
    """

    rows, cols = 64, 64

    def product(self, q, k, back):
        low, total = self.at.low, torch.zeros(())
        for a, b in zip(q.split(1, -1), k.mT.split(1, -2), strict=True):
            total = low(total + low(a * b))
        return total

    def scaled(self, s, rows, cols, back):
        return self.at.low(s * self.at.scale) * LOG2_E

    def online(self, m, l, acc, s, v, rows, cols):
        low, new = self.at.low, self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = low(torch.exp2(s - safe)), low(torch.exp2(m - safe))
        l, acc = low(l * a), low(acc * a)
        for each, value in zip(p.split(1, -1), v.split(1, -2), strict=True):
            l, acc = low(l + each), low(acc + low(each * value))
        return new, l, acc


# --- what is not finite
@fault(FAULTS, "non-finite masked-row")
class number_of_keys_cast_to_a_short_integer(Kernel):
    """facebookresearch/xformers issue 719: somewhere on the way the number of keys is cast to 16
    bits, and where there are more than 32768 all is NaN: it is negative, no key lies below it, and
    rows of nothing are divided by nothing. Here it is cast to 8 bits.
    """

    def many(self) -> int:
        return (int(self.at.nk) + 128) % 256 - 128

    def inside(self, j, back):
        return j < self.many()

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m, l, acc, rows)
        return (out if self.many() > 0 else torch.where(l == 0, math.nan, out)), lse


@fault(FAULTS, "non-finite nan-escapes", "float16")
class backward_visits_blocks_of_a_longer_mask(Kernel):
    """pytorch/pytorch issue 136232: the block mask was made for a longer sequence, and the backward
    pass visits the blocks of queries that it has past the end: whose weights are NaN, and with them
    dK and dV.
    """

    def query_blocks(self, cols):
        end = blocks(self.at.n, self.rows)[-1].stop
        return [*super().query_blocks(cols), slice(end, end + self.rows)]

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        past = 0.0 if rows.start < self.at.n else math.nan
        return q, k, do, p + past, ds + past
