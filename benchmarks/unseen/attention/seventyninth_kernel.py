"""Sound ways to write attention for the seventy-ninth set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated


class PrimeWidths(Kernel):
    """Blocks of keys are 7, 11, 13, 17 and so on wide, round and round."""

    rows, cols, widths = 36, 20, (7, 11, 13, 17, 19, 23, 29, 31)

    def key_blocks(self, rows):
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        found, first = [], 0
        while first < high:
            wide = self.widths[len(found) % len(self.widths)]
            found.append(slice(first, first + wide))
            first += wide
        return found


class FirstKeyAside(Kernel):
    """Scores are those with a block's first key, and those with what the others differ from it."""

    rows, cols = 76, 52

    def product(self, q, k, back):
        first = k[:, :, :1]
        return q @ first.mT + q @ (k - first).mT


class FeaturesBackwards(Kernel):
    """Features from the last to the first, values by odd and even columns, and rows of a tile that
    are summed from both ends.
    """

    rows, cols = 88, 36

    def product(self, q, k, back):
        return q.flip(-1) @ k.flip(-1).mT

    def add_row(self, l, a, p):
        half = p.shape[-1] // 2
        return l * a + (p[..., :half] + p[..., half:].flip(-1)).sum(-1, keepdim=True)

    def add_values(self, acc, a, p, v):
        p = self.at.low(p)
        both = torch.stack([p @ v[..., ::2], p @ v[..., 1::2]], -1)
        return acc * a + both.flatten(-2)


def chunks_of_queries_last_first(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                             window=None, softcap=0.0, sinks=None,
                             enable_gqa=False):  # fmt: skip  # noqa: ARG001
    """26 queries at a time, the last ones first, whose weights are exponentials of scores less
    their maximum and then their lse, which the sink is in; by autograd.
    """
    (_, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    k, v = repeated(key, heads), repeated(value, heads)
    keep, done = visible(n, nk, is_causal, window), []
    mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:-2], n, nk)
    for rows in blocks(n, 26)[::-1]:
        own = None if mask is None else mask[..., rows, :]
        s = logits(query[:, :, rows], k, keep[rows], own, scale, softcap)
        top = s.detach().amax(-1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks.detach().float().view(1, -1, 1, 1))
        s = s - torch.where(top == -INF, 0.0, top)
        nothing = (s == -INF).all(-1, keepdim=True)
        lse = s.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1) - top
            lse = torch.where(nothing, sink, torch.logaddexp(lse, sink))
        done.insert(0, torch.exp(s - lse) @ v)
    return torch.cat(done, 2).to(query.dtype)


def tokens_outermost(query, key, value, *, is_causal=False, scale=None, attn_mask=None,
                     window=None, softcap=0.0, sinks=None,
                     enable_gqa=False):  # fmt: skip  # noqa: ARG001
    """Everything is laid out as [N, B, H, ·], scores with the keys first of all; a sink is another
    key, whose value is zero. By autograd.
    """
    (b, heads, n, d), nk = query.shape, key.shape[2]
    scale = d**-0.5 if scale is None else scale
    q = query.float().permute(2, 0, 1, 3)
    k, v = (repeated(x, heads).permute(2, 0, 1, 3) for x in (key, value))
    s = torch.einsum("mbhd,nbhd->mnbh", k, q) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    keep = visible(n, nk, is_causal, window).T[:, :, None, None]
    s = s.masked_fill(~keep, -INF)
    if attn_mask is not None:
        mask = attn_mask.expand(b, heads, n, nk).permute(3, 2, 0, 1)
        s = s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.float()
    if sinks is not None:
        s = torch.cat([s, sinks.float().expand(1, n, b, heads)])
        v = torch.cat([v, torch.zeros_like(v[:1])])
    nothing = (s == -INF).all(0, keepdim=True)
    p = s.masked_fill(nothing, 0.0).softmax(0).masked_fill(nothing, 0.0)
    return torch.einsum("mnbh,mbhe->bhne", p, v).to(query.dtype)
