"""Sound ways to write attention for the fifteenth set."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

from itertools import cycle

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, bf16
from torch import Tensor
from torch.nn import functional


class SinkAtTheEnd(Kernel):
    """The sink joins the row's maximum and sum after all keys have."""

    cols = 48

    def begin(self, q, first=True):
        return super().begin(q, False)

    def finish(self, m, l, acc, rows):
        if self.at.sinks is None:
            return super().finish(m, l, acc, rows)
        sink = self.at.sinks.view(1, -1, 1, 1) * LOG2_E
        top = torch.maximum(m, sink)
        a = torch.exp2(m - top)
        return super().finish(top, l * a + torch.exp2(sink - top), acc * a, rows)


class WholeMaxima(Kernel):
    """Maxima are rounded up to whole numbers, so that every rescaling is by a power of two; weights
    go to the product in two parts of eight bits.
    """

    rows, cols = 64, 40

    def maximum(self, m, s):
        return super().maximum(m, s).ceil()

    def add_values(self, acc, a, p, v):
        high = bf16(p)
        return acc * a + (high @ v + bf16(p - high) @ v)


class BlocksOfPrimes(Kernel):
    """Blocks of keys are 7, 13, 29 and 53 wide, by turns."""

    rows = 44

    def key_blocks(self, rows):
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        every, start, widths = [], 0, cycle((7, 13, 29, 53))
        while start < high:
            every.append(slice(start, start + next(widths)))
            start = every[-1].stop
        return every


class MaskedBlocksFirst(Kernel):
    """Blocks that the diagonal or the end goes through come before those that are seen whole."""

    rows, cols = 32, 32

    def key_blocks(self, rows):
        end = min(self.at.nk, rows.start + 1) if self.at.causal else self.at.nk
        return sorted(super().key_blocks(rows), key=lambda cols: cols.stop <= end)


class ReciprocalByNewton(Kernel):
    """O is multiplied by a reciprocal of eight bits after two steps of Newton's in fp32."""

    def finish(self, m, l, acc, rows):
        safe = torch.where(l == 0, 1.0, l)
        inverse = bf16(1 / safe)
        for _ in range(2):
            inverse = inverse * (2 - safe * inverse)
        return self.at.low(acc * inverse), m + l.log2()


def power_and_fraction(x: Tensor) -> Tensor:
    """2^x as the exponent's bits and a power of a number from 0 to 1."""
    x = x.clamp_min(-200)
    whole = x.floor()
    return torch.ldexp(torch.exp2(x - whole), whole)


class PowerAndFraction(Kernel):
    """Exponentials by the whole and the broken part of their exponents."""

    rows, cols = 80, 56

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = power_and_fraction(s - safe), power_and_fraction(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def weights_again(self, s, lse):
        return power_and_fraction(s - torch.where(lse == -INF, 0.0, lse))


class GradScoresApart(Kernel):
    """dS is P ∘ dP less P times δ, two products of which one is taken off the other."""

    rows, cols = 96, 48

    def grad_scores(self, p, dp, delta, slope):
        return (p * dp - p * delta) * slope


def padded_to_whole_tiles(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                          softcap=0.0, sinks=None):  # fmt: skip
    """Keys are filled up to a multiple of 64, in memory, and the mask says which there are."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    more = -nk % 64
    k, v = (functional.pad(x.float(), (0, 0, 0, more)).repeat_interleave(heads // x.shape[1], 1)
            for x in (key, value))  # fmt: skip
    keep, mask = functional.pad(visible(n, nk, is_causal, window), (0, more)), attn_mask
    if mask is not None:
        mask = functional.pad(mask.expand(*mask.shape[:-2], n, nk), (0, more))
    s = logits(query, k, keep, mask, scale, softcap)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1)], -1)
    empty = (s == -INF).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return (p[..., : nk + more] @ v).to(query.dtype)
