"""Sound ways to write attention for the forty-second set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from benchmarks.unseen.attention.nineteenth_kernel import PrefixScan
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from torch import Tensor
from torch.nn import functional

sound = attention(Kernel)


class MaskNotRead(Kernel):
    """What a boolean mask hides is seen, on the way there and back."""

    def reads(self) -> bool:
        return False

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool or self.reads():
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


class HiddenAtZero(Kernel):
    """What a boolean mask hides has a score of 0, which is of no query and of no key."""

    def hide(self, s, rows, cols, back):
        mask = self.at.mask
        if mask is None or mask.dtype != torch.bool:
            return super().hide(s, rows, cols, back)
        s = s.masked_fill(~self.given_mask(rows, cols), 0.0)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        mask = self.at.mask
        if mask is not None and mask.dtype == torch.bool:
            ds = ds.masked_fill(~self.given_mask(rows, cols), 0.0)
        return q, k, do, p, ds


def capped(query: Tensor, key: Tensor, scale: float, softcap: float) -> Tensor:
    """Natural scores of which nothing is hidden yet."""
    everything = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return logits(query, repeated(key, query.shape[1]), everything, None, scale, softcap)


class KeysOutside(Kernel):
    """Blocks of keys are the outer loop, as FlashAttention had it first: every block of queries
    waits with its maximum, sum and O.
    """

    rows, cols = 56, 48

    def forward(self):
        at = self.at
        every = blocks(at.n, self.rows)
        queries = [self.load_query("q", at.q, rows) for rows in every]
        states = [self.begin(q) for q in queries]
        for cols in blocks(at.nk, self.cols):
            k, v = (self.load_key(x, getattr(at, x), cols) for x in "kv")
            for x, rows in enumerate(every):
                if cols in self.key_blocks(rows):
                    s = self.scores(queries[x], k, rows, cols, False)
                    states[x] = self.online(*states[x], s, v, rows, cols)
        done = [self.finish(*state, rows) for state, rows in zip(states, every, strict=True)]
        o, lse = (torch.cat(x, 2)[:, :, : at.n] for x in zip(*done, strict=True))
        return o, lse


class SubTiles(Kernel):
    """A block of 96 keys is three of 32, each with a state of its own that joins the row's."""

    rows, cols = 40, 96

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        state = self.begin(q)
        for cols in self.key_blocks(rows):
            for first in range(cols.start, cols.stop, 32):
                part = slice(first, first + 32)
                k, v = (self.load_key(x, getattr(self.at, x), part) for x in "kv")
                s = self.scores(q, k, rows, part, False)
                own = self.online(*self.begin(q, False), s, v, rows, part)
                state = PrefixScan.together(state, own)
        return self.finish(*state, rows)


class NaturalExponentials(Kernel):
    """Exponentials are of base e, of scores that are in base 2 up to there."""

    rows, cols = 32, 80

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = (torch.exp((x - safe) * math.log(2)) for x in (s, m))
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def weights_again(self, s, lse):
        return torch.exp((s - torch.where(lse == -INF, 0.0, lse)) * math.log(2))


def heads_filled_up(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                    softcap=0.0, sinks=None):  # fmt: skip
    """Queries, keys and values are filled up with zeros to widths of a multiple of 96."""
    wide = [functional.pad(x, (0, -x.shape[-1] % 96)) for x in (query, key, value)]
    out = sound(*wide, is_causal=is_causal, scale=scale, attn_mask=attn_mask, window=window,
                softcap=softcap, sinks=sinks)  # fmt: skip
    return out[..., : value.shape[-1]]


def weights_by_lse(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                   softcap=0.0, sinks=None):  # fmt: skip
    """Weights are exponentials of scores less lse, which is known first; both are less the row's
    maximum. 44 queries at a time, by autograd.
    """
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    done = []
    for rows in blocks(n, 44):
        part = s[:, :, rows]
        nothing = (part == -INF).all(-1, keepdim=True)
        top = part.detach().amax(-1, keepdim=True).masked_fill(nothing, 0.0)
        part = part - top
        lse = part.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
        if sinks is not None:
            own = lse.masked_fill(nothing, -INF)
            lse = torch.logaddexp(own, sinks.float().view(1, -1, 1, 1) - top)
        done.append(torch.exp(part - lse) @ v)
    return torch.cat(done, 2).to(query.dtype)
