"""Sound ways to write attention for the twenty-ninth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, load
from torch import Tensor


def int8(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Codes from −127 to 127 by the largest magnitude over some dimensions."""
    scale = x.abs().amax(dims, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round() * scale


def shared_exponent(x: Tensor, code, top: int) -> Tensor:
    """Blocks of 32 features are codes times a power of two, as OCP has them."""
    width = x.shape[-1]
    block = torch.nn.functional.pad(x, (0, -width % 32)).unflatten(-1, (-1, 32))
    most = block.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(most.log2().floor() - top)
    return (code(block / scale) * scale).flatten(-2)[..., :width]


class SmallTiles(Kernel):
    """16 queries and 24 keys a tile."""

    rows, cols = 16, 24


class FiveParts(Parts):
    """Every fifth block of 32 keys belongs to one part."""

    rows, cols, parts = 80, 32, 5


class FromTheMiddle(Kernel):
    """Blocks of keys from the middle one outwards, to both sides by turns."""

    rows, cols = 64, 48

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        middle = len(every) // 2
        return sorted(every, key=lambda c: (abs(c.start // self.cols - middle), c.start))


class FeaturesByThirtyTwo(Kernel):
    """Scores are summed over 32 features at a time, and so are products with dO."""

    rows, cols = 56, 64

    def product(self, q, k, back):
        parts = [a @ b.mT for a, b in zip(q.split(32, -1), k.split(32, -1), strict=True)]
        return torch.stack(parts).sum(0)

    def add_values(self, acc, a, p, v):
        low = self.at.low(p)
        return acc * a + torch.cat([low @ part for part in v.split(32, -1)], -1)


class KeyGradientsOfPairs(Kernel):
    """What query blocks add to dK and dV is summed two by two, then pairs of pairs."""

    rows, cols = 32, 56

    def key_gradients(self, cols):
        parts = []
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            parts.append((ds.mT @ q, self.at.low(p).mT @ do))
        if not parts:
            return torch.zeros_like(load(self.at.k, cols)), torch.zeros_like(load(self.at.v, cols))
        while len(parts) > 1:
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [(sum(x[0] for x in two), sum(x[1] for x in two)) for two in pairs]
        return parts[0][0] * self.at.scale, parts[0][1]


class NegatedMaximum(Kernel):
    """What is kept is the least of negated scores, which is added."""

    rows, cols = 48, 80

    def online(self, m, l, acc, s, v, rows, cols):
        least = torch.minimum(-m, (-s).amin(-1, keepdim=True))
        safe = torch.where(least == INF, 0.0, least)
        p, a = torch.exp2(s + safe), torch.exp2(m + safe)
        return -least, self.add_row(l, a, p), self.add_values(acc, a, p, v)


def one_head_at_a_time(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Every head alone, with a softmax over its scores and its sink."""
    (b, heads, n, _), nk, outs = query.shape, key.shape[2], []
    groups = heads // key.shape[1]
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    keys, values = key.float(), value.float()
    for head in range(heads):
        one = slice(head, head + 1)
        shared = slice(head // groups, head // groups + 1)
        k, v = keys[:, shared], values[:, shared]
        own = None if mask is None else mask[:, one]
        s = logits(query[:, one], k, keep, own, scale, softcap)
        if sinks is not None:
            s = torch.cat([sinks[one].float().view(1, 1, 1, 1).expand(b, 1, n, 1), s], -1)
        hidden = (s == -INF).all(-1, keepdim=True)
        p = s.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)[..., -nk:]
        outs.append(p @ v)
    return torch.cat(outs, 1).to(query.dtype)


def keys_by_their_remainder(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                            softcap=0.0, sinks=None):  # fmt: skip
    """Keys of one remainder by three are a part; parts grow by differences of their lse."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -INF, 0.0, top)
    s, lse = s - top, torch.full((b, heads, n, 1), -1e30)
    if sinks is not None:
        lse = sinks.float().view(1, -1, 1, 1) - top
    out = torch.zeros(b, heads, n, value.shape[-1])
    for first in range(3):
        own = s[..., first::3].clamp_min(-1e20)
        there = (s[..., first::3] > -INF).any(-1, keepdim=True)
        part = torch.where(there, own.logsumexp(-1, keepdim=True), -1e30)
        new = torch.logaddexp(lse, part)
        share = torch.where(there, torch.exp(part - new), 0.0)
        out = out * torch.exp(lse - new) + share * (own.softmax(-1) @ v[:, :, first::3])
        lse = new
    return out.to(query.dtype)
