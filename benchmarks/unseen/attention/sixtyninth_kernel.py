"""Sound ways to write attention for the sixty-ninth set, and what its faults share."""

# ruff: noqa: ARG001, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor


class OtherMask(Kernel):
    """What a boolean mask hides is not what it says, on the way there and back."""

    def changed(self, mask: Tensor) -> Tensor:
        """What is read in place of the mask; it broadcasts."""
        raise NotImplementedError

    def forward(self):
        mask = self.at.mask
        if mask is not None and mask.dtype == torch.bool:
            self.at.mask = self.changed(mask)
        return super().forward()


def scores_of(query, key, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0):
    """The scores of all pairs, −∞ where they are hidden."""
    keep = visible(query.shape[2], key.shape[2], is_causal, window)
    return logits(query, repeated(key, query.shape[1]), keep, attn_mask, scale, softcap)


def eager(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
          sinks=None, enable_gqa=False):  # fmt: skip
    """The whole matrix at once, by autograd."""
    s = scores_of(query, key, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                  window=window, softcap=softcap)  # fmt: skip
    return (softmax_of(s, sinks) @ repeated(value, query.shape[1])).to(query.dtype)


class EveryThirdBlock(Kernel):
    """Blocks 0, 3, 6, … of the keys, then 1, 4, 7, …, then 2, 5, 8, …; queries likewise."""

    rows, cols = 56, 24

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::3] + every[1::3] + every[2::3]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[2::3] + every[1::3] + every[::3]


class MaximumFirst(Kernel):
    """Keys are gone through once for the row's maximum, and once more for sum and O, which then
    need no rescale; weights are not rounded on the way there.
    """

    rows, cols = 88, 40

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        tiles = []
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            tiles.append((self.scores(q, k, rows, cols, False), v))
        top = m
        for s, _ in tiles:
            top = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        l = l * torch.exp2(m - safe)
        for s, v in tiles:
            p = torch.exp2(s - safe)
            l, acc = l + p.sum(-1, keepdim=True), acc + p @ v
        return self.finish(top, l, acc, rows)


class MeanAsItRuns(Kernel):
    """O is the mean of the values so far, and each block moves it by its share of the new sum."""

    rows, cols = 32, 104

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        m, l, mean = self.begin(q)
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            safe = torch.where(new == -INF, 0.0, new)
            p = torch.exp2(s - safe)
            part = p.sum(-1, keepdim=True)
            l = l * torch.exp2(m - safe) + part
            over = torch.where(l == 0, 1.0, l)
            mean = mean + (p @ v - mean * part) / over
            m = new
        return self.finish(m, torch.where(l == 0, 0.0, l), mean * l, rows)


def chunks_against_one_maximum(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                               softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Chunks of 17 keys are exponentiated against the maximum of all and added up, by autograd."""
    s = scores_of(query, key, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                  window=window, softcap=softcap)  # fmt: skip
    v, top = repeated(value, query.shape[1]), s.detach().amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.float().view(1, -1, 1, 1)
    top = top if sink is None else top.maximum(sink.detach())
    top = torch.where(top == -INF, 0.0, top)
    total = 0.0 if sink is None else torch.exp(sink - top)
    out = torch.zeros(())
    for cols in blocks(key.shape[2], 17):
        p = torch.exp(s[..., cols] - top)
        total, out = total + p.sum(-1, keepdim=True), out + p @ v[:, :, cols]
    return (out / torch.where(total == 0, 1.0, total)).to(query.dtype)


def keys_from_the_last(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                       softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Keys stand in the order of the last to the first; 36 queries at a time, and the log of the
    sum is taken off the scores before they are exponentiated, by autograd.
    """
    (b, heads, n, _), nk, done = query.shape, key.shape[2], []
    k, v = repeated(key.flip(2), heads), repeated(value.flip(2), heads)
    keep = visible(n, nk, is_causal, window).flip(-1)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk).flip(-1)
    for rows in blocks(n, 36):
        own = None if mask is None else mask[:, :, rows]
        s = logits(query[:, :, rows], k, keep[rows], own, scale, softcap)
        top = s.detach().amax(-1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks.detach().float().view(1, -1, 1, 1))
        top = torch.where(top == -INF, 0.0, top)
        total = torch.exp(s - top).sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
        rest = torch.where(total == 0, 1.0, total).log()
        done.append(torch.exp(s - top - rest) @ v)
    return torch.cat(done, 2).to(query.dtype)
