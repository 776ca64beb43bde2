"""Sound ways to write attention for the sixty-eighth set, and what its faults share."""

# ruff: noqa: ARG001, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from torch import Tensor


class OtherMask(ForwardAlone):
    """The forward pass reads another mask of booleans than it is given."""

    def read(self, mask: Tensor) -> Tensor:
        """What is read of a mask that has a row for every query."""
        raise NotImplementedError

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None and kept.dtype == torch.bool:
            at.mask = self.read(kept.expand(*kept.shape[:-2], at.n, at.nk))
        found = super().forward()
        at.mask = kept
        return found


class WeightsInTwoParts(Kernel):
    """Weights are the sum of two numbers of the operands' format, each with its own product."""

    rows, cols = 88, 56

    def add_values(self, acc, a, p, v):
        high = self.at.low(p)
        return acc * a + high @ v + self.at.low(p - high) @ v


class EachTileBeginsElsewhere(Kernel):
    """Tiles of queries begin at different blocks of keys, and go round; tiles of keys likewise."""

    rows, cols = 56, 40

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        first = 3 * (rows.start // self.rows) % max(len(every), 1)
        return every[first:] + every[:first]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        first = 2 * (cols.start // self.cols) % max(len(every), 1)
        return every[first:] + every[:first]


class GradientsBySixteenFeatures(Kernel):
    """Gradients are made sixteen features at a time, each of them with weights of its own."""

    rows, cols = 40, 72

    def key_gradients(self, cols):
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            low = self.at.low(p).mT
            dv = dv + torch.cat([low @ part for part in do.split(16, -1)], -1)
            dk = dk + torch.cat([ds.mT @ part for part in q.split(16, -1)], -1)
        return dk * self.at.scale, dv

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = dq + torch.cat([ds @ part for part in k.split(16, -1)], -1)
        return dq * self.at.scale


def by_running_logarithms(query, key, value, *, is_causal, scale, attn_mask=None,
                          enable_gqa=False, window=None, softcap=0.0, sinks=None):  # fmt: skip
    """The last of the running log-sums of exponentials is a row's lse; by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1), s], -1)
    nothing = (s == -INF).all(-1, keepdim=True)
    top = s.detach().amax(-1, keepdim=True).masked_fill(nothing, 0.0)
    s = (s - top).clamp_min(-200.0)  # a running logarithm of −∞ has no gradient
    lse = torch.logcumsumexp(s, -1)[..., -1:]
    p = torch.exp(s - lse).masked_fill(nothing, 0.0)
    return (p[..., s.shape[-1] - nk :] @ v).to(query.dtype)


def batched_products_with_alpha(query, key, value, *, is_causal, scale, attn_mask=None,
                                enable_gqa=False, window=None, softcap=0.0,
                                sinks=None):  # fmt: skip
    """Heads of all sequences are one batch, whose products are scaled as they are made; 32 queries
    at a time, by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q, k, v = (x.flatten(0, 1) for x in (query.float(), repeated(key, heads),
                                         repeated(value, heads)))  # fmt: skip
    hidden = torch.zeros(n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        own = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF) if hides else attn_mask
        hidden = hidden + own.float()
    hidden = hidden.expand(b, heads, n, nk).flatten(0, 1)
    done = []
    for part, keep in zip(q.split(32, 1), hidden.split(32, 1), strict=True):
        s = torch.baddbmm(part.new_zeros(()), part, k.mT, beta=0, alpha=scale)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s + keep
        top = s.detach().amax(-1, keepdim=True)
        sink = None if sinks is None else sinks.float().repeat(b).view(-1, 1, 1)
        top = top if sink is None else top.maximum(sink.detach())
        p = torch.exp(s - torch.where(top == -INF, 0.0, top))
        l = p.sum(-1, keepdim=True)
        l = l if sink is None else l + torch.exp(sink - top)
        done.append(torch.bmm(p, v) / torch.where(l == 0, 1.0, l))
    return torch.cat(done, 1).unflatten(0, (b, heads)).to(query.dtype)
