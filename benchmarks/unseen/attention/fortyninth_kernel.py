"""Sound ways to write attention for the forty-ninth set, and what its faults share."""

# ruff: noqa: D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.unseen import Fault
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, attention, blocks, load
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated, softmax_of
from torch import Tensor

sound = attention(Kernel)


def put(into: list[Fault], fn: Callable[..., Tensor], right: str, dtype: str = "bfloat16") -> None:
    """Put a function into the set, with the keys of the causes that are right."""
    keys, vague = frozenset(right.split()), frozenset({"elements"})
    into.append(Fault(fn.__name__, keys, fn, dtype, vague))


def half(x: Tensor) -> Tensor:
    """What a half keeps of fp32, also of its gradient: infinity past 65504."""
    return x.half().float()


def eager(query: Tensor, key: Tensor, value: Tensor, scores: Callable[[Tensor, Tensor], Tensor],
          weights: Callable[[Tensor], Tensor], *, is_causal, attn_mask, window, softcap,
          sinks) -> Tensor:  # fmt: skip
    """Every row's softmax at once, by autograd: `scores` come with their scale, and `weights` as
    they meet V. A row that nothing is hidden from keeps a NaN that its scores make.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    s = scores(query.float(), repeated(key, heads))
    s = softcap * torch.tanh(s / softcap) if softcap else s
    keep = visible(n, nk, is_causal, window).expand(b, heads, n, nk)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        keep = keep & (attn_mask if boolean else attn_mask > -INF)
        s = s if boolean else s + attn_mask.float()
    nothing = ~keep.any(-1, keepdim=True)
    s = s.masked_fill(~keep, -INF)
    if sinks is not None:
        s = torch.cat([s, sinks.float().view(1, -1, 1, 1).expand(b, -1, n, 1)], -1)
        nothing = torch.zeros_like(nothing)
    p = s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)[..., :nk]
    return (weights(p) @ repeated(value, heads)).to(query.dtype)


def end_to_end(call: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *,
               turned: bool = False, **options: Any) -> Tensor:  # fmt: skip
    """The sequences of a causal call without a mask in one long row, whose mask knows of no
    boundary; `turned`, the last sequence comes first.
    """
    b, _, n, _ = query.shape
    if not options["is_causal"] or options["attn_mask"] is not None or n != key.shape[2]:
        return sound(query, key, value, **options)
    given = (x.flip(0) if turned else x for x in (query, key, value))
    row = (x.transpose(0, 1).flatten(1, 2)[None] for x in given)
    found = call(*row, **options)[0].unflatten(1, (b, n)).transpose(0, 1)
    return found.flip(0) if turned else found


class FineGradients(Kernel):
    """dS stays in fp32."""

    def again(self, rows, cols, which):
        kept, self.at.low = self.at.low, lambda x: x
        found = super().again(rows, cols, which)
        self.at.low = kept
        return found


class WholeNumberMaxima(FineGradients):
    """What is taken off a row's scores is the next whole number above their maximum in base 2, so
    that rescaling is by powers of two and rounds nothing; weights and dS stay in fp32.
    """

    rows, cols = 36, 52

    def maximum(self, m, s):
        return torch.maximum(m, s.amax(-1, keepdim=True).ceil())

    def add_values(self, acc, a, p, v):
        return acc * a + p @ v


class Halving(FineGradients):
    """The keys of a row are halved again and again, down to one block, and halves' unnormalized
    states are put together on the way up; dS stays in fp32 here as well.
    """

    rows, cols = 104, 28

    def state(self, q: Tensor, every: list[slice], rows: slice, first: bool):
        if len(every) < 2:
            state = self.begin(q, first)
            for cols in every:
                k, v = (self.load_key(x, getattr(self.at, x), cols) for x in "kv")
                state = self.online(*state, self.scores(q, k, rows, cols, False), v, rows, cols)
            return state
        middle = len(every) // 2
        one = self.state(q, every[:middle], rows, first)
        two = self.state(q, every[middle:], rows, False)
        top = torch.maximum(one[0], two[0])
        safe = torch.where(top == -INF, 0.0, top)
        a, b = torch.exp2(one[0] - safe), torch.exp2(two[0] - safe)
        return top, one[1] * a + two[1] * b, one[2] * a + two[2] * b

    def row(self, rows):
        q = self.load_query("q", self.at.q, rows)
        return self.finish(*self.state(q, self.key_blocks(rows), rows, True), rows)


class FromTheMiddle(FineGradients):
    """Blocks of keys from the middle outwards; on the way back even and odd blocks of queries have
    a dK and a dV of their own, of dS in fp32.
    """

    rows, cols = 28, 44

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        middle = (len(every) - 1) / 2
        return sorted(every, key=lambda part: abs(part.start // self.cols - middle))

    def key_gradients(self, cols):
        every = self.query_blocks(cols)
        pairs = []
        for part in (every[::2], every[1::2]):
            dk, dv = (torch.zeros_like(load(x, cols)) for x in (self.at.k, self.at.v))
            for rows in part:
                q, _, do, p, ds = self.again(rows, cols, "keys")
                dk, dv = dk + ds.mT @ q, dv + self.at.low(p).mT @ do
            pairs.append((dk * self.at.scale, dv))
        return pairs[0][0] + pairs[1][0], pairs[0][1] + pairs[1][1]


def root_of_the_scale_on_both(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                              softcap=0.0, sinks=None):  # fmt: skip
    """Queries and keys are each multiplied by the root of the scale, and with each other, in fp64;
    the softmax is in fp32. Sequences one after the other, by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    root, keep = math.sqrt(abs(scale)), visible(n, nk, is_causal, window)
    mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)
    done = []
    for one in range(b):
        own = slice(one, one + 1)
        q = query[own].double() * math.copysign(root, scale)
        k, v = repeated(key[own], heads).double() * root, repeated(value[own], heads)
        s = (q @ k.mT).float()
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s.masked_fill(~keep, -INF)
        if mask is not None:
            boolean = mask.dtype == torch.bool
            s = s.masked_fill(~mask[own], -INF) if boolean else s + mask[own].float()
        done.append(softmax_of(s, sinks) @ v)
    return torch.cat(done).to(query.dtype)


def keys_in_strides_of_seven(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                             softcap=0.0, sinks=None):  # fmt: skip
    """Every seventh key makes a part with an exponential sum and an O against the maximum of the
    whole row; queries 52 at a time, by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    keep, done = visible(n, nk, is_causal, window), []
    for rows in blocks(n, 52):
        mask = None if attn_mask is None else attn_mask.expand(b, heads, n, nk)[:, :, rows]
        s = logits(query[:, :, rows], k, keep[rows], mask, scale, softcap)
        top = s.detach().amax(-1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks.detach().float().view(1, -1, 1, 1))
        top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(s - top)
        l = sum(p[..., lane::7].sum(-1, keepdim=True) for lane in range(7))
        o = sum(p[..., lane::7] @ v[:, :, lane::7] for lane in range(7))
        if sinks is not None:
            l = l + torch.exp(sinks.float().view(1, -1, 1, 1) - top)
        done.append(o / torch.where(l == 0, 1.0, l))
    return torch.cat(done, 2).to(query.dtype)
