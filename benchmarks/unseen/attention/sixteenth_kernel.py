"""Sound ways to write attention for the sixteenth set, none of which an earlier set has."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, load
from torch import Tensor


class SinkAtTheEnd(Kernel):
    """The sink is no score of the loop: it joins the maximum and the sum when all keys are done."""

    rows, cols = 48, 96

    def begin(self, q, first=True):
        return super().begin(q, False)

    def finish(self, m, l, acc, rows):
        if self.at.sinks is None:
            return super().finish(m, l, acc, rows)
        sink = self.at.sinks.view(1, -1, 1, 1) * LOG2_E
        top = torch.maximum(m, sink)
        a = torch.exp2(m - top)
        return super().finish(top, l * a + torch.exp2(sink - top), acc * a, rows)


class OddAndEvenBlocks(Kernel):
    """Two sums and two O, of odd and of even blocks of keys, have one maximum, and are added."""

    rows, cols = 32, 32

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        q = self.load_query("q", self.at.q, rows)
        m, *state = self.begin(q)
        sums, outs = [state[0], torch.zeros_like(state[0])], [state[1], torch.zeros_like(state[1])]
        for number, cols in enumerate(self.key_blocks(rows)):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            new = self.maximum(m, s)
            safe = torch.where(new == -INF, 0.0, new)
            p, a = torch.exp2(s - safe), torch.exp2(m - safe)
            sums, outs, m = [l * a for l in sums], [o * a for o in outs], new
            sums[number % 2] = sums[number % 2] + p.sum(-1, keepdim=True)
            outs[number % 2] = outs[number % 2] + self.at.low(p) @ v
        return self.finish(m, sums[0] + sums[1], outs[0] + outs[1], rows)


class FeaturesInHalves(Kernel):
    """Scores are the sum of two products, each of half the features; O has its halves apart."""

    cols = 48

    def product(self, q, k, back):
        half = q.shape[-1] // 2
        return q[..., half:] @ k[..., half:].mT + q[..., :half] @ k[..., :half].mT

    def add_values(self, acc, a, p, v):
        low = self.at.low(p)
        found = [low @ part for part in v.split(-(-v.shape[-1] // 2), -1)]
        return acc * a + torch.cat(found, -1)


class StatisticsInDouble(Kernel):
    """The maximum, the sum and its logarithm are in fp64."""

    rows, cols = 112, 40

    def add_row(self, l, a, p):
        return l.double() * a.double() + p.double().sum(-1, keepdim=True)

    def finish(self, m, l, acc, rows):
        out, lse = super().finish(m.double(), l, acc, rows)
        return self.at.low(out.float()), lse.float()


class TermsApart(Kernel):
    """dS is P ∘ dP less P times δ, and not P times their difference."""

    rows, cols = 40, 72

    def grad_scores(self, p, dp, delta, slope):
        return torch.addcmul(p * dp, p, delta, value=-1) * slope


class QueriesOutside(Kernel):
    """One backward sweep over blocks of queries, which adds to dK and dV of all keys in fp32."""

    rows, cols = 64, 56

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        every = blocks(at.nk, self.cols)
        dk, dv = (torch.zeros_like(load(x, slice(0, every[-1].stop))) for x in (at.k, at.v))
        dq = []
        for rows in blocks(at.n, self.rows):
            total = torch.zeros_like(load(at.q, rows))
            for cols in self.key_blocks(rows):
                q, k, do, p, ds = self.again(rows, cols, "both")
                dv[:, :, cols] += at.low(p).mT @ do
                dk[:, :, cols] += ds.mT @ q
                total = total + ds @ k
            dq.append(total)
        dq = torch.cat(dq, 2)[:, :, : at.n] * at.scale
        return dq, self.group(dk[:, :, : at.nk] * at.scale), self.group(dv[:, :, : at.nk])


class FirstBlockShort(Kernel):
    """Blocks of keys end where the keys do: it is the first one that is not whole."""

    rows, cols = 80, 64

    def key_blocks(self, rows: slice) -> list[slice]:
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        first = high % self.cols or self.cols
        every = [slice(i, i + self.cols) for i in range(first, high, self.cols)]
        return [slice(0, first), *every]


class ValuesLast(Kernel):
    """Weights of all keys are kept, as they were rounded, and meet the values in one product."""

    rows, cols = 64, 64

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        at, every = self.at, self.key_blocks(rows)
        q = self.load_query("q", at.q, rows)
        m, l, _ = self.begin(q)
        tiles, tops = [], []
        for cols in every:
            s = self.scores(q, self.load_key("k", at.k, cols), rows, cols, False)
            new = self.maximum(m, s)
            safe = torch.where(new == -INF, 0.0, new)
            tiles.append(torch.exp2(s - safe))
            tops.append(new)
            l, m = self.add_row(l, torch.exp2(m - safe), tiles[-1]), new
        safe = torch.where(m == -INF, 0.0, m)
        pairs = zip(tiles, tops, strict=True)
        p = torch.cat([at.low(t) * torch.exp2(top - safe) for t, top in pairs], -1)
        v = load(at.v, slice(0, every[-1].stop))
        return self.finish(m, l, p @ v, rows)
