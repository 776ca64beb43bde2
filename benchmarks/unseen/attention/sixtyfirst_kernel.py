"""Sound ways to write attention for the sixty-first set, and what its faults share."""

# ruff: noqa: ARG001, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from torch import Tensor


class OutMadeAgain(Kernel):
    """The backward pass keeps nothing of the forward pass: it makes O and lse once more, by other
    tiles, and δ of an O that was never rounded.
    """

    rows, cols = 48, 112

    def backward(self):
        at = self.at
        own = Kernel(**vars(at))
        own.rows, own.cols, own.at.low = 32, 56, lambda x: x
        at.o, at.lse = own.forward()
        return super().backward()


class LostBitsCarried(Kernel):
    """Gradients are sums by Kahan: what an addition lost goes into the next one."""

    rows, cols = 80, 48

    def add(self, name, total, part, rows, cols):
        place = (cols if name in ("dk_acc", "dv_acc") else rows).start
        lost = self.memory.get((name, place), torch.zeros_like(total))
        part = part - lost
        found = total + part
        self.memory[name, place] = (found - total) - part
        return found


class QueriesInTwoHalves(Kernel):
    """dK and dV are made twice, of the earlier blocks of queries and of the later ones, and dQ of
    every third block of keys by itself; then they are added.
    """

    rows, cols = 40, 40

    def key_gradients(self, cols):
        every = self.query_blocks(cols)
        middle = len(every) // 2
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for some in (every[middle:], every[:middle]):
            own_k, own_v = torch.zeros_like(dk), torch.zeros_like(dv)
            for rows in some:
                q, _, do, p, ds = self.again(rows, cols, "keys")
                own_k, own_v = own_k + ds.mT @ q, own_v + self.at.low(p).mT @ do
            dk, dv = dk + own_k, dv + own_v
        return dk * self.at.scale, dv

    def query_gradient(self, rows):
        every, dq = self.key_blocks(rows), torch.zeros_like(load(self.at.q, rows))
        for first in range(3):
            own = torch.zeros_like(dq)
            for cols in every[first::3]:
                _, k, _, _, ds = self.again(rows, cols, "queries")
                own = own + ds @ k
            dq = dq + own
        return dq * self.at.scale


class _Formula(torch.autograd.Function):
    """Softmax of whole scores, and dS = P ∘ (dP − rowsum(P ∘ dP)) on the way back."""

    @staticmethod
    def forward(ctx, s: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        top = s.amax(-1, keepdim=True)
        top = top if sink is None else top.maximum(sink)
        top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        total = total if sink is None else total + torch.exp(sink - top)
        p = p / torch.where(total == 0, 1.0, total)
        ctx.save_for_backward(p, v)
        return p @ v

    @staticmethod
    def backward(ctx, do: Tensor):
        p, v = ctx.saved_tensors
        dp = do @ v.mT
        return p * (dp - (p * dp).sum(-1, keepdim=True)), p.mT @ do, None


def by_the_formula(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                   softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """One softmax of all scores, whose gradient is the textbook's."""
    heads, n, nk = query.shape[1], query.shape[2], key.shape[2]
    keep = visible(n, nk, is_causal, window)
    s = logits(query, repeated(key, heads), keep, attn_mask, scale, softcap)
    sink = None if sinks is None else sinks.float().view(1, -1, 1, 1)
    return _Formula.apply(s, repeated(value, heads), sink).to(query.dtype)


def shards(query, key, value, width: int, *, is_causal, scale, attn_mask=None, window=None,
           softcap=0.0, sinks=None) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """O of every shard of keys, and its natural lse less the row's largest score; the sinks are the
    first one's.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    every = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = every.detach().amax(-1, keepdim=True)
    top, outs, lses = torch.where(top == -INF, 0.0, top), [], []
    for part in blocks(nk, width):
        s, values = every[..., part] - top, v[:, :, part]
        if sinks is not None and part.start == 0:
            sink = sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1) - top
            s = torch.cat([s, sink], -1)
        empty = (s == -INF).all(-1, keepdim=True)
        s = s.masked_fill(empty, 0.0)
        p = s.softmax(-1).masked_fill(empty, 0.0)
        outs.append(p[..., : values.shape[2]] @ values)
        lses.append(s.logsumexp(-1, keepdim=True).masked_fill(empty, -INF))
    return outs, lses


def together(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """O of all shards, which are weighed by their lse."""
    every = torch.stack(lses)
    nothing = (every == -INF).all(0)
    share = every.masked_fill(nothing, 0.0).softmax(0).masked_fill(nothing, 0.0)
    return (torch.stack(outs) * share).sum(0)


def ring_by_autograd(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip
    """Shards of 44 keys come by from the last to the first, and O and lse move on with each; by
    autograd, through lse as well.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap, "sinks": sinks}  # fmt: skip
    outs, lses = shards(query, key, value, 44, **options)
    o, lse = outs.pop(), lses.pop()
    while outs:
        own, new = outs.pop(), lses.pop()
        nothing, first = new == -INF, lse == -INF
        apart = (new.masked_fill(nothing, 0.0) - lse.masked_fill(first, 0.0)).masked_fill(
            nothing | first, 0.0
        )
        part = torch.where(first, 1.0, torch.where(nothing, 0.0, torch.sigmoid(apart)))
        o = o + part * (own - o)
        merged = lse.masked_fill(first, 0.0) + torch.nn.functional.softplus(apart)
        lse = torch.where(first, new, torch.where(nothing, lse, merged))
    return o.to(query.dtype)
