"""Sound ways to write attention for the fifty-seventh set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor


class Eager:
    """Attention as models write it out, of all queries and keys at once, in fp32 but for the
    weights, which are rounded before they meet V; autograd differentiates it.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
        self.at = SimpleNamespace(**options)
        self.q, self.k, self.v = query, key, value
        self.hides = self.at.attn_mask is not None and self.at.attn_mask.dtype == torch.bool

    def scaled(self, s: Tensor) -> Tensor:
        return s * self.at.scale

    def masked(self, s: Tensor) -> Tensor:
        """What a mask, if any, makes of the scores."""
        mask = self.at.attn_mask
        if mask is None:
            return s
        return s.masked_fill(~mask, -INF) if self.hides else s + mask.float()

    def weights(self, s: Tensor) -> Tensor:
        return softmax_of(s, self.at.sinks)

    def result(self) -> Tensor:
        (_, heads, n, _), nk, at = self.q.shape, self.k.shape[2], self.at
        s = self.scaled(self.q.float() @ repeated(self.k, heads).mT)
        s = at.softcap * torch.tanh(s / at.softcap) if at.softcap else s
        s = self.masked(s).masked_fill(~visible(n, nk, at.is_causal, at.window), -INF)
        p = self.weights(s).to(self.v.dtype).float()
        return (p @ repeated(self.v, heads)).to(self.q.dtype)


def eager(into: list[Fault], right: str, dtype: str = "bfloat16"):
    """Put eager code into the set, with the keys of the causes that are right."""

    def put(kind: type[Eager]) -> type[Eager]:
        def call(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                 softcap=0.0, sinks=None):  # fmt: skip
            return kind(query, key, value, is_causal=is_causal, scale=scale, window=window,
                        attn_mask=attn_mask, softcap=softcap, sinks=sinks).result()  # fmt: skip

        into.append(Fault(kind.__name__, frozenset(right.split()), call, dtype,
                          frozenset({"elements"})))  # fmt: skip
        return kind

    return put


class RunningMean(Kernel):
    """O is the mean of the values that are seen so far, at every step: what it was and what a block
    adds have shares of the row sum.
    """

    rows, cols = 60, 100

    def online(self, m, l, acc, s, v, rows, cols):  # noqa: ARG002
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, old = torch.exp2(s - safe), l * torch.exp2(m - safe)
        l = old + p.sum(-1, keepdim=True)
        share = 1 / torch.where(l == 0, 1.0, l)
        return new, l, acc * (old * share) + self.at.low(p) @ v * share

    def finish(self, m, l, acc, rows):  # noqa: ARG002
        return self.at.low(acc), m + l.log2()


class WeightsInTwoPieces(Kernel):
    """Weights are the sum of two numbers of 16 bits, each of which multiplies V."""

    rows, cols = 44, 76

    def add_values(self, acc, a, p, v):
        high = self.at.low(p)
        return acc * a + self.at.low(p - high) @ v + high @ v


class TilesByDiagonals(Kernel):
    """The backward pass goes over tiles of 52 by 52 along their diagonals, from the last one on."""

    rows, cols = 52, 52

    def backward(self):
        at, wide = self.at, self.rows
        at.delta = self.delta(at.do, at.o)
        queries, keys = blocks(at.n, wide), blocks(at.nk, wide)
        dq = torch.zeros(*at.q.shape[:2], len(queries) * wide, at.q.shape[3])
        dk = torch.zeros(*at.k.shape[:2], len(keys) * wide, at.k.shape[3])
        dv = torch.zeros(*at.v.shape[:2], len(keys) * wide, at.v.shape[3])
        for apart in range(len(keys) - 1, -len(queries), -1):
            if at.causal and apart > 0:
                continue
            for number, rows in enumerate(queries):
                if not 0 <= number + apart < len(keys):
                    continue
                cols = keys[number + apart]
                q, k, do, p, ds = self.again(rows, cols, "all")
                dq[:, :, rows] += ds @ k
                dk[:, :, cols] += ds.mT @ q
                dv[:, :, cols] += at.low(p).mT @ do
        dk, dv = dk[:, :, : at.nk] * at.scale, dv[:, :, : at.nk]
        return dq[:, :, : at.n] * at.scale, self.group(dk), self.group(dv)


def every_seventh_query(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                        softcap=0.0, sinks=None):  # fmt: skip
    """Queries 0, 7, 14 and so on are done together, then 1, 8, 15; weights are exponentials of
    scores less the maximum and the lse of what that leaves; by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    keep, step = visible(n, nk, is_causal, window), min(7, n)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    done = []
    for first in range(step):
        rows = slice(first, None, step)
        hides = None if mask is None else mask[:, :, rows]
        s = logits(query[:, :, rows], k, keep[rows], hides, scale, softcap)
        nothing = (s == -INF).all(-1, keepdim=True)
        s = s.masked_fill(nothing, 0.0)
        top = s.detach().amax(-1, keepdim=True)
        s = s - top
        lse = s.logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1) - top)
        done.append(torch.exp(s - lse).masked_fill(nothing, 0.0) @ v)
    order = torch.cat([torch.arange(first, n, step) for first in range(step)])
    return torch.cat(done, 2)[:, :, order.argsort()].to(query.dtype)


def keys_in_two_halves(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Keys of even and of odd numbers have a sum of exponentials and a product with V each, by one
    maximum, and a sink is a third part; one sequence after the other, by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    keep, done = visible(n, nk, is_causal, window), []
    for x in range(b):
        k, v = (repeated(y[x : x + 1], heads) for y in (key, value))
        hides = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)[x : x + 1]
        s = logits(query[x : x + 1], k, keep, hides, scale, softcap)
        top = s.detach().amax(-1, keepdim=True)
        sink = None if sinks is None else sinks.float().view(1, -1, 1, 1)
        top = top if sink is None else top.maximum(sink.detach())
        top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(s - top)
        total = p[..., ::2].sum(-1, keepdim=True) + p[..., 1::2].sum(-1, keepdim=True)
        total = total if sink is None else total + torch.exp(sink - top)
        o = p[..., ::2] @ v[:, :, ::2] + p[..., 1::2] @ v[:, :, 1::2]
        done.append(o / torch.where(total == 0, 1.0, total))
    return torch.cat(done).to(query.dtype)
