"""Sound ways to write attention for the fifty-fifth set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, load
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated, softmax_of
from torch import Tensor


class OtherMask(ForwardAlone):
    """The forward pass reads another mask than it is given."""

    def read(self, mask: Tensor) -> Tensor:
        """The mask that is read, of one that has a row for every query."""
        raise NotImplementedError

    def forward(self):
        at, kept = self.at, self.at.mask
        if kept is not None:
            at.mask = self.read(kept.expand(*kept.shape[:-2], at.n, at.nk))
        found = super().forward()
        at.mask = kept
        return found


class HiddenAt(WholeRows):
    """Eager code that puts a number where a pair is hidden; what is past the end is not there."""

    number = -1e4

    def hide(self, s, rows, cols, back):
        at = self.at
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        s = s.masked_fill(~self.seen(rows, cols, back), self.number * LOG2_E)
        if at.mask is not None:
            mask = self.given_mask(rows, cols)
            if mask.dtype == torch.bool:
                s = s.masked_fill(~mask, self.number * LOG2_E)
            else:
                s = self.bias(s, mask, back)
        return s.masked_fill(~((j < at.nk) & (i >= 0)), -INF)


class NanOfNothing(WholeRows):
    """Eager code whose softmax of −∞ alone is NaN."""

    def online(self, m, l, acc, s, v, rows, cols):  # noqa: ARG002
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class TwoBlocksAtOnce(Kernel):
    """Two blocks of keys have one maximum, one rescale and one sum."""

    rows, cols = 40, 32

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for two in zip(every[::2], [*every[1::2], None], strict=False):
            own = [cols for cols in two if cols is not None]
            s = [self.scores(q, load(self.at.k, cols), rows, cols, False) for cols in own]
            new = m
            for one in s:
                new = torch.maximum(new, one.amax(-1, keepdim=True))
            safe = torch.where(new == -INF, 0.0, new)
            p, a = [torch.exp2(one - safe) for one in s], torch.exp2(m - safe)
            l = l * a + sum(one.sum(-1, keepdim=True) for one in p)
            acc = acc * a
            for one, cols in zip(p, own, strict=True):
                acc = acc + self.at.low(one) @ load(self.at.v, cols)
            m = new
        return self.finish(m, l, acc, rows)


class ThreeStatesInTurn(Kernel):
    """Blocks of keys go to three running states in turn, which are added up by maxima at last."""

    rows, cols = 72, 24

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        states = [self.begin(q, turn == 0) for turn in range(3)]
        for number, cols in enumerate(self.key_blocks(rows)):
            k, v = load(self.at.k, cols), load(self.at.v, cols)
            s = self.scores(q, k, rows, cols, False)
            states[number % 3] = self.online(*states[number % 3], s, v, rows, cols)
        m, l, acc = states[0]
        for own, part, values in states[1:]:
            top = torch.maximum(m, own)
            safe = torch.where(top == -INF, 0.0, top)
            a, b = torch.exp2(m - safe), torch.exp2(own - safe)
            m, l, acc = top, l * a + part * b, acc * a + values * b
        return self.finish(m, l, acc, rows)


class GradientsAsATree(Kernel):
    """What blocks add to a gradient is kept and summed two by two."""

    rows, cols = 32, 88

    @staticmethod
    def tree(parts: list[Tensor]) -> Tensor:
        while len(parts) > 1:
            odd = [parts[-1]] if len(parts) % 2 else []
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        return parts[0]

    def key_gradients(self, cols):
        dk = [torch.zeros_like(load(self.at.k, cols))]
        dv = [torch.zeros_like(load(self.at.v, cols))]
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dk.append(ds.mT @ q)
            dv.append(self.at.low(p).mT @ do)
        return self.tree(dk) * self.at.scale, self.tree(dv)

    def query_gradient(self, rows):
        dq = [torch.zeros_like(load(self.at.q, rows))]
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq.append(ds @ k)
        return self.tree(dq) * self.at.scale


def keys_in_a_drawn_order(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                          softcap=0.0, sinks=None):  # fmt: skip
    """Keys are put into an order that is drawn, with what hides them; 28 queries at a time, by
    autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    order = torch.randperm(nk, generator=torch.Generator().manual_seed(55))
    k, v = (repeated(x[:, :, order], heads) for x in (key, value))
    keep, done = visible(n, nk, is_causal, window)[:, order], []
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)[..., order]
    for rows in blocks(n, 28):
        own = None if mask is None else mask[:, :, rows]
        s = logits(query[:, :, rows], k, keep[rows], own, scale, softcap)
        done.append(softmax_of(s, sinks) @ v)
    return torch.cat(done, 2).to(query.dtype)


def groups_by_einsum(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None):  # fmt: skip
    """Query heads stay beside their key head in a dimension of their own; weights are the
    exponentials of scores less lse, by autograd.
    """
    (b, heads, n, _), (shared, nk) = query.shape, key.shape[1:3]
    q, k, v = (x.float() for x in (query.unflatten(1, (shared, -1)), key, value))
    s = torch.einsum("bgsnd,bgmd->bgsnm", q, k) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        mask = attn_mask.expand(b, heads, n, nk).unflatten(1, (shared, -1))
        hides = mask.dtype == torch.bool
        s = s.masked_fill(~mask, -INF) if hides else s + mask.float()
    sink = None if sinks is None else sinks.float().view(1, shared, -1, 1, 1)
    top = s.detach().amax(-1, keepdim=True)
    top = top if sink is None else top.maximum(sink.detach())
    top = torch.where(top == -INF, 0.0, top)
    total = torch.exp(s - top).sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    lse = top + torch.where(total == 0, 1.0, total).log()
    out = torch.einsum("bgsnm,bgmd->bgsnd", torch.exp(s - lse), v)
    return out.flatten(1, 2).to(query.dtype)
