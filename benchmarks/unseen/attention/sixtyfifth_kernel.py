"""Sound ways to write attention for the sixty-fifth set, and what its faults share."""

# ruff: noqa: ARG001, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated
from benchmarks.unseen.attention.thirtysixth_kernel import OtherOperands
from torch import Tensor
from torch.nn import functional


class Served(OtherOperands):
    """What a cache that is read gives in place of the keys and values of a call."""

    def decodes(self) -> bool:
        """Whether there are keys of a past, which is where queries are fewer."""
        return self.at.n < self.at.nk

    def own(self, x: Tensor) -> Tensor:
        """Key heads as they were given, once each."""
        return x[:, :: self.at.groups]

    def changed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def read(self, k, v):
        return tuple(self.spread(self.changed(self.own(x))) for x in (k, v))


class Paged(Kernel):
    """Keys and values lie in a pool of pages of sixteen rows, and are loaded by a table."""

    rows, cols, page = 64, 48, 16

    def load_key(self, name, x, part):
        if name not in self.memory:
            whole = functional.pad(x, (0, 0, 0, -x.shape[2] % self.page))
            pages = whole.unflatten(2, (-1, self.page))
            chance = torch.Generator().manual_seed(len(name))
            table = torch.randperm(pages.shape[2], generator=chance)
            pool = torch.empty_like(pages)
            pool[:, :, table] = pages
            self.memory[name] = pool, table
        pool, table = self.memory[name]
        row = torch.arange(part.start, part.stop)
        inside = row < x.shape[2]
        row = row.clamp_max(x.shape[2] - 1)
        found = pool[:, :, table[row // self.page], row % self.page]
        return self.seam(name, found * inside[:, None], part)


class KeysOutside(Kernel):
    """Blocks of keys are the outer loop of the forward pass, and all queries' states are kept."""

    rows, cols = 40, 80

    def forward(self):
        at = self.at
        every = blocks(at.n, self.rows)
        queries = [self.load_query("q", at.q, rows) for rows in every]
        states, seen = [self.begin(q) for q in queries], [self.key_blocks(rows) for rows in every]
        for cols in blocks(at.nk, self.cols):
            k, v = (self.load_key(x, getattr(at, x), cols) for x in "kv")
            for number, rows in enumerate(every):
                if cols in seen[number]:
                    s = self.scores(queries[number], k, rows, cols, False)
                    states[number] = self.online(*states[number], s, v, rows, cols)
        done = [self.finish(*states[i], rows) for i, rows in enumerate(every)]
        o, lse = (torch.cat(x, 2)[:, :, : at.n] for x in zip(*done, strict=True))
        return o, lse


class MaximumFirst(Kernel):
    """Keys are gone through once for the maximum alone, so that nothing is rescaled."""

    rows, cols = 88, 24

    def row(self, rows):
        q, tiles = self.load_query("q", self.at.q, rows), []
        first, l, acc = self.begin(q)
        top = first
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            top = self.maximum(top, s)
            tiles.append((s, v, cols))
        state = top, l * torch.exp2(first - torch.where(top == -INF, 0.0, top)), acc
        for s, v, cols in tiles:
            state = self.online(*state, s, v, rows, cols)
        return self.finish(*state, rows)


def exponentials_of_log_softmax(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None,
                                enable_gqa=False):  # fmt: skip
    """The weights are exponentials of logarithms, less the logarithm of all that takes a share; a
    sink is one score more.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([sinks.float().view(1, -1, 1, 1).expand(b, heads, n, 1), s], -1)
    nothing = (s == -INF).all(-1, keepdim=True)
    p = functional.log_softmax(s.masked_fill(nothing, 0.0), -1).exp()
    return (p.masked_fill(nothing, 0.0)[..., -nk:] @ v).to(query.dtype)


def heads_of_all_sequences_in_a_row(query, key, value, *, is_causal, scale, attn_mask=None,
                                    window=None, softcap=0.0, sinks=None,
                                    enable_gqa=False):  # fmt: skip
    """Sequences and heads are one axis; all that hides is one bias, which baddbmm adds to all
    products at once.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    q = query.float().flatten(0, 1)
    k, v = (repeated(x, heads).flatten(0, 1) for x in (key, value))
    bias = torch.zeros(b, heads, n, nk)
    bias = bias.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        bias = bias.masked_fill(~attn_mask, -INF) if hides else bias + attn_mask.float()
    bias = bias.flatten(0, 1)
    if softcap:
        s = softcap * torch.tanh(torch.bmm(q, k.mT) * (scale / softcap)) + bias
    else:
        s = torch.baddbmm(bias, q, k.mT, alpha=scale)
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().repeat(b).view(-1, 1, 1)
        top = top.maximum(sink.detach())
    top = torch.where(top == -INF, 0.0, top)
    p = torch.exp(s - top)
    l = p.sum(-1, keepdim=True)
    l = l if sinks is None else l + torch.exp(sink - top)
    o = torch.bmm(p, v) / torch.where(l == 0, 1.0, l)
    return o.unflatten(0, (b, heads)).to(query.dtype)
