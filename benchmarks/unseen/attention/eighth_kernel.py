"""More ways to write attention, beside those of the fifth and the sixth set: sound ones, of which
no two compute in the same order; and what the eighth set's faults read memory by.
"""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks, load
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def fault(into: list[Fault], right: str, dtype: str = "bfloat16"):
    """Put a kernel into the set, with the keys of the causes that are right."""

    def put(kind: type[Kernel]) -> type[Kernel]:
        into.append(Fault(kind.__name__, frozenset(right.split()), attention(kind), dtype,
                          frozenset({"elements"})))  # fmt: skip
        return kind

    return put


def permuted(x: Tensor) -> bool:
    """Whether tokens lie before heads, [B, T, H, D] in memory, as a transposed view has it."""
    return x.ndim == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


def as_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] in memory, read as [B, T, H, D] is, and seen as [B, H, T, D] again."""
    b, h, t, d = x.shape
    return x.contiguous().view(b, t, h, d).transpose(1, 2)


def rows_by(x: Tensor, part: slice, step: int) -> Tensor:
    """A block whose first row is where it belongs, its later ones `step` elements apart."""
    b, h, n, d = x.shape
    row = torch.arange(part.stop - part.start)
    at = part.start * d + row[:, None] * step + torch.arange(d)
    head = torch.arange(b * h).view(b, h, 1, 1) * (n * d)
    found = x.contiguous().view(-1)[(head + at).clamp_max(x.numel() - 1)]
    return found * (part.start + row < n)[:, None]


class Tree(Kernel):
    """Every block of keys gives O and lse of its own; pairs of them are merged, then pairs of
    pairs.
    """

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        q, parts = self.load_query("q", self.at.q, rows), []
        for number, cols in enumerate(self.key_blocks(rows)):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.online(*self.begin(q, number == 0), s, v, rows, cols)
            parts.append((acc / torch.where(l == 0, 1.0, l), m + l.log2()))
        while len(parts) > 1:
            odd = [parts.pop()] if len(parts) % 2 else []
            parts = [self.pair(*two) for two in zip(parts[::2], parts[1::2], strict=True)] + odd
        return self.at.low(parts[0][0]), parts[0][1]

    def pair(self, one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]):
        lse = torch.logaddexp2(one[1], two[1])
        safe = torch.where(lse == -INF, 0.0, lse)
        return sum(o * torch.exp2(x - safe) for o, x in (one, two)), lse


class Ring(Kernel):
    """O is kept normalized, and moved towards each block's by a sigmoid of lse's difference."""

    rows, cols = 32, 32

    def row(self, rows: slice) -> tuple[Tensor, Tensor]:
        q = self.load_query("q", self.at.q, rows)
        m, l, acc = self.begin(q)
        o, lse = acc, m + l.log2()
        for cols in self.key_blocks(rows):
            k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
            s = self.scores(q, k, rows, cols, False)
            m, l, acc = self.online(*self.begin(q, False), s, v, rows, cols)
            own = m + l.log2()
            nats = (own - torch.where(lse == -INF, own, lse)) * math.log(2)
            part = torch.where(lse == -INF, 1.0, torch.sigmoid(nats).nan_to_num(0))
            o = o + part * (acc / torch.where(l == 0, 1.0, l) - o)
            lse = torch.logaddexp2(lse, own)
        return self.at.low(o), lse


class OwnStatistics(Kernel):
    """The backward pass goes over the keys first, for an lse of its own."""

    cols = 80

    def backward(self):
        every, lse = slice(0, self.at.n), torch.full_like(self.at.lse, -INF)
        if self.at.sinks is not None:
            lse = lse.maximum(self.at.sinks.view(1, -1, 1, 1) / math.log(2))
        for cols in blocks(self.at.nk, 48):
            s = self.scores(self.at.q, load(self.at.k, cols), every, cols, True)
            whole = torch.logsumexp(s * math.log(2), -1, keepdim=True) / math.log(2)
            lse = torch.logaddexp2(lse, whole)
        self.at.lse = lse
        return super().backward()


class OneBackwardPass(Kernel):
    """dQ, dK and dV in one loop, keys outside, from the last block to the first."""

    rows, cols = 96, 48

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        high = -(-at.n // self.rows) * self.rows
        dq, pairs = torch.zeros(*at.q.shape[:2], high, at.q.shape[3]), []
        for cols in blocks(at.nk, self.cols)[::-1]:
            dk, dv = (torch.zeros_like(load(x, cols)) for x in (at.k, at.v))
            for rows in self.query_blocks(cols)[::-1]:
                q, k, do, p, ds = self.again(rows, cols, "keys")
                dv, dk = dv + at.low(p).mT @ do, dk + ds.mT @ q
                dq[:, :, rows] += ds @ k * at.scale
            pairs.insert(0, (dk * at.scale, dv))
        dk, dv = (torch.cat(x, 2)[:, :, : at.nk] for x in zip(*pairs, strict=True))
        return dq[:, :, : at.n], self.group(dk), self.group(dv)


class InStripes(Kernel):
    """Q Kᵀ is summed over 24 features at a time, and O is made 40 columns at a time."""

    def product(self, q, k, back):
        return sum(a @ b.mT for a, b in zip(q.split(24, -1), k.split(24, -1), strict=True))

    def add_values(self, acc, a, p, v):
        low = self.at.low(p)
        return acc * a + torch.cat([low @ part for part in v.split(40, -1)], -1)


class Lifted(Kernel):
    """Weights are 2⁸ times as large, so that none of them is subnormal, and so is their sum."""

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp2(s - safe + 8), torch.exp2(m - safe)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)

    def begin(self, q, first=True):
        m, l, acc = super().begin(q, first)
        return m, l * 256, acc

    def finish(self, m, l, acc, rows):
        o, lse = super().finish(m, l, acc, rows)
        return o, lse - 8


class FromBothEnds(Kernel):
    """Blocks of keys in turn from the first and from the last one; queries likewise."""

    rows, cols = 48, 64

    def key_blocks(self, rows: slice) -> list[slice]:
        return self.folded(super().key_blocks(rows))

    def query_blocks(self, cols: slice) -> list[slice]:
        return self.folded(super().query_blocks(cols))

    @staticmethod
    def folded(every: list[slice]) -> list[slice]:
        return [every[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(len(every))]


class Columns(Kernel):
    """Scores as K Qᵀ, reduced down the columns; O and dK as sums over rows of transposes."""

    def product(self, q, k, back):
        return (k @ q.mT).mT

    def add_row(self, l, a, p):
        return l * a + p.mT.contiguous().sum(-2).unsqueeze(-1)

    def add_values(self, acc, a, p, v):
        return acc * a + (v.mT @ self.at.low(p).mT).mT


def visible(n: int, nk: int, causal: bool, window) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(nk)[None]
    keep = (j <= i) if causal else (j >= 0) & (i >= 0)
    if window is None:
        return keep
    left, right = window
    keep = keep & (j >= i - left) if left >= 0 else keep
    return keep & (j <= i + right) if right >= 0 else keep


def logits(q, k, keep, mask, scale, softcap) -> Tensor:
    s = q.float() @ k.float().mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~keep, -INF)
    if mask is None:
        return s
    return s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.float()


def head_by_head(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                 sinks=None):  # fmt: skip
    """One head of one sequence after the other, each of them recomputed on the way back."""
    b, heads, n, _ = query.shape
    nk, share = key.shape[2], query.shape[1] // key.shape[1]
    keep = visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)

    def one(q, k, v, hidden, sink):
        s = logits(q, k, keep, hidden, scale, softcap)
        m = s.amax(-1, keepdim=True)
        m = torch.where(m == -INF, 0.0, m) if sink is None else m.maximum(sink)
        p = torch.exp(s - m.detach())
        l = p.sum(-1, keepdim=True) + (0 if sink is None else torch.exp(sink - m.detach()))
        return p @ v / torch.where(l == 0, 1.0, l)

    q, k, v = query.float(), key.float(), value.float()
    done = [
        checkpoint(one, q[x, h], k[x, h // share], v[x, h // share],
                   None if mask is None else mask[x, h], None if sinks is None else sinks[h],
                   use_reentrant=False)
        for x in range(b) for h in range(heads)
    ]  # fmt: skip
    return torch.stack(done).view(b, heads, n, -1).to(query.dtype)


def groups_packed(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
                  sinks=None):  # fmt: skip
    """Query heads that share a key head are rows of one matrix; log-softmax, all in fp32."""
    (b, heads, n, d), shared, nk = query.shape, key.shape[1], key.shape[2]
    share = heads // shared
    q = query.reshape(b, shared, share * n, d)
    keep = visible(n, nk, is_causal, window).repeat(share, 1)
    mask = attn_mask
    if mask is not None:
        mask = mask.expand(b, heads, n, nk).reshape(b, shared, share * n, nk)
    s = logits(q, key, keep, mask, scale, softcap)
    if sinks is not None:
        column = sinks.float().view(1, shared, share, 1, 1).expand(b, -1, -1, n, 1)
        s = torch.cat([column.reshape(b, shared, share * n, 1), s], -1)
    p = functional.log_softmax(s, -1).exp().nan_to_num(0)[..., -nk:]
    return (p @ value.float()).to(query.dtype).reshape(b, heads, n, -1)
