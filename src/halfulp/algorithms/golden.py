"""The golden value: attention and its gradients in fp64, by the plain definition, in O(N)
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from halfulp.algorithms.problem import divisor_of, shift_of
from halfulp.calls import Call, Dropout, Gradients, Result, Sees

# fp64 scores held at once: 512 KiB a matrix, so that all of them stay in a core's cache
CHUNK_ELEMENTS = 2**16

# rows at once where each sees other keys, since keys that none of them sees are left out: fewer
# rows leave out more, and products of fewer are slower
_ROWS = 64


def golden(call: Call, grad_out: Tensor | None = None, grad_lse: Tensor | None = None) -> Result:
    """Attention of a call and, with `grad_out [B, H, N, D_v]`, the gradients of all its inputs;
    with `grad_lse [B, H, N]` beside it, of both results.

    δ is rowsum(dO ∘ O) of the exact O. Fully masked rows: out 0, lse −inf, gradients 0.
    Inputs are taken as they are (any float dtype) and results are float64. Memory beside inputs and
    results: a few blocks of 2¹⁶ scores.
    """
    (batch, heads), key_heads, groups = call.query.shape[:2], call.key.shape[1], call.groups

    def by_key_head(x: Tensor) -> Tensor:
        """`[B, H, ...]` → `[B·H_k, heads of queries that share a key head, ...]`"""
        return x.reshape(batch * key_heads, groups, *x.shape[2:])

    q, k, v = by_key_head(call.query), call.key.flatten(0, 1), call.value.flatten(0, 1)
    given = [q, *(None if x is None else by_key_head(x) for x in (grad_out, grad_lse))]
    dq, dk, dv, out = (
        q.new_empty(shape, dtype=torch.float64)
        for shape in (q.shape, k.shape, v.shape, (*q.shape[:3], v.shape[2]))
    )
    lse = out.new_empty(out.shape[:-1])
    sinks, mask = (
        None if x is None or x.dtype == torch.bool else torch.zeros_like(x, dtype=torch.float64)
        for x in (call.sinks, call.sees.mask)
    )
    by_sink = None if sinks is None else lse.new_zeros(lse.shape[:2])
    for own in _own(call):
        part = _Heads.of(call, own)
        # as fp64 no more than is looked at, which stays in the cache
        of_rows = [None if x is None else x[own].double() for x in given]
        k_own, v_own = k[own].double(), v[own].double()
        # rows of dQ are whole within their block; keys gather from every block of queries
        of_k, of_v = dk[own].zero_(), dv[own].zero_()
        for rows, cols in _blocks(call):
            q_rows, do, d_lse = (None if x is None else x[:, :, rows] for x in of_rows)
            assert q_rows is not None
            operands = (q_rows, k_own[:, cols], v_own[:, cols])
            out[own][:, :, rows], lse[own][:, :, rows], grads = part.block(
                rows, cols, *operands, do, d_lse
            )
            if grads is None:
                continue
            dq[own][:, :, rows] = grads.query
            of_k[:, cols] += grads.key
            of_v[:, cols] += grads.value
            if by_sink is not None and grads.sinks is not None:
                by_sink[own] += grads.sinks
            if mask is not None and grads.mask is not None:
                # what a mask is broadcast over shares its gradient
                tile = Sees(mask=_of_heads(mask, call, own)).tile(rows, cols)
                tile += grads.mask[0].sum_to_size(tile.shape)
    out, lse, dq = (x.view(batch, heads, *x.shape[2:]) for x in (out, lse, dq))
    if grad_out is None:
        return Result(out, lse)
    sinks = None if by_sink is None else by_sink.view(batch, heads).sum(0)
    dk, dv = (x.view(batch, key_heads, *x.shape[1:]) for x in (dk, dv))
    return Result(out, lse, dq, dk, dv, sinks, mask)


def _own(call: Call) -> Iterator[slice]:
    """Which key heads of all batch entries are computed at once: one where a mask is, whose parts
    need no copies then.
    """
    total = call.key.shape[0] * call.key.shape[1]
    scores = call.groups * min(call.query.shape[2], _most_rows(call)) * call.key.shape[2]
    step = 1 if call.sees.mask is not None else max(1, CHUNK_ELEMENTS // max(1, scores))
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _blocks(call: Call) -> Iterator[tuple[slice, slice]]:
    """Blocks of query rows, each with the keys that one of them sees, at least one."""
    n, n_k = call.query.shape[2], call.key.shape[2]
    least, greatest = call.bounds
    # whole rows, so that softmax is its definition, with no running maximum to rescale by
    at_once = min(max(1, CHUNK_ELEMENTS // max(1, n_k * call.groups)), _most_rows(call))
    for start in range(0, n, at_once):
        rows = slice(start, min(start + at_once, n))
        stop = n_k if greatest is None else max(1, min(rows.stop + greatest, n_k))
        first = 0 if least is None else max(0, rows.start + least)
        yield rows, slice(min(first, stop - 1), stop)


def _most_rows(call: Call) -> int:
    """Rows of a block, at most."""
    return call.query.shape[2] if call.bounds == (None, None) else _ROWS


def _of_heads(mask: Tensor, call: Call, own: slice) -> Tensor:
    """The `[groups or 1, N or 1, N_k or 1]` part of one key head, a view."""
    b, h = divmod(own.start, call.key.shape[1])
    mask = mask[(None,) * (4 - mask.ndim)]
    of_batch = mask[min(b, mask.shape[0] - 1)]
    heads = slice(h * call.groups, (h + 1) * call.groups)
    return of_batch if of_batch.shape[0] == 1 else of_batch[heads]


class _Heads(NamedTuple):
    """Some key heads, each with the heads of queries that share it."""

    call: Call
    sees: Sees
    sinks: Tensor | None  # `[key heads, groups, 1, 1]`
    numbers: Tensor | None  # `[key heads, groups]`, b·H + h, which dropout and sinks count by

    @classmethod
    def of(cls, call: Call, own: slice) -> _Heads:
        sees, (batch, heads) = call.sees, call.query.shape[:2]
        if sees.mask is not None:
            sees = Sees(sees.causal, sees.window, sees.offset, _of_heads(sees.mask, call, own))
        if call.sinks is None and call.dropout is None:
            return cls(call, sees, None, None)
        numbers = torch.arange(batch * heads, device=call.query.device)
        numbers = numbers.view(-1, call.groups)[own]
        sinks = None if call.sinks is None else call.sinks.double()[numbers % heads, None, None]
        return cls(call, sees, sinks, numbers)

    def block(
        self,
        rows: slice,
        cols: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor | None,
        d_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Gradients | None]:
        """Out and lse of a block of query rows `[key heads, groups, rows, D]`, all the keys
        `[key heads, N_k, D]` that it sees at hand; with `do` its part of the gradients, that of the
        mask `[..., rows, cols]`.
        """
        call, slope, split = self.call, None, q.shape[:3]
        q = q.flatten(1, 2) * call.scale  # heads that share keys are so many more rows
        s = (q @ k.mT).view(*split, k.shape[1])
        if call.softcap:
            t = torch.tanh(s / call.softcap)
            s, slope = t * call.softcap, 1 - t * t
        p = self.sees.apply(s, rows, cols, 1.0)
        m = p.amax(-1, keepdim=True)
        if self.sinks is not None:
            m = torch.maximum(m, self.sinks)
        # P times the row sum, which is at least 1: rows of D are divided by it, not rows of N_k
        p = p.sub_(shift_of(m)).exp_()
        l = p.sum(-1, keepdim=True)
        of_sink = None if self.sinks is None else (self.sinks - shift_of(m)).exp()
        l = l if of_sink is None else l + of_sink
        lse, l = (m + l.log()).squeeze(-1), divisor_of(l, m)
        factor = None if call.dropout is None else self._kept(call.dropout, rows, cols)
        kept = (p if factor is None else p * factor).flatten(1, 2)
        out = (kept @ v).view(*split, v.shape[2]) / l
        if do is None:
            return out, lse, None
        delta = (do * out).sum(-1, keepdim=True)
        if d_lse is not None:
            # ∂lse/∂S is P, so its gradient joins δ; a masked row's lse is constant
            delta -= torch.where(lse == -torch.inf, 0.0, d_lse)[..., None]
        # P = p / l: δ and dO divided once a row leave p as it is in dV and dS
        delta, do = delta / l, (do / l).flatten(1, 2)
        dv = kept.mT @ do
        dp = (do @ v.mT).view(*split, v.shape[1])
        dp = dp if factor is None else dp * factor
        # a sink's value is 0, so its dP is too, and −P δ is left of its dS
        if of_sink is not None:
            of_sink = -(of_sink * delta).sum((2, 3))
        # a mask is added behind the softcap, so its gradient has no slope
        of_mask = ds = dp.sub_(delta).mul_(p)
        ds = (ds if slope is None else ds * slope).flatten(1, 2)
        # q has α in it already, which dK takes from there
        dq = (ds @ k).mul_(call.scale).view(*split, k.shape[2])
        return out, lse, Gradients(dq, ds.mT @ q, dv, of_sink, of_mask)

    def _kept(self, dropout: Dropout, rows: slice, cols: slice) -> Tensor:
        """What dropout multiplies the weights by."""
        queries = self.call.query.shape[2]
        assert self.numbers is not None
        return dropout.keep(self.numbers, rows, cols, queries).double() * dropout.scale
