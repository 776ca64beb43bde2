"""Sound ways to write attention for the thirty-fifth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from torch import Tensor


class EveryBlock(Kernel):
    """All blocks are visited, whatever is hidden in them."""

    def key_blocks(self, rows):
        return blocks(self.at.nk, self.cols)

    def query_blocks(self, cols):
        return blocks(self.at.n, self.rows)


class OtherKeys(ForwardAlone):
    """The forward pass reads keys and values at wrong places."""

    def read(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self):
        kept = self.at.k, self.at.v
        self.at.k, self.at.v = (self.read(x) for x in kept)
        found = super().forward()
        self.at.k, self.at.v = kept
        return found


class ScoresTimes(Kernel):
    """Scores are a number times what they should be, in both passes."""

    def times(self) -> float:
        raise NotImplementedError

    def scaled(self, s, rows, cols, back):
        return super().scaled(s, rows, cols, back) * self.times()

    def backward(self):
        dq, dk, dv = super().backward()
        return dq * self.times(), dk * self.times(), dv

    def slope(self, q, k):
        return super().slope(q * self.times(), k)


class LastKeysOfTheCorner(EveryBlock):
    """The diagonal ends in the last key, as the libraries lay it whose layout is mistaken."""

    def causal(self, i, j, back):
        return j <= i + self.at.nk - self.at.n


def across(kind: type[Kernel], axis: int):
    """[B, H, N, D] given to a kernel that takes another axis for the tokens: along axis 1 heads
    attend to heads, along axis 0 sequences to sequences, at each token.

    What such a kernel has no argument for, or refuses, goes to a sound one.
    """
    core, sound = attention(kind), attention(Kernel)

    def call(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
             sinks=None):  # fmt: skip
        options = {"is_causal": is_causal, "scale": scale, "window": window, "softcap": softcap}
        if query.shape[2] != key.shape[2] or attn_mask is not None or sinks is not None:
            return sound(query, key, value, attn_mask=attn_mask, sinks=sinks, **options)
        turned = (x.transpose(axis, 2) for x in (query, key, value))
        return core(*turned, **options).transpose(axis, 2)

    return call


# --- sound ways
class EvenBlocksFirst(Kernel):
    """Every second block of keys, and then those between them."""

    rows, cols = 48, 40

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[::2] + every[1::2]


class TwoAccumulators(Parts):
    """Two states take blocks of 24 keys by turns, and are merged at the end."""

    rows, cols, parts = 80, 24, 2


class HalvesOfTheOutput(Kernel):
    """Keys are gone through once for the first half of O's columns, and again for the other."""

    rows, cols = 64, 32

    def row(self, rows):
        whole, halves = self.at.v, []
        for part in whole.chunk(2, -1):
            self.at.v = part
            halves.append(super().row(rows))
        self.at.v = whole
        return torch.cat([o for o, _ in halves], -1), halves[0][1]


def values_less_their_mean(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                           softcap=0.0, sinks=None):  # fmt: skip
    """The mean of V is taken off, and put back by the weight that a row has in all, by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1)], -1)
    nothing = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)[..., :nk]
    mean = v.mean(2, keepdim=True)
    return (p @ (v - mean) + p.sum(-1, keepdim=True) * mean).to(query.dtype)


def keys_less_their_mean(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """Queries meet keys less their mean, and that mean by itself, by autograd."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    mean = k.mean(2, keepdim=True)
    q = query.float() * scale
    s = q @ (k - mean).mT + q @ mean.mT
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -INF) if boolean else s + attn_mask.float()
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        top = top.maximum(sinks.detach().float().view(1, -1, 1, 1))
    top = torch.where(top == -INF, 0.0, top)
    p = torch.exp(s - top)
    l = p.sum(-1, keepdim=True)
    if sinks is not None:
        l = l + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
    return (p @ v / torch.where(l == 0, 1.0, l)).to(query.dtype)
