"""Sound ways to write attention for the seventeenth set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks


class PowerOfTwoInTheQuery(Kernel):
    """Of the scale the power of two goes into the query, which is exact; the rest comes after the
    product.
    """

    rows, cols = 48, 80

    def power(self) -> float:
        return 2.0 ** math.floor(math.log2(self.at.scale))

    def product(self, q, k, back):
        return (q * self.power()) @ k.mT

    def scaled(self, s, rows, cols, back):
        return s * (self.at.scale / self.power() * LOG2_E)


class NaturalBase(Kernel):
    """Scores, maxima and lse are in nats, and exponentials are powers of e."""

    rows, cols = 64, 56

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
        return super().finish(m, l, acc, rows)[0], m + l.log()

    def weights_again(self, s, lse):
        return torch.exp(s - torch.where(lse == -INF, 0.0, lse))


class CompensatedSums(Kernel):
    """What is lost at every block of the row's sum and of O is kept and put back at the next."""

    rows, cols = 72, 24

    def row(self, rows):
        self.memory.clear()
        return super().row(rows)

    def plus(self, name: str, total, part, a):
        part = part - self.memory.get(name, torch.zeros_like(total)) * a
        found = total * a + part
        self.memory[name] = (found - total * a) - part
        return found

    def add_row(self, l, a, p):
        return self.plus("l", l, p.sum(-1, keepdim=True), a)

    def add_values(self, acc, a, p, v):
        return self.plus("acc", acc, self.at.low(p) @ v, a)


class EvenAndOddFeatures(Kernel):
    """Q Kᵀ is the sum of two products, of even and of odd features; O's columns are made so too."""

    cols = 40

    def product(self, q, k, back):
        return sum(q[..., i::2] @ k[..., i::2].mT for i in range(2))

    def add_values(self, acc, a, p, v):
        low = self.at.low(p)
        return acc * a + torch.stack([low @ v[..., i::2] for i in range(2)], -1).flatten(-2)


class PositiveAndNegativeValues(Kernel):
    """O is the product with the positive values less the one with the negative ones' sizes."""

    rows, cols = 32, 96

    def add_values(self, acc, a, p, v):
        low = self.at.low(p)
        return acc * a + (low @ v.clamp_min(0) - low @ (-v).clamp_min(0))


class EveryOtherBlockFirst(Kernel):
    """Even blocks of keys, then odd ones; queries from the last tile to the first."""

    rows, cols = 56, 40

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::2] + every[1::2]

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]

    def forward(self):
        done = [self.row(rows) for rows in blocks(self.at.n, self.rows)[::-1]][::-1]
        o, lse = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*done, strict=True))
        return o, lse


class ScoresSaved(Kernel):
    """The forward pass keeps its scores, and the backward pass takes those."""

    rows, cols = 80, 64

    def scores(self, q, k, rows, cols, back):
        saved = self.at.__dict__.setdefault("saved", {})
        where = rows.start, cols.start
        if not back or where not in saved:
            saved[where] = super().scores(q, k, rows, cols, back)
        return saved[where]


def two_halves_merged(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Each half of the keys gives its own maximum, sum and O, and so does the sink; autograd
    differentiates what merges them.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    halves = [(s[..., x], v[:, :, x]) for x in (slice(0, nk // 2), slice(nk // 2, nk))]
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1)
        halves.append((sink, torch.zeros_like(v[:, :, :1])))
    tops = torch.stack([own.detach().amax(-1, keepdim=True) for own, _ in halves])
    top = tops.amax(0)
    total, out = 0.0, 0.0
    for (own, values), m in zip(halves, tops, strict=True):
        p = torch.exp(own - torch.where(m == -INF, 0.0, m))
        a = torch.exp(m - torch.where(top == -INF, 0.0, top))
        total, out = total + a * p.sum(-1, keepdim=True), out + a * (p @ values)
    return (out / torch.where(total == 0, 1.0, total)).to(query.dtype)
