"""Sound ways to write attention for the fortieth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from torch import Tensor


class WholeRows(Kernel):
    """All keys of a query at once, and a softmax that does not know of rows that see nothing."""

    def key_blocks(self, rows):
        return [slice(0, self.at.nk)]

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


def spread(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1)


class BlocksOfBlocks(Kernel):
    """Three blocks of keys have a state of their own, which is then put together with the row's."""

    rows, cols = 48, 40

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for first in range(0, len(every), 3):
            own = self.begin(q, False)
            for cols in every[first : first + 3]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                own = self.online(*own, self.scores(q, k, rows, cols, False), v, rows, cols)
            top = torch.maximum(m, own[0])
            safe = torch.where(top == -INF, 0.0, top)
            a, b = torch.exp2(m - safe), torch.exp2(own[0] - safe)
            m, l, acc = top, l * a + own[1] * b, acc * a + own[2] * b
        return self.finish(m, l, acc, rows)


class KeysOutside(Kernel):
    """Blocks of keys are the outer loop, as in the first FlashAttention: every tile of queries has
    a state that waits for the next block.
    """

    rows, cols = 32, 96

    def forward(self):
        at, tiles = self.at, blocks(self.at.n, self.rows)
        queries = [self.load_query("q", at.q, rows) for rows in tiles]
        states = [self.begin(q) for q in queries]
        for cols in blocks(at.nk, self.cols):
            k, v = (self.load_key(x, getattr(at, x), cols) for x in "kv")
            for x, rows in enumerate(tiles):
                if cols in self.key_blocks(rows):
                    s = self.scores(queries[x], k, rows, cols, False)
                    states[x] = self.online(*states[x], s, v, rows, cols)
        done = [self.finish(*x, rows) for x, rows in zip(states, tiles, strict=True)]
        o, lse = (torch.cat(x, 2)[:, :, : at.n] for x in zip(*done, strict=True))
        return o, lse


class FiveSplits(Parts):
    """Blocks of forty keys are dealt to five splits in turn, merged by lse at the end."""

    rows, cols, parts = 40, 40, 5


class TilesFromTwoPlaces(Kernel):
    """A step takes a block of the first half of the keys with one of the second half."""

    rows, cols = 64, 24

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        half, state = -(-len(every) // 2), self.begin(q)
        for x in range(half):
            both = every[x : half + x + 1 : half] if half + x < len(every) else [every[x]]
            s, values = [], []
            for cols in both:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                s.append(self.scores(q, k, rows, cols, False))
                values.append(v)
            state = self.online(*state, torch.cat(s, -1), torch.cat(values, 2), rows, both[0])
        return self.finish(*state, rows)


def keys_from_the_last(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Keys are turned round, hidden scores are left out of lse by a second mask, and weights are
    exp(s − lse), 30 queries at a time; by autograd.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = spread(key, heads), spread(value, heads).flip(2)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap).flip(-1)
    done = []
    for rows in blocks(n, 30):
        part = s[:, :, rows]
        seen = part > -INF
        top = part.detach().amax(-1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks.float().view(1, -1, 1, 1))
        top = torch.where(top == -INF, 0.0, top)
        powers = torch.exp(torch.where(seen, part - top, 0.0)) * seen
        total = powers.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
        lse = torch.where(total == 0, 0.0, torch.where(total == 0, 1.0, total).log() + top)
        weights = torch.exp(torch.where(seen, part - lse, 0.0)) * seen
        done.append(weights @ v)
    return torch.cat(done, 2).to(query.dtype)
