"""Sound ways to write attention for the forty-sixth set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import RangesOfKeys, repeated, softmax_of
from torch import Tensor


def by_tokens(x: Tensor) -> Tensor:
    """[B, H, T, D] laid out as [B, T, H, D] in memory, and viewed as [B, H, T, D] all the same."""
    return x.transpose(1, 2).contiguous().view(x.shape)


class FiveRanges(RangesOfKeys):
    """Split-KV: five ranges of keys, in tiles of sixteen."""

    rows, cols, ranges = 40, 16, 5


class OutsideIn(Kernel):
    """Blocks of keys in turn from either end, and so those of queries on the way back; Q Kᵀ is a
    sum over even and odd features.
    """

    rows, cols = 104, 40

    def key_blocks(self, rows):
        return self.inwards(super().key_blocks(rows))

    def query_blocks(self, cols):
        return self.inwards(super().query_blocks(cols))

    def product(self, q, k, back):  # noqa: ARG002
        return q[..., ::2] @ k[..., ::2].mT + q[..., 1::2] @ k[..., 1::2].mT

    @staticmethod
    def inwards(every: list[slice]) -> list[slice]:
        last = len(every) - 1
        return [every[i // 2 if i % 2 == 0 else last - i // 2] for i in range(len(every))]


class HalvesOfBlocks(Kernel):
    """Either half of a block of keys has an addition to the row sum and to O of its own."""

    rows, cols = 28, 96

    def add_row(self, l, a, p):
        half = p.shape[-1] // 2
        first = l * a + p[..., :half].sum(-1, keepdim=True)
        return first + p[..., half:].sum(-1, keepdim=True)

    def add_values(self, acc, a, p, v):
        half, p = p.shape[-1] // 2, self.at.low(p)
        return acc * a + p[..., :half] @ v[:, :, :half] + p[..., half:] @ v[:, :, half:]


def queries_from_the_end(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """28 queries at a time, from the last to the first, in fp32, by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (repeated(x, heads) for x in (key, value))
    keep, done = visible(n, nk, is_causal, window), []
    for rows in blocks(n, 28)[::-1]:
        mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)[:, :, rows]
        s = logits(query[:, :, rows], k, keep[rows], mask, scale, softcap)
        done.append(softmax_of(s, sinks) @ v)
    return torch.cat(done[::-1], 2).to(query.dtype)


def halves_of_keys(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                   softcap=0.0, sinks=None):  # fmt: skip
    """Either half of the keys has a softmax of its own, and the two are mixed by lse, by autograd;
    a sink is a third part, whose value is 0.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (repeated(x, heads) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    half, outs, lses = nk // 2, [], []
    for part in (slice(0, half), slice(half, nk)):
        own = s[..., part]
        none = (own == -INF).all(-1, keepdim=True)
        outs.append(softmax_of(own, None) @ v[:, :, part])
        lses.append(own.masked_fill(none, 0.0).logsumexp(-1, keepdim=True).masked_fill(none, -INF))
    if sinks is not None:
        outs.append(torch.zeros_like(outs[0]))
        lses.append(sinks.float().view(1, -1, 1, 1).expand_as(lses[0]))
    shares = softmax_of(torch.cat(lses, -1), None)
    mixed = sum(shares[..., i, None] * o for i, o in enumerate(outs))
    return mixed.to(query.dtype)
