"""Sound ways to write attention for the fifty-second set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import visible
from benchmarks.unseen.attention.fifth_kernel import INF, LOG2_E, Kernel, blocks, cut
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import WholeRows, repeated
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor


class EagerRows(WholeRows, EveryBlock):
    """All keys of a query at once; the maximum is taken off the scores whatever it is, and what
    hides is a number that is added.
    """

    def number(self) -> float:
        """What hides, in natural units."""
        return -INF

    def hide(self, s, rows, cols, back):
        keep, bias = self.seen(rows, cols, back), 0.0
        if self.at.mask is not None:
            mask = self.given_mask(rows, cols)
            if mask.dtype == torch.bool:
                keep = keep & mask
            else:
                bias = mask.float() * LOG2_E
        s = self.hidden(s + bias, keep)
        past = torch.arange(cols.start, cols.stop) >= self.at.nk
        return s.masked_fill(past, -INF)

    def hidden(self, s: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, s, s + self.number() * LOG2_E)

    def online(self, m, l, acc, s, v, rows, cols):
        new = self.maximum(m, s)
        p, a = torch.exp2(s - new), torch.exp2(m - new)
        return new, self.add_row(l, a, p), self.add_values(acc, a, p, v)


class InOneBuffer(ForwardAlone):
    """The weights of all heads are made before any of them meets the values."""

    def stored(self, p: Tensor) -> Tensor:
        return p

    def forward(self):
        at, rows, cols = self.at, slice(0, self.at.n), slice(0, self.at.nk)
        s = self.scores(at.q, at.k, rows, cols, False)
        m, l, _ = self.begin(at.q)
        new = self.maximum(m, s)
        safe = torch.where(new == -INF, 0.0, new)
        p = torch.exp2(s - safe)
        l = l * torch.exp2(m - safe) + p.sum(-1, keepdim=True)
        p = self.stored(p / torch.where(l == 0, 1.0, l))
        return at.low(at.low(p) @ at.v), new + l.log2()


def eager(query, key, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
          sinks=None):  # noqa: ARG001  # fmt: skip
    """Natural scores before anything is hidden, a float mask among them; what a causal call and a
    window let be seen, and what a boolean mask does. Sinks are the caller's.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    s = query.float() @ repeated(key, heads).mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    keep, own = visible(n, nk, is_causal, window), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        own = attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.float()
    return s, keep.expand(b, heads, n, nk), own.expand(b, heads, n, nk)


def with_sinks(s: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores with a column more, if there are sinks."""
    if sinks is None:
        return s
    return torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)


def memory_of(x: Tensor) -> Tensor:
    """What lies in memory, read as if it were contiguous."""
    if x.is_contiguous():
        return x
    many = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    room = x.as_strided((many,), (1,))
    return room[torch.arange(x.numel()).clamp_max(many - 1)].view(x.shape)


# --- sound kernels
class HalvesOfHalves(Kernel):
    """The blocks of keys are halved until there is one, and the states of halves put together."""

    rows, cols = 52, 48

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        return self.finish(*self.state(q, self.key_blocks(rows), rows, True), rows)

    def state(self, q, every, rows, first):
        if len(every) == 1:
            k, v = (self.load_key(x, getattr(self.at, x), every[0]) for x in "kv")
            s = self.scores(q, k, rows, every[0], False)
            return self.online(*self.begin(q, first), s, v, rows, every[0])
        half = len(every) // 2
        one = self.state(q, every[:half], rows, first)
        two = self.state(q, every[half:], rows, False)
        m = torch.maximum(one[0], two[0])
        safe = torch.where(m == -INF, 0.0, m)
        a, b = torch.exp2(one[0] - safe), torch.exp2(two[0] - safe)
        return m, one[1] * a + two[1] * b, one[2] * a + two[2] * b


class OwnBlockFirst(Kernel):
    """Keys go round the circle from the block beside a tile's own queries on, and queries of a
    block of keys likewise.
    """

    rows, cols = 44, 28

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        first = rows.start // self.cols % len(every)
        return every[first:] + every[:first]

    def query_blocks(self, cols):
        every = super().query_blocks(cols)
        return every[len(every) // 3 :] + every[: len(every) // 3]


class QueriesInTwoTerms(Kernel):
    """A query is the sum of its upper bits and the rest of it, and so is its product; keys are
    added up to the row's sum one half of the block after the other.
    """

    rows, cols = 60, 20

    def product(self, q, k, back):
        upper = cut(q, 18)
        return upper @ k.mT + (q - upper) @ k.mT

    def add_row(self, l, a, p):
        half = p.shape[-1] // 2
        return l * a + p[..., :half].sum(-1, keepdim=True) + p[..., half:].sum(-1, keepdim=True)


def groups_by_einsum(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None):  # fmt: skip
    """Query heads as [group, share] in one einsum; 33 keys after 33 with a running state, by
    autograd.
    """
    (b, heads, n, d), (groups, nk) = query.shape, key.shape[1:3]
    share = heads // groups
    q = query.float().view(b, groups, share, n, d) * scale
    added = torch.zeros(n, nk).masked_fill(~visible(n, nk, is_causal, window), -INF)
    if attn_mask is not None:
        own = attn_mask
        if own.dtype == torch.bool:
            own = torch.zeros(own.shape).masked_fill(~own, -INF)
        added = added + own.float()
    added = added.expand(b, heads, n, nk).unflatten(1, (groups, share))
    m = torch.full((b, groups, share, n, 1), -INF)
    l, acc = torch.zeros_like(m), torch.zeros_like(m) * value.float()[:, :, None, :1]
    if sinks is not None:
        sink = sinks.float().view(1, groups, share, 1, 1).expand(m.shape)
        m, l = sink.detach(), torch.exp(sink - sink.detach())
    for cols in blocks(nk, 33):
        s = torch.einsum("bgsnd,bgkd->bgsnk", q, key[:, :, cols].float())
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s + added[..., cols]
        new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        safe = torch.where(new == -INF, 0.0, new)
        p, a = torch.exp(s - safe), torch.exp(m - safe)
        acc = acc * a + torch.einsum("bgsnk,bgkd->bgsnd", p, value[:, :, cols].float())
        m, l = new, l * a + p.sum(-1, keepdim=True)
    return (acc / torch.where(l == 0, 1.0, l)).flatten(1, 2).to(query.dtype)


def ratio_by_logarithms(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                        softcap=0.0, sinks=None):  # fmt: skip
    """Weights are exponentials of scores less their logsumexp, all of them less the row's maximum;
    28 queries at a time, by autograd; what a query does not see is a zero weight.
    """
    s, keep, own = eager(query, key, is_causal=is_causal, scale=scale, attn_mask=attn_mask,
                         window=window, softcap=softcap)  # fmt: skip
    keep, v, done = keep & own & (s > -INF), repeated(value, query.shape[1]), []
    for rows in blocks(query.shape[2], 28):
        part, seen = s[:, :, rows], keep[:, :, rows]
        part = with_sinks(part.masked_fill(~seen, -1e30), sinks)
        part = part - part.detach().amax(-1, keepdim=True)
        lse, part = part.logsumexp(-1, keepdim=True), part[..., : key.shape[2]]
        p = torch.exp(part - lse).masked_fill(~seen, 0.0)
        done.append(p @ v)
    return torch.cat(done, 2).to(query.dtype)
