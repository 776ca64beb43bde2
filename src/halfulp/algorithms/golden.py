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

# fp64 scores of one head held at once: 4 MiB a matrix, a handful of matrices in the cache
CHUNK_ELEMENTS = 2**19


def golden(call: Call, grad_out: Tensor | None = None, grad_lse: Tensor | None = None) -> Result:
    """Attention of a call and, with `grad_out [B, H, N, D_v]`, the gradients of all its inputs;
    with `grad_lse [B, H, N]` beside it, of both results.

    δ is rowsum(dP ∘ P), free of O's rounding. Fully masked rows: out 0, lse −inf, gradients 0.
    Inputs are taken as they are (any float dtype) and results are float64. Memory beside inputs and
    results: a few blocks of 2¹⁹ scores.
    """
    q, k, v = call.query.double(), call.key.double(), call.value.double()
    do = None if grad_out is None else grad_out.double()
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_zeros(q.shape[:3])
    learned = (
        None if x is None or x.dtype == torch.bool else torch.zeros_like(x, dtype=torch.float64)
        for x in (call.sinks, call.sees.mask)
    )
    grads = Gradients(*(torch.zeros_like(x) for x in (q, k, v)), *learned)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head, of_key = _Head.of(call, b, h), (b, h // call.groups)
            for rows, cols in _blocks(call):
                operands = (q[b, h, rows], k[of_key][cols], v[of_key][cols])
                d_out, d_lse = (None if x is None else x[b, h, rows] for x in (do, grad_lse))
                out[b, h, rows], lse[b, h, rows], part = head.block(
                    rows, cols, *operands, d_out, d_lse
                )
                if part is None:
                    continue
                grads.query[b, h, rows] = part.query
                grads.key[of_key][cols] += part.key
                grads.value[of_key][cols] += part.value
                if grads.sinks is not None and part.sinks is not None:
                    grads.sinks[h] += part.sinks
                if grads.mask is not None and part.mask is not None:
                    tile = Sees(mask=_of_head(grads.mask, b, h)).tile(rows, cols)
                    tile += part.mask.sum_to_size(tile.shape)
    if do is None:
        return Result(out, lse)
    return Result(out, lse, grads.query, grads.key, grads.value, grads.sinks, grads.mask)


def _blocks(call: Call) -> Iterator[tuple[slice, slice]]:
    """Blocks of query rows, each with the keys that one of them sees, at least one."""
    n, n_k = call.query.shape[2], call.key.shape[2]
    least, greatest = call.bounds
    at_once = max(1, CHUNK_ELEMENTS // max(1, n_k))
    for start in range(0, n, at_once):
        rows = slice(start, min(start + at_once, n))
        stop = n_k if greatest is None else max(1, min(rows.stop + greatest, n_k))
        first = 0 if least is None else max(0, rows.start + least)
        yield rows, slice(min(first, stop - 1), stop)


def _of_head(mask: Tensor, b: int, h: int) -> Tensor:
    """The `[N or 1, N_k or 1]` part of one head, a view."""
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask[min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1)]


class _Head(NamedTuple):
    """One head of one batch entry."""

    call: Call
    sees: Sees
    sink: Tensor | None  # a number
    number: Tensor  # b·H + h, which dropout counts by

    @classmethod
    def of(cls, call: Call, b: int, h: int) -> _Head:
        sees, mask = call.sees, call.sees.mask
        own = Sees(
            sees.causal, sees.window, sees.offset, None if mask is None else _of_head(mask, b, h)
        )
        sink = None if call.sinks is None else call.sinks[h].double()
        number = torch.tensor(b * call.query.shape[1] + h, device=call.query.device)
        return cls(call, own, sink, number)

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
        """Out and lse of a block of query rows, all the keys that it sees at hand; with `do` its
        part of the gradients, that of the mask `[rows, cols]`.
        """
        call, slope = self.call, None
        s = (q @ k.mT).mul_(call.scale)
        if call.softcap:
            t = torch.tanh(s / call.softcap)
            s, slope = t * call.softcap, 1 - t * t
        p = self.sees.apply(s, rows, cols, 1.0)
        m = p.amax(-1, keepdim=True)
        if self.sink is not None:
            m = torch.maximum(m, self.sink)
        p = p.sub_(shift_of(m)).exp_()
        l = p.sum(-1, keepdim=True)
        of_sink = None if self.sink is None else (self.sink - shift_of(m)).exp()
        l = l if of_sink is None else l + of_sink
        lse = (m + l.log()).squeeze(-1)
        p /= divisor_of(l, m)
        factor = None if call.dropout is None else self._kept(call.dropout, rows, cols)
        kept = p if factor is None else p * factor
        out = kept @ v
        if do is None:
            return out, lse, None
        dv = kept.mT @ do
        dp = do @ v.mT
        dp = dp if factor is None else dp * factor
        delta = (dp * p).sum(-1, keepdim=True)
        if d_lse is not None:
            delta -= torch.where(lse == -torch.inf, 0.0, d_lse.double())[:, None]
        if of_sink is not None:
            of_sink = -(of_sink / divisor_of(l, m) * delta).sum()
        of_mask = ds = dp.sub_(delta).mul_(p)
        ds = ds if slope is None else ds * slope
        dq, dk = (ds @ k).mul_(call.scale), (ds.mT @ q).mul_(call.scale)
        return out, lse, Gradients(dq, dk, dv, of_sink, of_mask)

    def _kept(self, dropout: Dropout, rows: slice, cols: slice) -> Tensor:
        """What dropout multiplies the weights by."""
        queries = self.call.query.shape[2]
        return dropout.keep(self.number, rows, cols, queries).double() * dropout.scale
