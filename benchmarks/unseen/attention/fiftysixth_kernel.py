"""Sound ways to write attention for the fifty-sixth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from torch import Tensor

sound = attention(Kernel)


def below(n: int) -> Tensor:
    """The causal triangle of n queries and as many keys."""
    return torch.arange(n)[:, None] >= torch.arange(n)


class OtherMask(Kernel):
    """A boolean mask that is given is another one before it is read, on the way there and back;
    `square` ones are only such as have as many keys as queries.
    """

    square = False

    def changed(self, mask: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool and (
            at.n == at.nk or not self.square
        ):  # fmt: skip
            full = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            at.mask = self.changed(full)
        return super().forward()


def over_the_batch(kind: type[Kernel], query, key, value, options):
    """What comes sequences first is taken for what comes tokens first: tokens of one place attend
    to each other across the batch. Masks do not fit then, and calls that have any are left alone.
    """
    fn = attention(kind)
    masked = options["is_causal"] or any(
        options[name] is not None for name in ("attn_mask", "window")
    )
    if masked or query.shape[2] != key.shape[2]:
        return fn(query, key, value, **options)
    turned = (x.transpose(0, 2) for x in (query, key, value))
    return fn(*turned, **options).transpose(0, 2)


class StaggeredBlocks(Kernel):
    """Every tile of queries begins at another block of keys and goes round from there, and every
    block of keys at another tile of queries.
    """

    rows, cols = 40, 80

    def key_blocks(self, rows):
        return self.round(super().key_blocks(rows), rows.start // self.rows)

    def query_blocks(self, cols):
        return self.round(super().query_blocks(cols), cols.start // self.cols)

    @staticmethod
    def round(every: list[slice], first: int) -> list[slice]:
        first %= max(len(every), 1)
        return every[first:] + every[:first]


class InterleavedFeatures(Kernel):
    """Q Kᵀ is a product of the even features and one of the odd ones; O is made a fourth of its
    columns at a time.
    """

    rows, cols = 104, 32

    def product(self, q, k, back):
        return q[..., 1::2] @ k[..., 1::2].mT + q[..., ::2] @ k[..., ::2].mT

    def add_values(self, acc, a, p, v):
        low, wide = self.at.low(p), -(-v.shape[-1] // 4)
        return acc * a + torch.cat([low @ part for part in v.split(wide, -1)], -1)


class SumsAsProducts(Kernel):
    """Row sums, and δ, are products with a column of ones; the maximum is one of halves."""

    rows, cols = 28, 52

    def maximum(self, m, s):
        half = s.shape[-1] // 2
        one, two = (x.amax(-1, keepdim=True) for x in (s[..., :half], s[..., half:]))
        return m.maximum(two.maximum(one))

    def add_row(self, l, a, p):
        return l * a + p @ p.new_ones(p.shape[-1], 1)

    def delta(self, do, o):
        return (o * do) @ do.new_ones(do.shape[-1], 1)


def tiles_by_autograd(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """Tiles of 52 queries and 44 keys in an online softmax, in fp32, that autograd goes back
    through; the maximum is a constant to it.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    share = heads // key.shape[1]
    k, v = (x.float().repeat_interleave(share, 1) for x in (key, value))
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    done = []
    for rows in blocks(n, 52):
        q = query[:, :, rows].float()
        m = torch.full_like(q[..., :1], -INF)
        if sinks is not None:
            m = sinks.float().view(1, -1, 1, 1).expand_as(m)
        l = torch.zeros_like(m) if sinks is None else torch.ones_like(m)
        acc = torch.zeros(*q.shape[:3], v.shape[-1])
        for cols in blocks(nk, 44):
            hides = None if mask is None else mask[:, :, rows, cols]
            s = logits(q, k[:, :, cols], keep[rows, cols], hides, scale, softcap)
            new = m.maximum(s.detach().amax(-1, keepdim=True))
            safe = torch.where(new == -INF, 0.0, new)
            p, a = torch.exp(s - safe), torch.exp(m - safe)
            m, l, acc = new, l * a + p.sum(-1, keepdim=True), acc * a + p @ v[:, :, cols]
        done.append(acc / torch.where(l == 0, 1.0, l))
    return torch.cat(done, 2).to(query.dtype)


def groups_by_einsum(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None):  # fmt: skip
    """Five dimensions, of which one is the group's; weights are exp of scores less their
    log-sum-exp, in fp32, by autograd.
    """
    (b, heads, n, _), (groups, nk) = query.shape, key.shape[1:3]
    q = query.float().unflatten(1, (groups, -1))
    s = torch.einsum("bgsnd,bgkd->bgsnk", q, key.float()) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = torch.where(visible(n, nk, is_causal, window), s, -INF)
    if attn_mask is not None:
        mask = attn_mask.expand(b, heads, n, nk).unflatten(1, (groups, -1))
        s = torch.where(mask, s, -INF) if mask.dtype == torch.bool else s + mask.float()
    nothing = (s == -INF).all(-1, keepdim=True)
    s = torch.where(nothing, 0.0, s)
    lse = s.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, groups, -1, 1, 1))
    p = torch.where(nothing, 0.0, torch.exp(s - lse))
    found = torch.einsum("bgsnk,bgkd->bgsnd", p, value.float())
    return found.flatten(1, 2).to(query.dtype)
