"""Sound ways to write attention for the ninth set, none of which an earlier set has."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, load
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Compensated(Kernel):
    """The row's sum and O keep what each addition loses, and add it to the next one."""

    cols = 48

    def begin(self, q, first=True):
        self.memory["lost"] = [0.0, 0.0]
        return super().begin(q, first)

    def kept(self, which: int, old: Tensor, a: Tensor, part: Tensor) -> Tensor:
        part = part + self.memory["lost"][which] * a
        old = old * a
        total = old + part
        self.memory["lost"][which] = part - (total - old)
        return total

    def add_row(self, l, a, p):
        return self.kept(0, l, a, p.sum(-1, keepdim=True))

    def add_values(self, acc, a, p, v):
        return self.kept(1, acc, a, self.at.low(p) @ v)


class InNats(Kernel):
    """e^x in the place of 2^x, from the scores to the weights of the backward pass."""

    rows, cols = 80, 48

    def scaled(self, s, rows, cols, back):
        return s * self.at.scale

    def cap(self, s, back):
        c = self.at.softcap
        return c * torch.tanh(s / c) if c else s

    def bias(self, s, mask, back):
        return s + mask.float()

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m / LOG2_E, l, acc

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp(s - safe), torch.exp(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def finish(self, m, l, acc, rows):
        o, _ = super().finish(m, l, acc, rows)
        return o, m + l.log()

    def weights_again(self, s, lse):
        return torch.exp(s - torch.where(lse == -INF, 0.0, lse))


class MaximumAndSum(Kernel):
    """The backward pass is given the maximum and the sum of a row, not lse."""

    rows, cols = 32, 96

    def finish(self, m, l, acc, rows):
        o, _ = super().finish(m, l, acc, rows)
        return o, torch.stack([m, l], -1)

    def forward(self):
        o, both = super().forward()
        m, self.at.l = both.unbind(-1)
        return o, m

    def again(self, rows, cols, which):
        self.memory["l"] = load(self.at.l, rows, 1.0)
        return super().again(rows, cols, which)

    def weights_again(self, s, lse):
        l = self.memory["l"]
        return super().weights_again(s, lse) / torch.where(l == 0, 1.0, l)


class HighAndLow(Kernel):
    """Weights are two numbers of the operands' format, one for what the other cannot hold."""

    def add_values(self, acc, a, p, v):
        high = self.at.low(p)
        return acc * a + (high @ v + self.at.low(p - high) @ v)


class RootScaled(Kernel):
    """Q and K are each multiplied by the root of the scale, in fp32."""

    cols = 112

    def product(self, q, k, back):
        root = math.sqrt(self.at.scale)
        return (q * root) @ (k * root).mT

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


class InDouble(Kernel):
    """The sums over blocks of keys are in fp64: the row's, and those of O, dQ, dK and dV."""

    rows, cols = 48, 32

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l.double(), acc.double()

    def add_row(self, l, a, p):
        return l * a + p.double().sum(-1, keepdim=True)

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o.float(), lse.float()

    def add(self, name, total, part, rows, cols):
        return super().add(name, total.double(), part, rows, cols)

    def backward(self):
        return tuple(x.float() for x in super().backward())


class Unrounded(Kernel):
    """P, dS and the O that δ is made of stay in fp32."""

    def forward(self):
        self.at.low = Tensor.float
        return super().forward()


def keys_shuffled(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                  sinks=None):  # fmt: skip
    """Keys in another order, the mask's columns with them; blocks of 40, all maxima first."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    order = torch.arange(nk).view(-1, 1) * 7 % 11 * nk + torch.arange(nk).view(-1, 1)
    order = order.flatten().argsort()
    k, v = (x.float()[:, :, order].repeat_interleave(heads // key.shape[1], 1)
            for x in (key, value))  # fmt: skip
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)[..., order]
    keep = visible(n, nk, is_causal, window)[:, order]
    s = logits(query, k, keep, mask, scale, softcap)
    m = s.amax(-1, keepdim=True).detach()
    sink = None if sinks is None else sinks.float().view(1, -1, 1, 1)
    m = m if sink is None else m.maximum(sink.detach())
    m = torch.where(m == -INF, 0.0, m)
    l = 0.0 if sink is None else torch.exp(sink - m)
    o = 0.0
    for part, values in zip(s.split(40, -1), v.split(40, 2), strict=True):
        p = torch.exp(part - m)
        l, o = l + p.sum(-1, keepdim=True), o + p @ values
    return (o / torch.where(l == 0, 1.0, l)).to(query.dtype)


def through_lse(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                sinks=None):  # fmt: skip
    """P = exp(s − lse), all in fp32, with a library's logsumexp; s is less the row's maximum."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    hidden = (s == -INF).all(-1, keepdim=True)
    m = s.amax(-1, keepdim=True).detach().masked_fill(hidden, 0.0)
    s = s - m
    lse = torch.logsumexp(s.masked_fill(hidden, 0.0), -1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1) - m)
    return (torch.exp(s - lse) @ v).to(query.dtype)


def in_row_chunks(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                  sinks=None):  # fmt: skip
    """72 rows of queries at a time see all keys; each chunk is made again on the way back."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)

    def some(q, k, v, rows, sinks):
        hidden = None if mask is None else mask[:, :, rows]
        s = logits(q, k, keep[rows], hidden, scale, softcap)
        if sinks is not None:
            column = sinks.float().view(1, -1, 1, 1).expand(b, -1, s.shape[2], 1)
            s = torch.cat([s, column], -1)
        empty = (s == -INF).all(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        return p[..., :nk] @ v

    parts = [slice(i, i + 72) for i in range(0, n, 72)]
    done = [checkpoint(some, query[:, :, x], k, v, x, sinks, use_reentrant=False) for x in parts]
    return torch.cat(done, 2).to(query.dtype)
