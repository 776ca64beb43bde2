"""Sound ways to write attention for the sixty-second set, and what its faults share."""

# ruff: noqa: ARG001, ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, e4m3
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor


def tf32(x: Tensor) -> Tensor:
    """To ten bits of mantissa, ties away from zero."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & -0x2000).view(torch.float32)


def saturated(x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Codes of E4M3 by a scale, with it once more; what is too large is the largest code."""
    return e4m3((x / scale).clamp(-448, 448)) * scale


class Unscaled(OtherOperands):
    """A cache in E4M3 whose scales are all 1."""

    def read(self, k, v):
        return saturated(k), saturated(v)


class TwoLevels(Kernel):
    """Three blocks of keys have a state of their own, which is put into the row's behind them;
    weights are not rounded on the way there.
    """

    rows, cols, each = 56, 16, 3

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for first in range(0, len(every), self.each):
            state = self.begin(q, False)
            for cols in every[first : first + self.each]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            new = torch.maximum(m, state[0])
            safe = torch.where(new == -INF, 0.0, new)
            a, b = torch.exp2(m - safe), torch.exp2(state[0] - safe)
            m, l, acc = new, l * a + state[1] * b, acc * a + state[2] * b
        return self.finish(m, l, acc, rows)


class WithRemainders(Kernel):
    """What additions to the gradients lose is kept beside them, and added at the end."""

    rows, cols = 40, 40

    def again(self, rows, cols, which):
        self.memory["place"] = which, (cols if which == "keys" else rows).start
        return super().again(rows, cols, which)

    def add(self, name, total, part, rows, cols):
        key = (name, *self.memory["place"])
        lost = self.memory.get(key, torch.zeros_like(total))
        part = part + lost
        found = total + part
        self.memory[key] = part - (found - total)
        return found


class LanesOfKeys(Kernel):
    """Four lanes of a block's keys are summed and weighed for themselves, then added two by two."""

    rows, cols = 32, 96

    def add_row(self, l, a, p):
        one, two, three, four = p.unflatten(-1, (-1, 4)).sum(-2).unbind(-1)
        return l * a + ((one + two) + (three + four)).unsqueeze(-1)

    def add_values(self, acc, a, p, v):
        p = self.at.low(p)
        one, two, three, four = (p[..., i::4] @ v[:, :, i::4] for i in range(4))
        return acc * a + ((one + two) + (three + four))


def every_fourth_query(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                       window=None, softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Queries four apart are one batch, with a softmax over all keys; by autograd."""
    (b, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    k, v, found = repeated(key, heads), repeated(value, heads), {}
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    for first in range(min(4, n)):
        own = None if mask is None else mask[:, :, first::4]
        s = logits(query[:, :, first::4], k, keep[first::4], own, scale, softcap)
        done = (softmax_of(s, sinks) @ v).unbind(2)
        found |= {first + 4 * i: row for i, row in enumerate(done)}
    return torch.stack([found[i] for i in range(n)], 2).to(query.dtype)


def values_in_chunks_by_lse(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                            window=None, softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """lse first, then 36 keys at a time weighed by the exponential of scores less it; by autograd,
    which goes through lse.
    """
    (_, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    all_of = s
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        all_of = torch.cat([column, s], -1)
    nothing = (all_of == -INF).all(-1, keepdim=True)
    lse = all_of.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
    out = torch.zeros(*s.shape[:3], v.shape[-1])
    for cols in blocks(nk, 36):
        out = out + torch.exp(s[..., cols] - lse) @ v[:, :, cols]
    return out.to(query.dtype)
