"""Sound ways to write attention for the thirty-seventh set."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel


class KeysByThrees(Kernel):
    """Every third block of keys first, then the ones after those, then the rest."""

    rows, cols = 48, 32

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::3] + every[1::3] + every[2::3]


class InnerTilesFirst(Kernel):
    """Blocks of keys from the middle outwards, and blocks of queries too."""

    rows, cols = 32, 48

    @staticmethod
    def outwards(every):
        return sorted(every, key=lambda part: abs(part.start - every[len(every) // 2].start))

    def key_blocks(self, rows):
        return self.outwards(super().key_blocks(rows))

    def query_blocks(self, cols):
        return self.outwards(super().query_blocks(cols))


class EvenAndOddKeys(Kernel):
    """In a block even keys and odd keys are summed apart, and added to O one after the other."""

    rows, cols = 64, 80

    def add_row(self, l, a, p):
        return l * a + (p[..., ::2].sum(-1, keepdim=True) + p[..., 1::2].sum(-1, keepdim=True))

    def add_values(self, acc, a, p, v):
        low = self.at.low(p)
        return acc * a + low[..., ::2] @ v[:, :, ::2] + low[..., 1::2] @ v[:, :, 1::2]


def halves_of_the_keys(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None):  # fmt: skip
    """Both halves of the keys by themselves, relative to one maximum; their sums are added up."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    half, outs, sums = nk // 2, [], []
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        top = top.maximum(sinks.detach().float().view(1, -1, 1, 1))
    top = torch.where(top == -INF, 0.0, top)
    for part in (slice(0, half), slice(half, nk)):
        p = torch.exp(s[..., part] - top)
        sums.append(p.sum(-1, keepdim=True))
        outs.append(p @ v[:, :, part])
    total = sums[0] + sums[1]
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
    return ((outs[0] + outs[1]) / torch.where(total == 0, 1.0, total)).to(query.dtype)


def one_query_at_a_time(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                        softcap=0.0, sinks=None):  # fmt: skip
    """A softmax for every query, in fp32, the sink beside its scores."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1)], -1)
    done = []
    for row in s.unbind(2):
        nothing = (row == -INF).all(-1, keepdim=True)
        p = row.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        done.append(p[..., None, :nk] @ v)
    return torch.cat(done, 2).to(query.dtype)
