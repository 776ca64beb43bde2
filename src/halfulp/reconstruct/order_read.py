"""In which order a kernel sums over keys, and dV over queries, revealed by masks of huge values.

All weights are alike, values are units but for one pair, M and −M, that swallows whatever is added
to M before −M comes: the sum counts the units outside the smallest partial sum that holds both.
Source: Xie et al., FPRev (arXiv 2411.00442), with a pair for each column and head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfulp.calls import Call
from halfulp.reconstruct.panel import Run, Trial

# terms, M and the unit: counts must be exact in the result's format, and units below half an ulp
# of M in fp32
_SIZES = {
    torch.bfloat16: (256, 2.0**40, 1.0),
    torch.float16: (64, 2.0**15, 2.0**-17),
    torch.float32: (256, 2.0**40, 1.0),
}
WIDTH = 64  # columns, a pair in each


@dataclass(frozen=True)
class Order:
    """How a sum of n terms goes."""

    terms: int
    block: int | None  # terms that are summed by themselves and then added; None: no such width
    backward: bool  # from the last block to the first

    @property
    def text(self) -> str:
        """In words."""
        if self.block is None:
            return "in an order of its own"
        if self.block == self.terms:
            return f"in one go, of {self.terms}"
        way = "last to first" if self.backward else "first to last"
        return f"in blocks of {self.block}, {way}" if self.block > 1 else f"one by one, {way}"


def key_order(run: Run, dtype: torch.dtype) -> Order | None:
    """Of O's sum over keys; None where the kernel gives nothing, or its counts are no counts."""
    n, huge, unit = _SIZES[dtype]
    pairs = _pairs(n)
    heads = -(-len(pairs) // WIDTH)
    x = _laden(pairs, heads, n, huge, unit).to(dtype)
    query, key = torch.zeros(1, heads, 16, WIDTH), torch.zeros(1, heads, n, WIDTH)
    call = Call(query.to(dtype), key.to(dtype), x, scale=0.125)
    result = run(Trial("order of keys", call, torch.zeros(1, heads, 16, WIDTH).to(dtype)))
    if result is None or result.out.shape != (1, heads, 16, WIDTH):
        return None
    return _order(result.out[0, :, 0].double() * (n / unit), pairs, n)


def query_order(run: Run, dtype: torch.dtype) -> Order | None:
    """Of dV's sum over queries."""
    n, huge, unit = _SIZES[dtype]
    pairs = _pairs(n)
    heads, keys = -(-len(pairs) // WIDTH), 16
    grad_out = _laden(pairs, heads, n, huge, unit).to(dtype)
    query, key = torch.zeros(1, heads, n, WIDTH), torch.zeros(1, heads, keys, WIDTH)
    value = torch.zeros(1, heads, keys, WIDTH)
    call = Call(query.to(dtype), key.to(dtype), value.to(dtype), scale=0.125)
    result = run(Trial("order of queries", call, grad_out))
    grad = None if result is None else result.grad_value
    if grad is None or grad.shape != (1, heads, keys, WIDTH):
        return None
    return _order(grad[0, :, 0].double() * (keys / unit), pairs, n)


def _pairs(n: int) -> list[tuple[int, int]]:
    return [*((0, j) for j in range(1, n)), *((j, n - 1) for j in range(1, n - 1))]


def _laden(pairs: list[tuple[int, int]], heads: int, n: int, huge: float, unit: float) -> Tensor:
    """Units with one pair of huge numbers in every column, `[1, heads, n, WIDTH]`."""
    x = torch.full((heads * WIDTH, n), unit)
    index = torch.arange(len(pairs))
    first, second = torch.tensor(pairs).T
    x[index, first], x[index, second] = huge, -huge
    return x.view(1, heads, WIDTH, n).mT.contiguous()


def _order(counts: Tensor, pairs: list[tuple[int, int]], n: int) -> Order | None:
    """From the units that are left: n − the terms of the smallest sum that holds a pair."""
    sizes = n - counts.flatten()[: len(pairs)]
    whole = sizes.round()
    if not bool(((sizes - whole).abs() < 0.25).all()):
        return None
    if not bool(((whole >= 2) & (whole <= n)).all()):
        return None
    first, last = whole[: n - 1].long(), torch.cat([whole[n - 1 :], whole[n - 2 : n - 1]]).long()
    # partial sums on the way from a term to the whole: the side that is visited last joins late
    steps = [len(set(side.tolist())) for side in (first, last)]
    backward = steps[1] > steps[0]
    early = last.flip(0) if backward else first
    terms = torch.arange(1, n)
    for block in range(1, n + 1):
        expected = torch.clamp((terms // block + 1) * block, max=n)
        within = early[: block - 1]
        if bool((early[block - 1 :] == expected[block - 1 :]).all()) and (
            block == 1 or int(within.max()) <= block
        ):
            return Order(n, block, backward)
    return Order(n, None, backward)
