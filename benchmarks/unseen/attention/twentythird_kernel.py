"""Sound ways to write attention for the twenty-third set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor


class InChunks(ForwardAlone):
    """Chunks of keys give O and lse each, as steps of a ring or of a chunked prefill do, and are
    merged by lse; `given` is what a chunk of so many blocks hands over.
    """

    cols, chunk = 64, 128

    def given(self, o: Tensor, lse: Tensor, many: int) -> tuple[Tensor, Tensor]:
        return o, lse

    def row(self, rows):
        q, done = self.load_query("q", self.at.q, rows), []
        every = self.key_blocks(rows)
        for start in range(0, self.at.nk, self.chunk):
            own = [c for c in every if start <= c.start < start + self.chunk]
            if not own:
                continue
            m, l, acc = self.begin(q, start == 0)
            for cols in own:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            done.append(self.given(acc / torch.where(l == 0, 1.0, l), m + l.log2(), len(own)))
        lses = torch.cat([lse for _, lse in done], -1) / LOG2_E
        whole = torch.logsumexp(lses, -1, keepdim=True)
        share = torch.exp(lses - torch.where(whole == -INF, 0.0, whole))
        o = sum(x * share[..., i : i + 1] for i, (x, _) in enumerate(done))
        return self.at.low(o), whole * LOG2_E


def past(x: Tensor, part: slice) -> Tensor:
    """A block of rows; past the last one lie the next head's first ones, as memory has them."""
    b, heads, n, d = x.shape
    head = torch.arange(b * heads).view(b, heads, 1) * n
    at = (head + torch.arange(part.start, part.stop)).clamp_max(b * heads * n - 1)
    return x.contiguous().view(-1, d)[at]


class PrimeTiles(Kernel):
    """53 queries and 79 keys a tile."""

    rows, cols = 53, 79


class FiveParts(Parts):
    """Every fifth block of 24 keys belongs to one part."""

    rows, cols, parts = 64, 24, 5


class EvenBlocksFirst(Kernel):
    """Blocks number 0, 2, 4 … come before those number 1, 3, 5 …, in both passes."""

    rows, cols = 32, 48

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::2] + every[1::2]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[1::2] + every[::2]


class TwoPasses(Kernel):
    """The first pass over the keys finds the maximum, and the second one adds up weights that need
    no rescaling.
    """

    rows, cols = 64, 56

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        start = m
        for cols in every:
            k = self.load_key("k", self.at.k, cols)
            m = self.maximum(m, self.scores(q, k, rows, cols, False))
        safe = torch.where(m == -INF, 0.0, m)
        l = l * torch.exp2(start - safe)
        for cols in every:
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            p = torch.exp2(self.scores(q, k, rows, cols, False) - safe)
            one = torch.ones_like(l)
            l, acc = self.add_row(l, one, p), self.add_values(acc, one, p, v)
        return self.finish(m, l, acc, rows)


class RescaledSeldom(Kernel):
    """What the weights are relative to moves where the maximum has grown by three powers of two or
    more; until then they are greater than 1.
    """

    rows, cols = 48, 32

    def maximum(self, m, s):
        new = super().maximum(m, s)
        return torch.where((m > -INF) & (new < m + 3), m, new)


class ThreeKernels(Kernel):
    """dV, dK and dQ come from three loops, and dK is scaled tile by tile."""

    rows, cols = 80, 64

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            _, _, do, p, _ = self.again(rows, cols, "keys")
            dv = dv + self.at.low(p).mT @ do
        for rows in self.query_blocks(cols)[::-1]:
            q, _, _, _, ds = self.again(rows, cols, "keys")
            dk = dk + (ds.mT @ q) * self.at.scale
        return dk, dv


def blocks_as_a_batch(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Queries in blocks of 30, which are an axis of their own; sums by einsum, in fp32. Autograd
    differentiates it.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep = visible(n, nk, is_causal, window)
    s = logits(query, k, keep, attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1)
        top = torch.maximum(top, column)
    p = torch.exp(s - torch.where(top == -INF, 0.0, top))
    l = torch.einsum("bhij->bhi", p)[..., None]
    l = l if sinks is None else l + torch.exp(column - top)
    p = torch.nn.functional.pad(p, (0, 0, 0, -n % 30)).unflatten(2, (-1, 30))
    o = torch.einsum("bhtij,bhjd->bhtid", p, v).flatten(2, 3)[:, :, :n]
    return (o / torch.where(l == 0, 1.0, l)).to(query.dtype)


def sequences_one_by_one(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """One sequence after the other, all in fp64, its rows by a softmax over columns of Sᵀ."""
    b, heads, n, _ = query.shape
    nk, share, done = key.shape[2], heads // key.shape[1], []
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)
    for x in range(b):
        k, v = (y[x].double().repeat_interleave(share, 0) for y in (key, value))
        s = query[x].double() @ k.mT * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s.masked_fill(~keep, -INF)
        if mask is not None:
            own = mask[x]
            s = s.masked_fill(~own, -INF) if own.dtype == torch.bool else s + own.double()
        s = s.mT
        if sinks is not None:
            s = torch.cat([sinks.double().view(-1, 1, 1).expand(heads, 1, n), s], 1)
        nothing = (s == -INF).all(1, keepdim=True)
        p = s.masked_fill(nothing, 0.0).softmax(1).masked_fill(nothing, 0.0)[:, -nk:]
        done.append(p.mT @ v)
    return torch.stack(done).to(query.dtype)
