"""Which keys are read where others should be, as weights show it that were read off."""

from __future__ import annotations

import torch
from torch import Tensor

from halfulp.reconstruct.exact import CLEAR, logarithms
from halfulp.reconstruct.part_ratios import COARSEST
from halfulp.reconstruct.ranges import ranges

LEFT = 0.05  # of an error, that keys read in others' place may leave
ROWS = 8  # in which a key is told from others by what it weighs
ALIKE = 0.9  # the cosine of weights over all rows with those that they are
NEAR = 0.2  # of a whole number, that a count is
ROUNDS = 8  # of means over rows and over keys, which weights that are not clear keep apart


def in_their_place(read: Tensor, exact: Tensor, lost: Tensor) -> str:
    """Which keys stand where others should that get no weight, in words: with their K and V, and
    then as many are read as there should be, or with their V alone; empty where rows merely lack
    those. All `[B, H, N, N_k]`; `lost` marks pairs.
    """
    gone = lost.flatten(0, -2).any(0)
    without = exact.masked_fill(gone, 0.0)
    most = LEFT * min(_left(read, x) for x in (exact, without, _normalized(without, exact)))
    times = _times(read, exact, gone)
    made = _normalized(without * times, exact)
    if int(times.sum()) == len(gone) and _left(read, made) < most:
        return f"keys {ranges((times > 1).nonzero().flatten())} are read in their place"
    # what stands in the others' place may be no key's, and takes its part of every row
    part = (read * made).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True).clamp_min(
        1e-300
    )
    if bool((times > 1).any()) and _left(read, part * made) < most:
        twice = ranges((times > 1).nonzero().flatten())
        return f"keys {twice} are read in the place of some, in others' no key"
    of_key, known = _values(read, exact)
    made = torch.zeros_like(exact).index_add_(-1, of_key[known], exact[..., known])
    moved = known & (of_key != torch.arange(len(gone)))
    if not bool(moved.any()) or _left(read, made) >= most:
        return ""
    place = "their place" if torch.equal(moved, gone) else (
        f"the place of {ranges(moved.nonzero().flatten())}")  # fmt: skip
    return f"V of keys {ranges(torch.unique(of_key[moved]))} are read in {place}"


def exchanged_keys(read: Tensor, exact: Tensor) -> str:
    """Which keys weigh what others should, all of them being there, in words; empty where it is not
    so: K, or V, lies in another order.
    """
    x, y = (t.double().flatten(0, -2) for t in (exact, read))
    x, y = x - x.mean(0), y - y.mean(0)
    alike = (x / x.norm(dim=0).clamp_min(1e-300)).mT @ (y / y.norm(dim=0).clamp_min(1e-300))
    best, of_key = alike.max(0)
    moved = of_key != torch.arange(len(of_key))
    every = len(torch.unique(of_key)) == len(of_key) and float(best.min()) > ALIKE
    if not every or int(moved.sum()) < ROWS or float(alike.diagonal()[moved].max()) > ALIKE:
        return ""
    return f"keys {ranges(moved.nonzero().flatten())} weigh as others among them should"


def others_weigh(read: Tensor, exact: Tensor, extra: Tensor) -> str:
    """Which keys' weights hidden pairs have that `extra` marks, where these are other keys': no
    mask that is wrong gives them those. In words; empty where it is not so.
    """
    read, exact, extra = (x.flatten(0, -2) for x in (read, exact, extra.double()))
    own = read * extra
    rest = own.square().sum(0)[:, None] - 2 * own.mT @ exact + extra.mT @ exact.square()
    some = extra.sum(0) >= ROWS
    least, of_key = rest.fill_diagonal_(torch.inf)[some].min(-1)
    if not bool(some.any()) or float(least.sum()) > LEFT * float(own.square().sum()):
        return ""
    return f"as much as keys {ranges(torch.unique(of_key))} have in these rows"


def _left(read: Tensor, made: Tensor) -> float:
    return float((read - made).square().sum())


def _normalized(weights: Tensor, exact: Tensor) -> Tensor:
    """Weights over their rows' sums, to which sinks add what the exact ones lack."""
    sums = weights.sum(-1, keepdim=True) + 1 - exact.sum(-1, keepdim=True)
    return weights / sums.clamp_min(1e-300)


def _times(read: Tensor, exact: Tensor, gone: Tensor) -> Tensor:
    """How often each key is counted, `[N_k]`: those that are, once at least."""
    log, clear = logarithms(read, exact)
    clear = clear * ~gone
    each = torch.zeros(len(gone), dtype=torch.float64)
    for _ in range(ROUNDS):
        rows = ((log - each) * clear).sum(-1, keepdim=True) / clear.sum(-1, keepdim=True).clamp_min(
            1)  # fmt: skip
        each = ((log - rows) * clear).sum((0, 1, 2)) / clear.sum((0, 1, 2)).clamp_min(1)
    told = clear.sum((0, 1, 2)) > 0
    least = each[told].min() if bool(told.any()) else 0.0
    weighed = torch.where(told, (each - least).exp(), 1.0) * ~gone
    # all are read once or more, as many as there are; what counts alike may count once
    whole = len(gone) * weighed / weighed.sum().clamp_min(1e-300)
    times = whole.round()
    if bool(gone.all()):
        return weighed
    apart = bool(((whole - times).abs() < NEAR).all() and times[~gone].min() < times.max())
    return times if apart and int(times.sum()) == len(gone) else weighed.round()


def _values(read: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """The key whose V is read for each, and whether any is, `[N_k]`: its weights as they were read
    hold the exact ones in every row, and go along with them the most.
    """
    read, exact = read.flatten(0, -2), exact.flatten(0, -2)
    held = torch.stack([((1 - COARSEST) * e[:, None] <= read + CLEAR).all(0) for e in exact.mT])
    x, y = (t - t.mean(0) for t in (exact, read))
    alike = x.mT @ (y / y.norm(dim=0).clamp_min(1e-300))
    return alike.masked_fill(~held, -torch.inf).argmax(-1), held.any(-1)
