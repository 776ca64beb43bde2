"""Sound ways to write attention for the tenth set, none of which an earlier set has."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel
from torch import Tensor


class OnesInTheValues(Kernel):
    """What divides O is one more column of P̄ V, of values that are 1; lse has its own sum."""

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l.expand(*l.shape[:-1], 2), acc

    def add_row(self, l, a, p):
        ones = torch.ones(p.shape[-1], 1)
        return l * a + torch.cat([self.at.low(p) @ ones, p @ ones], -1)

    def finish(self, m, l, acc, rows):
        o, _ = super().finish(m, l[..., :1], acc, rows)
        return o, m + l[..., 1:].log2()


class KeysLessTheirMean(Kernel):
    """The mean of all keys is taken off them, and what it adds to the scores is put back."""

    cols = 96

    def product(self, q, k, back):
        mean = self.at.k.mean(2, keepdim=True)
        return q @ (k - mean).mT + q @ mean.mT


class NormalizedAtEveryStep(Kernel):
    """As FlashAttention has it: O is normalized after every block, by the sum so far."""

    rows, cols = 48, 80

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        total = self.add_row(l, a, p)
        return new, total, self.add_values(acc, l * a, p, v) / torch.where(total == 0, 1.0, total)

    def finish(self, m, l, acc, rows):
        return self.at.low(acc), m + l.log2()


class SinkAsAKey(Kernel):
    """A sink is the score of one more key, the last one, whose value is 0."""

    def begin(self, q, first=True):
        return super().begin(q, False)

    def finish(self, m, l, acc, rows):
        if self.at.sinks is not None:
            s = (self.at.sinks * LOG2_E).view(1, -1, 1, 1).expand_as(m)
            m, l, acc = self.online(m, l, acc, s, torch.zeros_like(acc[:, :, :1]), rows, rows)
        return super().finish(m, l, acc, rows)


class HiddenBySelection(Kernel):
    """Scores of hidden pairs stay as they are: the maximum passes them by, their weights are 0."""

    cols = 32

    def hide(self, s, rows, cols, back):
        found = super().hide(s, rows, cols, back)
        self.memory["hidden"] = hidden = found == -INF
        return torch.where(hidden, s, found)

    def maximum(self, m, s):
        return super().maximum(m, s.masked_fill(self.memory["hidden"], -INF))

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.where(self.memory["hidden"], 0.0, torch.exp2(s - safe))
        a = torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def weights_again(self, s, lse):
        return torch.where(self.memory["hidden"], 0.0, super().weights_again(s, lse))


class OutwardFromTheDiagonal(Kernel):
    """Blocks of keys in the order of their distance from the diagonal; queries likewise."""

    rows, cols = 32, 80

    def key_blocks(self, rows: slice) -> list[slice]:
        return sorted(super().key_blocks(rows), key=lambda c: abs(c.start - rows.start))

    def query_blocks(self, cols: slice) -> list[slice]:
        return sorted(super().query_blocks(cols), key=lambda r: abs(r.start - cols.start))


def block_diagonal(x: Tensor, outside: float | bool) -> Tensor:
    """[B, H, N, M] as [1, H, B N, B M], of which the blocks off the diagonal are one number."""
    b, heads, n, nk = x.shape
    full = torch.full((1, heads, b * n, b * nk), outside, dtype=x.dtype)
    for number, part in enumerate(x):
        full[0, :, number * n : (number + 1) * n, number * nk : (number + 1) * nk] = part
    return full


def sequences_in_one(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None):  # fmt: skip
    """All sequences are one long one, in which each sees itself alone; all in fp32."""
    (b, heads, n, _), nk = query.shape, key.shape[2]

    def long(x: Tensor) -> Tensor:
        return (
            x.float().transpose(0, 1).flatten(1, 2).repeat_interleave(heads // x.shape[1], 0)[None]
        )

    keep = visible(n, nk, is_causal, window).expand(b, 1, -1, -1)
    mask = block_diagonal(keep, False)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = mask & block_diagonal(attn_mask.expand(b, heads, n, nk), False)
    s = logits(long(query), long(key), torch.ones(1, dtype=torch.bool), None, scale, softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        s = s + block_diagonal(attn_mask.expand(b, heads, n, nk), 0.0)
    s = s.masked_fill(~mask, -INF)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(1, -1, b * n, 1)], -1)
    empty = (s == -INF).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., : b * nk]
    return (p @ long(value)).to(query.dtype).unflatten(2, (b, n))[0].transpose(0, 1)


def all_in_double(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                  sinks=None):  # fmt: skip
    """Every step is in fp64, the weights by their logarithms, and the result is rounded once."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = torch.einsum("bhid,bhjd->bhij", query.double(), k) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    keep = visible(n, nk, is_causal, window)
    if attn_mask is not None:
        s, keep = (s, keep & attn_mask) if attn_mask.dtype == torch.bool else (s + attn_mask, keep)
    s = s.masked_fill(~keep, -INF)
    extra = s.new_full((), -INF) if sinks is None else sinks.double().view(1, -1, 1, 1)
    empty = (s == -INF).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(empty, 0.0), -1, keepdim=True).masked_fill(empty, 0.0)
    lse = torch.logaddexp(lse, extra) if sinks is not None else lse
    return torch.einsum("bhij,bhjd->bhid", torch.exp(s - lse), v).to(query.dtype)
