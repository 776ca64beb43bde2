"""Sound ways to write attention for the thirtieth set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, e4m3, load
from torch import Tensor


def mxfp8(x: Tensor, dim: int) -> Tensor:
    """Codes of E4M3, 32 of which along a dimension share a power of two."""
    x = x.movedim(dim, -1)
    many = x.shape[-1]
    whole = torch.nn.functional.pad(x, (0, -many % 32)).unflatten(-1, (-1, 32))
    top = whole.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    step = torch.exp2(top.log2().floor() - 8)
    found = (e4m3((whole / step).clamp(-448, 448)) * step).flatten(-2)[..., :many]
    return found.movedim(-1, dim)


class TinyTiles(Kernel):
    """16 queries and 24 keys a tile."""

    rows, cols = 16, 24


class ElevenParts(Parts):
    """Every eleventh block of eight keys belongs to one part."""

    rows, cols, parts = 40, 8, 11


class OddBlocksFirst(Kernel):
    """Every second block of keys, then those between them; queries likewise."""

    rows, cols = 56, 40

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[1::2] + every[::2]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[1::2] + every[::2]


class AllKeysAtOnce(Kernel):
    """One block holds every key, and there is nothing to rescale."""

    rows, cols = 24, 1024


class WholePowers(Kernel):
    """The maximum is rounded up to a whole number, so that rescaling is exact."""

    rows, cols = 32, 56

    def maximum(self, m, s):
        return super().maximum(m, s).ceil()


class FeaturesInHalves(Kernel):
    """dQ, dK and dV are made one half of their columns after the other."""

    rows, cols = 48, 48

    @staticmethod
    def halves(a, b):
        return torch.cat([a @ part.contiguous() for part in b.chunk(2, -1)], -1)

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dk, dv = dk + self.halves(ds.mT, q), dv + self.halves(self.at.low(p).mT, do)
        return dk * self.at.scale, dv

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = dq + self.halves(ds, k)
        return dq * self.at.scale


def sequence_by_sequence(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """One sequence of the batch after another, its shared heads in a dimension of their own."""
    (b, heads, n, d), shared, nk = query.shape, key.shape[1], key.shape[2]
    keep, done = visible(n, nk, is_causal, window), []
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    for x in range(b):
        q = query[x].reshape(shared, heads // shared, n, d)
        own = None if mask is None else mask[x].reshape(shared, -1, n, nk)
        s = logits(q, key[x][:, None], keep, own, scale, softcap)
        if sinks is not None:
            column = sinks.float().reshape(shared, -1, 1, 1).expand(-1, -1, n, 1)
            s = torch.cat([s, column], -1)
        hidden = (s == -INF).all(-1, keepdim=True)
        p = s.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)[..., :nk]
        done.append(torch.einsum("grqk,gkd->grqd", p, value[x].float()).reshape(heads, n, -1))
    return torch.stack(done).to(query.dtype)


def sums_of_two_halves(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Numerators and denominators of even keys and of odd ones, by one maximum, from both."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.float().view(1, -1, 1, 1))
    top = torch.where(top == -INF, 0.0, top)
    out, total = torch.zeros(b, heads, n, value.shape[-1]), torch.zeros(b, heads, n, 1)
    for first in (0, 1):
        p = torch.exp(s[..., first::2] - top)
        out, total = out + p @ v[:, :, first::2], total + p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
    return (out / torch.where(total == 0, 1.0, total)).to(query.dtype)


def halves_of(every: list[slice]) -> tuple[list[slice], list[slice]]:
    """Blocks in two chunks, the first of which has at least one."""
    middle = max(1, len(every) // 2)
    return every[:middle], every[middle:]


def in_chunks(n: int, rows: int) -> tuple[list[slice], list[slice]]:
    """All blocks of n rows in two chunks."""
    return halves_of(blocks(n, rows))
