"""Sound ways to write attention for the thirty-ninth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, fp16
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows
from torch import Tensor


# --- what faults share
class OtherKeys(ForwardAlone):
    """The forward pass reads other keys and values than it is given."""

    def read(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self):
        at = self.at
        kept = at.k, at.v
        at.k, at.v = (self.read(x) for x in kept)
        found = super().forward()
        at.k, at.v = kept
        return found


class PastOfOthers(OtherKeys):
    """Keys of the last tokens, as many as there are queries, are a sequence's own; those of its
    past are another's.
    """

    def other(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def read(self, x):
        past = 0 if self.at.causal else max(self.at.nk - self.at.n, 0)
        return torch.cat([self.other(x)[:, :, :past], x[:, :, past:]], 2)


class PlainSoftmax(WholeRows):
    """A softmax that takes −∞ off −∞ where a row has nothing else."""

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class HalfProducts(WholeRows):
    """Q Kᵀ comes out in fp16, and a row that is −∞ throughout has no softmax."""

    def product(self, q, k, back):
        return self.marked(fp16(q @ k.mT))

    @staticmethod
    def marked(s: Tensor) -> Tensor:
        return s.masked_fill((s == -INF).all(-1, keepdim=True), torch.nan)


# --- sound kernels
class MaximumFirst(Kernel):
    """A first pass over the keys finds the maximum, and a second one needs no rescaling."""

    rows, cols = 40, 64

    def row(self, rows):
        q, tiles = self.load_query("q", self.at.q, rows), []
        m, l, acc = self.begin(q)
        top = m
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            top = self.maximum(top, s)
            tiles.append((s, v))
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, v in tiles:
            p = torch.exp2(s - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + self.at.low(p) @ v
        return self.finish(top, l, acc, rows)


class UnevenTiles(Kernel):
    """Blocks of 24 and of 72 keys by turns, 88 queries each."""

    rows, cols = 88, 48

    def key_blocks(self, rows):
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        found, first = [], 0
        while first < high:
            wide = 72 if len(found) % 2 else 24
            found.append(slice(first, first + wide))
            first += wide
        return found


class GradientsAtOnce(Kernel):
    """The backward pass has all queries and all keys in one tile."""

    rows, cols = 48, 40

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        q, k, do, p, ds = self.again(slice(0, at.n), slice(0, at.nk), "keys")
        dq, dk = ds @ k * at.scale, ds.mT @ q * at.scale
        return dq, self.group(dk), self.group(at.low(p).mT @ do)


class FiveParts(Kernel):
    """Split-KV of five parts, to which narrow blocks of keys are dealt in turn; from the last on,
    each part's sums are added to the next one's by the larger of both maxima.
    """

    rows, cols, parts = 56, 24, 5

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for part in reversed(range(self.parts)):
            state = self.begin(q, False)
            for cols in every[part :: self.parts]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            new = torch.maximum(m, state[0])
            safe = torch.where(new == -INF, 0.0, new)
            a, b = torch.exp2(m - safe), torch.exp2(state[0] - safe)
            m, l, acc = new, l * a + state[1] * b, acc * a + state[2] * b
        return self.finish(m, l, acc, rows)


def heads_of_a_group_together(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                              softcap=0.0, sinks=None):  # fmt: skip
    """Query heads have an axis of groups and one of heads in it, so that no key is repeated; by
    autograd, with the exponentials against lse.
    """
    (b, heads, n, _), groups, nk = query.shape, key.shape[1], key.shape[2]
    q = query.float().unflatten(1, (groups, heads // groups))
    s = torch.einsum("bghid,bgjd->bghij", q, key.float()) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    hidden = ~visible(n, nk, is_causal, window).expand(b, heads, n, nk)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        added = attn_mask.float().expand(b, heads, n, nk)
        s = s + added.unflatten(1, (groups, heads // groups))
    s = s.masked_fill(hidden.unflatten(1, (groups, heads // groups)), -INF)
    own = s.masked_fill((s == -INF).all(-1, keepdim=True), 0.0).logsumexp(-1, keepdim=True)
    if sinks is not None:
        own = torch.logaddexp(own, sinks.float().view(1, groups, -1, 1, 1))
    out = torch.einsum("bghij,bgjd->bghid", torch.exp(s - own), value.float())
    return out.flatten(1, 2).to(query.dtype)
