"""Sound ways to write attention for the eighteenth set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, load


class GrowingTiles(Kernel):
    """Tiles of keys are 16 wide, then 32, then 64, and so on."""

    rows, cols = 48, 64

    def key_blocks(self, rows):
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        found, start, width = [], 0, 16
        while start < high:
            found.append(slice(start, start + width))
            start, width = start + width, width * 2
        return found


class TwoLevels(Kernel):
    """Two blocks of keys are added up by themselves, and then to what came before them."""

    rows, cols = 64, 40

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        every = self.key_blocks(rows)
        for i in range(0, len(every), 2):
            own = self.begin(q, False)
            for cols in every[i : i + 2]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                own = self.online(*own, self.scores(q, k, rows, cols, False), v, rows, cols)
            new = torch.maximum(m, own[0])
            safe = torch.where(new == -INF, 0.0, new)
            a, b = torch.exp2(m - safe), torch.exp2(own[0] - safe)
            m, l, acc = new, l * a + own[1] * b, acc * a + own[2] * b
        return self.finish(m, l, acc, rows)


class HalvesOfColumns(Kernel):
    """Each half of O's columns is made in a pass of its own, softmax included."""

    rows, cols = 80, 48

    def forward(self):
        whole, found = self.at.v, []
        for self.at.v in whole.chunk(2, -1):
            o, lse = super().forward()
            found.append(o)
        self.at.v = whole
        return torch.cat(found, -1), lse


class WideSums(Kernel):
    """The row's sum and O are fp64."""

    rows, cols = 56, 72

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l.double(), acc.double()

    def add_row(self, l, a, p):
        return l * a + p.double().sum(-1, keepdim=True)

    def add_values(self, acc, a, p, v):
        return acc * a + self.at.low(p).double() @ v.double()

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse.float()


class RootOfTheScaleOnBoth(Kernel):
    """The query and the key are each multiplied by √scale, in fp32."""

    rows, cols = 64, 88

    def product(self, q, k, back):
        root = self.at.scale**0.5
        return (q * root) @ (k * root).mT

    def scaled(self, s, rows, cols, back):
        return s * LOG2_E


class DeltaByTheWeights(Kernel):
    """δ is the sum of the weights times dP, over all keys, and reads no O."""

    rows, cols = 40, 64

    def delta(self, do, o):
        every, found = slice(0, self.at.n), torch.zeros_like(do[..., :1])
        for cols in blocks(self.at.nk, 48):
            s = self.scores(self.at.q, load(self.at.k, cols), every, cols, True)
            dp = do @ load(self.at.v, cols).mT
            found += (self.weights_again(s, self.at.lse) * dp).sum(-1, keepdim=True)
        return found


def sink_as_a_key(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                  softcap=0.0, sinks=None):  # fmt: skip
    """The sink is a column of the scores in front of the first key, whose value is zero."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1), s], -1)
        v = torch.cat([torch.zeros_like(v[:, :, :1]), v], 2)
    hidden = (s == -INF).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    return (p @ v).to(query.dtype)


def two_passes_over_chunks(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                           softcap=0.0, sinks=None):  # fmt: skip
    """The maximum and the sum over chunks of 72 keys come first, then the weights by them, a chunk
    after the other.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    parts, tops = s.split(72, -1), s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1)
        parts, tops = (sink, *parts), tops.maximum(sink.detach())
    tops = torch.where(tops == -INF, 0.0, tops)
    total = sum(torch.exp(x - tops).sum(-1, keepdim=True) for x in parts)
    inverse = 1 / torch.where(total == 0, 1.0, total)
    weights = [torch.exp(x - tops) * inverse for x in parts[nk // -72 :]]
    out = sum(p @ x for p, x in zip(weights, v.split(72, 2), strict=True))
    return out.to(query.dtype)
