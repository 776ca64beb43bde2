"""Sound ways to write attention for the twenty-fifth set."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load


class TallTiles(Kernel):
    """112 queries and 24 keys a tile."""

    rows, cols = 112, 24


class FiveParts(Parts):
    """Every fifth block of 24 keys belongs to one part."""

    rows, cols, parts = 32, 24, 5


class TwoPasses(Kernel):
    """A row's maximum is known before anything is added up."""

    rows, cols = 48, 80

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        every = self.key_blocks(rows)
        for cols in every:
            k = self.load_key("k", self.at.k, cols)
            m = self.maximum(m, self.scores(q, k, rows, cols, False))
        if self.at.sinks is not None:
            l = l * torch.exp2(self.begin(q)[0] - m)
        for cols in every:
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.online(m, l, acc, s, v, rows, cols)
        return self.finish(m, l, acc, rows)


class CompensatedSums(Kernel):
    """What is lost where O and l grow is kept beside them, and added at the end."""

    rows, cols = 64, 16

    def row(self, rows):
        self.memory["lost"] = 0.0, 0.0
        return super().row(rows)

    def add_row(self, l, a, p):
        new, lost = self.kept(l * a, p.sum(-1, keepdim=True), self.memory["lost"][0] * a)
        self.memory["lost"] = lost, self.memory["lost"][1]
        return new

    def add_values(self, acc, a, p, v):
        new, lost = self.kept(acc * a, self.at.low(p) @ v, self.memory["lost"][1] * a)
        self.memory["lost"] = self.memory["lost"][0], lost
        return new

    def finish(self, m, l, acc, rows):
        return super().finish(m, l + self.memory["lost"][0], acc + self.memory["lost"][1], rows)

    @staticmethod
    def kept(total, part, lost):
        part = part + lost
        new = total + part
        return new, part - (new - total)


class KeysFromTheMiddle(Kernel):
    """Blocks of keys from the middle one on, and then those before it; queries likewise."""

    rows, cols = 80, 48

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[len(every) // 2 :] + every[: len(every) // 2]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[len(every) // 2 :] + every[: len(every) // 2]


class GradientsByHalves(Kernel):
    """dK and dV of even and of odd blocks of queries apart, added up at the end."""

    rows, cols = 32, 96

    def key_gradients(self, cols):
        halves = []
        for parity in range(2):
            dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
            for rows in self.query_blocks(cols)[parity::2]:
                q, _, do, p, ds = self.again(rows, cols, "keys")
                dv, dk = dv + self.at.low(p).mT @ do, dk + ds.mT @ q
            halves.append((dk * self.at.scale, dv))
        (dk, dv), (more_dk, more_dv) = halves
        return dk + more_dk, dv + more_dv


def keys_shuffled(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                  softcap=0.0, sinks=None):  # fmt: skip
    """Keys in another order, known beforehand; the softmax of whole rows in fp64."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    order = torch.randperm(nk, generator=torch.Generator().manual_seed(3))
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1)[:, :, order] for x in (key, value))
    mask = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)[..., order]
    s = logits(query, k, visible(n, nk, is_causal, window)[:, order], mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1), s], -1)
    hidden = (s == -INF).all(-1, keepdim=True)
    p = s.double().masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return (p[..., -nk:].float() @ v).to(query.dtype)


def sequences_one_by_one(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """One sequence after the other, 90 queries at a time; numerator and denominator apart."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    keep, share, out = visible(n, nk, is_causal, window), heads // key.shape[1], []
    for one in range(b):
        k, v = (x[one].float().repeat_interleave(share, 0) for x in (key, value))
        mask, parts = None if attn_mask is None else attn_mask.expand(b, -1, n, nk)[one], []
        for rows in blocks(n, 90):
            hidden = None if mask is None else mask[:, rows]
            s = logits(query[one][:, rows], k, keep[rows], hidden, scale, softcap)
            top = s.detach().amax(-1, keepdim=True)
            top = torch.where(top == -INF, 0.0, top)
            least = torch.zeros_like(top)
            if sinks is not None:
                sink = sinks.float().view(-1, 1, 1)
                top = torch.maximum(top, sink)
                least = torch.exp(sink - top)
            p = torch.exp(s - top)
            l = p.sum(-1, keepdim=True) + least
            parts.append((p @ v) * torch.where(l == 0, 1.0, l).reciprocal())
        out.append(torch.cat(parts, 1))
    return torch.stack(out).to(query.dtype)
