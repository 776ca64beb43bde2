"""Sound ways to write attention for the nineteenth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, load
from torch import Tensor


class ForwardAlone(Kernel):
    """A kernel whose forward pass alone is another's: gradients come from a sound one, which makes
    its own O and lse.
    """

    def backward(self):
        sound = Kernel(**vars(self.at))
        sound.at.o, sound.at.lse = sound.forward()
        return sound.backward()


def down(x: Tensor, dim: int) -> Tensor:
    """Blocks of eight share an exponent, and mantissas of eight bits are rounded towards −∞."""
    x = x.movedim(dim, -1)
    many = x.shape[-1]
    whole = torch.nn.functional.pad(x, (0, -many % 8)).unflatten(-1, (-1, 8))
    top = whole.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    step = torch.exp2(top.log2().floor() - 6)
    found = ((whole / step).floor().clamp(-128, 127) * step).flatten(-2)[..., :many]
    return found.movedim(-1, dim)


class FourWarps(Parts):
    """Four warps take every fourth block of keys each; what they have is merged at the end."""

    rows, cols, parts = 32, 32, 4


class LargestBlocksFirst(Kernel):
    """Every block's largest score is looked for first, and blocks follow from the largest to the
    least of those.
    """

    rows, cols = 96, 32

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        if hasattr(self.at, "do"):
            return every
        q = load(self.at.q, rows)
        tops = [self.scores(q, load(self.at.k, cols), rows, cols, False).amax() for cols in every]
        return [every[i] for i in sorted(range(len(every)), key=lambda i: -float(tops[i]))]


class PrefixScan(Kernel):
    """States of blocks are put together two by two, at growing distances, as a scan does."""

    rows, cols = 48, 64

    @staticmethod
    def together(one, two):
        m = torch.maximum(one[0], two[0])
        safe = torch.where(m == -INF, 0.0, m)
        a, b = torch.exp2(one[0] - safe), torch.exp2(two[0] - safe)
        return m, one[1] * a + two[1] * b, one[2] * a + two[2] * b

    def row(self, rows):
        q, states = self.load_query("q", self.at.q, rows), []
        for number, cols in enumerate(self.key_blocks(rows)):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            states.append(self.online(*self.begin(q, number == 0), s, v, rows, cols))
        distance = 1
        while distance < len(states):
            states = [x if i < distance else self.together(states[i - distance], x)
                      for i, x in enumerate(states)]  # fmt: skip
            distance *= 2
        return self.finish(*states[-1], rows)


class MaskAsBias(Kernel):
    """All that hides is one matrix of zeros and −∞, which is added."""

    rows, cols = 48, 96

    def hide(self, s, rows, cols, back):
        added = torch.zeros_like(s).masked_fill(~self.seen(rows, cols, back), -INF)
        if self.at.mask is not None:
            mask = self.given_mask(rows, cols)
            hides = mask.dtype == torch.bool
            own = torch.zeros(mask.shape).masked_fill(~mask, -INF) if hides else mask.float()
            added = added + own * LOG2_E if not hides else added + own
        return s + added


class SmallQueryTiles(Kernel):
    """Eight queries and 128 keys a tile."""

    rows, cols = 8, 128


class PaddedWithTheLastKey(Kernel):
    """Past the end lies the last row once more, in place of zeros; it is hidden all the same."""

    rows, cols = 40, 72

    def load_key(self, name, x, part):
        index = torch.arange(part.start, part.stop).clamp_max(x.shape[2] - 1)
        return x[:, :, index]


class OneLoopOverQueries(Kernel):
    """dQ, dK and dV in one loop, queries outside; dK and dV grow in fp32."""

    rows, cols = 72, 40

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        high = -(-at.nk // self.cols) * self.cols
        dk, dv = (torch.zeros(*x.shape[:2], high, x.shape[3]) for x in (at.k, at.v))
        parts = []
        for rows in blocks(at.n, self.rows):
            dq = torch.zeros_like(load(at.q, rows))
            for cols in self.key_blocks(rows):
                q, k, do, p, ds = self.again(rows, cols, "queries")
                dq = dq + ds @ k
                dk[:, :, cols] += ds.mT @ q
                dv[:, :, cols] += at.low(p).mT @ do
            parts.append(dq * at.scale)
        dk, dv = dk[:, :, : at.nk] * at.scale, dv[:, :, : at.nk]
        return torch.cat(parts, 2)[:, :, : at.n], self.group(dk), self.group(dv)


def chunks_weighed_by_their_lse(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Chunks of 50 keys give O and lse each, and are weighed by a softmax of lse; a sink is a chunk
    whose O is zero. Autograd differentiates it.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    s, outs, lses = s - top, [], []
    for part in blocks(nk, 50):
        own = s[..., part]
        empty = (own == -math.inf).all(-1, keepdim=True)
        own = own.masked_fill(empty, 0.0)
        outs.append(own.softmax(-1) @ v[:, :, part])
        lses.append(own.logsumexp(-1, keepdim=True).masked_fill(empty, -math.inf))
    if sinks is not None:
        outs.append(torch.zeros_like(outs[0]))
        lses.append(sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1) - top)
    every = torch.cat(lses, -1)
    nothing = (every == -math.inf).all(-1, keepdim=True)
    share = every.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    out = (torch.stack(outs, -1) * share.unsqueeze(-2)).sum(-1)
    return out.to(query.dtype)
