"""Sound ways to write attention for the twenty-fourth set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, load


def joined(one, two):
    """Two states of a row, maximum, sum and O, as one."""
    m = torch.maximum(one[0], two[0])
    safe = torch.where(m == -INF, 0.0, m)
    a, b = torch.exp2(one[0] - safe), torch.exp2(two[0] - safe)
    return m, one[1] * a + two[1] * b, one[2] * a + two[2] * b


class SinkAtTheEnd(Kernel):
    """Keys alone first; the sink is one more state, without values, that joins theirs."""

    rows, cols = 56, 32

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q, False)
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.online(m, l, acc, s, v, rows, cols)
        if self.at.sinks is not None:
            m, l, acc = joined((m, l, acc), self.begin(q))
        return self.finish(m, l, acc, rows)


class ContiguousParts(Kernel):
    """Three runs of neighboring blocks, the last one first, each with a state of its own."""

    rows, cols = 80, 48

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        share = -(-len(every) // 3)
        whole = self.begin(q)
        for first in range(0, len(every), share)[::-1]:
            m, l, acc = self.begin(q, False)
            for cols in every[first : first + share]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s = self.scores(q, k, rows, cols, False)
                m, l, acc = self.online(m, l, acc, s, v, rows, cols)
            whole = joined((m, l, acc), whole)
        m, l, acc = whole
        return self.finish(m, l, acc, rows)


class TwoPasses(Kernel):
    """Maxima of whole rows first; then weights, their sum and O."""

    rows, cols = 64, 72

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        found = [
            self.scores(q, self.load_key("k", self.at.k, c), rows, c, False) for c in every
        ]  # fmt: skip
        top = m
        for s in found:
            top = self.maximum(top, s)
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, cols in zip(found, every, strict=True):
            p = torch.exp2(s - safe)
            l = l + p.sum(-1, keepdim=True)
            acc = acc + self.at.low(p) @ self.load_key("v", self.at.v, cols)
        return self.finish(top, l, acc, rows)


class RescaledByTiles(Kernel):
    """A tile's maxima stay as they are until one of its rows' has grown by more than 6 bits."""

    rows, cols = 48, 40

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        grown = ((new - m) > 6) | ((m == -INF) & (new > -INF))
        tile = grown.any(-2, keepdim=True)
        kept = torch.where(tile, new, m)
        safe = torch.where(kept == -INF, 0.0, kept)
        p, a = torch.exp2(s - safe), torch.where(kept == m, 1.0, torch.exp2(m - safe))
        return kept, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class PagesByATable(Kernel):
    """Keys and values lie in pages of 16, in an order that a table tells."""

    rows, cols = 32, 64

    def load_key(self, name, x, part):
        b, h, n, d = x.shape
        pages = -(-n // 16)
        table = torch.arange(pages).flip(0).roll(3)
        padded = torch.nn.functional.pad(x, (0, 0, 0, pages * 16 - n)).view(b, h, pages, 16, d)
        pool = torch.zeros_like(padded)
        pool[:, :, table] = padded
        token = torch.arange(part.start, min(part.stop, n))
        found = pool[:, :, table[token // 16], token % 16]
        return load(found, slice(0, part.stop - part.start))


class SmoothedKeys(Kernel):
    """The keys' mean is taken off in fp32, and what it adds to every score of a row to lse."""

    rows, cols = 64, 56

    def shift(self, rows):
        mean = self.at.k.mean(2, keepdim=True)
        return load(self.at.q, rows) @ mean.mT * (self.at.scale * LOG2_E)

    def scaled(self, s, rows, cols, back):
        if self.at.softcap or self.at.sinks is not None or back:
            return super().scaled(s, rows, cols, back)
        k = load(self.at.k, cols) - self.at.k.mean(2, keepdim=True)
        return load(self.at.q, rows) @ k.mT * (self.at.scale * LOG2_E)

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        plain = bool(self.at.softcap) or self.at.sinks is not None
        return o, lse if plain else lse + self.shift(rows)


class GradientsInParts(Kernel):
    """Even and odd tiles of queries have sums of their own for dK and dV, which are added up last;
    so have those of keys for dQ.
    """

    rows, cols = 40, 64

    def key_gradients(self, cols):
        sums = []
        for part in (self.query_blocks(cols)[::2], self.query_blocks(cols)[1::2]):
            dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
            for rows in part[::-1]:
                q, _, do, p, ds = self.again(rows, cols, "keys")
                dv, dk = dv + self.at.low(p).mT @ do, dk + ds.mT @ q
            sums.append((dk * self.at.scale, dv))
        (dk, dv), (other_dk, other_dv) = sums
        return dk + other_dk, dv + other_dv

    def query_gradient(self, rows):
        sums = [torch.zeros_like(load(self.at.q, rows)) for _ in range(2)]
        for number, cols in enumerate(self.key_blocks(rows)):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            sums[number % 2] = sums[number % 2] + ds @ k
        return (sums[0] + sums[1]) * self.at.scale


def sequences_packed(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None):  # fmt: skip
    """All sequences one behind the other, as one whose mask has a block for each of them; autograd
    differentiates it.
    """
    (b, heads, n, d), nk = query.shape, key.shape[2]
    share = heads // key.shape[1]
    q = query.float().transpose(0, 1).reshape(heads, b * n, d)
    k, v = (x.float().repeat_interleave(share, 1).transpose(0, 1).flatten(1, 2)
            for x in (key, value))  # fmt: skip
    own = torch.eye(b, dtype=torch.bool).repeat_interleave(n, 0).repeat_interleave(nk, 1)
    keep = visible(n, nk, is_causal, window).repeat(b, b) & own
    mask = None
    if attn_mask is not None:
        each = attn_mask.expand(b, heads, n, nk)
        mask = torch.zeros(heads, b * n, b * nk, dtype=each.dtype)
        for x in range(b):
            mask[:, x * n : (x + 1) * n, x * nk : (x + 1) * nk] = each[x]
    s = logits(q, k, keep, mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(-1, 1, 1).expand(heads, b * n, 1)], -1)
    hidden = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)[..., : b * nk]
    return (p @ v).unflatten(1, (b, n)).transpose(0, 1).to(query.dtype)
