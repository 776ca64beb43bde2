"""Sound ways to write attention for the forty-fifth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

from typing import Any

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth import Parts
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor

sound = attention(Kernel)


class Dropped(Kernel):
    """Weights are dropped by chance, and the others are larger by as much; the way back drops the
    same ones.
    """

    chance = 0.1

    def forward(self):
        self.at.kept = {}
        return super().forward()

    def kept(self, rows: slice, cols: slice | None) -> Tensor:
        place = rows.start, cols.start if cols else 0
        if place not in self.at.kept:
            drawn = torch.rand(*self.at.q.shape[:2], self.rows, self.cols) >= self.chance
            self.at.kept[place] = drawn / (1 - self.chance)
        return self.at.kept[place]

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe), torch.exp2(m - safe)
        values = self.add_values(acc, a, p * self.kept(rows, cols), v)
        return new, self.add_row(l, a, p), values

    def seam(self, name, x, rows, cols=None):
        return x * self.kept(rows, cols) if name == "dp" else x

    def again(self, rows, cols, which):
        q, k, do, p, ds = super().again(rows, cols, which)
        return q, k, do, p * self.kept(rows, cols), ds


class NoWindowOfTheLast(ForwardAlone):
    """Of a sequence the later queries are steps of decoding, which see all that is before them."""

    decoded = 2

    def window(self, i, j, back):
        steps = i >= self.at.n - self.at.n // self.decoded
        return super().window(i, j, back) | (steps & (j <= i))


def eager(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor:
    """Natural scores of all queries and keys, in fp32, of what the options hide −∞."""
    keep = visible(query.shape[2], key.shape[2], options["is_causal"], options["window"])
    k = repeated(key, query.shape[1])
    mask, scale, cap = options["attn_mask"], options["scale"], options["softcap"]
    return logits(query.float(), k, keep, mask, scale, cap)


# --- sound kernels
class DiagonalFirst(Kernel):
    """The last block of keys comes first, and then the others from the first on."""

    rows, cols = 52, 36

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        return every[-1:] + every[:-1]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[1:] + every[:1]


class SixParts(Parts):
    """Blocks of 20 keys are dealt to six parts, which are merged by their lse."""

    rows, cols, parts = 68, 20, 6


class FeaturesBySixteen(Kernel):
    """Q Kᵀ and dO Vᵀ are not of one product: scores are summed over 16 features at a time, from
    the last of them on.
    """

    rows, cols = 100, 60

    def product(self, q, k, back):
        pairs = list(zip(q.split(16, -1), k.split(16, -1), strict=True))
        return sum(a @ b.mT for a, b in pairs[::-1])


def keys_as_rows(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                 sinks=None):  # fmt: skip
    """Scores lie on their side, K Qᵀ, a sink is one more row of them, and O comes out as Vᵀ P; by
    autograd.
    """
    options = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "window": window,
               "softcap": softcap}  # fmt: skip
    s = eager(query, key, options).mT
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(*s.shape[:2], 1, s.shape[3])
        s = torch.cat([sink, s], 2)
    top = s.detach().amax(2, keepdim=True)
    p = torch.exp(s - torch.where(top == -INF, 0.0, top))
    total = p.sum(2, keepdim=True)
    p = p[:, :, p.shape[2] - key.shape[2] :] / torch.where(total == 0, 1.0, total)
    return (repeated(value, query.shape[1]).mT @ p).mT.to(query.dtype)


def sequences_apart(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                    softcap=0.0, sinks=None):  # fmt: skip
    """One sequence after the other, 70 queries at a time, by autograd."""
    (b, heads, n, _), nk = query.shape, key.shape[2]
    keep, done = visible(n, nk, is_causal, window), []
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    for one in range(b):
        k, v = (repeated(x[one, None], heads) for x in (key, value))
        parts = []
        for rows in blocks(n, 70):
            own = None if mask is None else mask[one, None, :, rows]
            s = logits(query[one, None, :, rows].float(), k, keep[rows], own, scale, softcap)
            parts.append(softmax_of(s, sinks) @ v)
        done.append(torch.cat(parts, 2))
    return torch.cat(done).to(query.dtype)
