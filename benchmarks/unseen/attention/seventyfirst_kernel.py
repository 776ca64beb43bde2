"""Sound ways to write attention for the seventy-first set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel, and the calls are
# those of scaled_dot_product_attention

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor


class KeysOutside(Kernel):
    """Blocks of keys are the outer loop of the forward pass; every tile of queries keeps its state
    from one to the next.
    """

    rows, cols = 72, 88

    def forward(self):
        tiles = blocks(self.at.n, self.rows)
        visited = [[c.start for c in self.key_blocks(rows)] for rows in tiles]
        queries = [self.load_query("q", self.at.q, rows) for rows in tiles]
        states = [self.begin(q) for q in queries]
        for cols in blocks(self.at.nk, self.cols):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            for i, (q, rows) in enumerate(zip(queries, tiles, strict=True)):
                if cols.start in visited[i]:
                    s = self.scores(q, k, rows, cols, False)
                    states[i] = self.online(*states[i], s, v, rows, cols)
        done = [self.finish(*state, rows) for state, rows in zip(states, tiles, strict=True)]
        o, lse = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*done, strict=True))
        return o, lse


class WholeAndFraction(Kernel):
    """2^x is the power of x's whole part, times that of the rest, which lies between 1 and 2."""

    rows, cols = 40, 104

    @staticmethod
    def power(x: Tensor) -> Tensor:
        x = x.clamp_min(-200.0)
        whole = x.floor()
        return torch.ldexp(torch.exp2(x - whole), whole.to(torch.int32).clamp_min(-126)) * (
            whole >= -126
        )

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = self.power(s - safe), self.power(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class MaximumFirst(Kernel):
    """Keys are gone through once for the row's maximum alone, and once more, from the last block to
    the first, for sums that nothing rescales.
    """

    rows, cols = 88, 40

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        tiles, top = [], m
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            tiles.append((s, v))
            top = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, v in tiles[::-1]:
            p = torch.exp2(s - safe)
            l = l + p.sum(-1, keepdim=True)
            acc = acc + self.at.low(p) @ v
        return self.finish(top, l, acc, rows)


def one_batch_of_matrices(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                          window=None, softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Sequences and heads are one batch, in which a loop takes one matrix after the other."""
    (b, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    q, k, v = query.float(), repeated(key, heads), repeated(value, heads)
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk).flatten(0, 1)
    done = []
    for at, (one, two, three) in enumerate(
        zip(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), strict=True)
    ):
        own = None if mask is None else mask[at]
        s = logits(one * scale, two, keep, own, 1.0, softcap)
        sink = None if sinks is None else sinks[at % heads : at % heads + 1]
        p = softmax_of(s[None, None], sink)[0, 0]
        done.append(p @ three)
    return torch.stack(done).unflatten(0, (b, heads)).to(query.dtype)


def halves_of_halves(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                     window=None, softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Keys are halved until 36 or fewer are left; two halves are put together by the logarithms of
    their sums. A sink is one more part, whose O is zero. Autograd differentiates it.
    """
    (b, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -INF, 0.0, top)
    s = s - top

    def both(one, two):
        lse = torch.logaddexp(one[1], two[1])
        return sum(o * torch.exp(x - lse) for o, x in (one, two)), lse

    def part(first, last):
        if last - first > 36:
            middle = (first + last) // 2
            return both(part(first, middle), part(middle, last))
        own = s[..., first:last]
        nothing = (own == -INF).all(-1, keepdim=True)
        lse = own.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
        p = torch.exp(own - lse).masked_fill(nothing, 0.0)
        return p @ v[:, :, first:last], lse.masked_fill(nothing, -1e30)

    found = part(0, nk)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)
        found = both(found, (torch.zeros_like(found[0]), sink - top))
    return found[0].to(query.dtype)


class Cached(Kernel):
    """The forward pass reads keys and values that something brought into a cache; gradients come
    from a sound one.
    """

    def brought(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self):
        at = self.at
        kept = at.k, at.v
        at.k, at.v = (self.brought(x) for x in kept)
        found = super().forward()
        at.k, at.v = kept
        return found

    def backward(self):
        sound = Kernel(**vars(self.at))
        sound.at.o, sound.at.lse = sound.forward()
        return sound.backward()


def in_pages(x: Tensor, size: int) -> Tensor:
    """[B, pages, H, size, D], the last page filled up with zeros."""
    x = load(x, slice(0, -(-x.shape[2] // size) * size))
    return x.unflatten(2, (-1, size)).transpose(1, 2)
