"""Sound ways to write attention for the thirteenth set, none of which an earlier set has."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.eleventh_kernel import added
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load
from torch import Tensor
from torch.nn import functional


class GrowingBlocks(Kernel):
    """Every block of keys is as wide as all before it together, and a query's first one has 8."""

    rows = 80

    def key_blocks(self, rows: slice) -> list[slice]:
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        every = [slice(0, 8)]
        while every[-1].stop < high:
            every.append(slice(every[-1].stop, 2 * every[-1].stop))
        return every


class LanesWithOwnMaxima(Kernel):
    """Every fourth key is one lane's, which has a maximum, a sum and an O of its own to the end."""

    rows, cols = 48, 64

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        q = self.load_query("q", self.at.q, rows)
        states = [self.begin(q, lane == 0) for lane in range(4)]
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            states = [self.online(*state, s[..., lane::4], v[:, :, lane::4], rows, cols)
                      for lane, state in enumerate(states)]  # fmt: skip
        return self.finish(*added(added(*states[:2]), added(*states[2:])), rows)


class GradientsOfOneMatrix(Kernel):
    """The backward pass has all of P and dS at once, and one product for every gradient."""

    cols = 80

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        q, k, do, p, ds = self.again(slice(0, at.n), slice(0, at.nk), "both")
        dk, dv = ds.mT @ q * at.scale, at.low(p).mT @ do
        return ds @ k * at.scale, self.group(dk), self.group(dv)


class PaddedToAPowerOfTwo(Kernel):
    """Heads are as wide as the next power of two, with zeros, from the loads to the stores."""

    rows, cols = 32, 64

    @staticmethod
    def padded(x: Tensor) -> Tensor:
        wide = 1 << (x.shape[-1] - 1).bit_length()
        return functional.pad(x, (0, wide - x.shape[-1]))

    def forward(self):
        at = self.at
        at.widths = at.q.shape[-1], at.v.shape[-1]
        at.q, at.k, at.v = map(self.padded, (at.q, at.k, at.v))
        o, lse = super().forward()
        return o[..., : at.widths[1]], lse

    def backward(self):
        at = self.at
        at.do, at.o = self.padded(at.do), self.padded(at.o)
        d, dv = at.widths
        return tuple(x[..., :w] for x, w in zip(super().backward(), (d, d, dv), strict=True))


class SquaredExponential(Kernel):
    """2^x is the square of 2^(x / 2)."""

    rows, cols = 64, 48

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = (torch.exp2((x - safe) / 2).square() for x in (s, m))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def weights_again(self, s, lse):
        return torch.exp2((s - torch.where(lse == -INF, 0.0, lse)) / 2).square()


class RowsOutside(Kernel):
    """One loop for all gradients: a block of queries has its dQ when all keys are done, and adds
    its part to dK and dV in memory.
    """

    rows, cols = 48, 96

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        high, dqs = -(-at.nk // self.cols) * self.cols, []
        dk, dv = (torch.zeros(*x.shape[:2], high, x.shape[3]) for x in (at.k, at.v))
        for rows in blocks(at.n, self.rows):
            dq = torch.zeros_like(load(at.q, rows))
            for cols in self.key_blocks(rows):
                q, k, do, p, ds = self.again(rows, cols, "both")
                dk[:, :, cols] += ds.mT @ q * at.scale
                dv[:, :, cols] += at.low(p).mT @ do
                dq = dq + ds @ k
            dqs.append(dq * at.scale)
        dk, dv = (self.group(x[:, :, : at.nk]) for x in (dk, dv))
        return torch.cat(dqs, 2)[:, :, : at.n], dk, dv


def mapped(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
           sinks=None):  # fmt: skip
    """One head of one sequence is written down, in fp32, and `vmap` makes it one of all of them."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    hidden = torch.zeros(n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        own = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF) if boolean else attn_mask
        hidden = hidden + own.float()
    hidden = hidden.expand(b, heads, n, nk)
    extra = torch.full((heads,), -INF) if sinks is None else sinks.float()

    def one(q, k, v, hide, sink):
        s = q @ k.mT * scale
        s = (softcap * torch.tanh(s / softcap) if softcap else s) + hide
        m = s.detach().amax(-1, keepdim=True).maximum(sink)
        m = torch.where(m == -INF, 0.0, m)
        p = torch.exp(s - m)
        total = p.sum(-1, keepdim=True) + torch.exp(sink - m)
        return p @ v / torch.where(total == 0, 1.0, total)

    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    every = torch.vmap(torch.vmap(one), in_dims=(0, 0, 0, 0, None))
    return every(query.float(), k, v, hidden, extra).to(query.dtype)


def only_visible_keys(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """40 queries at a time gather the keys that any of them sees, in fp32."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    q, seen, done = query.float(), visible(n, nk, is_causal, window), []
    mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:-2], n, nk)
    for rows in blocks(n, 40):
        keep, own = seen[rows], None if mask is None else mask[..., rows, :]
        anyone = keep.any(0)
        if own is not None and own.dtype == torch.bool:
            anyone = anyone & own.flatten(0, -2).any(0)
        chosen = anyone.nonzero()[:, 0] if anyone.any() else torch.zeros(1, dtype=torch.long)
        own = own if own is None else own[..., chosen]
        s = logits(q[:, :, rows], k[:, :, chosen], keep[:, chosen], own, scale, softcap)
        if sinks is not None:
            s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, -1, s.shape[2], 1)], -1)
        empty = (s == -INF).all(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        done.append(p[..., : len(chosen)] @ v[:, :, chosen])
    return torch.cat(done, 2).to(query.dtype)
