"""Sound ways to write attention for the twelfth set, none of which an earlier set has."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.eleventh_kernel import added
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, load
from torch import Tensor
from torch.nn import functional


class LanesReducedLast(Kernel):
    """Eight lanes have a sum of the row each, which are added up when all keys are done."""

    rows, cols = 48, 64

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, functional.pad(l, (0, 7)), acc

    def add_row(self, l, a, p):
        return l * a + p.unflatten(-1, (-1, 8)).sum(-2)

    def finish(self, m, l, acc, rows):
        return super().finish(m, l.sum(-1, keepdim=True), acc, rows)


class ScaledInTheExponent(Kernel):
    """The maximum is that of raw products, and the scale is multiplied in with the subtraction,
    where nothing else is done to scores.
    """

    cols = 96

    def plain(self) -> bool:
        at = self.at
        biased = at.mask is not None and at.mask.dtype != torch.bool
        return at.scale > 0 and not at.softcap and at.sinks is None and not biased

    def scaled(self, s, rows, cols, back):
        return s if self.plain() and not back else super().scaled(s, rows, cols, back)

    def online(self, m, l, acc, s, v, rows, cols):
        if not self.plain():
            return super().online(m, l, acc, s, v, rows, cols)
        factor = self.at.scale * LOG2_E
        new = self.maximum(m, s)
        less = torch.where(new == -INF, 0.0, new) * factor
        p, a = torch.exp2(s * factor - less), torch.exp2(m * factor - less)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def finish(self, m, l, acc, rows):
        m = m * (self.at.scale * LOG2_E) if self.plain() else m
        return super().finish(m, l, acc, rows)


class UnevenParts(Kernel):
    """Every tile of queries has its keys cut in two at another place, as where programs get equal
    shares of all tiles; the parts are added up before the one division.
    """

    rows, cols = 64, 32

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        cut = (rows.start // self.rows * 3 + 1) % (len(every) + 1)
        states = []
        for number, part in enumerate((every[:cut], every[cut:])):
            state = self.begin(q, number == 0)
            for cols in part:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            states.append(state)
        return self.finish(*added(*states), rows)


class GradientsByTree(Kernel):
    """What tiles give to a gradient is added up in pairs, and pairs of pairs."""

    rows, cols = 48, 48

    @staticmethod
    def tree(parts: list[Tensor]) -> Tensor:
        while len(parts) > 1:
            odd = [parts[-1]] if len(parts) % 2 else []
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        return parts[0]

    def key_gradients(self, cols):
        dk, dv = ([torch.zeros_like(load(x, cols))] for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv.append(self.at.low(p).mT @ do)
            dk.append(ds.mT @ q)
        return self.tree(dk) * self.at.scale, self.tree(dv)

    def query_gradient(self, rows):
        dq = [torch.zeros_like(load(self.at.q, rows))]
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq.append(ds @ k)
        return self.tree(dq) * self.at.scale


class TransposedBackward(Kernel):
    """The backward pass has Sᵀ, dPᵀ and dSᵀ, and adds up dQᵀ."""

    rows, cols = 64, 80

    def again(self, rows, cols, which):
        at = self.at
        q, k, do, v = (load(getattr(at, name), part) for name, part in
                       (("q", rows), ("k", cols), ("do", rows), ("v", cols)))  # fmt: skip
        s = self.scaled((k @ q.mT).mT, rows, cols, True)
        s = self.hide(self.cap(s, True), rows, cols, True).mT.contiguous()
        p = self.weights_again(s, load(at.lse, rows, INF).mT)
        slope = self.slope(q, k)
        slope = slope.mT if isinstance(slope, Tensor) else slope
        ds = p * (v @ do.mT - load(at.delta, rows).mT) * slope
        return q, k, do, p.mT, at.low(ds).mT

    def query_gradient(self, rows):
        dq = torch.zeros_like(load(self.at.q, rows)).mT
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = dq + k.mT @ ds.mT
        return dq.mT * self.at.scale


class InterleavedQueries(Kernel):
    """A tile has every so many-th query, so that tiles have equally much to do below a diagonal;
    every tile goes over all keys.
    """

    def order(self) -> Tensor:
        count = -(-self.at.n // self.rows)
        return torch.cat([torch.arange(first, self.at.n, count) for first in range(count)])

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)

    def seen(self, rows, cols, back):
        full = visible(self.at.n, self.at.nk, self.at.causal, self.at.window)
        keep = full[self.memory["order"]][rows, cols]
        missing = (0, self.cols - keep.shape[1], 0, self.rows - keep.shape[0])
        return functional.pad(keep, missing, value=False)

    def forward(self):
        at = self.at
        at.order = self.memory["order"] = self.order()
        at.q = at.q[:, :, at.order]
        if at.mask is not None:
            full = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            at.mask = full[..., at.order, :]
        o, lse = super().forward()
        back = at.order.argsort()
        return o[:, :, back], lse[:, :, back]

    def backward(self):
        at = self.at
        self.memory["order"] = at.order
        at.do, at.o, at.lse = (x[:, :, at.order] for x in (at.do, at.o, at.lse))
        dq, dk, dv = super().backward()
        return dq[:, :, at.order.argsort()], dk, dv


def einsum_by_groups(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None):  # fmt: skip
    """Key heads stay as they are: products have an axis of groups, tokens lie before heads, and the
    division is by the sum of e^s; all in fp32.
    """
    n, shared, nk = query.shape[2], *key.shape[1:3]
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    q = q.unflatten(2, (shared, -1))
    s = torch.einsum("bikgd,bjkd->bkgij", q, k).flatten(1, 2) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    hidden = torch.zeros(n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        own = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -INF) if boolean else attn_mask
        hidden = hidden + own.float()
    s = s + hidden
    m = s.amax(-1, keepdim=True) if sinks is None else s.amax(-1, keepdim=True).maximum(
        sinks.float().view(1, -1, 1, 1))  # fmt: skip
    m = torch.where(m == -INF, 0.0, m).detach()
    p = torch.exp(s - m)
    total = p.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1) - m[..., 0])
    p = p.unflatten(1, (shared, -1))
    out = torch.einsum("bkgij,bjkd->bikgd", p, v).flatten(2, 3).transpose(1, 2)
    return (out / torch.where(total == 0, 1.0, total)[..., None]).to(query.dtype)


def tiles_by_autograd(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                      softcap=0.0, sinks=None):  # fmt: skip
    """An online softmax over blocks of 56 keys in fp32, whose gradients autograd finds; the maxima
    are constants to it.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    q = query.float()  # once, so that its gradient is added up in fp32
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:-2], n, nk)
    m, l = torch.full((b, heads, n, 1), -INF), torch.zeros(b, heads, n, 1)
    if sinks is not None:
        m, l = sinks.float().view(1, -1, 1, 1).expand_as(m), l + 1
        m, l = m.detach(), l * torch.exp(m - m.detach())
    acc = torch.zeros(b, heads, n, v.shape[-1])
    for part in blocks(nk, 56):
        own = None if mask is None else mask[..., part]
        s = logits(q, k[:, :, part], keep[:, part], own, scale, softcap)
        new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp(s - safe), torch.exp(m - safe)
        m, l, acc = new, l * a + p.sum(-1, keepdim=True), acc * a + p @ v[:, :, part]
    return (acc / torch.where(l == 0, 1.0, l)).to(query.dtype)
