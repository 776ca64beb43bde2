"""Sound ways to write attention for the fifty-ninth set, and what its faults share."""

# ruff: noqa: ARG002, D102 - steps are those of the fifth set's kernel

from __future__ import annotations

import torch
from benchmarks.unseen.attention.eighth_kernel import logits, visible
from benchmarks.unseen.attention.fifth_kernel import INF, Kernel, blocks
from benchmarks.unseen.attention.thirtyeighth_kernel import repeated


class OtherTruth(Kernel):
    """A mask of truth values is another than the one that is given, on the way there and back."""

    def other(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask [·, ·, N, Nk] that is read in place of the given one."""
        raise NotImplementedError

    def forward(self):
        at = self.at
        if at.mask is not None and at.mask.dtype == torch.bool:
            at.mask = self.other(at.mask.expand(*at.mask.shape[:-2], at.n, at.nk))
        return super().forward()


def unhidden_sequences(mask: torch.Tensor) -> torch.Tensor:
    """Whether anything at all may be seen, for every sequence and head of a mask."""
    return mask.flatten(-2).any(-1)[..., None, None]


class MiddleOutwards(Kernel):
    """Blocks of keys from the middle one outwards, in turn to the left and to the right."""

    rows, cols = 44, 64

    def key_blocks(self, rows):
        every = super().key_blocks(rows)
        half = len(every) // 2
        return sorted(every, key=lambda c: (abs(every.index(c) - half), c.start))


class FeaturesInFiveLanes(Kernel):
    """Every fifth feature of Q and K makes a product, and five of them the scores; row sums are
    those of fours of keys.
    """

    rows, cols = 120, 44

    def product(self, q, k, back):
        return sum(q[..., lane::5] @ k[..., lane::5].mT for lane in range(5))

    def add_row(self, l, a, p):
        return l * a + p.unflatten(-1, (-1, 4)).sum(-1).sum(-1, keepdim=True)


class AllQueriesOnTheWayBack(Kernel):
    """The backward pass has all queries at once, one block of keys after the other from the last,
    and dK, dV as transposes of products the other way round.
    """

    rows, cols = 68, 60

    def backward(self):
        at = self.at
        at.delta = self.delta(at.do, at.o)
        dq, pairs = torch.zeros_like(at.q), []
        for cols in blocks(at.nk, self.cols)[::-1]:
            q, k, do, p, ds = self.again(slice(0, at.n), cols, "all")
            dq = dq + ds @ k
            pairs.insert(0, ((q.mT @ ds).mT * at.scale, (do.mT @ at.low(p)).mT))
        dk, dv = (torch.cat(x, 2)[:, :, : at.nk] for x in zip(*pairs, strict=True))
        return dq * at.scale, self.group(dk), self.group(dv)


def sums_of_exponentials_by_block(query, key, value, *, is_causal, scale, attn_mask=None,
                                  window=None, softcap=0.0, sinks=None):  # fmt: skip
    """The row's maximum first; sums and O of 33 keys at a time are added up behind it, from the
    last block on, by autograd.
    """
    (_, heads, n, _), nk = query.shape, key.shape[2]
    k, v = repeated(key, heads), repeated(value, heads)
    s = logits(query, k, visible(n, nk, is_causal, window), attn_mask, scale, softcap)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -INF, 0.0, top)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        top = top.maximum(sink.detach())
    l = 0 if sinks is None else torch.exp(sink - top)
    o = 0
    for part in blocks(nk, 33)[::-1]:
        p = torch.exp(s[..., part] - top)
        l, o = l + p.sum(-1, keepdim=True), o + p @ v[:, :, part]
    return (o / torch.where(l == 0, 1.0, l)).to(query.dtype)


def a_sequence_at_a_time(query, key, value, *, is_causal, scale, attn_mask=None, window=None,
                         softcap=0.0, sinks=None):  # fmt: skip
    """One sequence after the other, whose weights are exponentials of scores less their lse, which
    the sink is in; by autograd.
    """
    (b, heads, n, _), nk = query.shape, key.shape[2]
    keep, done = visible(n, nk, is_causal, window), []
    for one in range(b):
        mask = None if attn_mask is None else attn_mask[one % len(attn_mask)]
        k, v = (repeated(x[one, None], heads)[0] for x in (key, value))
        s = logits(query[one], k, keep, mask, scale, softcap)
        nothing = (s == -INF).all(-1, keepdim=True)
        lse = s.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.float().view(-1, 1, 1)
            lse = torch.where(nothing, sink, torch.logaddexp(lse, sink))
        done.append(torch.exp(s - lse) @ v)
    return torch.stack(done).to(query.dtype)
