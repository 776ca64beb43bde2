"""What factors of parts of the keys, one in each row, go with: the rounding of each part's lse, a
power of its sum, the queries.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from halfulp.algorithms.problem import LOG2_E
from halfulp.calls import Call, Sees
from halfulp.reconstruct.exact import rms, scores_of

EXPLAINED = 0.85  # of the factors' variance that what they go with must explain, and
HALF = 0.5  # from row to row
SOME = 24  # rows that are enough
COARSEST = 2.0**-4  # of a number: what any format loses of it
NEAR, OFTEN = 0.05, 5  # of a whole number, by which a count is off; more often nothing is counted
FEW = 0.02  # of all parts that are counted otherwise
LEFT = 0.05  # of what hidden pairs add to sums, that they may leave


def of_parts(call: Call, factors: Tensor, width: int, log: Tensor, weight: Tensor
) -> tuple[str, str]:  # fmt: skip
    """What these logarithms of factors `[B, H, N, parts]` of `width` keys each go with, in words,
    and the cause; `log` are those of the pairs, where `weight` is not 0.
    """
    blocks = factors.shape[-1]
    tiles = width in (16, 32, 64, 128)
    rounded = tiles and rms(log, weight) < COARSEST
    if power := power_of_sums(call, factors, -(-log.shape[-1] // blocks)):
        return f", as of sums to the power of {power:.3g}", "split-merge"
    if rounded and (lse := format_of_lse(call, factors, blocks)):
        return f", as rounding the lse of each to {lse} makes", "split-merge"
    if parts := in_turn(factors):
        return f", one for all that {parts} parts take in turn", "split-merge"
    if often := _counted(factors, weight, width):
        return f": some count {'twice' if often == 2 else f'{often} times'}", "split-merge"
    if where_it_grows(call, factors, width):
        told = "another where the maximum grows, and there alone"
        return f", {told}: sums are rescaled by another factor", "rescale"
    at = torch.arange(log.shape[-1]).div(width, rounding_mode="floor")
    last = weight * (at == blocks - 1)  # which is not rescaled any more
    if rounded and rms(log, last) > HALF * rms(log, weight):
        return ", which is small, and the last has one as well: the maximum is rounded", "row-max"
    if along_queries(call, factors):
        return ", as if K had another vector added in each", "operand"
    if rounded:
        return ", which is small: sums are rescaled coarsely", "accumulator"
    return "", "rescale" if tiles else "split-merge"


def _counted(factors: Tensor, weight: Tensor, width: int) -> int:
    """How often some parts count, beside others that do once, in every row that has several; 0
    where this is no matter of counts.
    """
    seen = torch.stack([x.sum(-1) > 0 for x in torch.split(weight, width, -1)], -1)
    least = torch.where(seen, factors, math.inf).amin(-1, keepdim=True)
    times = (factors - least).exp()[seen & (seen.sum(-1, keepdim=True) > 1)]
    whole = times.round()
    if not len(times) or bool(((times / whole - 1).abs() > NEAR).any()):
        return 0
    more = whole[whole > 1]
    return int(whole.max()) if len(more) > FEW * len(times) and int(whole.max()) < OFTEN else 0


def format_of_lse(call: Call, factors: Tensor, blocks: int) -> str:
    """The format to which each part's lse is rounded, where that makes these logarithms of factors
    `[B, H, N, parts]`; empty where none does.
    """
    lse = _lse_of_parts(call, -(-call.key.shape[2] // blocks))
    known = lse.isfinite().all(-1, keepdim=True)
    total = float((factors * known).square().sum())
    for name, fmt in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for unit in (1.0, LOG2_E):
            made = torch.where(known, (lse * unit).to(fmt).double() / unit - lse, 0.0)
            made = made - made.mean(-1, keepdim=True)
            left = float(((factors - made) * known).square().sum())
            if left < HALF * total:
                return name
    return ""


def in_turn(factors: Tensor) -> int:
    """How many parts take blocks of keys in turn, by these logarithms of the blocks' factors
    `[B, H, N, blocks]`: those of one part have one; else 0.
    """
    blocks = factors.shape[-1]
    own = factors - factors.mean(-1, keepdim=True)
    for parts in range(2, blocks // 2 + 1):
        left = sum(float((x - x.mean(-1, keepdim=True)).square().sum())
                   for x in (own[..., first::parts] for first in range(parts)))  # fmt: skip
        if left < (1 - EXPLAINED) * float(own.square().sum()):
            return parts
    return 0


def power_of_sums(call: Call, factors: Tensor, width: int) -> float:
    """The power of the sum of each `width` keys that they are weighed by, where these logarithms of
    factors `[B, H, N, parts]` are those of one, from row to row as well; 0 where they are not.
    """
    sums = _lse_of_parts(call, width)
    known = (sums.isfinite() & (factors != 0)).all(-1)
    if sums.shape != factors.shape or int(known.sum()) < SOME:
        return 0.0
    x, y = (t[known] - t[known].mean(-1, keepdim=True) for t in (sums, factors))
    slope = float((x * y).sum() / x.square().sum().clamp_min(1e-300))
    left, own = y - slope * x, y - y.mean(0)
    whole = float(left.square().sum()) < (1 - EXPLAINED) * float(y.square().sum())
    # parts of other lengths have other sums, whatever they are weighed by
    rows = float((left - left.mean(0)).square().sum()) < (1 - HALF) * float(own.square().sum())
    return 1 + slope if whole and rows else 0.0


def where_it_grows(call: Call, factors: Tensor, width: int) -> bool:
    """Whether these logarithms of factors `[B, H, N, parts]` change from one part to the next in
    rows whose maximum grows there, and in no other: what only sums that are rescaled have.
    """
    tops = torch.stack([x.amax(-1) for x in torch.split(scores_of(call), width, -1)], -1)
    if tops.shape != factors.shape:
        return False
    running = tops.cummax(-1).values
    known = tops.isfinite()[..., 1:] & tops.isfinite()[..., :-1]
    grows = running.diff() > 0
    step = factors.diff().square()
    here, elsewhere = step[known & grows], step[known & ~grows]
    if min(len(here), len(elsewhere)) < SOME:
        return False
    return float(elsewhere.mean()) < (1 - EXPLAINED) * float(here.mean())


def along_queries(call: Call, factors: Tensor) -> bool:
    """Whether factors of parts, `[B, H, N, parts]` logarithms, are linear in Q, on one head."""
    q, y = call.query[0, 0].double(), factors[0, 0]
    n, d = q.shape
    if n < 1.25 * d:
        return False
    left = y - q @ torch.linalg.lstsq(q, y).solution
    # what as many random numbers would explain does not count
    return float(left.square().sum()) * n / (n - d) < (1 - EXPLAINED) * float(y.square().sum())


def _lse_of_parts(call: Call, width: int) -> Tensor:
    """`[B, H, N, parts]`, of `width` keys each."""
    return torch.stack([x.logsumexp(-1) for x in torch.split(scores_of(call), width, -1)], -1)


def hidden_counted(call: Call, log: Tensor, told: Tensor) -> bool:
    """Whether one factor a row, as logarithms `[B, H, N]`, is what its sum makes of it that has all
    pairs, those that are hidden as well.
    """
    every = scores_of(replace(call, sees=Sees(mask=call.sees.added))).logsumexp(-1)
    more = every - scores_of(call).logsumexp(-1)
    left, size = ((x[told]).square().sum() for x in (log + more, more))
    return bool(left < LEFT * size)


def hides(call: Call) -> str:
    """The cause that stands for what hides pairs; empty where nothing does."""
    if call.sees.mask is not None:
        return "mask"
    if call.sees.window is not None:
        return "window"
    return "causal-mask" if call.sees.causal else ""
