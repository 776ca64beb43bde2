"""Sound ways to write attention for the thirty-sixth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor


class EveryBlock(Kernel):
    """All blocks are visited, whatever is hidden in them."""

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)


class OtherOperands(ForwardAlone):
    """The forward pass reads other keys and values than it is given."""

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self):
        at = self.at
        kept = at.k, at.v, at.nk
        self.memory["keys"] = at.nk
        at.k, at.v = self.read(at.k, at.v)
        at.nk = at.k.shape[2]
        found = super().forward()
        at.k, at.v, at.nk = kept
        return found

    def given_mask(self, rows, cols):
        read, self.at.nk = self.at.nk, self.memory["keys"]
        found = super().given_mask(rows, cols)
        self.at.nk = read
        return found


class RowAtOnce(ForwardAlone):
    """A tile of queries has the scores of all keys before the softmax begins."""

    def all_scores(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Scores in base 2, and the values, of every key that is visited."""
        q, found = self.load_query("q", self.at.q, rows), []
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            found.append((self.scores(q, k, rows, cols, False), v))
        return torch.cat([s for s, _ in found], -1), torch.cat([v for _, v in found], 2)


class BackToFront(Kernel):
    """Blocks of keys, and of queries on the way back, from the last to the first."""

    rows, cols = 80, 56

    def key_blocks(self, rows):
        return super().key_blocks(rows)[::-1]

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class TwoParts(Parts):
    """Blocks of 24 keys are dealt to two parts in turn, which are merged by lse."""

    rows, cols, parts = 96, 24, 2


class SumFirst(Kernel):
    """Keys are gone through once for lse, and once more for weights of sum 1 in fp32."""

    rows, cols = 72, 48

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        tiles, lse = [], m + l.log2()
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            tiles.append((s, v))
            top = torch.maximum(lse, s.amax(-1, keepdim=True))
            safe = torch.where(top == -INF, 0.0, top)
            part = torch.exp2(s - safe).sum(-1, keepdim=True)
            lse = safe + (torch.exp2(lse - safe) + part).log2()
        for s, v in tiles:
            acc = acc + torch.exp2(s - torch.where(lse == -INF, 0.0, lse)) @ v
        return self.at.low(acc), lse


class HalvesOfFeatures(Kernel):
    """Scores are the sum of two products, and values are weighed in two halves of columns."""

    rows, cols = 56, 112

    def product(self, q, k, back):
        half = q.shape[-1] // 2
        return q[..., half:] @ k[..., half:].mT + q[..., :half] @ k[..., :half].mT

    def add_values(self, acc, a, p, v):
        half, p = v.shape[-1] // 2, self.at.low(p)
        return acc * a + torch.cat([p @ v[..., :half], p @ v[..., half:]], -1)


def keys_by_queries(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                    softcap=0.0, sinks=None):  # fmt: skip
    """Scores with a row for every key, whose softmax goes down the columns, by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap).mT
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, -1, 1, n)], 2)
    hidden = (s == -INF).all(2, keepdim=True)
    p = s.masked_fill(hidden, 0.0).softmax(2).masked_fill(hidden, 0.0)
    return (v.mT @ p[:, :, :nk]).mT.to(query.dtype)
