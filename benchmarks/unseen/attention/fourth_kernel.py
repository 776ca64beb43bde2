"""Attention as the fourth set of unseen faults has it: tiles, an online softmax in base 2, and a
backward pass that recomputes the weights from lse; kept in fp32 but for the operands of products.

Every step that authors get wrong is a method. Beside the loop over queries there is one over keys
(FlashAttention 1), splits of the keys that are merged, two passes over them, and tiles transposed.
"""

# ruff: noqa: ARG002, D102 - steps are named for what they compute, and are given all of it

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

INF, LOG2_E = math.inf, math.log2(math.e)
At = dict[str, Any]


def to(fmt: torch.dtype):
    return lambda x: x.to(fmt).float()


bf16, fp16, e4m3, e5m2 = map(
    to, (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
)


def tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return (((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) << 13).view(torch.float32)


def shifted(x: Tensor) -> Tensor:
    """bf16 by the upper half of the bits, without rounding."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def spans(n: int, width: int) -> list[slice]:
    return [slice(i, min(i + width, n)) for i in range(0, n, width)]


class Tiled:
    """One program a tile of queries, which goes over the keys; backward the other way round."""

    rows, cols = 64, 64

    # --- what is visited and seen
    def query_tiles(self, n: int) -> list[slice]:
        return spans(n, self.rows)

    def key_tiles(self, rows: slice, nk: int, at: At) -> list[slice]:
        """Tiles that may be seen by these queries."""
        high = min(nk, rows.stop) if at["causal"] else nk
        return [c for c in spans(nk, self.cols) if c.start < high]

    def visible(self, i: Tensor, j: Tensor, at: At) -> Tensor:
        keep = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool)
        if at["causal"]:
            keep = keep & (j <= i)
        if at["window"] is not None:
            left, right = at["window"]
            keep = keep & ((j >= i - left) if left >= 0 else True)
            keep = keep & ((j <= i + right) if right >= 0 else True)
        return keep

    # --- scores, in base 2
    def product(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        return q @ k.mT * at["scale"]

    def cap(self, s: Tensor, at: At) -> Tensor:
        return at["cap"] * torch.tanh(s / at["cap"]) if at["cap"] else s

    def bias(self, s: Tensor, mask: Tensor, at: At) -> Tensor:
        return s + mask.float() * LOG2_E

    def hide(self, s: Tensor, rows: slice, cols: slice, at: At) -> Tensor:
        i, j = torch.arange(rows.start, rows.stop)[:, None], torch.arange(cols.start, cols.stop)
        s = s.masked_fill(~self.visible(i, j[None], at), -INF)
        if at["mask"] is None:
            return s
        mask = at["mask"][..., rows if at["mask"].shape[-2] > 1 else slice(None), cols]
        return s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else self.bias(s, mask, at)

    def scores(self, q: Tensor, k: Tensor, rows: slice, cols: slice, at: At) -> Tensor:
        return self.hide(self.cap(self.product(q, k, at), at) * LOG2_E, rows, cols, at)

    # --- forward
    def operands(self, q: Tensor, k: Tensor, v: Tensor, at: At):
        return q, k, v

    def start(self, q: Tensor, at: At) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Maximum, row sum and O before the first tile; a sink is a key of its own."""
        m = q.new_full((*q.shape[:-1], 1), -INF)
        if at["sinks"] is None:
            return m, 0.0, 0.0
        return m.fill_(0) + at["sinks"].view(1, -1, 1, 1) * LOG2_E, torch.ones_like(m), 0.0

    def shift(self, s: Tensor, m: Tensor) -> Tensor:
        return s - m

    def exp2(self, x: Tensor) -> Tensor:
        return torch.exp2(x)

    def factor(self, x: Tensor) -> Tensor:
        """By which sums are multiplied where the maximum grows."""
        return torch.exp2(x)

    def weights(self, p: Tensor, at: At) -> Tensor:
        return at["low"](p)

    def add_row(self, l: Any, a: Tensor, p: Tensor, at: At) -> Tensor:
        return l * a + p.sum(-1, keepdim=True)

    def add_values(self, acc: Any, a: Tensor, p: Tensor, v: Tensor, at: At) -> Tensor:
        return acc * a + self.weights(p, at) @ v

    def online(self, m: Tensor, l: Any, acc: Any, s: Tensor, v: Tensor, at: At):
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = torch.where(new == -INF, 0.0, new)
        p, a = self.exp2(self.shift(s, safe)), self.factor(m - safe)
        return new, self.add_row(l, a, p, at), self.add_values(acc, a, p, v, at)

    def divide(self, acc: Tensor, l: Tensor, at: At) -> Tensor:
        return at["low"](acc / torch.where(l == 0, 1.0, l))

    def lse(self, m: Tensor, l: Tensor, at: At) -> Tensor:
        return m + l.log2()

    def rowwise(self, q: Tensor, k: Tensor, v: Tensor, rows: slice, at: At):
        state = self.start(q[:, :, rows], at)
        for cols in self.key_tiles(rows, k.shape[2], at):
            s = self.scores(q[:, :, rows], k[:, :, cols], rows, cols, at)
            state = self.online(*state, s, v[:, :, cols], at)
        m, l, acc = state
        if isinstance(acc, float):  # no tile was visited
            l, acc = torch.zeros_like(m), torch.zeros_like(m) * v[:, :, :1]
        return m, l, acc

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: At) -> tuple[Tensor, Tensor]:
        out, lse = [], []
        for rows in self.query_tiles(q.shape[2]):
            m, l, acc = self.rowwise(q, k, v, rows, at)
            out.append(self.divide(acc, l, at))
            lse.append(self.lse(m, l, at))
        return torch.cat(out, 2), torch.cat(lse, 2)

    # --- backward
    def delta(self, do: Tensor, o: Tensor, at: At) -> Tensor:
        return (do * o).sum(-1, keepdim=True)

    def scores_again(self, q: Tensor, k: Tensor, rows: slice, cols: slice, at: At) -> Tensor:
        return self.scores(q, k, rows, cols, at)

    def weights_again(self, s: Tensor, lse: Tensor) -> Tensor:
        return torch.exp2(s - torch.where(lse == -INF, 0.0, lse))

    def grad_weights(self, do: Tensor, v: Tensor) -> Tensor:
        return do @ v.mT

    def slope(self, q: Tensor, k: Tensor, at: At) -> Any:
        c = at["cap"]
        return 1 - torch.tanh(q @ k.mT * at["scale"] / c).square() if c else 1.0

    def grad_scores(self, p: Tensor, dp: Tensor, delta: Tensor, slope: Any, at: At) -> Tensor:
        return at["low"](p * (dp - delta) * slope)

    def value_part(self, p: Tensor, do: Tensor, at: At) -> Tensor:
        return at["low"](p).mT @ do

    def key_part(self, ds: Tensor, q: Tensor, at: At) -> Tensor:
        return ds.mT @ q

    def query_part(self, ds: Tensor, k: Tensor, at: At) -> Tensor:
        return ds @ k

    def add_query(self, dq: Tensor, part: Tensor, at: At) -> Tensor:
        return dq + part

    def add_key(self, dk: Any, part: Tensor, at: At) -> Tensor:
        return dk + part

    def query_tiles_of(self, cols: slice, n: int, at: At) -> list[slice]:
        return [r for r in spans(n, self.rows) if not at["causal"] or r.stop > cols.start]

    def key_tiles_back(self, nk: int) -> list[slice]:
        return spans(nk, self.cols)

    def scaled(self, dq: Tensor, dk: Tensor, at: At) -> tuple[Tensor, Tensor]:
        return dq * at["scale"], dk * at["scale"]

    def group(self, grad: Tensor, at: At) -> Tensor:
        return grad.unflatten(1, (-1, at["groups"])).sum(2)

    def backward(self, kept: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, lse, at = kept
        delta = self.delta(do, o, at)
        dq, dks, dvs = torch.zeros_like(q), [], []
        for cols in self.key_tiles_back(k.shape[2]):
            kj, vj = k[:, :, cols], v[:, :, cols]
            dk, dv = torch.zeros_like(kj), torch.zeros_like(vj)
            for rows in self.query_tiles_of(cols, q.shape[2], at):
                qi, doi = q[:, :, rows], do[:, :, rows]
                s = self.scores_again(qi, kj, rows, cols, at)
                p = self.weights_again(s, lse[:, :, rows])
                ds = self.grad_scores(p, self.grad_weights(doi, vj), delta[:, :, rows],
                                      self.slope(qi, kj, at), at)  # fmt: skip
                dv = self.add_key(dv, self.value_part(p, doi, at), at)
                dk = self.add_key(dk, self.key_part(ds, qi, at), at)
                dq[:, :, rows] = self.add_query(
                    dq[:, :, rows], self.query_part(ds, kj, at), at)  # fmt: skip
            dks.append(dk)
            dvs.append(dv)
        order = sorted(range(len(dks)), key=lambda t: self.key_tiles_back(k.shape[2])[t].start)
        dk, dv = (torch.cat([x[t] for t in order], 2) for x in (dks, dvs))
        dq, dk = self.scaled(dq, dk, at)
        return dq, self.group(dk, at), self.group(dv, at)


class KeysOuter(Tiled):
    """As FlashAttention 1: keys outside, O divided anew for every tile."""

    def kept(self, o: Tensor, at: At) -> Tensor:
        return o

    def forward(self, q, k, v, at):
        m, l, _ = self.start(q, at)
        o, l = torch.zeros_like(q[..., :1] * v[:, :, :1]), torch.zeros_like(m) + l
        for cols in spans(k.shape[2], self.cols):
            for rows in self.query_tiles(q.shape[2]):
                if at["causal"] and cols.start >= rows.stop:
                    continue
                s = self.scores(q[:, :, rows], k[:, :, cols], rows, cols, at)
                acc = o[:, :, rows] * l[:, :, rows]
                m_new, l_new, acc = self.online(
                    m[:, :, rows], l[:, :, rows], acc, s, v[:, :, cols], at)  # fmt: skip
                o[:, :, rows] = self.kept(acc / torch.where(l_new == 0, 1.0, l_new), at)
                m[:, :, rows], l[:, :, rows] = m_new, l_new
        return at["low"](o), self.lse(m, l, at)


class Split(Tiled):
    """Keys in four splits, each with its own O and lse, which a second kernel merges."""

    splits = 4

    def stored(self, o: Tensor, lse: Tensor, at: At) -> tuple[Tensor, Tensor]:
        return o, lse

    def part(self, q: Tensor, k: Tensor, v: Tensor, cols: slice, at: At):
        rows = slice(0, q.shape[2])
        first = at if cols.start == 0 else at | {"sinks": None}
        m, l, acc = self.start(q, first)
        for inner in spans(cols.stop - cols.start, self.cols):
            c = slice(cols.start + inner.start, cols.start + inner.stop)
            s = self.scores(q, k[:, :, c], rows, c, at)
            m, l, acc = self.online(m, l, acc, s, v[:, :, c], at)
        return self.stored(acc / torch.where(l == 0, 1.0, l), self.lse(m, l, at), at)

    def bounds(self, nk: int) -> list[slice]:
        return spans(nk, -(-nk // self.splits))

    def merge(self, outs: Tensor, lses: Tensor, at: At) -> tuple[Tensor, Tensor]:
        m = lses.amax(0)
        w = torch.exp2(lses - torch.where(m == -INF, 0.0, m))
        l = w.sum(0)
        return (w * outs).sum(0) / torch.where(l == 0, 1.0, l), m + l.log2()

    def forward(self, q, k, v, at):
        parts = [self.part(q, k, v, cols, at) for cols in self.bounds(k.shape[2])]
        o, lse = self.merge(*(torch.stack(x) for x in zip(*parts, strict=True)), at)
        return at["low"](o), lse


class TwoPass(Tiled):
    """The row's maximum and sum first, then the product with the values."""

    def forward(self, q, k, v, at):
        out, lses = [], []
        for rows in self.query_tiles(q.shape[2]):
            m, l, _ = self.rowwise(q, k, v, rows, at)
            acc, safe = 0.0, torch.where(m == -INF, 0.0, m)
            for cols in self.key_tiles(rows, k.shape[2], at):
                s = self.scores(q[:, :, rows], k[:, :, cols], rows, cols, at)
                acc = self.add_values(
                    acc, torch.ones_like(m), self.exp2(s - safe), v[:, :, cols], at)  # fmt: skip
            out.append(self.divide(acc, l, at))
            lses.append(self.lse(m, l, at))
        return torch.cat(out, 2), torch.cat(lses, 2)


class Transposed(Tiled):
    """Sᵀ = K Qᵀ, and Oᵀ = Vᵀ Pᵀ."""

    rows, cols = 32, 128

    def product(self, q, k, at):
        return (k @ q.mT * at["scale"]).mT

    def add_values(self, acc, a, p, v, at):
        return acc * a + (v.mT @ self.weights(p, at).mT).mT

    def grad_weights(self, do, v):
        return (v @ do.mT).mT


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, kernel, at):
        groups = query.shape[1] // key.shape[1]
        at = at | {"groups": groups, "low": to(query.dtype), "key_heads": key.shape[1]}
        q, k, v = query.float(), *(x.float().repeat_interleave(groups, 1) for x in (key, value))
        q, k, v = kernel.operands(q, k, v, at)
        o, lse = kernel.forward(q, k, v, at)
        ctx.kept, ctx.kernel, ctx.dtype = (q, k, v, o, lse, at), kernel, query.dtype
        return o.to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        grads = ctx.kernel.backward(ctx.kept, grad.float())
        return (*(g.to(ctx.dtype) for g in grads), None, None)


def attention(kernel: Tiled):
    """A function as scaled_dot_product_attention's, with windows, caps and sinks."""

    def call(query, key, value, *, is_causal, scale, attn_mask=None, enable_gqa=False,  # noqa: ARG001
             window=None, softcap=0.0, sinks=None):  # fmt: skip
        at = {"causal": is_causal, "scale": scale, "mask": attn_mask, "window": window,
              "cap": softcap, "sinks": sinks}  # fmt: skip
        return _Apply.apply(query, key, value, kernel, at)

    return call
