"""Two more ways to write attention, beside the fifth set's tiles: O divided at every step, as
FlashAttention 1 keeps it, and all weights kept for the backward pass, as code without tiles does.
"""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from torch import Tensor


class Divided(Kernel):
    """FlashAttention, algorithm 1: what is accumulated is O itself, divided by the sum so far."""

    rows, cols = 32, 64

    def online(self, m, l, acc, s, v, rows: slice, cols: slice):
        new = self.seam("row_max", self.maximum(m, s), rows, cols)
        safe = torch.where(new == -INF, 0.0, new)
        p = self.seam("weights", torch.exp2(s - safe), rows, cols)
        a = self.seam("rescale", torch.exp2(m - safe), rows, cols)
        total = self.seam("row_sum", self.add_row(l, a, p), rows, cols)
        o = self.add_values(acc * l, a, p, v) / torch.where(total == 0, 1.0, total)
        return new, total, self.seam("accumulator", o, rows, cols)

    def finish(self, m: Tensor, l: Tensor, acc: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return self.at.low(self.seam("out", acc, rows)), self.seam("lse", m + l.log2(), rows)


class Kept(Kernel):
    """llm.c's first kernels: every weight is divided, kept, and read by the backward pass."""

    def key_blocks(self, rows: slice) -> list[slice]:  # noqa: ARG002
        return [slice(0, self.at.nk)]

    def forward(self) -> tuple[Tensor, Tensor]:
        at, rows, cols = self.at, slice(0, self.at.n), slice(0, self.at.nk)
        q = self.load_query("q", at.q, rows)
        k, v = (self.load_key(x, getattr(at, x), cols) for x in "kv")
        s = self.scores(q, k, rows, cols, False)
        before, l, _ = self.begin(q)
        m = self.seam("row_max", self.maximum(before, s), rows, cols)
        safe = torch.where(m == -INF, 0.0, m)
        p = self.seam("weights", torch.exp2(s - safe), rows, cols)
        l = self.seam("row_sum", self.add_row(l, torch.exp2(before - safe), p), rows, cols)
        at.kept = self.seam("normalized", p / torch.where(l == 0, 1.0, l), rows, cols)
        return at.low(self.seam("out", at.kept @ v, rows)), m + l.log2()

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        at, rows, cols = self.at, slice(0, self.at.n), slice(0, self.at.nk)
        q, do = self.load_query("b_q", at.q, rows), self.load_query("do", at.do, rows)
        k, v = self.load_key("b_k", at.k, cols), self.load_key("b_v", at.v, cols)
        p = self.seam("b_weights", at.kept, rows, cols)
        dp = self.seam("dp", do @ v.mT, rows, cols)
        delta = self.seam("delta", (dp * p).sum(-1, keepdim=True), rows)
        ds = self.seam("ds", self.grad_scores(p, dp, delta, self.slope(q, k)), rows, cols)
        dq = self.seam("dq", at.low(ds) @ k * at.scale, rows)
        dk = self.seam("dk", at.low(ds).mT @ q * at.scale, cols)
        return dq, self.group(dk), self.group(self.seam("dv", p.mT @ do, cols))


STYLES: dict[str, type[Kernel]] = {"tiles": Kernel, "divided": Divided, "kept": Kept}


def dense(x: Tensor) -> Tensor:
    """What lies in memory, read as if it were contiguous."""
    strides, size = [], 1
    for n in reversed(x.shape):
        strides.insert(0, size)
        size *= n
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x if x.is_contiguous() or room < size else torch.as_strided(x, x.shape, strides)


def as_tokens(x: Tensor) -> Tensor:
    """Heads and tokens taken for each other: [B, T, H, …] in memory, read as [B, H, T, …]."""
    return x.transpose(1, 2).contiguous().view(x.shape)
