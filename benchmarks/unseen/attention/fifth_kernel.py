"""Attention as the fifth set of unseen faults has it: FlashAttention-2 as Triton kernels write it.

Blocks are loaded at their full width, filled up with zeros past the end, and hidden by index; the
backward pass is two kernels, one for dK and dV and one for dQ. Every intermediate passes a seam
under its name, and every step that authors get wrong is a method.
"""

# ruff: noqa: ARG002, D102 - steps are named for what they compute, and are given all of it

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

INF, LOG2_E = math.inf, math.log2(math.e)


def to(fmt: torch.dtype):
    return lambda x: x.to(fmt).float()


bf16, fp16, e4m3 = map(to, (torch.bfloat16, torch.float16, torch.float8_e4m3fn))


def cut(x: Tensor, bits: int = 16) -> Tensor:
    """The lowest bits of an fp32 number cleared."""
    return (x.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)


def blocks(n: int, width: int) -> list[slice]:
    """Blocks of one width; the last one may end past n."""
    return [slice(i, i + width) for i in range(0, n, width)]


def load(x: Tensor, part: slice, fill: float = 0.0) -> Tensor:
    found = x[:, :, part]
    missing = part.stop - part.start - found.shape[2]
    return functional.pad(found, (0, 0, 0, missing), value=fill) if missing else found


