"""Sound ways to write attention for the twenty-sixth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor


class Whole(ForwardAlone):
    """All of the scores at once, in bits, and the weights that `weigh` makes of them."""

    def weigh(self, s: Tensor) -> Tensor:
        return (s / LOG2_E).softmax(-1).nan_to_num(0.0)

    def forward(self) -> tuple[Tensor, Tensor]:
        rows, cols = slice(0, self.at.n), slice(0, self.at.nk)
        q = self.load_query("q", self.at.q, rows)
        k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
        s = self.scores(q, k, rows, cols, False)
        if self.at.sinks is not None:
            sinks = self.at.sinks.view(1, -1, 1, 1).float() * LOG2_E
            s = torch.cat([sinks.expand(*s.shape[:3], 1), s], -1)
        p = self.weigh(s)[..., -self.at.nk :]
        return self.at.low(self.at.low(p) @ v), s.logsumexp(-1, keepdim=True)


def swapped(x: Tensor, size: int = 16) -> Tensor:
    """Every square block of a matrix transposed where it lies."""
    high, wide = x.shape[-2:]
    block = x.unflatten(-1, (wide // size, size)).unflatten(-3, (high // size, size))
    return block.transpose(-3, -1).flatten(-4, -3).flatten(-2)


class WideTiles(Kernel):
    """24 queries and 112 keys a tile."""

    rows, cols = 24, 112


class SevenParts(Parts):
    """Every seventh block of sixteen keys belongs to one part."""

    rows, cols, parts = 56, 16, 7


class FromTheDiagonal(Kernel):
    """The last block of keys comes first, and queries from the last one on."""

    rows, cols = 64, 32

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class LazyMaximum(Kernel):
    """A maximum stays until a score is 2⁸ times as large in weight; all goes by the one kept."""

    rows, cols = 32, 48

    def maximum(self, m, s):
        new = super().maximum(m, s)
        return torch.where((new - m > 8) | (m == -INF), new, m)


class QueryGradientsOfPairs(Kernel):
    """What key blocks add to dQ is summed two by two, then pairs of pairs."""

    rows, cols = 40, 40

    def query_gradient(self, rows):
        parts = []
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            parts.append(ds @ k)
        while len(parts) > 1:
            parts = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return parts[0] * self.at.scale


class InNats(Kernel):
    """Exponentials to the base e, of differences that are brought to nats."""

    rows, cols = 64, 80

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = (torch.exp((x - safe) * math.log(2)) for x in (s, m))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


def rows_of_both_ends(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Queries in pairs from both ends, and log-softmax of their rows."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    half = torch.arange(-(-n // 2))
    order = torch.stack([half, n - 1 - half], 1).flatten()[:n]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)[:, :, order]
    keep = visible(n, nk, is_causal, window)[order]
    s = logits(query[:, :, order], k, keep, mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    hidden = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(hidden, 0.0).log_softmax(-1).exp().masked_fill(hidden, 0.0)
    return (p[..., :nk] @ v)[:, :, order.argsort()].to(query.dtype)


def chunks_of_a_running_sum(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                            softcap=0.0, sinks=None):  # fmt: skip
    """The maximum of whole rows, and numerators and denominators that grow by 37 keys at a time."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    total: Tensor | float = 0.0
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        top = torch.maximum(top, sink)
        total = torch.exp(sink - top)
    top = torch.where(top == -INF, 0.0, top)
    out = torch.zeros(b, heads, n, value.shape[-1])
    for part in blocks(nk, 37):
        p = torch.exp(s[..., part] - top)
        out, total = out + p @ v[:, :, part], total + p.sum(-1, keepdim=True)
    total = torch.as_tensor(total)
    return (out / torch.where(total == 0, 1.0, total)).to(query.dtype)
