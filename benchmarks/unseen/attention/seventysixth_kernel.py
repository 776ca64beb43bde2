"""Sound ways to write attention for the seventy-sixth set."""

# ruff: noqa: ARG001, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks, load
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated


class ValuesABlockLater(Kernel):
    """A pipeline: the product with V of one block of keys follows on the scores of the next one."""

    rows, cols = 56, 80

    def row(self, rows):
        q, waiting = self.load_query("q", self.at.q, rows), None
        m, l, acc = self.begin(q)
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            new = self.maximum(m, s)
            safe = torch.where(new == -INF, 0.0, new)
            if waiting is not None:
                acc = acc + self.at.low(waiting[0]) @ waiting[1]
            p, a = torch.exp2(s - safe), torch.exp2(m - safe)
            m, l, acc, waiting = new, self.add_row(l, a, p), acc * a, (p, v)
        if waiting is not None:
            acc = acc + self.at.low(waiting[0]) @ waiting[1]
        return self.finish(m, l, acc, rows)


class MaximumThatLags(Kernel):
    """The maximum is only replaced where it grows by more than 4 in base 2: until then weights are
    as much larger, and so is their sum. They are not rounded on the way to the values.
    """

    rows, cols = 48, 40

    def maximum(self, m, s):
        new = super().maximum(m, s)
        return torch.where(new > m + 4, new, m)

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v


class QueryGradientsByParts(Kernel):
    """One pass over tiles, keys outside: each writes a part of dQ of its own, which are added up by
    pairs behind it.
    """

    rows, cols = 32, 72

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        high, parts, pairs = -(-at.n // self.rows) * self.rows, [], []
        for cols in blocks(at.nk, self.cols):
            dk, dv = (torch.zeros_like(load(x, cols)) for x in (at.k, at.v))
            part = torch.zeros(*at.q.shape[:2], high, at.q.shape[3])
            for rows in self.query_blocks(cols):
                q, k, do, p, ds = self.again(rows, cols, "keys")
                dv, dk = dv + at.low(p).mT @ do, dk + ds.mT @ q
                part[:, :, rows] = ds @ k
            parts.append(part)
            pairs.append((dk * at.scale, dv))
        while len(parts) > 1:
            odd = parts[len(parts) // 2 * 2 :]
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        dk, dv = (torch.cat(x, 2)[:, :, : at.nk] for x in zip(*pairs, strict=True))
        return parts[0][:, :, : at.n] * at.scale, self.group(dk), self.group(dv)


def strided_keys(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                 window=None, softcap=0.0, sinks=None):  # fmt: skip
    """Every third key makes a part, whose exponentials, less the maximum of the whole row, are
    summed and weigh its values; the parts are added up. By autograd.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        top = top.maximum(sink.detach())
    top = torch.where(top == -INF, 0.0, top)
    done = [torch.exp(s[..., part::3] - top) for part in range(3)]
    l = sum(p.sum(-1, keepdim=True) for p in done)
    o = sum(p @ v[:, :, part::3] for part, p in enumerate(done))
    l = l if sinks is None else l + torch.exp(sink - top)
    return (o / torch.where(l == 0, 1.0, l)).to(query.dtype)


def mapped_over_heads(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,
                      window=None, softcap=0.0, sinks=None):  # fmt: skip
    """One head as a function of matrices, mapped over sequences and heads; the row's sum is a
    product with ones. By autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    keep = visible(n, nk, is_causal, window)
    added = torch.zeros(n, nk).masked_fill(~keep, -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        own = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF) if hides else attn_mask
        added = added + own.float()
    sink = torch.full((heads,), -INF) if sinks is None else sinks.float()

    def one(q, k, v, extra, z):
        s = scale * (q @ k.mT)
        s = (softcap * torch.tanh(s / softcap) if softcap else s) + extra
        top = s.detach().amax(-1, keepdim=True).maximum(z.detach())
        top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(s - top)
        l = p @ torch.ones(nk, 1) + torch.exp(z - top)
        return p @ v / torch.where(l == 0, 1.0, l)

    each = torch.vmap(torch.vmap(one), in_dims=(0, 0, 0, 0, None))
    parts = query.float(), repeated(key, heads), repeated(value, heads)
    return each(*parts, added.expand(b, heads, n, nk), sink).to(query.dtype)