class Kernel:
    """One call: its tensors and options lie in `at`, what a fault remembers in `memory`."""

    rows, cols = 64, 64

    def __init__(self, **at: Any) -> None:
        self.at, self.memory = SimpleNamespace(**at), {}

    def seam(self, name: str, x: Tensor, rows: slice, cols: slice | None = None) -> Tensor:
        return x

    # --- what is loaded, visited and seen
    def load_key(self, name: str, x: Tensor, part: slice) -> Tensor:
        return self.seam(name, load(x, part), part)

    def load_query(self, name: str, x: Tensor, part: slice) -> Tensor:
        return self.seam(name, load(x, part), part)

    def key_blocks(self, rows: slice) -> list[slice]:
        high = min(self.at.nk, rows.stop) if self.at.causal else self.at.nk
        return [c for c in blocks(self.at.nk, self.cols) if c.start < high]

    def query_blocks(self, cols: slice) -> list[slice]:
        every = blocks(self.at.n, self.rows)
        return [r for r in every if not self.at.causal or r.stop > cols.start]

    def causal(self, i: Tensor, j: Tensor, back: bool) -> Tensor:
        return j <= i

    def window(self, i: Tensor, j: Tensor, back: bool) -> Tensor:
        left, right = self.at.window
        keep = j >= i - left if left >= 0 else j >= 0
        return keep & (j <= i + right) if right >= 0 else keep & (i >= 0)

    def inside(self, j: Tensor, back: bool) -> Tensor:
        return j < self.at.nk

    def seen(self, rows: slice, cols: slice, back: bool) -> Tensor:
        i = torch.arange(rows.start, rows.stop)[:, None]
        j = torch.arange(cols.start, cols.stop)[None]
        keep = self.inside(j, back).expand(i.shape[0], -1)
        if self.at.causal:
            keep = keep & self.causal(i, j, back)
        return keep & self.window(i, j, back) if self.at.window is not None else keep

    def given_mask(self, rows: slice, cols: slice) -> Tensor:
        mask = self.at.mask
        full = mask.expand(*mask.shape[:-2], self.at.n, self.at.nk)[..., rows, cols]
        high, wide = rows.stop - rows.start, cols.stop - cols.start
        missing = (0, wide - full.shape[-1], 0, high - full.shape[-2])
        return functional.pad(full, missing, value=False if mask.dtype == torch.bool else 0.0)

    def bias(self, s: Tensor, mask: Tensor, back: bool) -> Tensor:
        return s + mask.float() * LOG2_E

    def hide(self, s: Tensor, rows: slice, cols: slice, back: bool) -> Tensor:
        s = s.masked_fill(~self.seen(rows, cols, back), -INF)
        if self.at.mask is None:
            return s
        mask = self.given_mask(rows, cols)
        return s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else self.bias(s, mask, back)

    # --- scores, in base 2
    def product(self, q: Tensor, k: Tensor, back: bool) -> Tensor:
        return q @ k.mT

    def scaled(self, s: Tensor, rows: slice, cols: slice, back: bool) -> Tensor:
        return s * (self.at.scale * LOG2_E)

    def cap(self, s: Tensor, back: bool) -> Tensor:
        c = self.at.softcap * LOG2_E
        return c * torch.tanh(s / c) if c else s

    def scores(self, q: Tensor, k: Tensor, rows: slice, cols: slice, back: bool) -> Tensor:
        s = self.product(q, k, back)
        s = s if back else self.seam("product", s, rows, cols)
        s = self.cap(self.scaled(s, rows, cols, back), back)
        s = self.seam("b_scores" if back else "scores", s, rows, cols)
        return self.hide(s, rows, cols, back)

    # --- forward
    def begin(self, q: Tensor, first: bool = True):
        m = torch.full_like(q[..., :1], -INF)
        l, acc = torch.zeros_like(m), torch.zeros_like(q[..., :1]) * self.at.v[:, :, :1]
        if self.at.sinks is None or not first:
            return m, l, acc
        return m.fill_(0) + self.at.sinks.view(1, -1, 1, 1) * LOG2_E, l + 1, acc

    def maximum(self, m: Tensor, s: Tensor) -> Tensor:
        return torch.maximum(m, s.amax(-1, keepdim=True))

    def add_row(self, l: Tensor, a: Tensor, p: Tensor) -> Tensor:
        return l * a + p.sum(-1, keepdim=True)

    def add_values(self, acc: Tensor, a: Tensor, p: Tensor, v: Tensor) -> Tensor:
        return acc * a + self.at.low(p) @ v

    def online(self, m, l, acc, s, v, rows: slice, cols: slice):
        new = self.seam("row_max", self.maximum(m, s), rows, cols)
        safe = torch.where(new == -INF, 0.0, new)
        p = self.seam("weights", torch.exp2(s - safe), rows, cols)
        a = self.seam("rescale", torch.exp2(m - safe), rows, cols)
        l = self.seam("row_sum", self.add_row(l, a, p), rows, cols)
        return new, l, self.seam("accumulator", self.add_values(acc, a, p, v), rows, cols)

    def finish(self, m: Tensor, l: Tensor, acc: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        out = self.at.low(self.seam("out", acc / torch.where(l == 0, 1.0, l), rows))
        return out, self.seam("lse", m + l.log2(), rows)

    def row(self, rows: slice):
        q = self.load_query("q", self.at.q, rows)
        state = self.begin(q)
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
        return self.finish(*state, rows)

    def forward(self) -> tuple[Tensor, Tensor]:
        done = [self.row(rows) for rows in blocks(self.at.n, self.rows)]
        o, lse = (torch.cat(x, 2)[:, :, : self.at.n] for x in zip(*done, strict=True))
        return o, lse

    # --- backward
    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        return (do * o).sum(-1, keepdim=True)

    def slope(self, q: Tensor, k: Tensor) -> Any:
        c = self.at.softcap
        return 1 - torch.tanh(q @ k.mT * self.at.scale / c).square() if c else 1.0

    def weights_again(self, s: Tensor, lse: Tensor) -> Tensor:
        return torch.exp2(s - torch.where(lse == -INF, 0.0, lse))

    def grad_scores(self, p: Tensor, dp: Tensor, delta: Tensor, slope: Any) -> Tensor:
        return p * (dp - delta) * slope

    def again(self, rows: slice, cols: slice, which: str):
        """Of one tile the query, the key, dO, the weights and dS."""
        at = self.at
        q, k = self.load_query("b_q", at.q, rows), self.load_key("b_k", at.k, cols)
        do, v = self.load_query("do", at.do, rows), self.load_key("b_v", at.v, cols)
        s = self.scores(q, k, rows, cols, True)
        p = self.weights_again(s, load(self.at.lse, rows, INF))
        p = self.seam("b_weights", p, rows, cols)
        dp = self.seam("dp", do @ v.mT, rows, cols)
        ds = self.grad_scores(p, dp, load(at.delta, rows), self.slope(q, k))
        return q, k, do, p, at.low(self.seam("ds", ds, rows, cols))

    def add(self, name: str, total: Tensor, part: Tensor, rows: slice, cols: slice) -> Tensor:
        return self.seam(name, total + part, rows, cols)

    def key_gradients(self, cols: slice) -> tuple[Tensor, Tensor]:
        dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
        for rows in self.query_blocks(cols):
            q, _, do, p, ds = self.again(rows, cols, "keys")
            dv = self.add("dv_acc", dv, self.at.low(p).mT @ do, rows, cols)
            dk = self.add("dk_acc", dk, ds.mT @ q, rows, cols)
        return self.seam("dk", dk * self.at.scale, cols), self.seam("dv", dv, cols)

    def query_gradient(self, rows: slice) -> Tensor:
        dq = torch.zeros_like(load(self.at.q, rows))
        for cols in self.key_blocks(rows):
            _, k, _, _, ds = self.again(rows, cols, "queries")
            dq = self.add("dq_acc", dq, ds @ k, rows, cols)
        return self.seam("dq", dq * self.at.scale, rows)

    def group(self, grad: Tensor) -> Tensor:
        return grad.unflatten(1, (-1, self.at.groups)).sum(2)

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.at.groups, 1)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        at = self.at
        every = slice(0, at.n)
        at.delta = self.seam("delta", self.delta(at.do, at.o), every)
        pairs = [self.key_gradients(cols) for cols in blocks(at.nk, self.cols)]
        dk, dv = (torch.cat(x, 2)[:, :, : at.nk] for x in zip(*pairs, strict=True))
        dq = torch.cat([self.query_gradient(rows) for rows in blocks(at.n, self.rows)], 2)
        return dq[:, :, : at.n], self.group(dk), self.group(dv)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, kernel):
        at = kernel.at
        at.n, at.nk, at.groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        at.low = to(query.dtype)
        at.q, at.k, at.v = query.float(), kernel.spread(key.float()), kernel.spread(value.float())
        at.o, at.lse = kernel.forward()
        ctx.kernel, ctx.dtype = kernel, query.dtype
        return at.o.to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        ctx.kernel.at.do, ctx.kernel.memory = grad.float(), {}
        grads = ctx.kernel.backward()
        return (*(g.to(ctx.dtype) for g in grads), None)


def attention(kind: type[Kernel]):
    """A function as scaled_dot_product_attention's, with windows, caps and sinks."""

    def call(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,  # noqa: ARG001
             window=None, softcap=0.0, sinks=None):  # fmt: skip
        kernel = kind(causal=is_causal, scale=scale, mask=attn_mask, window=window,
                      softcap=softcap, sinks=sinks)  # fmt: skip
        return _Apply.apply(query, key, value, kernel)

    return call
