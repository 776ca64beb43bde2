"""Sound ways to write attention for the forty-eighth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from torch import Tensor


def rows_in_order(x: Tensor) -> Tensor:
    """What is read where a head begins where it does, and its rows are taken to lie behind each
    other.
    """
    sizes, strides = x.shape, x.stride()
    many = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    place = torch.arange(sizes[0]).view(-1, 1, 1, 1) * strides[0]
    place = place + torch.arange(sizes[1]).view(-1, 1, 1) * strides[1]
    place = place + torch.arange(sizes[2])[:, None] * sizes[3] + torch.arange(sizes[3])
    return x.as_strided((many,), (1,))[place.clamp_max(many - 1)]


def hadamard(width: int) -> Tensor:
    """The orthonormal transform of a power of two."""
    found = torch.ones(1, 1)
    while len(found) < width:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)], 0)
    return found * width**-0.5


def by_the_token(x: Tensor) -> Tensor:
    """In 256 steps between the least and the largest number of each token of a head."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / 255).clamp_min(2.0**-120)
    return ((x - low) / step).round() * step + low


class NarrowerAndNarrower(Kernel):
    """Blocks of 104, 72 and 40 keys, and of 24 from there on."""

    rows, cols = 44, 40

    def key_blocks(self, rows):
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        found, first, wide = [], 0, 104
        while first < high:
            found.append(slice(first, first + wide))
            first, wide = first + wide, max(wide - 32, 24)
        return found


class EvenAndOddFeatures(Kernel):
    """Q Kᵀ is the sum of the products of odd and of even features, and O has its odd columns before
    its even ones.
    """

    rows, cols = 92, 56

    def product(self, q, k, back):
        return q[..., 1::2] @ k[..., 1::2].mT + q[..., ::2] @ k[..., ::2].mT

    def add_values(self, acc, a, p, v):
        p, found = self.at.low(p), acc * a
        for first in (1, 0):
            found[..., first::2] += p @ v[..., first::2]
        return found


class AllQueriesOfAKeyBlock(Kernel):
    """On the way back a block of keys meets all queries at once, the last block first."""

    rows, cols = 76, 20

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        every, dq, pairs = slice(0, at.n), torch.zeros_like(at.q), []
        for cols in blocks(at.nk, self.cols)[::-1]:
            q, k, do, p, ds = self.again(every, cols, "all")
            dq = dq + ds @ k
            pairs.append((ds.mT @ q * at.scale, at.low(p).mT @ do))
        dk, dv = (torch.cat(x[::-1], 2)[:, :, : at.nk] for x in zip(*pairs, strict=True))
        return dq * at.scale, self.group(dk), self.group(dv)


def running_sums_from_the_largest(query, key, value, *, is_causal, scale, attn_mask=None,
                                  window=None, softcap=0.0, sinks=None):  # fmt: skip
    """The largest score of a row is known before 28 keys at a time are added to its sums, by
    autograd; a sink is what the sums begin with.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q = query.float()
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    keep, parts = visible(n, nk, is_causal, window), blocks(nk, 28)
    tiles = [
        logits(q, k[:, :, part], keep[:, part], None if mask is None else mask[..., part],
               scale, softcap)
        for part in parts
    ]  # fmt: skip
    top = torch.stack([s.detach().amax(-1) for s in tiles]).amax(0)[..., None]
    total, out = torch.zeros_like(top), 0.0
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        top = top.maximum(sink)
        total = total + torch.exp(sink - top)
    top = torch.where(top == -INF, 0.0, top)
    for s, part in zip(tiles, parts, strict=True):
        p = torch.exp(s - top)
        total, out = total + p.sum(-1, keepdim=True), out + p @ v[:, :, part]
    return (out / torch.where(total == 0, 1.0, total)).to(query.dtype)


def a_sequence_at_a_time(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """One sequence after the other, whose query heads are a group and a number in it, and whose
    weights are exponentials less the logarithm of their sum; by autograd.
    """
    (b, heads, n, _), (groups, nk) = query.shape, key.shape[1:3]
    keep, done = visible(n, nk, is_causal, window), []
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    for one in range(b):
        q, k, v = query[one].unflatten(0, (groups, -1)), key[one, :, None], value[one, :, None]
        hides = None if mask is None else mask[one].unflatten(0, (groups, -1))
        s = logits(q, k, keep, hides, scale, softcap)
        empty = (s == -INF).all(-1, keepdim=True)
        lse = s.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True).masked_fill(empty, -INF)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(groups, -1, 1, 1))
        p = torch.exp(s - lse.masked_fill(lse == -INF, 0.0))
        done.append((p @ v.float()).flatten(0, 1))
    return torch.stack(done).to(query.dtype)
