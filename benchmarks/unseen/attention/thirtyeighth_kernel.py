"""Sound ways to write attention for the thirty-eighth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load
from torch import Tensor


class WholeRows(Kernel):
    """All keys of a query at once, as eager code has them."""

    def key_blocks(self, rows):
        return [slice(0, self.at.nk)]


def softmax_of(s: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of natural scores; a sink takes its share, and a row of nothing is 0."""
    nk = s.shape[-1]
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    nothing = (s == -INF).all(-1, keepdim=True)
    return s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)[..., :nk]


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1)


class WiderAndWider(Kernel):
    """Blocks of sixteen keys, then of twice as many each."""

    rows, cols = 80, 32

    def key_blocks(self, rows):
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        found, first, wide = [], 0, 16
        while first < high:
            found.append(slice(first, first + wide))
            first, wide = first + wide, 2 * wide
        return found


class RangesOfKeys(Kernel):
    """Split-KV: three ranges of keys, each with a sum and an unnormalized O, added up by the
    largest maximum.
    """

    rows, cols, ranges = 48, 24, 3

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        each = -(-len(every) // self.ranges)
        found = []
        for first in range(0, len(every), each):
            state = self.begin(q, first == 0)
            for cols in every[first : first + each]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            found.append(state)
        top = torch.stack([m for m, _, _ in found]).amax(0)
        safe = torch.where(top == -INF, 0.0, top)
        l = torch.stack([l * torch.exp2(m - safe) for m, l, _ in found]).sum(0)
        acc = torch.stack([acc * torch.exp2(m - safe) for m, _, acc in found]).sum(0)
        return self.finish(top, l, acc, rows)


class OddTilesLast(Kernel):
    """Even blocks of keys come before odd ones, queries of a key from the middle outwards."""

    rows, cols = 24, 56

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::2] + every[1::2]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[len(every) // 2 :] + every[: len(every) // 2][::-1]


class DeltaOfTheWeights(Kernel):
    """δ is made of the weights and their gradient, over the keys, and not of dO and O."""

    rows, cols = 112, 16

    def delta(self, do, o):
        at, parts = self.at, []
        for rows in blocks(at.n, self.rows):
            grad, q = load(do, rows), load(at.q, rows)
            total = torch.zeros_like(q[..., :1])
            for cols in self.key_blocks(rows):
                s = self.scores(q, load(at.k, cols), rows, cols, True)
                p = self.weights_again(s, load(at.lse, rows, INF))
                total = total + (p * (grad @ load(at.v, cols).mT)).sum(-1, keepdim=True)
            parts.append(total)
        return torch.cat(parts, 2)[:, :, : at.n]


def values_weighed_first(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """Exponentials against the row's maximum multiply V with a column of ones beside it, which
    sums them; by autograd, 20 queries at a time.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    done = []
    for rows in blocks(n, 20):
        part = s[:, :, rows]
        top = part.detach().amax(-1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks.float().view(1, -1, 1, 1))
        top = torch.where(top == -INF, 0.0, top)
        whole = torch.exp(part - top) @ v
        o, total = whole[..., :-1], whole[..., -1:]
        if sinks is not None:
            total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
        done.append(o / torch.where(total == 0, 1.0, total))
    return torch.cat(done, 2).to(query.dtype)
