"""Sound ways to write attention for the fifty-eighth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor


class WholeMatrix(ForwardAlone):
    """The scores of all queries and keys lie in memory before the softmax begins."""

    def changed(self, s: Tensor) -> Tensor:
        """What the softmax reads of them."""
        return s

    def forward(self):
        at = self.at
        rows, cols = slice(0, at.n), slice(0, at.nk)
        s = self.changed(self.scores(at.q, at.k, rows, cols, False))
        state = self.online(*self.begin(at.q), s, at.v, rows, cols)
        return self.finish(*state, rows)


class Shifted(EveryBlock):
    """The diagonal does not begin at the first key."""

    def shift(self) -> int:
        raise NotImplementedError

    def causal(self, i, j, back):
        return j <= i + self.shift()


class NothingSeen(ForwardAlone):
    """What a kernel gives where a query's mask hides all, and its caller's buffer held else."""

    def blind(self) -> Tensor:
        """[B, H, N, 1], or what broadcasts to it."""
        at = self.at
        return ~at.mask.expand(*at.mask.shape[:-2], at.n, at.nk).any(-1, keepdim=True)

    def held(self, o: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self):
        o, lse = super().forward()
        if self.at.mask is None or self.at.mask.dtype != torch.bool:
            return o, lse
        return torch.where(self.blind(), self.held(o), o), lse


class FromTheDiagonal(Kernel):
    """Blocks of keys from the one that the queries stand in outwards; queries likewise."""

    rows, cols = 64, 40

    def key_blocks(self, rows):
        return sorted(super().key_blocks(rows), key=lambda c: abs(c.start - rows.start))

    def query_blocks(self, cols):
        return sorted(super().query_blocks(cols), key=lambda r: abs(r.start - cols.start))


class EvenAndOddKeys(Kernel):
    """Even and odd keys of a block have a maximum, a sum and an O each, put together at the end;
    weights are not rounded on the way there.
    """

    rows, cols = 24, 64

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        lanes = [self.begin(q), self.begin(q, False)]
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            for lane in (0, 1):
                part = s[..., lane::2], v[:, :, lane::2]
                lanes[lane] = self.online(*lanes[lane], *part, rows, cols)
        top = torch.maximum(lanes[0][0], lanes[1][0])
        safe = torch.where(top == -INF, 0.0, top)
        weights = [torch.exp2(m - safe) for m, _, _ in lanes]
        l = sum(l * w for (_, l, _), w in zip(lanes, weights, strict=True))
        acc = sum(acc * w for (_, _, acc), w in zip(lanes, weights, strict=True))
        return self.finish(top, l, acc, rows)


class WholeExponents(Kernel):
    """The maximum is rounded up to a whole number, so that sums are rescaled by powers of two;
    weights are not rounded on the way there.
    """

    rows, cols = 104, 32

    def maximum(self, m, s):
        return torch.maximum(m, s.amax(-1, keepdim=True).ceil())

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v


def groups_by_einsum(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None):  # fmt: skip
    """Heads that share keys are an axis of their own, features and keys are summed by einsum."""
    n, (shared, nk) = query.shape[2], key.shape[1:3]
    q = query.float().unflatten(1, (shared, -1))
    s = torch.einsum("bgsnd,bgmd->bgsnm", q, key.float()).flatten(1, 2) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if hides else s + attn_mask.float()
    p = softmax_of(s, sinks).unflatten(1, (shared, -1))
    return torch.einsum("bgsnm,bgme->bgsne", p, value.float()).flatten(1, 2).to(query.dtype)


def online_by_autograd(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """The online softmax over blocks of 28 keys, differentiated as it stands."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q, k, v = query.float(), repeated(key, heads), repeated(value, heads)
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:-2], n, nk)
    m = torch.full((b, heads, n, 1), -INF)
    l, acc = torch.zeros_like(m), torch.zeros(b, heads, n, v.shape[-1])
    if sinks is not None:
        m, l = m.fill_(0) + sinks.float().view(1, -1, 1, 1), l + 1
    for cols in blocks(nk, 28):
        hides = None if mask is None else mask[..., cols]
        s = logits(q, k[:, :, cols], keep[:, cols], hides, scale, softcap)
        new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp(s - safe), torch.exp(m - safe)
        m, l, acc = new, l * a + p.sum(-1, keepdim=True), acc * a + p @ v[:, :, cols]
    return (acc / torch.where(l == 0, 1.0, l)).to(query.dtype)
