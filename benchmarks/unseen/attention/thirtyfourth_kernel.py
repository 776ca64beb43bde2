"""Sound ways to write attention for the thirty-fourth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel
from torch import Tensor


def groups_of(x: Tensor, dim: int, many: int, peak: float) -> tuple[Tensor, Tensor]:
    """A dimension in groups, at the end, and the step by which a group's largest is a peak."""
    x = x.movedim(dim, -1)
    whole = torch.nn.functional.pad(x, (0, -x.shape[-1] % many)).unflatten(-1, (-1, many))
    return whole, whole.abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / peak


def int8_groups(x: Tensor, dim: int, many: int) -> Tensor:
    """Whole numbers up to 127 by one scale for so many along a dimension."""
    whole, step = groups_of(x, dim, many, 127.0)
    found = ((whole / step).round().clamp(-127, 127) * step).flatten(-2)
    return found[..., : x.shape[dim]].movedim(-1, dim)


def int8_by_thread(x: Tensor) -> Tensor:
    """Whole numbers up to 127 by one scale for every eighth row of a tile."""
    turned = x.unflatten(-2, (-1, 8)).transpose(-2, -3)
    step = turned.abs().amax((-1, -2), keepdim=True).clamp_min(2.0**-100) / 127
    found: Tensor = (turned / step).round() * step
    rows: Tensor = found.transpose(-2, -3).flatten(-3, -2)
    return rows


class FromTheMiddle(Kernel):
    """Blocks of keys from the middle outwards."""

    rows, cols = 40, 32

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        middle = (len(every) - 1) / 2
        return sorted(every, key=lambda c: abs(every.index(c) - middle))


class SevenParts(Parts):
    """Every seventh block of sixteen keys belongs to one part."""

    rows, cols, parts = 64, 16, 7


class WideQueries(Kernel):
    """More queries a tile than there are keys; the last queries first on the way back."""

    rows, cols = 160, 24

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class NaturalBase(Kernel):
    """Exponentials of natural scores."""

    rows, cols = 48, 80

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp((s - safe) / LOG2_E), torch.exp((m - safe) / LOG2_E)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class MaximumFirst(Kernel):
    """Keys are gone through once for the maximum, and once more for the rest."""

    rows, cols = 56, 56

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        top, tiles = m, []
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            top = torch.maximum(top, s.amax(-1, keepdim=True))
            tiles.append((s, v))
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, v in tiles:
            p = torch.exp2(s - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + self.at.low(p) @ v
        return self.finish(top, l, acc, rows)


class PiecesOfDot(Kernel):
    """Scores and dP are summed over sixteen features at a time."""

    rows, cols = 72, 40

    def product(self, q, k, back):
        found = torch.zeros(())
        for first in range(0, q.shape[-1], 16):
            found = found + q[..., first : first + 16] @ k[..., first : first + 16].mT
        return found


def by_log_weights(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                   softcap=0.0, sinks=None):  # fmt: skip
    """The exponential of the logarithm of the softmax, by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1), s], -1)
    hidden = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(hidden, 0.0).log_softmax(-1).exp().masked_fill(hidden, 0.0)
    return (p[..., -nk:] @ v).to(query.dtype)


def queries_by_elevens(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Eleven queries at a time, against all keys, by autograd."""
    (_, heads, _, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(query.shape[2], nk, is_causal, window), attn_mask, scale, softcap)
    done = []
    for part in s.split(11, 2):
        top = part.detach().amax(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks.float().view(1, -1, 1, 1))
        top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(part - top)
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
        done.append((p @ v) / torch.where(total == 0, 1.0, total))
    return torch.cat(done, 2).to(query.dtype)
