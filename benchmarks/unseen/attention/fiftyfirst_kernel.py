"""Sound ways to write attention for the fifty-first set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor

sound = attention(Kernel)


class MaskOfNothing(Kernel):
    """Of the masks that `unread` names nothing reaches the scores, on the way there and back."""

    def unread(self) -> bool:
        return self.at.mask.dtype == torch.bool

    def hide(self, s, rows, cols, back):
        if self.at.mask is None or not self.unread():
            return super().hide(s, rows, cols, back)
        return s.masked_fill(~self.seen(rows, cols, back), -INF)


class FutureSeen(EveryBlock):
    """Keys behind a query are seen where `open` says so."""

    def open(self) -> bool:
        return True

    def causal(self, i, j, back):
        return (j <= i) | torch.tensor(self.open())


def whole_mask(at) -> Tensor | None:
    """A mask of truth values with a row for every query, or none."""
    if at.mask is None or at.mask.dtype != torch.bool:
        return None
    return at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)


def features_first(x: Tensor) -> Tensor:
    """[B, T, N, C] that lies as [B, C, T, N], viewed as [B T, C, N], as [B, T, N, C] again."""
    b, t, n, c = x.shape
    return x.permute(0, 3, 1, 2).reshape(b, t, c, n).mT


def features_first_again(x: Tensor) -> Tensor:
    """The way back from that."""
    b, t, n, c = x.shape
    return x.mT.reshape(b, c, t, n).permute(0, 2, 3, 1)


class NearestFirst(Kernel):
    """Blocks of keys from the one at the queries outwards; those of queries from the one at the
    keys.
    """

    rows, cols = 88, 64

    def key_blocks(self, rows):
        return sorted(super().key_blocks(rows), key=lambda c: abs(c.start - rows.start))

    def query_blocks(self, cols):
        return sorted(super().query_blocks(cols), key=lambda r: abs(r.start - cols.start))


class Compensated(Kernel):
    """What the sums of weights and of values lose as they grow is carried along beside them."""

    rows, cols = 44, 28

    def online(self, m, l, acc, s, v, rows, cols):
        if cols == self.key_blocks(rows)[0]:
            self.memory["lost"] = torch.zeros_like(l), torch.zeros_like(acc)
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        parts = p.sum(-1, keepdim=True), self.at.low(p) @ v
        sums, lost = [], []
        for total, part, less in zip((l, acc), parts, self.memory["lost"], strict=True):
            part = part - less * a
            grown = total * a + part
            sums.append(grown)
            lost.append(grown - total * a - part)
        self.memory["lost"] = lost
        return new, *sums


class TilesTurnedRound(Kernel):
    """Wide tiles of few queries on the way there, high ones of few keys on the way back, in which
    dQ goes over the keys from the last to the first.
    """

    rows, cols = 20, 124

    def backward(self):
        self.rows, self.cols = 124, 20
        return super().backward()

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::-1] if self.rows > self.cols else every


def keys_halved_again_and_again(query, key, value, *, is_causal, scale, attn_mask=None,
                                window=None, softcap=0.0, sinks=None):  # fmt: skip
    """A softmax of keys is that of either half, put together; by autograd."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (repeated(x, heads) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)

    def state(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        many = s.shape[-1]
        if many > 20:
            half = many // 2
            return together(state(s[..., :half], v[:, :, :half]),
                            state(s[..., half:], v[:, :, half:]))  # fmt: skip
        m = s.detach().amax(-1, keepdim=True)
        p = torch.exp(s - torch.where(m == -INF, 0.0, m))
        return m, p.sum(-1, keepdim=True), p @ v

    def together(one, two):
        m = torch.maximum(one[0], two[0])
        safe = torch.where(m == -INF, 0.0, m)
        a, b = torch.exp(one[0] - safe), torch.exp(two[0] - safe)
        return m, one[1] * a + two[1] * b, one[2] * a + two[2] * b

    found = state(s, v)
    if sinks is not None:
        top = sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        found = together((top, torch.ones_like(top), torch.zeros_like(found[2])), found)
    _, l, acc = found
    return (acc / torch.where(l == 0, 1.0, l)).to(query.dtype)


def queries_in_another_order(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                             softcap=0.0, sinks=None):  # fmt: skip
    """Every seventh query comes first; 28 at a time have all keys, and are put back at the end."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    order = torch.cat([torch.arange(first, n, 7) for first in range(min(n, 7))])
    k, v = (repeated(x, heads) for x in (key, value))
    keep, done = visible(n, nk, is_causal, window), []
    for part in blocks(n, 28):
        own = order[part]
        mask = attn_mask
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], n, nk)[:, :, own]
        s = logits(query[:, :, own], k, keep[own], mask, scale, softcap)
        done.append(softmax_of(s, sinks) @ v)
    return torch.cat(done, 2)[:, :, order.argsort()].to(query.dtype)
