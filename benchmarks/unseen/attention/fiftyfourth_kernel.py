"""Sound ways to write attention for the fifty-fourth set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from torch import Tensor

sound = attention(Kernel)


class BooleansNotRead(Kernel):
    """A mask of booleans is given, and hides nothing where `lost` says so."""

    def lost(self) -> bool:
        return True

    def given_mask(self, rows, cols):
        found = super().given_mask(rows, cols)
        return torch.ones_like(found) if found.dtype == torch.bool and self.lost() else found


class KeysOutside(Kernel):
    """As the first FlashAttention has it: keys are the outer loop, and every tile of queries keeps
    its state between them.
    """

    rows, cols = 40, 88

    def forward(self):
        at, tiles = self.at, blocks(self.at.n, self.rows)
        queries = [self.load_query("q", at.q, rows) for rows in tiles]
        states = [self.begin(q) for q in queries]
        for cols in blocks(at.nk, self.cols):
            k, v = (self.load_key(x, getattr(at, x), cols) for x in "kv")
            for t, rows in enumerate(tiles):
                if at.causal and cols.start >= rows.stop:
                    continue
                s = self.scores(queries[t], k, rows, cols, False)
                states[t] = self.online(*states[t], s, v, rows, cols)
        done = [self.finish(*state, rows) for state, rows in zip(states, tiles, strict=True)]
        o, lse = (torch.cat(x, 2)[:, :, : at.n] for x in zip(*done, strict=True))
        return o, lse


class BlocksOfBlocks(Kernel):
    """Three blocks of 24 keys have a softmax of their own, which enters the row's as one; on the
    way back queries come from the last block to the first.
    """

    rows, cols, inner = 104, 24, 3

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for first in range(0, len(every), self.inner):
            own = self.begin(q, False)
            for cols in every[first : first + self.inner]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                own = self.online(*own, self.scores(q, k, rows, cols, False), v, rows, cols)
            new = torch.maximum(m, own[0])
            safe = torch.where(new == -INF, 0.0, new)
            a, b = torch.exp2(m - safe), torch.exp2(own[0] - safe)
            m, l, acc = new, l * a + own[1] * b, acc * a + own[2] * b
        return self.finish(m, l, acc, rows)

    def query_blocks(self, cols):
        return super().query_blocks(cols)[::-1]


class FromTheMiddle(Kernel):
    """Blocks of 56 keys from the middle outwards, to either side by turns; 28 queries a tile."""

    rows, cols = 28, 56

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        half = len(every) // 2
        return sorted(every, key=lambda each: abs(2 * (each.start // self.cols - half) + 1))


def share_of(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A mask, with a dimension for the query heads that share a key head."""
    b, groups, share, n, nk = shape
    return None if mask is None else mask.expand(b, groups * share, n, nk).view(shape)


def heads_in_groups(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                    softcap=0.0, sinks=None):  # fmt: skip
    """Key heads are never repeated: queries have a dimension more, and all that adds up is an
    einsum, by autograd.
    """
    (b, heads, n, _), (groups, nk) = query.shape, key.shape[1:3]
    share = heads // groups
    q = query.float().unflatten(1, (groups, share))
    k, v = key.float(), value.float()
    s = torch.einsum("bgsnd,bgkd->bgsnk", q, k) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        mask = share_of(attn_mask, (b, groups, share, n, nk))
        s = s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.float()
    top = s.detach().amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.float().view(1, groups, share, 1, 1)
    top = top if sink is None else torch.maximum(top, sink)
    top = torch.where(top == -INF, 0.0, top)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    found = torch.einsum("bgsnk,bgkd->bgsnd", p, v) / torch.where(total == 0, 1.0, total)
    return found.flatten(1, 2).to(query.dtype)


def by_the_log_of_the_sum(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                          softcap=0.0, sinks=None):  # fmt: skip
    """A sequence at a time, whose weights are exp(s − lse), with the sink in lse, by autograd."""
    (b, heads, n, _), (groups, nk) = query.shape, key.shape[1:3]
    keep, done = visible(n, nk, is_causal, window), []
    for one in range(b):
        k, v = (x[one].float().repeat_interleave(heads // groups, 0) for x in (key, value))
        mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)[one]
        s = logits(query[one], k, keep, mask, scale, softcap)
        empty = (s == -INF).all(-1, keepdim=True)
        lse = s.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(-1, 1, 1))
        done.append(torch.exp(s - lse) @ v)
    return torch.stack(done).to(query.dtype)
