"""Sound ways to write attention for the seventy-third set, and what its faults share."""

# ruff: noqa: ARG001, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from torch import Tensor


class Narrow(Kernel):
    """Tiles of 32 queries and 64 keys."""

    rows, cols = 32, 64


class Wide(Kernel):
    """Tiles of 128 queries and 64 keys."""

    rows, cols = 128, 64


narrow, wide = attention(Narrow), attention(Wide)


def in_one_step(x: Tensor, rows: int) -> Tensor:
    """What lies in memory as [B, H, N, D], reshaped to [B, N, H · D], and its heads after that."""
    b, h, n, d = x.shape
    assert n == rows
    return x.reshape(b, n, h, d).transpose(1, 2)


class DrawnOrder(Kernel):
    """Blocks of keys, and of queries on the way back, come in an order that is drawn."""

    rows, cols = 56, 40

    @staticmethod
    def drawn(every: list[slice]) -> list[slice]:
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(73))
        return [every[i] for i in order.tolist()]

    def key_blocks(self, rows):
        return self.drawn(super().key_blocks(rows))

    def query_blocks(self, cols):
        return self.drawn(super().query_blocks(cols))


class LogSumFirst(Kernel):
    """Scores of all blocks are kept for their logsumexp, and V is weighed from the last block to
    the first by what they are below it.
    """

    rows, cols = 88, 72

    def row(self, rows):
        q, tiles = self.load_query("q", self.at.q, rows), []
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            tiles.append((self.scores(q, k, rows, cols, False), v))
        m, l, acc = self.begin(q)
        own = [torch.where(l > 0, m, -INF), *(s for s, _ in tiles)]
        every = torch.cat(own, -1)
        top = every.amax(-1, keepdim=True)
        top = torch.where(top == -INF, 0.0, top)
        rest = torch.logsumexp((every - top) * math.log(2), -1, keepdim=True) / math.log(2)
        safe = torch.where(rest == -INF, 0.0, rest)
        for s, v in tiles[::-1]:
            acc = acc + torch.exp2(s - top - safe) @ v
        return self.at.low(acc), top + rest


class HalvesOfABlock(Kernel):
    """The keys of a block are weighed in two halves, whose products are added before they join O;
    weights are not rounded on the way there.
    """

    rows, cols = 40, 48

    def add_row(self, l, a, p):
        low, high = p.chunk(2, -1)
        return l * a + (low + high).sum(-1, keepdim=True)

    def add_values(self, acc, a, p, v):
        return acc * a + sum(x @ y for x, y in zip(p.chunk(2, -1), v.chunk(2, 2), strict=True))


def everything_in_double(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Weights are exponentials over their sum in float64, differentiated as they stand."""
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    q, k, v = query.double(), repeated(key, heads).double(), repeated(value, heads).double()
    s = torch.einsum("bhnd,bhmd->bhnm", q * scale, k)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.double()
    top = s.detach().amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.double().view(1, -1, 1, 1)
    top = top if sink is None else torch.maximum(top, sink.detach())
    top = torch.where(top == -INF, 0.0, top)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    out = torch.einsum("bhnm,bhme->bhne", p / torch.where(total == 0, 1.0, total), v)
    return out.to(query.dtype)


def log_weights_of_flat_heads(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                              softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Sequences and heads are one dimension; a bias of zeros and −∞ is added to the scores, whose
    log softmax has its exponential taken; by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q, k, v = (repeated(x, heads).flatten(0, 1) for x in (query, key, value))
    bias = torch.zeros(n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    bias = bias.expand(b, heads, n, nk)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        own = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF) if hides else attn_mask
        bias = bias + own.float()
    s = torch.bmm(q, k.mT) * scale
    s = (softcap * torch.tanh(s / softcap) if softcap else s) + bias.reshape(-1, n, nk)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1).expand(b, heads, n).reshape(-1, n, 1)
        s = torch.cat([s, sink], -1)
    nothing = (s == -INF).all(-1, keepdim=True)
    logs = torch.log_softmax(s.masked_fill(nothing, 0.0), -1).masked_fill(nothing, -INF)
    return torch.bmm(logs[..., :nk].exp(), v).unflatten(0, (b, heads)).to(query.dtype)
