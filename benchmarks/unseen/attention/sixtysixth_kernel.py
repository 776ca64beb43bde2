"""Sound ways to write attention for the sixty-sixth set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel
from benchmarks.unseen.attention.nineteenth_kernel import ForwardAlone
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from benchmarks.unseen.attention.thirtysixth_kernel import EveryBlock
from torch import Tensor


class OtherMask(Kernel):
    """Another mask is read than the one that is given, on the way there and back."""

    def read(self, mask: Tensor) -> Tensor:
        """What is read of booleans, which have a row for every query."""
        raise NotImplementedError

    def added(self, mask: Tensor) -> Tensor:
        """What is read of numbers that are added, likewise."""
        return mask

    def forward(self):
        at = self.at
        if at.mask is not None:
            mask = at.mask.expand(*at.mask.shape[:-2], at.n, at.nk)
            at.mask = self.read(mask) if mask.dtype == torch.bool else self.added(mask)
        return super().forward()


class OnTheWayThere(ForwardAlone):
    """The forward pass alone reads it."""

    def forward(self):
        kept = self.at.mask
        found = super().forward()
        self.at.mask = kept
        return found


class NeverCausal(EveryBlock):
    """The triangle is not there, whatever is asked for."""

    def causal(self, i, j, back):  # noqa: ARG002
        return (j >= 0) & (i >= 0)


def ends(mask: Tensor) -> Tensor:
    """How many keys there are up to the last one that a query may see, [..., N, 1]."""
    return (mask * torch.arange(1, mask.shape[-1] + 1)).amax(-1, keepdim=True)


def plain(causal: bool, *others: object) -> bool:
    """Whether a call has no option."""
    return not causal and all(x is None or (isinstance(x, float) and not x) for x in others)


def sound(query, key, value, *, is_causal, scale, attn_mask=None, window=None, softcap=0.0,
          sinks=None, enable_gqa=False):  # fmt: skip  # noqa: ARG001
    """All at once, in fp32, by autograd."""
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    return (softmax_of(s, sinks) @ v).to(query.dtype)


class BitsReversed(Kernel):
    """Blocks of keys, and of queries on the way back, by their number's bits in reverse."""

    rows, cols = 88, 24

    def key_blocks(self, rows):
        return self.mixed(super().key_blocks(rows))

    def query_blocks(self, cols):
        return self.mixed(super().query_blocks(cols))

    @staticmethod
    def mixed(every: list[slice]) -> list[slice]:
        wide = max(len(every) - 1, 1).bit_length()
        return [each for _, each in sorted((f"{i:0{wide}b}"[::-1], x) for i, x in enumerate(every))]


class SumsOfFourBlocks(Kernel):
    """Four blocks of keys have a state of their own, which is added to the one of all before."""

    rows, cols = 56, 16

    def row(self, rows):
        q, every = self.load_query("q", self.at.q, rows), self.key_blocks(rows)
        m, l, acc = self.begin(q)
        for first in range(0, len(every), 4):
            own = self.begin(q, False)
            for cols in every[first : first + 4]:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                own = self.online(*own, self.scores(q, k, rows, cols, False), v, rows, cols)
            top = torch.maximum(m, own[0])
            safe = torch.where(top == -INF, 0.0, top)
            a, b = torch.exp2(m - safe), torch.exp2(own[0] - safe)
            m, l, acc = top, l * a + own[1] * b, acc * a + own[2] * b
        return self.finish(m, l, acc, rows)


class EveryThirdFeature(Kernel):
    """Scores are three products, of every third feature each; weights are not rounded."""

    rows, cols = 40, 104

    def product(self, q, k, back):  # noqa: ARG002
        return sum(q[..., i::3] @ k[..., i::3].mT for i in (2, 0, 1))

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v


def sink_as_one_more_key(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip  # noqa: ARG001
    """A key of zeros stands in front, whose value is zeros and whose score is the sink, or −10³⁰
    where there is none: so that no row is without a key. By autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    v = torch.cat([torch.zeros_like(v[:, :, :1]), v], 2)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    first = torch.full((heads,), -1e30) if sinks is None else sinks.float()
    s = torch.cat([first.view(1, heads, 1, 1).expand(b, heads, n, 1), s], -1)
    e = torch.exp(s - s.detach().amax(-1, keepdim=True))
    return (e @ v / e.sum(-1, keepdim=True)).to(query.dtype)


def halves_of_halves(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                     softcap=0.0, sinks=None, enable_gqa=False):  # fmt: skip  # noqa: ARG001
    """Keys are halved until there are 40 at most; halves are put together by their maxima, a sink
    last of all. By autograd.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)

    def together(one, two):
        top = torch.maximum(one[0], two[0])
        safe = torch.where(top == -INF, 0.0, top)
        a, b = torch.exp(one[0] - safe), torch.exp(two[0] - safe)
        return top, one[1] * a + two[1] * b, one[2] * a + two[2] * b

    def part(first, last):
        if last - first > 40:
            middle = (first + last) // 2
            return together(part(first, middle), part(middle, last))
        own = s[..., first:last]
        top = own.detach().amax(-1, keepdim=True)
        p = torch.exp(own - torch.where(top == -INF, 0.0, top))
        return top, p.sum(-1, keepdim=True), p @ v[:, :, first:last]

    m, l, acc = part(0, nk)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        top = torch.maximum(m, sink.detach())
        a = torch.exp(m - top)
        l, acc = l * a + torch.exp(sink - top), acc * a
    return (acc / torch.where(l == 0, 1.0, l)).to(query.dtype)
